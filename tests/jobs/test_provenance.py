import json
from pathlib import Path

import pytest

from jobs import provenance


def test_provenance_is_json_and_says_where_and_with_what() -> None:
    found = json.loads(json.dumps(provenance.provenance()))
    assert {"started_at", "command", "commit", "machine", "versions"} <= found.keys()
    assert found["machine"]["torch_threads"] >= 1
    assert found["versions"]["torch"]


def test_the_command_does_not_tell_private_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/bin/graft", "bench", "--prompts", "/home/me/p.jsonl", "--out", "runs/x"])
    assert provenance.provenance()["command"] == ["graft", "bench", "--prompts", "p.jsonl", "--out", "runs/x"]


def test_outside_of_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() is None
