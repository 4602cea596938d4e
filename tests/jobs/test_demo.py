"""Parts of the demonstration that need no cluster: its prompts, its users, what it reports."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graft_dist.config import TargetConfig
from graft_dist.errors import GraftError
from graft_dist.prompts import is_held_out, learning_split, prompt_hash
from jobs.demo import Demo, DemoRequest, Stage, _request, _verdict, _wait_for, main, render_report
from jobs.demo_prompts import made_prompts
from jobs.demo_users import Asked, Users
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
    for some, least in ((fresh[:first], {"fit": 20, "tune": 4, "test": 5}), (fresh[first:][:second], {"test": 20})):
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
        steps=(1, 1), max_new_tokens=8, busy_s=1.0,
    )  # fmt: skip
    return Demo(request)


def test_the_log_has_no_folders_of_this_machine(tmp_path: Path) -> None:
    demo_in(tmp_path).write(f"run in {tmp_path / 'work'}/runs\n")
    assert (tmp_path / "out" / "demo.log").read_text() == "run in WORK/runs\n"


def test_the_newest_report_of_the_gate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/elsewhere")
    demo = demo_in(tmp_path)
    for run in ("20260101T000000", "20260102T000000"):
        (tmp_path / "work" / "runs" / "target" / run).mkdir(parents=True)
        (tmp_path / "work" / "runs" / "target" / run / "report.html").write_text(f"{tmp_path}/work/runs of {run}")
    demo.keep_gate_report()
    kept = tmp_path / "out" / "gate.html"
    assert kept.read_text() == "WORK/runs of 20260102T000000"
    kept.unlink()
    for page in ("x" * 1_000_001, "in /elsewhere/x", f"in {Path.home()}/x"):
        (tmp_path / "work" / "runs" / "target" / "20260102T000000" / "report.html").write_text(page)
        demo.keep_gate_report()
        assert not kept.exists()
    assert "is left in WORK/runs" in (tmp_path / "out" / "demo.log").read_text()


def test_the_last_word_of_a_retraining_counts() -> None:
    lines = ["retrain: step 1 of 7: choose", "retrain: no drift seen (x)", "retrain: promoted v2: replay: ..."]
    assert _verdict(lines) == "promoted v2: replay: ..."
    with pytest.raises(GraftError, match="said nothing of its end"):
        _verdict(json.dumps(lines[:1]).splitlines())
