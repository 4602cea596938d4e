"""A block that needs a cluster leaves the process as it found it, gets its room, and goes where it is told."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import ray
from ray.dashboard.utils import get_address_for_submission_client

from graft_dist.errors import ConfigError
from jobs import cluster, ray_jobs
from jobs.ray_head import free_ports


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


class Dashboard(BaseHTTPRequestHandler):
    """Says what a Ray dashboard, or some other program on its port, says of its version."""

    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/api/version" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "body", "is_ray"),
    [
        (200, b'{"ray_version": "2.60.0"}', True),
        (401, b"a token, please", True),
        (200, b'{"version": "1"}', False),
        (200, b"<html>", False),
        (200, b"7", False),
        (404, b"", False),
    ],
)
def test_the_ray_that_runs_is_told_from_other_programs(
    status: int, body: bytes, is_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = type("Answering", (Dashboard,), {"status": status, "body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(cluster, "dashboard_address", lambda given: address)
        assert cluster.running_dashboard() == (address if is_ray else None)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)  # somebody says that it is one
        if is_ray:
            assert cluster.running_dashboard() == address
        else:
            with pytest.raises(ConfigError, match=f"no Ray dashboard answers at {address}, which RAY_API_SERVER_ADDR"):
                cluster.running_dashboard()
        server.shutdown()


def test_where_nobody_listens_there_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "dashboard_address", lambda given: f"http://127.0.0.1:{free_ports(1)[0]}")
    assert cluster.running_dashboard() is None


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
