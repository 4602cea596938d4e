"""`graft policies`, `graft promote` and `graft rollback` on a real registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

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


def test_where_the_registry_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(None) == default_tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri(None) == "http://tracker:5000"
    assert tracking_uri("sqlite:////a/b.db") == "sqlite:////a/b.db"
