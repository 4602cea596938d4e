"""What a published text must not give away of the machine it was written on."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.machine_names import MachineNames


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> MachineNames:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch")
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/home/ada"))
    monkeypatch.setattr("socket.gethostname", lambda: "node-17")
    names = MachineNames()
    names.add(Path("/home/ada/project"), ".")
    names.add(Path("/home/ada/project/data/demo"), "WORK")
    names.add(Path("/scratch/graft-ray-x1"), "HEAD")
    return names


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("in /home/ada/project/data/demo/runs", "in WORK/runs"),
        ("File '/home/ada/project/jobs/x.py'", "File './jobs/x.py'"),
        ("sqlite:////home/ada/project/data/demo/mlflow.db", "sqlite:///WORK/mlflow.db"),
        ("/home/ada/.cache/x, /home/ada.", "~/.cache/x, ~."),
        ("/scratch/graft-ray-x1/session_1/logs", "HEAD/session_1/logs"),
        ("/scratch/other", "TMP/other"),
        ("/home/adam, /var/scratch and ./scratch", "/home/adam, /var/scratch and ./scratch"),
        ("joined the Ray cluster at 10.0.3.17:6379.", "joined the Ray cluster at NODE:6379."),
        ("(CollectActor pid=7, ip=10.0.3.17)", "(CollectActor pid=7, ip=NODE)"),
        ("http://127.0.0.1:8265, 0.0.0.0", "http://127.0.0.1:8265, 0.0.0.0"),
        ("torch 2.13.0+cpu, 1.2.3.4.5", "torch 2.13.0+cpu, 1.2.3.4.5"),
        ("package gcs://_ray_pkg_0a1b.zip.", "package PACKAGE.zip."),
        ("/scratch/graft-ray-x1/session_1/_ray_pkg_0a1b/jobs/x.py", "PACKAGE/jobs/x.py"),
        ("on node-17, not on node-171", "on HOST, not on node-171"),
    ],
)
def test_words_stand_for_names(names: MachineNames, text: str, hidden: str) -> None:
    assert names.hide(text) == hidden
    assert names.left_in(hidden) == []


def test_what_is_left_is_said(names: MachineNames) -> None:
    assert names.left_in("a 10.0.3.17, b /home/ada/x, c %2Fscratch%2Fy") == ["%2Fscratch%2F", "/home/ada/", "10.0.3.17"]


def test_a_host_whose_name_may_be_a_word_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "graft")
    assert MachineNames().hide("graft policies") == "graft policies"


def test_a_root_folder_has_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: Path("/"))
    assert MachineNames().hide("a / b") == "a / b"
