"""`graft policies`, `graft promote` and `graft rollback` on a real registry."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from graft_dist.errors import RegistryError
from jobs import cli
from jobs.policy_option import policy_folder
from jobs.registry_command import tracking_uri
from storage.registry import Registry, default_tracking_uri
from tests.storage.test_registry import make_folder


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("registry")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    registry = Registry(uri)
    for number in (1, 2):
        metrics = {"test_tokens_per_s": 80.0 + number, "test_mat": 2.5, "test_mismatch_rate": 0.08}
        registry.register(make_folder(folder / str(number), str(number)), "smollm2-135m", metrics)
    return uri


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(list(words)) == 0
    return capsys.readouterr().out


def test_promote_list_and_roll_back(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config", "smollm2-135m", "--tracking-uri", uri]
    assert shown(capsys, "promote", *where, "1") == "graft-smollm2-135m: champion is version 1, previous is none\n"
    promoted = shown(capsys, "promote", *where, "challenger")
    assert promoted == "graft-smollm2-135m: champion is version 2, previous is version 1\n"
    header, newest, oldest, last = shown(capsys, "policies", "--tracking-uri", uri).splitlines()
    assert header.split()[:3] == ["policy", "version", "aliases"]
    assert re.fullmatch(r"graft-smollm2-135m +2  challenger, champion  .*  82\.0   2\.50      8\.0%", newest)
    assert "previous" in oldest and last == f"2 versions in {uri}"
    assert "champion is version 1, previous is none" in shown(capsys, "rollback", *where)
    rows = json.loads(shown(capsys, "policies", *where, "--format", "json"))
    assert [(row["version"], row["aliases"]) for row in rows] == [(2, ["challenger"]), (1, ["champion"])]
    assert cli.run(["rollback", *where]) == 2
    assert "no previous champion to go back to" in capsys.readouterr().err
    assert cli.run(["promote", *where, "9"]) == 2
    assert "holds no graft-smollm2-135m '9'" in capsys.readouterr().err


def test_policy_options_name_registered_versions(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert (policy_folder("models:/graft-smollm2-135m/1") / "policy.json").read_text() == "1"
    assert policy_folder("some/folder") == Path("some/folder")
    with pytest.raises(RegistryError, match="holds no graft-smollm2-135m '9'"):
        policy_folder("models:/graft-smollm2-135m/9")


class Dashboard(BaseHTTPRequestHandler):
    """Ray's, as far as `graft promote` speaks with it: asks for the token `secret`, and remembers what it is sent."""

    received: ClassVar[list[dict[str, Any]]] = []
    applications: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {"name": "small", "import_path": "serve.app:build", "args": {"config": "smollm2-135m"}}
    }

    def do_GET(self) -> None:
        if self.headers["Authorization"] == "Bearer secret":
            there = {name: {"deployed_app_config": config} for name, config in self.applications.items()}
            self._answer(200, json.dumps({"applications": there}))
        else:
            self._answer(401, "Unauthorized: Missing authentication token")

    def do_PUT(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(200, "")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    Dashboard.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("is_file", [False, True])
def test_a_cluster_that_asks_for_a_token_is_told_of_the_champion(
    dashboard: str, is_file: bool, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray_token").write_text("secret\n")
    name, value = ("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray_token")) if is_file else ("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv(name, value)
    where = ["--config", "smollm2-135m", "--tracking-uri", uri, "--address", dashboard]
    assert cli.run(["promote", *where, "2"]) == 0
    (sent,) = Dashboard.received
    (deployment,) = sent["applications"][0]["deployments"]
    assert deployment["user_config"]["policy"]["registry"] == {"version": 2, "tracking_uri": uri}


def test_without_its_token_nothing_is_promoted(
    dashboard: str, uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # then the token is not sent to anybody
    before = Registry(uri).resolve("smollm2-135m", "champion")
    where = ["--config", "smollm2-135m", "--tracking-uri", uri, "--address", dashboard]
    assert cli.run(["promote", *where, "1" if before == 2 else "2"]) == 2
    assert "refuses (401): Unauthorized" in capsys.readouterr().err
    assert Registry(uri).resolve("smollm2-135m", "champion") == before


def test_applications_are_told_of_a_registry_that_they_can_find(
    dashboard: str, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicas have other working directories, and do not see a file of this machine from another."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    folder = Path(uri.removeprefix("sqlite:///")).parent
    monkeypatch.chdir(folder)
    # Its configuration is a file of the cluster: it goes by its name.
    application = {"name": "smollm2-135m", "import_path": "serve.app:build", "args": {"config": "/there/only.yaml"}}
    monkeypatch.setattr(Dashboard, "applications", {"smollm2-135m": application})
    where = ["--config", "smollm2-135m", "--tracking-uri", "sqlite:///mlflow.db"]
    assert cli.run(["promote", *where, "--address", dashboard, "2"]) == 0
    (sent,) = Dashboard.received
    (deployment,) = sent["applications"][0]["deployments"]
    assert deployment["user_config"]["policy"]["registry"] == {"version": 2, "tracking_uri": uri}
    assert cli.run(["promote", *where, "--address", "http://head.invalid:8265", "1"]) == 2
    assert "the cluster at http://head.invalid:8265 does not see sqlite:///mlflow.db" in capsys.readouterr().err
    assert Registry(uri).resolve("smollm2-135m", "champion") == 2


def test_where_the_registry_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(None) == default_tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri(None) == "http://tracker:5000"
    assert tracking_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"
