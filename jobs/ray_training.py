"""The cluster that Ray Train's workers run on, and what becomes of their failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.train import WorkerGroupError

from graft_dist.errors import GraftError
from jobs.cluster import Cluster, connected


@contextmanager
def training_cluster(address: str | None) -> Iterator[Cluster]:
    """Join or start a cluster for a block that trains, see `connected`.

    Raises the `GraftError` that a worker raised, if one did: what a worker refuses is for the user to mend, and the
    other workers' failures only follow from it.
    """
    try:
        # Ray Train watches its controller through the State API, and complains every second where there is none.
        with connected(address, has_dashboard=True) as cluster:
            yield cluster
    except WorkerGroupError as error:
        refusal = next((one for one in error.worker_failures.values() if isinstance(one, GraftError)), None)
        if refusal is None:
            raise
        raise refusal from error
