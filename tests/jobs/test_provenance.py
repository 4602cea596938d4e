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
    given = ["/home/me/bin/graft", "bench", "--prompts", "../me/p.jsonl", "--config=/home/me/x.yaml", "--out", "runs/x"]
    shown = ["graft", "bench", "--prompts", "p.jsonl", "--config=x.yaml", "--out", "runs/x"]
    monkeypatch.setattr("sys.argv", given)
    assert provenance.provenance()["command"] == shown
    for argument, told in (
        ("~/p.jsonl", "p.jsonl"),
        ("--top-p=0.9", "--top-p=0.9"),
        ("z-lab/x", "z-lab/x"),
        ("sqlite:////home/me/mlflow.db", "sqlite://mlflow.db"),
        ("--tracking-uri=sqlite:////home/me/mlflow.db", "--tracking-uri=sqlite://mlflow.db"),
        ("http://host:5000/x", "http://host:5000/x"),
    ):
        assert provenance.without_folder(argument) == told


def test_outside_of_a_checkout_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.commit() is None
