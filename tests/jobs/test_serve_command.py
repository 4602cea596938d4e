"""`graft serve` says where it serves. It ends on Ctrl-C when running requests have finished, on a second one without
them. Where it is told to, its replicas follow the registry's champion."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from jobs import cli
from jobs.serve_command import ServeRequest, _application, run_serve
from serve import applications
from serve.serve_args import ServeArgs


def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is shared as Serve shares it: two servers on one port would answer in turns."""
    monkeypatch.setattr("jobs.serve_command._start_ray", None)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.run(["serve", "--config", "smollm2-135m", "--port", str(port), "--address", "local"]) == 2
    assert f"port {port} of 127.0.0.1 cannot be listened on (Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("is_patient", [True, False])
def test_ctrl_c_waits_for_requests_unless_it_comes_again(
    is_patient: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a cluster's dashboard that does nothing but remember."""
    told: list[str] = []
    looks = iter(range(100))

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def remains(*arguments: Any) -> bool:
        """The application goes after three looks, or never."""
        look = next(looks)
        if look == 0:
            raise ConfigError("a busy dashboard answers late")
        if look == 1 and not is_patient:
            signal.raise_signal(signal.SIGINT)
        return not (is_patient and look == 3)

    monkeypatch.setattr("jobs.serve_command.time.sleep", lambda seconds: None)
    monkeypatch.setattr(applications, "check_free", lambda *arguments: None)
    monkeypatch.setattr(applications, "is_serving", lambda *arguments: True)
    monkeypatch.setattr(applications, "free_route", lambda *arguments: "/")
    monkeypatch.setattr(applications, "deploy", lambda *arguments, **options: told.append("deploy"))
    monkeypatch.setattr(applications, "wait_until_running", interrupted)
    monkeypatch.setattr(applications, "remove", lambda *arguments: told.append("remove"))
    monkeypatch.setattr(applications, "is_there", remains)
    before = signal.getsignal(signal.SIGINT)
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, "http://head:8265", None)
    assert run_serve(request) == 130
    assert told == ["deploy", "remove"] and signal.getsignal(signal.SIGINT) is before
    assert ("nobody waits for them" in capsys.readouterr().err) is not is_patient


class Cluster:
    """The dashboard of a cluster whose Serve listens where it was told to when it started."""

    def __init__(self, http_options: dict[str, Any] | None) -> None:
        self._settings = {} if http_options is None else {"http_options": http_options}
        self._settings |= {"controller_info": {"actor_id": "c" * 32}}
        self._applications: dict[str, Any] = {}

    def answer(self, address: str, method: str, content: Any = None) -> dict[str, Any]:
        if method == "PUT":
            wanted = content["applications"]
            self._applications = {
                one["name"]: {
                    "deployed_app_config": {"import_path": "serve.app:build"} | one,
                    "status": "RUNNING",
                    "route_prefix": one["route_prefix"],
                }
                for one in wanted
            }
        return {"applications": self._applications} | self._settings


def printed_by_serve(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `graft serve --address http://head:8265 --port 8000` prints until Ctrl-C."""
    monkeypatch.setattr(applications, "_request", cluster.answer)
    monkeypatch.setattr("jobs.serve_command.time.sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, "http://head:8265", None)
    assert run_serve(request) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("http_options", "url"),
    [
        ({"host": "10.0.0.5", "port": 9000}, "http://10.0.0.5:9000"),
        ({"host": "::1", "port": 9000}, "http://[::1]:9000"),
        ({"host": "0.0.0.0", "port": 9000}, "http://head:9000"),  # the dashboard's machine is one that listens
        (None, "http://127.0.0.1:8000"),
    ],
)
def test_the_printed_address_is_where_the_cluster_listens(
    http_options: Any, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve keeps the host and port that it was started with, whatever the command asks for."""
    printed = printed_by_serve(Cluster(http_options), monkeypatch, capsys)
    assert f"smollm2-135m is served at {url}/v1 (page: {url}/, health: {url}/healthz)" in printed


def test_a_second_target_gets_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster({"host": "10.0.0.5", "port": 9000})
    cluster.answer("", "PUT", {"applications": [{"name": "other", "route_prefix": "/"}]})
    printed = printed_by_serve(cluster, monkeypatch, capsys)
    assert "smollm2-135m is served at http://10.0.0.5:9000/smollm2-135m/v1 (page: http://10.0.0.5:9000/smol" in printed
    names = [{"name": "other", "route_prefix": "/"}, {"name": "third", "route_prefix": "/smollm2-135m"}]
    cluster.answer("", "PUT", {"applications": names})
    with pytest.raises(ConfigError, match="the application 'third' at http://head:8265 has the place /smollm2-135m"):
        applications.free_route("http://head:8265", "smollm2-135m")


def test_a_dashboard_may_miss_some_looks_while_models_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own reason for refusing an application is told, not where pydantic's manual is."""
    running = {"applications": {"a": {"status": "RUNNING", "deployed_app_config": {"import_path": "serve.app:build"}}}}
    answers: list[Any] = [ConfigError("late")] * 4 + [running]
    monkeypatch.setattr("serve.applications.time.sleep", lambda seconds: None)

    def answer(address: str, method: str) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(applications, "_request", answer)
    assert applications.wait_until_running("http://head:8265", "a", 60.0).status == "RUNNING"
    answers = [ConfigError("late")] * 5
    with pytest.raises(ConfigError, match="late"):
        applications.wait_until_running("http://head:8265", "a", 60.0)
    refusal = "1 validation error\n  Value error, they share a route\n    For further information visit https://e.dev"
    assert applications._last_line(refusal) == "Value error, they share a route"


def test_an_application_that_finishes_its_requests_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve then says nothing of what it was made of."""
    details = {"applications": {"leaving": {"status": "DELETING", "deployed_app_config": None}}}
    monkeypatch.setattr(applications, "_request", lambda *arguments: details)
    assert applications.is_there("http://head:8265", "leaving")
    assert not applications.is_there("http://head:8265", "gone") and not applications.list_applications("any")


def test_a_dashboard_that_does_not_say_where_it_listens_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away(address: str) -> dict[str, Any]:
        raise ConfigError("no Ray dashboard answers")

    monkeypatch.setattr(applications, "http_options", away)
    assert "is served at http://127.0.0.1:8000/v1" in printed_by_serve(Cluster(None), monkeypatch, capsys)


def application(policy: str | None = None, followed_registry: str | None = None) -> dict[str, Any]:
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, policy, (), None, None, None, followed_registry)
    return _application(request, load_config("smollm2-135m"), None)


def test_replicas_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.serve_command.os.cpu_count", lambda: 8)
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 3, None, (), None, None, None)
    args = ServeArgs.model_validate(_application(request, load_config("smollm2-135m"), None)["args"])
    assert args.replicas == 3 and args.threads == 2 and args.num_cpus == pytest.approx(4 / 3)  # half stays free
    # On a cluster of somebody else the configuration says what a replica needs.
    args = ServeArgs.model_validate(_application(request, load_config("smollm2-135m"), "http://head:8265")["args"])
    assert args.replicas == 3 and args.threads is None and args.num_cpus is None


def test_replicas_follow_the_champion_where_they_are_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ServeArgs.model_validate(application()["args"]).poll_champion is None
    for given, expected in (
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite:///mlflow.db", f"sqlite:///{tmp_path}/mlflow.db"),
    ):
        followed = ServeArgs.model_validate(application(followed_registry=given)["args"]).poll_champion
        assert followed is not None and followed.tracking_uri == expected
    start = {None: {"folder": "builtin:smollm2-135m"}, "none": None}  # until there is a champion
    for policy, pin in start.items():
        (deployment,) = application(policy, "http://mlflow:5000")["deployments"]
        assert deployment["user_config"] == {"policy": pin}
    with pytest.raises(ConfigError, match=r"in the place of --policy mine: give one of the two"):
        application("mine", "http://mlflow:5000")
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, None, None, "sqlite:////m.db")
    with pytest.raises(ConfigError, match=r"the cluster at http://head:8265 does not see sqlite:////m\.db"):
        _application(request, load_config("smollm2-135m"), "http://head:8265")
    args = _application(request, load_config("smollm2-135m"), "http://127.0.0.1:8265")["args"]
    assert args["poll_champion"] == {"tracking_uri": "sqlite:////m.db"}


def test_it_serves_on_the_ray_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--address`; `local` starts another, and where there is none, one is started."""
    served: list[str] = []
    monkeypatch.setattr("jobs.serve_command._start_ray", lambda stack: "http://started:1")
    monkeypatch.setattr("jobs.serve_command._check_port", lambda host, port: None)
    monkeypatch.setattr("jobs.serve_command.time.sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    cluster = Cluster(None)

    def answer(address: str, method: str, content: Any = None) -> dict[str, Any]:
        served.append(address)
        return cluster.answer(address, method, content)

    monkeypatch.setattr(applications, "_request", answer)
    for running, given, expected in (
        ("http://127.0.0.1:8265", None, "http://127.0.0.1:8265"),
        ("http://127.0.0.1:8265", "local", "http://started:1"),
        ("http://127.0.0.1:8265", "http://head:8265", "http://head:8265"),
        (None, None, "http://started:1"),
    ):
        served.clear()
        monkeypatch.setattr("jobs.serve_command.running_dashboard", lambda running=running: running)
        assert run_serve(ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, given, None)) == 0
        assert set(served) == {expected}
        is_joined = running is not None and given is None
        assert ("serving on the Ray that runs at http://127.0.0.1:8265" in capsys.readouterr().err) is is_joined


def test_the_registry_to_follow_is_the_commands_or_the_environments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str | None] = []

    def serve(request: ServeRequest) -> int:
        asked.append(request.followed_registry)
        return 0

    monkeypatch.setattr("jobs.serve_command.run_serve", serve)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    command = ["serve", "--config", "smollm2-135m"]
    assert cli.run(command) == 0
    assert cli.run([*command, "--follow-champion"]) == 0
    assert cli.run([*command, "--follow-champion", "--tracking-uri", "http://other:5000"]) == 0
    assert asked == [None, "http://mlflow:5000", "http://other:5000"]
    assert cli.run([*command, "--tracking-uri", "http://other:5000"]) == 2
    assert "--follow-champion" in capsys.readouterr().err and len(asked) == 3
