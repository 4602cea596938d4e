"""Parts of the demonstration that need no cluster: its prompts, its users, what it reports."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from graft_dist.config import TargetConfig, load_config
from graft_dist.errors import GraftError
from graft_dist.prompts import is_held_out, learning_split, prompt_hash
from jobs.demo import (
    Demo,
    DemoRequest,
    Stage,
    _configs,
    _ended,
    _expect,
    _request,
    _verdict,
    _wait_for,
    main,
    render_report,
    within,
)
from jobs.demo_prompts import made_prompts
from jobs.demo_users import Asked, Users
from jobs.fresh_prompts import choose_fresh, write_prompts
from jobs.load_client import Outcome
from tests.jobs.scripted_server import json_answer, serving


def test_there_are_prompts_enough_of_every_split_for_each_retraining() -> None:
    prompts = made_prompts()
    assert len({prompt.turns for prompt in prompts}) == len({prompt.id for prompt in prompts}) == len(prompts)
    fresh = [prompt for prompt in prompts if is_held_out(prompt.turns)]
    keys = [prompt_hash(prompt.turns) for prompt in fresh]
    assert keys == sorted(keys)  # the order in which they are asked
    first, second = _request([]).num_prompts
    assert len(fresh) > first + second
    # The gate judges v2 by the prompts of both.
    for some, least in (
        (fresh[:first], {"fit": 20, "tune": 4, "test": 5}),
        (fresh[: first + second], {"fit": 80, "tune": 15, "test": 20}),
    ):
        splits = Counter(learning_split(prompt.turns) for prompt in some)
        assert all(splits[split] >= number for split, number in least.items()), splits
        tasks = Counter(prompt.task for prompt in some)
        assert 0 < tasks["chat"] < min(tasks["math"], tasks["code"])


def test_every_request_of_a_user_is_counted() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(json_answer({"data": [{"id": "tiny"}]}))
        elif len(seen) >= 6:
            writer.write(json_answer({"error": {"message": "broken"}}, "500 Internal Server Error"))
        else:
            seen.append(body)
            choice = {"index": 0, "message": {"content": "Yes."}, "finish_reason": "stop"}
            graft = {"policy_version": 7, "rounds": 2}
            answer = {"choices": [choice], "usage": {"completion_tokens": 5}, "metrics": {"graft": graft}}
            writer.write(json_answer(answer) if not body["stream"] else b"")  # a stream is cut
        await writer.drain()

    with serving(handler) as server, Users(server.url, made_prompts(), 8) as users:
        while len(users.asked) < 10:
            time.sleep(0.01)
    whole = [one for one in users.asked if one.is_answered]
    assert len(whole) == 3 and {(one.version, one.num_tokens, one.num_rounds) for one in whole} == {("v7", 5, 2)}
    assert {one.outcome for one in users.asked} == {Outcome.ok, Outcome.unreachable, Outcome.refused}
    assert {body["model"] for body in seen} == {"tiny"}


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(GraftError, match="the users ended early"), Users("http://127.0.0.1:9", made_prompts(), 8):
        pass


def test_after_an_error_the_users_are_not_waited_for() -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(json_answer({"data": [{"id": "tiny"}]}))
            await writer.drain()
            return
        is_asked.set()
        while not may_answer.is_set():
            await asyncio.sleep(0.01)

    users: Users | None = None
    with serving(handler) as server:
        try:
            with pytest.raises(GraftError, match="of something else"), Users(server.url, made_prompts(), 8) as users:
                assert is_asked.wait(60)
                raise GraftError("of something else")
            assert users is not None and users.asked == []
        finally:
            may_answer.set()


def test_the_limit_ends_whatever_is_waited_for() -> None:
    before = signal.getsignal(signal.SIGALRM)
    nobody = threading.Event()
    with pytest.raises(GraftError, match="limit for all of it is reached"), within(0.05):
        nobody.wait(60)
    with pytest.raises(GraftError, match="limit for all of it is reached"), within(-1.0):  # it is over already
        nobody.wait(60)
    with within(60):
        pass
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_command_that_does_not_end_when_asked_to_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.demo._STOP_TIMEOUT_S", 0.01)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with pytest.raises(GraftError, match="no"), _ended(process):
        assert process.stdout.readline() == "up\n"
        raise GraftError("no")
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


def test_a_server_that_does_not_answer_for_a_while_is_waited_for() -> None:
    num_asked = 0

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            writer.write(json_answer({"status": "starting"}, "503 Service Unavailable"))
        elif num_asked > 2:  # the second time it breaks off
            writer.write(json_answer({"policy": {"label": "v1"}}))
        await writer.drain()

    with serving(handler) as server:
        assert _wait_for(server.url, "v1", 60.0) > 0 and num_asked == 3
        with pytest.raises(GraftError, match=r"v2 is not in force after 1 s.*label.*v1"):
            _wait_for(server.url, "v2", 1.0)


@pytest.mark.parametrize("error", [GraftError("no"), OSError("no"), RuntimeError("no")])
def test_whatever_goes_wrong_stands_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(demo: Demo) -> list[Asked]:
        raise error

    monkeypatch.setattr("jobs.demo.show", broken)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (tmp_path / "out" / "demo.log").read_text() == "demo: no\n"


def test_the_report(tiny_config: TargetConfig) -> None:
    asked = [Asked(4, Outcome.ok, "v1", 2.0, 20, 10), Asked(4, Outcome.ok, "v2", 1.0, 20, 8)]
    stages = [Stage("a first policy", 3.0, 60.0, "promoted v1: it is faster")]
    asked.append(Asked(1, Outcome.cut, "", 1.0, 0, 0))
    page = render_report(tiny_config, stages, asked, 600.0, has_gate_report=True)
    assert "| 3 s | 60 s | a first policy | promoted v1: it is faster |" in page
    assert "| v1 | 4 | 1 | 1 | 2.00 | 10.0 |" in page and "| v2 | 4 | 1 | 1 | 2.50 | 20.0 |" in page
    assert "(gate.html)" in page
    assert "3 requests, of which 1 got no whole answer." in page and "10.0 minutes" in page


def demo_in(folder: Path) -> Demo:
    request = DemoRequest(
        config=Path("targets/smollm2-135m.yaml"), work=folder / "work", out=folder / "out", num_prompts=(1, 1),
        steps=(5, 300), max_new_tokens=8, busy_s=1.0, limit_s=60.0,
    )  # fmt: skip
    return Demo(request)


def test_only_v3_learns_from_nothing_new(tmp_path: Path) -> None:
    request = demo_in(tmp_path).request
    (request.work / "prompts").mkdir(parents=True)
    write_prompts(request.work / "prompts" / "made.jsonl", made_prompts())
    write_prompts(request.work / "prompts" / "none.jsonl", [])
    settings = [load_config(path).retrain for path in _configs(request)]
    found = []
    for one in settings:
        assert one is not None and one.margin > 0 and one.num_live_prompts > 0 and one.num_audit_prompts > 0
        fresh = choose_fresh(one.prompts, set(), one.num_prompts, every_prompt=one.every_prompt)
        assert len(fresh) >= one.min_new_sequences
        found.append((len(fresh), one.steps))
    assert found == [(1, 5), (1, 300), (0, 1)]


def test_the_log_has_no_names_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = demo_in(tmp_path)
    demo.write(f"run in {tmp_path / 'work'}/runs, joined 10.1.2.3:6379, {sys.prefix}/lib and {Path.home()}/.cache\n")
    demo.write(f"in two pieces: {str(tmp_path)[:2]}")
    demo.write(f"{str(tmp_path)[2:]}/work/runs\n")
    demo.check_pages()
    expected = "run in WORK/runs, joined NODE:6379, VENV/lib and ~/.cache\nin two pieces: WORK/runs\n"
    assert (tmp_path / "out" / "demo.log").read_text() == expected
    assert "still names" not in capsys.readouterr().out
    demo.write(f"?folder={quote(str(Path.home()), safe='')}%2Fx\n")
    demo.check_pages()
    assert "demo.log still names %2F" in capsys.readouterr().out


def test_the_newest_report_of_the_gate_is_kept(tmp_path: Path) -> None:
    demo = demo_in(tmp_path)
    for run in ("20260101T000000", "20260102T000000"):
        (tmp_path / "work" / "runs" / "target" / run).mkdir(parents=True)
        (tmp_path / "work" / "runs" / "target" / run / "report.html").write_text(f"{tmp_path}/work/runs of {run}")
    demo.keep_gate_report()
    kept = tmp_path / "out" / "gate.html"
    assert kept.read_text() == "WORK/runs of 20260102T000000"
    kept.unlink()
    for page in ("x" * 1_000_001, f"in {Path.home()}/x".replace("/", "%2F")):
        (tmp_path / "work" / "runs" / "target" / "20260102T000000" / "report.html").write_text(page)
        demo.keep_gate_report()
        assert not kept.exists()
    (tmp_path / "work" / "runs" / "target" / "20260103T000000").mkdir()  # it has failed before its decision
    demo.keep_gate_report()
    assert not kept.exists()
    log = (tmp_path / "out" / "demo.log").read_text()
    assert "is left in WORK/runs" in log and log.endswith("the retraining has left no report\n")


def test_what_the_gate_said_is_in_the_error() -> None:
    verdict = "kept v1 because it is not faster by 1 %: replay: challenger v2 12.9 tokens/s, champion v1 12.8"
    with pytest.raises(GraftError, match=r"was to end with 'promoted v2'.*kept v1 because it is not faster by 1 %"):
        _expect(verdict, "promoted v2")
    _expect("promoted v2: replay: ...", "promoted v2")


def test_the_last_word_of_a_retraining_counts() -> None:
    lines = ["retrain: step 1 of 8: choose", "retrain: no drift seen (x)", "retrain: promoted v2: replay: ..."]
    assert _verdict(lines) == "promoted v2: replay: ..."
    with pytest.raises(GraftError, match="said nothing of its end"):
        _verdict(json.dumps(lines[:1]).splitlines())
