"""`graft bench-serve` and its soak on a real Ray Serve application: policies swapped, processes watched."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from openai import APIError, InternalServerError, OpenAI, RateLimitError

from graft_dist.config import TargetConfig, load_config
from graft_dist.drafter import DFlashDrafter
from graft_dist.target import Target
from jobs import cli
from jobs.ray_head import RayHead, free_ports
from jobs.soak_command import proxies_beside
from serve import applications
from serve.serve_args import PolicyPin
from storage import run_query
from storage.registry import Registry
from tests.graft_dist.policies import make_policy, random_network
from tests.serve.conftest import recite

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True)
class Application:
    """A served tiny model."""

    url: str
    dashboard: str
    folder: Path  # with prompts.jsonl, three policies that fit, one that does not, and the store of recorded traffic


@pytest.fixture(scope="module")
def application(
    ray_head: RayHead, reciting_config: TargetConfig, reciting_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    folder = tmp_path_factory.mktemp("application")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(reciting_config.model_dump(mode="json")))
    lines = [{"id": f"p{index}", "task": "chat", "turns": [f"Question {index}?"]} for index in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drafter = DFlashDrafter.load(reciting_config.drafter, reciting_target)
    network = random_network(reciting_target.hidden_size, drafter.draft_depth)
    fitting = {"target_fingerprint": reciting_target.fingerprint, "drafter_fingerprint": drafter.fingerprint}
    make_policy(network, slug=reciting_config.slug, **fitting).save(folder / "fitting")
    make_policy(network, slug=reciting_config.slug, max_budget=5, **fitting).save(folder / "smaller")
    make_policy(network, slug=reciting_config.slug, max_budget=4, **fitting).save(folder / "smallest")
    make_policy(network, slug=reciting_config.slug).save(folder / "foreign")
    (port,) = free_ports(1)
    wanted = {
        "name": "tiny",
        "route_prefix": "/",
        "import_path": applications.IMPORT_PATH,
        "args": {
            "config": str(folder / "tiny.yaml"),
            "model": "reciter",
            "methods": ["plain", "ddtree"],
            "num_cpus": 0.5,
            "threads": 1,
            "record_traffic": {"store": str(folder / "store"), "share": 1.0, "unit_sequences": 4},
        },
    }
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [wanted]}))
    serve = str(Path(sys.executable).with_name("serve"))  # Ray's own command
    subprocess.run([serve, "deploy", str(file), "--address", ray_head.dashboard_url], check=True)
    applications.wait_until_running(ray_head.dashboard_url, "tiny", 300.0)
    yield Application(f"http://127.0.0.1:{port}", ray_head.dashboard_url, folder)
    applications.remove(ray_head.dashboard_url, "tiny")


def _find(application: Application, name: str) -> applications.ServedApplication:
    (found,) = (one for one in applications.list_applications(application.dashboard) if one.name == name)
    return found


def _logged_requests(head: RayHead, request_id: str) -> list[dict[str, Any]]:
    """The lines that replicas have logged for a request."""
    logs = (head.folder / "session_latest" / "logs" / "serve").glob("replica_*.log")
    lines = [line for log in logs for line in log.read_text().splitlines() if '"event": "request"' in line]
    found = [json.loads(line[line.index("{") :]) for line in lines if request_id in line]
    return [line for line in found if line["request_id"] == request_id]


def run(application: Application, out: Path, *options: str) -> int:
    fixed = ["--prompts", str(application.folder / "prompts.jsonl"), "--out", str(out), "--url", application.url]
    return cli.run(["bench-serve", *fixed, "--max-new-tokens", "16", *options])


def test_a_load_test(application: Application, tmp_path: Path) -> None:
    options = ["--arms", "plain,ddtree", "--concurrency", "2", "--blocks", "2", "--block-requests", "3"]
    assert run(application, tmp_path / "out", *options) == 0
    summary = {row["arm"]: row for row in json.loads((tmp_path / "out" / "summary.json").read_text())}
    assert summary["plain"]["num_ok"] == summary["ddtree"]["num_ok"] == 6
    assert summary["plain"]["mean_budget"] == 0.0 < summary["ddtree"]["mean_budget"]
    assert summary["ddtree"]["differs_from_plain"] == 0


def test_a_short_soak_with_swaps_through_the_dashboard(application: Application, tmp_path: Path) -> None:
    policies = f"none,{application.folder / 'fitting'}"
    options = ["--policies", policies, "--dashboard", application.dashboard, "--swap-every", "0.5"]
    code = run(application, tmp_path / "out", "--soak", "0.05", "--concurrency", "3", "--sample-every", "0.2", *options)
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert code == 0, report["problems"]
    assert report["num_compared"] > 0 == report["num_differing"]
    fingerprints = [swap["system_fingerprint"] for swap in report["swaps"]]
    assert fingerprints and fingerprints[0].split("-")[-2] == "folder"  # not the one that it began with
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    (replica,) = applications.list_applications(application.dashboard)[0].pids
    (proxy,) = proxies_beside([replica])  # the clients' connections are there
    assert {sample["pid"] for sample in samples} == {replica, proxy}


def test_a_policy_that_does_not_fit_is_a_problem_and_no_answer_is_lost(
    application: Application, tmp_path: Path
) -> None:
    policies = f"{application.folder / 'foreign'},none"  # the first swap is to it
    options = ["--policies", policies, "--dashboard", application.dashboard, "--swap-every", "0.5", "--limit", "4"]
    assert run(application, tmp_path / "out", "--soak", "0.02", "--concurrency", "2", *options) == 1
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert report["problems"] and all("the policy was refused" in problem for problem in report["problems"])
    assert report["num_differing"] == 0


def test_the_traffic_was_recorded_by_the_replica(application: Application) -> None:
    (run_of_replica,) = run_query(application.folder / "store", "runs").to_pylist()
    assert run_of_replica["sources"] == "traffic" and run_of_replica["num_sequences"] > 20
    assert run_of_replica["num_errors"] == 0 and run_of_replica["num_length"] > 0


def test_two_replicas_share_the_load_a_swap_reaches_both_and_one_can_go(application: Application) -> None:
    store = application.folder / "pair-store"
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "pair", "methods": ["plain"], "num_cpus": 0.2,
        "threads": 1, "replicas": 2, "record_traffic": {"store": str(store), "share": 1.0, "unit_sequences": 4},
    }  # fmt: skip
    pair = {"name": "pair", "route_prefix": "/pair", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(application.dashboard, pair)
    assert len(applications.wait_until_running(application.dashboard, "pair", 300.0).pids) == 2
    client = OpenAI(base_url=f"{application.url}/pair/v1", api_key="any", timeout=120.0)

    def ask(max_tokens: int) -> str:
        messages: list[Any] = [{"role": "user", "content": "recite"}]
        chunks = client.chat.completions.create(
            model="pair", messages=messages, temperature=0, max_tokens=max_tokens, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, [30] * 12)) == {recite(30)}
        applications.set_policy(application.dashboard, "pair", PolicyPin(folder=str(application.folder / "fitting")))
        in_force = 0
        deadline = time.monotonic() + 240.0
        while in_force < 12:  # requests go to either: so many answers in a row come from both
            assert time.monotonic() < deadline, in_force
            with urllib.request.urlopen(f"{application.url}/pair/healthz", timeout=30) as response:
                label = json.loads(response.read())["policy"]["label"]
            in_force = in_force + 1 if label.startswith("folder-") else 0
        answers = [pool.submit(ask, 150) for _ in range(8)]
        applications.deploy(application.dashboard, pair | {"args": args | {"replicas": 1}})
        assert {answer.result() for answer in answers} == {recite(150)}  # whoever served them finished them first
    while len(found := applications.wait_until_running(application.dashboard, "pair", 300.0).pids) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert ask(5) == recite(5)
    applications.remove(application.dashboard, "pair")
    while applications.is_there(application.dashboard, "pair"):
        assert time.monotonic() < deadline, "the application does not end"
        time.sleep(0.2)
    recorded = run_query(store, "SELECT run_id, count(*) AS times FROM sequences GROUP BY run_id").to_pylist()
    assert len(recorded) >= 2 and all(row["times"] > 0 for row in recorded)


def test_replicas_follow_the_load_up_and_down(application: Application) -> None:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0,
        "downscale_delay_s": 1,
    }  # fmt: skip
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "elastic", "num_cpus": 0.2, "threads": 1,
        "autoscaling": scaling,
    }  # fmt: skip
    wanted = {"name": "elastic", "route_prefix": "/elastic", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(application.dashboard, wanted)
    assert len(applications.wait_until_running(application.dashboard, "elastic", 300.0).pids) == 1
    client = OpenAI(base_url=f"{application.url}/elastic/v1", api_key="any", timeout=120.0)
    deadline = time.monotonic() + 300.0
    is_enough = threading.Event()

    def keep_asking() -> set[str]:
        answers = set()
        while not is_enough.is_set():
            answer = client.completions.create(model="elastic", prompt="recite", temperature=0, max_tokens=100)
            answers.add(answer.choices[0].text)
        return answers

    def wait_for_replicas(number: int) -> None:
        while (found := len(_find(application, "elastic").pids)) != number:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        try:
            wait_for_replicas(2)
        finally:
            is_enough.set()
        wait_for_replicas(1)
        assert {text for one in asking for text in one.result()} == {recite(100)}
    applications.remove(application.dashboard, "elastic")


def test_a_drawn_request_id_is_in_the_replicas_log(application: Application, ray_head: RayHead) -> None:
    client = OpenAI(base_url=f"{application.url}/v1", api_key="any", timeout=120.0)
    raw = client.completions.with_raw_response.create(model="reciter", prompt="recite", max_tokens=3)
    request_id = raw.headers["x-request-id"]
    deadline = time.monotonic() + 60.0
    while not (lines := _logged_requests(ray_head, request_id)):  # Ray may write its logs a little later
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (line,) = lines
    assert line["outcome"] == "ok" and line["output_tokens"] == 3 and line["endpoint"] == "completions"


def test_a_replica_follows_the_registrys_champion(application: Application, tmp_path: Path) -> None:
    slug = load_config(str(application.folder / "tiny.yaml")).slug
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    registry = Registry(uri)
    for version, folder in ((1, "fitting"), (2, "smaller"), (3, "foreign"), (4, "smallest")):
        assert registry.register(application.folder / folder, slug, {"mat": float(version)}) == version
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "follower", "num_cpus": 0.2, "threads": 1,
        "poll_champion": {"tracking_uri": uri, "every_s": 1},
    }  # fmt: skip
    wanted = {"name": "follower", "route_prefix": "/follower", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(application.dashboard, wanted)
    pids = applications.wait_until_running(application.dashboard, "follower", 300.0).pids
    client = OpenAI(base_url=f"{application.url}/follower/v1", api_key="any", timeout=120.0)
    deadline = time.monotonic() + 300.0

    def health() -> Any:
        with urllib.request.urlopen(f"{application.url}/follower/healthz", timeout=30) as response:
            return json.loads(response.read())

    def wait_for(is_so: Callable[[Any], bool]) -> None:
        while not is_so(found := health()):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        answer = client.completions.create(model="follower", prompt="recite", temperature=0, max_tokens=30)
        assert answer.choices[0].text == recite(30)

    wait_for(lambda found: found["champion_problem"] == f"the registry has no champion of {slug} yet")
    assert health()["policy"]["version"] is None
    registry.promote(slug, 1)
    wait_for(lambda found: found["policy"]["version"] == 1 and found["champion_problem"] is None)
    registry.promote(slug, 2)
    wait_for(lambda found: found["policy"]["version"] == 2)
    registry.promote(slug, 3)  # made for another target
    wait_for(lambda found: found["refused_policy"] is not None)
    assert (health()["policy"]["version"], health()["refused_policy"]["policy"]) == (2, "v3")
    registry.rollback(slug)
    wait_for(lambda found: found["refused_policy"] is None and found["policy"]["version"] == 2)
    shutil.rmtree(tmp_path / "mlartifacts")
    registry.promote(slug, 4)  # which no replica has a copy of
    wait_for(lambda found: found["refused_policy"] is not None)
    assert (health()["policy"]["version"], health()["refused_policy"]["policy"]) == (2, "v4")
    registry.promote(slug, 1)  # which this one has
    wait_for(lambda found: found["refused_policy"] is None and found["policy"]["version"] == 1)
    assert _find(application, "follower").pids == pids, "no replica was started anew"
    applications.remove(application.dashboard, "follower")


def test_serves_own_full_queue_says_when_to_come_back(application: Application) -> None:
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "narrow", "num_cpus": 0.2, "threads": 1,
        "max_slots": 1, "max_queue": 0, "retry_after_s": 7,
    }  # fmt: skip
    wanted = {"name": "narrow", "route_prefix": "/narrow", "import_path": applications.IMPORT_PATH, "args": args}
    applications.deploy(application.dashboard, wanted)
    applications.wait_until_running(application.dashboard, "narrow", 300.0)
    address = urlsplit(application.url)
    unfinished = (
        "POST /narrow/v1/completions HTTP/1.1\r\nHost: narrow\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    )
    body = json.dumps({"model": "narrow", "prompt": "recite", "temperature": 0, "max_tokens": 5}).encode()
    request = urllib.request.Request(
        f"{application.url}/narrow/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 240.0
    refused = None
    with ExitStack() as connections:

        def hold() -> None:
            """A client that never finishes what it asks: it holds a place in the replica, or in the queue before it."""
            held = connections.enter_context(socket.create_connection((address.hostname, address.port)))
            held.sendall(unfinished.encode())

        for _ in range(2 * (1 + 16) + 2):
            hold()
        while refused is None:  # until Serve has taken in all of them
            assert time.monotonic() < deadline
            try:
                urllib.request.urlopen(request, timeout=3).close()
            except urllib.error.HTTPError as error:
                refused = error
            except TimeoutError:  # it stood in the queue, where there was room: of a burst some were sent away
                hold()
    assert (refused.code, refused.headers["Retry-After"]) == (429, "7")
    while True:  # they are gone, and so are their places
        assert time.monotonic() < deadline
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                assert json.loads(response.read())["choices"][0]["text"] == recite(5)
            break
        except urllib.error.HTTPError as error:
            assert error.code == 429
    applications.remove(application.dashboard, "narrow")


def test_whoever_is_inside_serves_own_full_queue_is_answered_whole(application: Application) -> None:
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "single", "num_cpus": 0.2, "threads": 1,
        "methods": ["plain"], "retry_after_s": 7,
    }  # fmt: skip
    one_each = {"name": applications.DEPLOYMENT, "max_ongoing_requests": 1, "max_queued_requests": 1}
    wanted = {
        "name": "single", "route_prefix": "/single", "import_path": applications.IMPORT_PATH, "args": args,
        "deployments": [one_each],  # Serve's limits far below the service's own
    }  # fmt: skip
    applications.deploy(application.dashboard, wanted)
    applications.wait_until_running(application.dashboard, "single", 300.0)
    client = OpenAI(base_url=f"{application.url}/single/v1", api_key="any", timeout=120.0, max_retries=0)
    fields: dict[str, Any] = {"model": "single", "prompt": "recite", "temperature": 0}
    deadline = time.monotonic() + 240.0

    def ask(max_tokens: int) -> str | RateLimitError:
        try:
            return client.completions.create(**fields, max_tokens=max_tokens).choices[0].text
        except RateLimitError as error:
            return error

    refused: list[RateLimitError] = []
    while not refused:  # unless the stream was over before they came
        assert time.monotonic() < deadline
        body = {"graft": {"method": "plain"}}
        chunks = iter(client.completions.create(**fields, max_tokens=240, stream=True, extra_body=body))
        text = next(chunks).choices[0].text  # so it holds the replica's only place
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask, 5) for _ in range(4)]  # and the first of these the queue's
            text += "".join(chunk.choices[0].text for chunk in chunks)
            answers = [one.result() for one in asked]
        assert text == recite(240)
        assert {answer for answer in answers if isinstance(answer, str)} == {recite(5)}
        refused = [answer for answer in answers if isinstance(answer, RateLimitError)]
    for error in refused:
        assert (error.status_code, error.response.headers["retry-after"]) == (429, "7")
        assert "max_queued_requests=1" in error.response.text  # Serve's own words, and no JSON
    assert ask(5) == recite(5)
    applications.remove(application.dashboard, "single")


def test_a_stuck_replica_is_replaced_and_its_requests_end(application: Application) -> None:
    args = {
        "config": str(application.folder / "tiny.yaml"), "model": "hanging", "num_cpus": 0.2, "threads": 1,
        "stuck_after_s": 5.0, "health_check_period_s": 0.5,
    }  # fmt: skip
    build = "tests.serve.hanging_app:build"
    wanted = {"name": "hanging", "route_prefix": "/hanging", "import_path": build, "args": args}
    applications.deploy(application.dashboard, wanted)
    client = OpenAI(base_url=f"{application.url}/hanging/v1", api_key="any", timeout=120.0, max_retries=0)

    def ask() -> str | None:
        return client.completions.create(model="hanging", prompt="recite", temperature=0, max_tokens=5).choices[0].text

    def answer_within(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                assert ask() == recite(5)
                return
            except APIError:  # nobody is there yet
                assert time.monotonic() < deadline
                time.sleep(0.5)

    answer_within(300.0)
    urllib.request.urlopen(urllib.request.Request(f"{application.url}/hanging/hang", method="POST"), timeout=30).close()
    with pytest.raises(InternalServerError, match="failed to decode"):
        ask()
    answer_within(300.0)  # well before a replica with a request that never ends would be given up
    applications.remove(application.dashboard, "hanging")


def test_serve_run(application: Application, ray_head: RayHead) -> None:
    serve = str(Path(sys.executable).with_name("serve"))
    args = [f"config={application.folder / 'tiny.yaml'}", "model=runner", "num_cpus=0.2", "threads=1"]
    command = [serve, "run", "serve.app:build", *args, "--name", "runner", "--route-prefix", "/runner"]
    command += ["--address", ray_head.address, "--non-blocking"]
    subprocess.run(command, check=True, cwd=application.folder, env=ray_head.environment(), timeout=300)
    client = OpenAI(base_url=f"{application.url}/runner/v1", api_key="any", timeout=120.0)
    answer = client.completions.create(model="runner", prompt="recite", temperature=0, max_tokens=30)
    assert answer.choices[0].text == recite(30)
