"""Policies of the command line, and the application that a soak takes hold of, on a scripted dashboard."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from graft_dist.errors import ConfigError, GraftError, PolicyError
from jobs.soak_command import application_control, parse_policies
from serve.applications import IMPORT_PATH
from tests.jobs.scripted_server import json_answer, serving

HERE = "http://127.0.0.1:8265"


def test_policies_are_read_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none, shipped, folder, version = parse_policies("none, builtin:tiny,learned,v12", "sqlite:///mlflow.db", HERE)
    assert none is None and shipped is not None and folder is not None and version is not None
    assert shipped.folder == "builtin:tiny" and folder.folder == str(tmp_path / "learned")
    assert version.registry is not None and version.registry.version == 12
    assert version.registry.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"  # replicas are in another folder
    with pytest.raises(ConfigError, match=r"the cluster at http://head:8265 does not see sqlite:///mlflow\.db"):
        parse_policies("none,v12", "sqlite:///mlflow.db", "http://head:8265")


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [("none", "at least two"), ("a,a", "at least two"), ("a, a,a", "at least two"), ("v1,v2", "where")],
)
def test_policies_that_cannot_be_swapped_are_refused(listed: str, sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        parse_policies(listed, None, HERE)


class Dashboard:
    """Serve's REST interface of a cluster with some applications, each of one replica."""

    def __init__(self, **pids: int) -> None:
        self.pids = pids
        self.state = "RUNNING"
        self.user_config: dict[str, Any] = {}
        self.put: list[dict[str, Any]] = []

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body:
            self.put.append(body)
        replicas = {
            name: [
                {"state": self.state, "pid": pid},
                {"state": "STARTING", "pid": None},
                {"state": "RUNNING", "pid": 0},
            ]
            for name, pid in self.pids.items()
        }
        applications = {
            name: {
                "deployed_app_config": {"name": name, "import_path": IMPORT_PATH, "args": {"config": "tiny"}},
                "deployments": {
                    "Decoder": {"replicas": own, "deployment_config": {"user_config": self.user_config}},
                },
            }
            for name, own in replicas.items()
        }
        writer.write(json_answer({"applications": applications}))


def test_the_only_application_is_taken_hold_of() -> None:
    dashboard = Dashboard(tiny=os.getpid())
    with serving(dashboard.answer) as server:
        control = application_control(server.url, None, parse_policies("none,/policies/a", None, HERE))
        assert control.pids() == [os.getpid()]
        dashboard.state = "UPDATING"  # it takes a policy in, and is the same process
        assert control.pids() == [os.getpid()]
        assert control.swap is not None
        # It runs without a saved policy: so that each swap changes something, that one is not the first.
        assert [control.swap(), control.swap(), control.swap()] == ["/policies/a", "none", "/policies/a"]
        there, dashboard.pids = dashboard.pids, {}
        with pytest.raises(GraftError, match="'tiny' has gone"):
            control.pids()
        with pytest.raises(GraftError):
            control.swap()
        dashboard.pids = there
        assert control.swap() == "none"  # the one that could not be asked for
    told = [put["applications"][0]["deployments"][0]["user_config"]["policy"] for put in dashboard.put]
    assert [policy and policy["folder"] for policy in told] == ["/policies/a", None, "/policies/a", None]


def test_a_policy_that_cannot_be_read_does_not_hide_its_application() -> None:
    dashboard = Dashboard(tiny=os.getpid())
    dashboard.user_config = {"policy": {"fodler": "x"}}
    with serving(dashboard.answer) as server:
        assert application_control(server.url, None, []).pids() == [os.getpid()]


def test_several_applications_have_to_be_told_apart_and_nothing_is_swapped_unasked() -> None:
    with serving(Dashboard(one=os.getpid(), two=2**22 + 1).answer) as server:
        with pytest.raises(ConfigError, match=r"there are 2 applications at .*: name one of one, two"):
            application_control(server.url, None, [])
        with pytest.raises(ConfigError, match="no application 'three'"):
            application_control(server.url, "three", [])
        elsewhere = application_control(server.url, "two", [])
        assert elsewhere.swap is None and elsewhere.pids() == []  # its process is on another machine
