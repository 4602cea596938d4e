"""`graft serve` as a real process, with Ray Serve below it, and the `openai` package as its client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import yaml
from openai import AsyncOpenAI, OpenAI

from graft_dist.cost_curve import CostCurve
from graft_dist.drafter import DFlashDrafter
from graft_dist.errors import ConfigError, GraftError
from graft_dist.target import Target
from jobs import cli
from jobs.ray_head import RayHead, free_ports
from serve import applications
from serve.serve_args import PolicyPin
from storage.registry import Registry
from tests.graft_dist.policies import make_policy, random_network
from tests.serve.conftest import RECITAL, recite

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[2]
LENGTH = len(RECITAL.encode())
WAIT_S = 240.0


class Server:
    """A running `graft serve`, on a Ray of its own unless `address` names one."""

    def __init__(self, config: Path, slug: str, address: str = "local") -> None:
        self.config = config
        self.model = slug
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = config.with_suffix(".log")
        command = [sys.executable, "-m", "jobs.cli", "serve", "--config", str(config), "--port", str(self.port)]
        command += ["--address", address]
        # Ray gives its workers the lowest priority; on a busy machine loading would take minutes.
        environment = os.environ | {"RAY_worker_niceness": "0"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.wait_for(lambda: "Ctrl-C ends it" in self.output() or self.process.poll() is not None)
        assert self.process.poll() is None, self.output()
        found = re.search(r"Ray dashboard: (\S+)", self.output())
        assert found is not None
        self.dashboard = found[1]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def client(self, path: str = "", **options: Any) -> OpenAI:
        fields: dict[str, Any] = {"base_url": f"{self.url}{path}/v1", "api_key": "any", "max_retries": 0}
        return OpenAI(**(fields | {"timeout": 120.0} | options))

    def health(self, path: str = "") -> Any:
        with urllib.request.urlopen(f"{self.url}{path}/healthz", timeout=30) as response:
            return json.loads(response.read())

    def is_ready(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{path}/readyz", timeout=30) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError:
            return False

    def ask(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "recite"}]
        return {"model": self.model, "messages": messages, "temperature": 0} | fields

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def session_pids(self) -> list[int]:
        """Processes that descend from it: Ray's own and the replicas."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.process.pid in ancestors(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text()
        pid = int(re.search(r"PPid:\s+(\d+)", status)[1])  # type: ignore[index]
        found.add(pid)
    return found


@pytest.fixture(scope="module")
def config_file(reciting_folder: Path, reciting_drafter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("served") / "reciter.yaml"
    content = {
        "target": str(reciting_folder), "drafter": str(reciting_drafter_folder), "dtype": "float32", "device": "cpu",
        "threads": 1, "max_length": 512, "max_slots": 2, "num_candidates": 4, "budget": 6, "budgets": [4, 6],
        "resources": {"num_cpus": 0.2},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def server(config_file: Path) -> Iterator[Server]:
    running = Server(config_file, "folder--model")
    yield running
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(120)


def test_answers_as_any_client_asks(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [server.model]
    raw = client.chat.completions.with_raw_response.create(
        **server.ask(max_tokens=LENGTH), extra_headers={"X-Request-ID": "mine-1"}
    )
    assert raw.parse().choices[0].message.content == RECITAL
    assert raw.headers["x-request-id"] == "mine-1"
    pieces = client.chat.completions.create(**server.ask(max_tokens=40), stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == recite(40)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**server.ask(tools=[{"type": "function", "function": {"name": "f"}}]))
    assert caught.value.param == "tools"
    assert server.health()["system_fingerprint"].endswith("-ddtree")


def test_many_at_once_share_the_engine(server: Server) -> None:
    client = server.client()

    def one(number: int) -> str:
        answer = client.chat.completions.create(**server.ask(max_tokens=20 + number))
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == [recite(20 + number) for number in range(12)]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_place(server: Server, is_streamed: bool) -> None:
    async def begin_and_leave() -> None:
        body = server.ask(max_tokens=450, stream=is_streamed, graft={"method": "plain"})
        has_begun = asyncio.Event()
        async with httpx2.AsyncClient(timeout=120) as client:
            task = asyncio.create_task(hold(client, body, has_begun))
            await asyncio.to_thread(server.wait_for, lambda: server.health()["sequences"] > 0 or has_begun.is_set())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hold(client: Any, body: Any, has_begun: asyncio.Event) -> None:
        try:
            async with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    has_begun.set()
                    await asyncio.sleep(600)
        finally:
            has_begun.set()

    async def run() -> None:
        for _ in range(4):
            await begin_and_leave()

    asyncio.run(run())
    server.wait_for(lambda: server.health()["sequences"] == 0)


def test_a_full_server_says_when_to_come_back(server: Server) -> None:
    limit = server.health()["limit"]

    async def refusal() -> openai.RateLimitError | None:
        """What a request gets while another fills the server; None if that one was over too soon."""
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)
        many = server.ask(max_tokens=400, n=limit, extra_body={"graft": {"method": "plain"}})
        filling = asyncio.create_task(client.chat.completions.create(**many))
        is_full = lambda: filling.done() or server.health()["sequences"] == limit  # noqa: E731
        await asyncio.to_thread(server.wait_for, is_full)
        try:
            await client.chat.completions.create(**server.ask(max_tokens=3))
        except openai.RateLimitError as error:
            return error
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
        return None

    refused = None
    while refused is None:
        refused = asyncio.run(refusal())
    assert refused.response.headers["retry-after"] == "1" and refused.code == "server_busy"
    server.wait_for(lambda: server.health()["sequences"] == 0)


def saved_policy(target: Target, drafter_folder: Path, folder: Path, **changes: Any) -> Path:
    drafter = DFlashDrafter.load(str(drafter_folder), target)
    fields = {
        "target_fingerprint": target.fingerprint,
        "drafter_fingerprint": drafter.fingerprint,
        "slug": "folder--model",
        "max_budget": 6,
        "cost_curves": {"another box": CostCurve((0, 1), (1.0, 2.0), "hand")},
    }
    network = random_network(target.embedding_weight.shape[1], drafter.draft_depth)
    return make_policy(network, **(fields | changes)).save(folder)


def test_a_policy_goes_live_without_a_restart_and_a_wrong_one_is_refused(
    server: Server, reciting_target: Target, reciting_drafter_folder: Path, tmp_path: Path
) -> None:
    good = saved_policy(reciting_target, reciting_drafter_folder, tmp_path / "good")
    wrong = saved_policy(reciting_target, reciting_drafter_folder, tmp_path / "wrong", target_fingerprint="f" * 64)
    (name,) = [one.name for one in applications.list_applications(server.dashboard)]
    pieces = server.client().chat.completions.create(
        **server.ask(max_tokens=480), stream=True, extra_body={"graft": {"method": "plain"}}
    )
    stream = iter(pieces)
    text = next(stream).choices[0].delta.content or ""
    applications.set_policy(server.dashboard, name, PolicyPin(folder=str(good)))
    server.wait_for(lambda: server.health()["policy"]["label"].startswith("folder-"))
    text += "".join(piece.choices[0].delta.content or "" for piece in stream)
    assert text == recite(480)  # the answer that was under way went on
    fingerprint = server.health()["policy"]["fingerprint"]
    answer = server.client().chat.completions.create(
        **server.ask(max_tokens=40), extra_body={"graft": {"method": "graft", "metrics": True}}
    )
    assert answer.choices[0].message.content == recite(40)
    assert answer.model_dump()["metrics"]["graft"]["policy_fingerprint"] == fingerprint

    applications.set_policy(server.dashboard, name, PolicyPin(folder=str(wrong)))
    server.wait_for(lambda: server.health()["refused_policy"] is not None)
    health = server.health()
    assert health["policy"]["fingerprint"] == fingerprint and "ffffffffffff" in health["refused_policy"]["reason"]
    assert health["system_fingerprint"].endswith("+refused") and health["status"] == "ok"
    assert server.client().chat.completions.create(**server.ask(max_tokens=5)).choices[0].message.content == recite(5)
    (running,) = applications.list_applications(server.dashboard)
    assert running.serves("folder--model") and running.policy == PolicyPin(folder=str(wrong))

    def is_whole() -> bool:  # Serve may take a moment to see that its replica has taken the policy in
        return [(one.status, one.num_running) for one in applications.list_applications(server.dashboard)] == [
            ("RUNNING", 1)
        ]

    server.wait_for(is_whole)

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    Registry(uri).register(good, "folder--model", {"mat": 2.0})
    promote = ["promote", "--config", str(server.config), "--tracking-uri", uri, "--address", server.dashboard, "1"]
    assert cli.run(promote) == 0
    server.wait_for(lambda: server.health()["policy"]["label"] == "v1")
    assert server.health()["system_fingerprint"].endswith("-v1")

    applications.set_policy(server.dashboard, name, None)
    server.wait_for(lambda: server.health()["policy"]["version"] is None)
    assert server.health()["policy"]["label"] == "ddtree"


def test_a_second_application_beside_the_first_and_a_drain(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"config": str(server.config), "model": "second", "num_cpus": 0.2, "max_queue": 2, "methods": ["plain"]}
    second = {"name": "second", "route_prefix": "/second", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(server.dashboard, second)
    applications.wait_until_running(server.dashboard, "second", WAIT_S)
    with pytest.raises(ConfigError, match="an application 'folder--model' is on the cluster"):
        applications.check_free(server.dashboard, "folder--model")
    assert cli.run(["serve", "--config", str(server.config), "--address", server.dashboard]) == 2  # and leaves it there
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.dashboard)
    assert cli.run(["serve", "--config", str(server.config)]) == 2  # finds the cluster by itself
    assert f"serving on the Ray that runs at {server.dashboard}" in capsys.readouterr().err
    assert {one.name for one in applications.list_applications(server.dashboard)} == {"folder--model", "second"}
    client = server.client("/second")
    ask = server.ask(model="second")
    assert client.chat.completions.create(**ask, max_tokens=5).choices[0].message.content == recite(5)
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(**ask, max_tokens=5)

    assert server.is_ready("/second")
    stream = iter(client.chat.completions.create(**ask, max_tokens=480, stream=True))
    text = next(stream).choices[0].delta.content or ""
    applications.remove(server.dashboard, "second")
    server.wait_for(lambda: not server.is_ready("/second"))  # nothing new is sent to a replica that is to go
    text += "".join(piece.choices[0].delta.content or "" for piece in stream)
    assert text == recite(480)  # what ran was finished
    server.wait_for(lambda: not applications.is_there(server.dashboard, "second"))

    def is_refused() -> bool:
        try:
            client.chat.completions.create(**ask, max_tokens=5)
        except openai.APIStatusError:
            return True
        except openai.APIError:  # a proxy that has not heard of it yet
            pass
        return False

    server.wait_for(is_refused)
    assert server.health()["status"] == "ok"


def test_an_application_with_an_unknown_key_is_refused_and_the_others_stay(server: Server) -> None:
    args = {"config": str(server.config), "max_qeue": 2}
    wrong = {"name": "wrong", "route_prefix": "/wrong", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(server.dashboard, wrong)
    with pytest.raises(GraftError, match="could not be deployed"):
        applications.wait_until_running(server.dashboard, "wrong", WAIT_S)
    assert server.health()["status"] == "ok"
    applications.remove(server.dashboard, "wrong")
    with pytest.raises(ConfigError, match="no application 'nobody'"):
        applications.set_policy(server.dashboard, "nobody", None)
    with pytest.raises(ConfigError, match="no Ray dashboard answers"):
        applications.list_applications(f"http://127.0.0.1:{free_ports(1)[0]}")


def test_a_killed_replica_is_replaced(server: Server) -> None:
    replicas = [pid for pid in server.session_pids() if "ServeReplica" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert replicas
    for pid in replicas:
        os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        try:  # not for long: a request that went to the dead replica may hang
            answer = server.client(timeout=5).chat.completions.create(**server.ask(max_tokens=5))
        except openai.APIError:
            return False
        return answer.choices[0].message.content == recite(5)

    server.wait_for(answers)


def test_ctrl_c_ends_everything_it_started_once_requests_have_finished(server: Server) -> None:
    pids = server.session_pids()
    assert len(pids) > 3  # Ray's processes
    body = server.ask(max_tokens=450, extra_body={"graft": {"method": "plain"}})
    stream = iter(server.client().chat.completions.create(**body, n=2, stream=True))
    texts = ["", ""]
    for _ in range(8):  # it has begun: two roles, some tokens of each answer
        _add(texts, next(stream))
    server.process.send_signal(signal.SIGINT)
    for piece in stream:
        _add(texts, piece)
    assert texts == [recite(450)] * 2
    assert server.process.wait(WAIT_S) == 0, server.output()
    server.wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
    assert "Traceback" not in server.output()


def test_two_targets_share_a_ray_that_was_there_and_leave_it_as_it_was(
    config_file: Path, reciting_folder: Path, tmp_path: Path
) -> None:
    """The second gets a place of its own; with the last, Serve ends, which the first had started."""
    shutil.copytree(reciting_folder, tmp_path / "twin")
    content = yaml.safe_load(config_file.read_text()) | {"target": str(tmp_path / "twin")}
    twin = tmp_path / "twin.yaml"
    twin.write_text(yaml.safe_dump(content))
    with RayHead(num_cpus=2, environment={"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}) as head:
        first = Server(config_file, "folder--model", head.dashboard_url)
        second = Server(twin, "folder--twin", head.dashboard_url)
        assert f"folder--twin is served at {first.url}/folder--twin/v1" in second.output()
        for server, client in ((first, first.client()), (second, first.client("/folder--twin"))):
            text = client.chat.completions.create(**server.ask(max_tokens=5)).choices[0].message.content
            assert text == recite(5)
        with urllib.request.urlopen(f"{first.url}/folder--twin/", timeout=30) as page:
            assert page.url.endswith("/folder--twin/")
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(WAIT_S) == 0, second.output()
        assert [one.name for one in applications.list_applications(head.dashboard_url)] == ["folder--model"]
        assert first.is_ready("")
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(WAIT_S) == 0, first.output()
        assert not applications.is_serving(head.dashboard_url)
        with socket.create_server(("127.0.0.1", first.port)):  # nobody listens there any more
            pass


def _add(texts: list[str], piece: Any) -> None:
    for choice in piece.choices:
        texts[choice.index] += choice.delta.content or ""


def test_a_mistake_is_one_sentence_before_anything_starts(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "--config", str(config_file), "--policy", "/nowhere"]) == 2
    assert capsys.readouterr().err.strip() == "graft: there is no policy folder /nowhere"
