"""A block that needs a cluster leaves the process as it found it, gets its room, and goes where it is told."""

from __future__ import annotations

import os

import pytest
import ray
from ray.dashboard.utils import get_address_for_submission_client

from jobs import cluster, ray_jobs


@pytest.mark.parametrize("was_connected", [False, True])
def test_a_process_is_in_a_cluster_afterwards_if_it_was_before(
    was_connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    joined = cluster.Cluster(is_local=False, message="joined", resources={})
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: was_connected)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: events.append("left"))
    monkeypatch.setattr(cluster, "connect", lambda *_: joined)
    with pytest.raises(KeyError), cluster.connected(None) as found:
        assert found is joined and events == []
        raise KeyError
    assert events == ([] if was_connected else ["left"])


def test_jobs_go_to_the_address_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {"RAY_API_SERVER_ADDRESS": "http://elsewhere:1", "RAY_ADDRESS": "http://elsewhere:2"}
    for name, address in elsewhere.items():
        monkeypatch.setenv(name, address)
    # Of Ray's client what chooses the address.
    monkeypatch.setattr(ray_jobs, "JobSubmissionClient", get_address_for_submission_client)
    assert ray_jobs.job_client("http://here:8265") == "http://here:8265"
    assert {name: os.environ[name] for name in elsewhere} == elsewhere
    assert cluster.dashboard_address(None) == "http://elsewhere:1"


@pytest.mark.slow
@pytest.mark.ray
def test_room_that_others_hold_is_waited_for_and_then_said_to_be_missing(joinable: str) -> None:
    with cluster.connected(joinable):
        with cluster.reserved(1.5, 0, who="the first") as room:
            task = ray.remote(num_cpus=1.5, scheduling_strategy=room)(lambda: 7)
            assert ray.get(task.remote()) == 7
            with (
                pytest.raises(cluster.ClusterBusyError, match="no room for the second within 0 s: it needs 1 CPUs"),
                cluster.reserved(1, 0, who="the second", wait_s=0),
            ):
                pytest.fail("there was room")
        with cluster.reserved(1, 0, who="the third"):
            pass
