"""A learning run in MLflow: parameters, the data set, curves, numbers, plots.

Only the driver talks to MLflow, and writes in batches: a tracking server answers each call separately.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graft_dist.errors import RegistryError
from graft_dist.learning.tdes import Evaluation
from graft_dist.policy import DataIdentity
from jobs.cluster import job_id
from jobs.learning_data import SPLITS, LearningData
from jobs.provenance import provenance
from storage.registry import Registry


class TrackedRun:
    """One MLflow run in the target's experiment; a run that is resumed goes on in the same one."""

    def __init__(self, registry: Registry, run_id: str) -> None:
        self._registry, self._client, self.run_id = registry, registry.client, run_id

    @classmethod
    @contextmanager
    def open(
        cls, registry: Registry, slug: str, run_id: str | None, params: Mapping[str, Any], place: str
    ) -> Iterator[TrackedRun]:
        """Go on with run `run_id`, where it is known, or make a new one with these parameters.

        `place` names the run's folder: a run of it that was killed before anybody wrote down its id is not left behind
        as running for ever, but taken up. It is marked as running inside; then as finished, or as failed or killed by
        the error that went through.
        """
        is_known = run_id is not None and _is_known(registry, run_id)
        tracked = cls(registry, run_id if run_id is not None and is_known else _new_run(registry, slug, place))
        try:
            if is_known:
                tracked._resume()
            else:
                tracked._log_params(params)
            yield tracked
        except BaseException as error:
            tracked._give_up("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        tracked._end("FINISHED")

    def log_data(self, data: LearningData, identity: DataIdentity, root: str) -> None:
        """The data set: which versions of which store, and how much of it was used for what."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        profile = {
            split: {
                "sequences": len(data.splits[split]),
                "decoded_rounds": sum(each.num_decoded for each in data.splits[split]),
                "dense_rounds": sum(each.num_dense for each in data.splits[split]),
            }
            for split in SPLITS
        }
        # A digest of both, for MLflow takes data sets of one name and digest for one, and shows the first one's source.
        source = {
            "store": root,
            "snapshot": identity.store,
            "runs": identity.run_ids,
            "cost_runs": identity.cost_run_ids,
            "shards": identity.num_shards,
        }
        dataset = Dataset(
            name=f"rounds of {data.source.target_spec}"[:500],
            digest=hashlib.sha256(json.dumps([source, profile]).encode()).hexdigest()[:36],
            source_type="graft-store",
            source=json.dumps(source),
            profile=json.dumps(profile),
        )
        tag = InputTag("mlflow.data.context", "training")
        with self._registry.writing():
            self._client.log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])

    def log_results(self, metrics: Mapping[str, float], looks: Sequence[Evaluation], files: Sequence[Path]) -> None:
        """Curves of the fit, final numbers, plots and the report; what an earlier start has logged is left out."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, 0) for name, value in metrics.items()]
        rows += [Metric("fit_held_out_kl", look.held_out_kl, now, look.step) for look in looks]
        rows += [Metric("fit_loss", look.loss, now, look.step) for look in looks[1:]]
        known = self._logged("fit_held_out_kl", "fit_loss")
        rows = [row for row in rows if (row.key, row.step, row.value) not in known]
        with self._registry.writing():
            for start in range(0, len(rows), 500):
                self._client.log_batch(self.run_id, metrics=rows[start : start + 500])
            for file in files:
                self._client.log_artifact(self.run_id, str(file), "plots" if file.suffix == ".png" else None)

    def _logged(self, *curves: str) -> set[tuple[str, int, float]]:
        """Name, step and value of all that some curves hold, and of the last of every other number."""
        with self._registry.said("read"):
            last = self._client.get_run(self.run_id).data.metrics
            found = {(name, 0, value) for name, value in last.items() if name not in curves}
            for name in curves:
                found |= {(name, each.step, each.value) for each in self._client.get_metric_history(self.run_id, name)}
        return found

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        with self._registry.writing():
            self._client.log_batch(self.run_id, params=[Param(name, str(value)) for name, value in params.items()])

    def _resume(self) -> None:
        with self._registry.writing():
            self._client.update_run(self.run_id, status="RUNNING")

    def _end(self, status: str) -> None:
        with self._registry.writing():
            self._client.set_terminated(self.run_id, status=status)

    def _give_up(self, status: str) -> None:
        """End it without hiding the error that is on its way."""
        try:
            self._end(status)
        except RegistryError as error:
            print(f"MLflow's run {self.run_id} is not marked as {status.lower()}: {error}", flush=True)


def _new_run(registry: Registry, slug: str, place: str) -> str:
    experiment = registry.experiment(slug)
    with registry.said("read"):
        begun = f"tags.`graft.place` = '{place}' AND attributes.status = 'RUNNING'"
        for known in registry.client.search_runs([experiment], begun):
            is_begun = known.inputs is not None and known.inputs.dataset_inputs  # logged once its id is written down
            if not is_begun:
                return str(known.info.run_id)
    about = provenance()
    tags = {
        "graft.target": slug,
        "graft.commit": str(about["commit"]),
        "graft.versions": json.dumps(about["versions"]),
        "graft.ray_submission_id": job_id() or "",
        "graft.place": place,
    }
    with registry.writing():
        run: str = registry.client.create_run(experiment, run_name=f"policy of {slug}", tags=tags).info.run_id
    return run


def _is_known(registry: Registry, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    with registry.said("read"):
        try:
            registry.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
    return True
