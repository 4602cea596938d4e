"""`graft serve` ends on Ctrl-C when running requests have finished, and on a second one without them; where it is told
to, its replicas follow the registry's champion."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft_dist.config import load_config
from graft_dist.errors import ConfigError
from jobs import cli
from jobs.serve_command import ServeRequest, _application, run_serve
from serve import applications
from serve.serve_args import ServeArgs


@pytest.mark.parametrize("is_patient", [True, False])
def test_ctrl_c_waits_for_requests_unless_it_comes_again(
    is_patient: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a cluster's dashboard that does nothing but remember."""
    told: list[str] = []
    looks = iter(range(100))

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def remaining(*arguments: Any) -> list[Any]:
        """The application goes after three looks, or never."""
        look = next(looks)
        if look == 1 and not is_patient:
            signal.raise_signal(signal.SIGINT)
        return [] if is_patient and look == 3 else [SimpleNamespace(name="smollm2-135m")]

    monkeypatch.setattr("jobs.serve_command.time.sleep", lambda seconds: None)
    monkeypatch.setattr(applications, "check_free", lambda *arguments: None)
    monkeypatch.setattr(applications, "deploy", lambda *arguments, **options: told.append("deploy"))
    monkeypatch.setattr(applications, "wait_until_running", interrupted)
    monkeypatch.setattr(applications, "remove", lambda *arguments: told.append("remove"))
    monkeypatch.setattr(applications, "list_applications", remaining)
    before = signal.getsignal(signal.SIGINT)
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, "http://head:8265", None)
    assert run_serve(request) == 130
    assert told == ["deploy", "remove"] and signal.getsignal(signal.SIGINT) is before
    assert ("nobody waits for them" in capsys.readouterr().err) is not is_patient


def application(policy: str | None = None, followed_registry: str | None = None) -> dict[str, Any]:
    request = ServeRequest("smollm2-135m", "127.0.0.1", 8000, 1, policy, (), None, None, None, followed_registry)
    return _application(request, load_config("smollm2-135m"))


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
    far = ServeRequest(
        "smollm2-135m", "127.0.0.1", 8000, 1, None, (), None, "http://head:8265", None, "sqlite:////m.db"
    )
    with pytest.raises(ConfigError, match=r"the cluster at http://head:8265 does not see sqlite:////m\.db"):
        _application(far, load_config("smollm2-135m"))


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
