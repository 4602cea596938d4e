"""`graft bench-serve` against a real HTTP server: rows, summary, and what verify.py makes of them."""

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from tests.jobs.scripted_server import event, head, json_answer, piece, serving

ROOT = Path(__file__).resolve().parents[2]


class Replica:
    """Streams four tokens; drafting methods in pieces of two tokens, twice as fast."""

    def __init__(self, methods: tuple[str, ...] = ("plain", "ddtree"), plain_budget: float = 0.0) -> None:
        self.methods, self.plain_budget = methods, plain_budget
        self.asked: list[dict[str, Any]] = []
        self.fails_at: int | None = None
        self._numbers = itertools.count()

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            writer.write(json_answer({"data": [{"id": "tiny"}]}))
            return
        if path == "/version":
            writer.write(json_answer({"version": "1"}))
            return
        self.asked.append(body)
        method = body["graft"].get("method")
        if method is not None and method not in self.methods:
            writer.write(json_answer({"error": {"message": f"method {method} is not allowed"}}, "400 No"))
            return
        writer.write(head())
        if next(self._numbers) == self.fails_at:
            return
        budget = self.plain_budget if method == "plain" else 8.0
        for text in ("ab", "cd") if budget else "abcd":
            await asyncio.sleep(0.002)
            writer.write(piece(text))
        metrics = {"graft": {"rounds": 2 if budget else 4, "mean_budget": budget}}
        writer.write(piece("", reason="length") + event(choices=[], usage={"completion_tokens": 4}, metrics=metrics))
        writer.write(b"data: [DONE]\n\n")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{index}", "task": "ab"[index % 2], "turns": ["Hello.", f"Count to {index}."]} for index in range(5)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return file


def bench(replica: Replica, prompts: Path, *options: str) -> int:
    with serving(replica.answer) as server:
        fixed = ["--prompts", str(prompts), "--out", str(prompts.parent / "out"), "--url", server.url]
        return cli.run(["bench-serve", *fixed, *options])


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_and_summary_of_two_arms_and_three_loads(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = Replica()
    options = [
        "--arms",
        "ddtree,plain",
        "--concurrency",
        "1,3",
        "--rates",
        "80",
        "--blocks",
        "2",
        "--block-requests",
        "4",
    ]
    assert bench(replica, prompts, *options, "--max-new-tokens", "4") == 0
    out = tmp_path / "out"
    rows = read(out / "raw.jsonl")
    assert len(rows) == len(read(out / "gaps.jsonl")) == 3 * 2 * 2 * 4
    assert [row["arm"] for row in rows[::4]] == ["ddtree", "plain", "plain", "ddtree"] * 3  # the order rotates
    asked = {arm: [row["prompt_id"] for row in rows if row["arm"] == arm] for arm in ("plain", "ddtree")}
    assert asked["plain"] == asked["ddtree"]
    assert {row["load"] for row in rows} == {"closed-1", "closed-3", "poisson-80"}
    assert all(row["outcome"] == "ok" and row["num_tokens"] == 4 and row["finish_reason"] == "length" for row in rows)
    assert len({row["output_sha256"] for row in rows}) == 1
    body = replica.asked[-1]
    assert body["messages"][0] == {"role": "user", "content": "Hello."} and body["temperature"] == 0
    summary = {(row["load"], row["arm"]): row for row in json.loads((out / "summary.json").read_text())}
    assert len(summary) == 6 and summary["closed-1", "plain"]["throughput_ratio"] == 1.0
    assert summary["closed-3", "ddtree"]["mean_budget"] == 8.0 and summary["closed-3", "plain"]["mean_budget"] == 0.0
    run = json.loads((out / "run.json").read_text())
    assert run["settings"]["service_level"] == {"ttft_ms": 1000.0, "token_ms": 100.0} and run["machine"]["num_cpus"]
    command = [sys.executable, "-S", "-I", "bench/verify.py", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    shown = capsys.readouterr()
    assert "poisson-80   ddtree" in shown.out and "8/8" in shown.out
    assert "prompts.jsonl:6 is left out" in shown.err and "closed-3: block 2 of 2: tokens/s: ddtree" in shown.err


def test_a_request_without_an_answer_is_exit_code_one(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = Replica()
    replica.fails_at = 5
    options = ["--arms", "plain", "--concurrency", "2", "--blocks", "1"]
    assert bench(replica, prompts, *options) == 1
    assert "1 of 4 requests: cut" in capsys.readouterr().err
    assert "closed-2 plain p" in (tmp_path / "out" / "summary.md").read_text()


def test_a_server_that_drafts_for_plain_is_no_baseline(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Replica(plain_budget=3.0), prompts, "--arms", "plain", "--concurrency", "1", "--blocks", "1") == 1
    assert "drafted for the arm plain" in capsys.readouterr().err


def test_an_arm_that_the_server_does_not_allow_is_said_before_the_work(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(Replica(), prompts, "--arms", "plain,graft") == 2
    shown = capsys.readouterr().err
    assert "does not answer with arm graft: HTTP 400: method graft is not allowed" in shown
    assert not (tmp_path / "out").exists()


def test_the_default_arm_asks_for_no_method(prompts: Path) -> None:
    replica = Replica(methods=())
    assert bench(replica, prompts, "--arms", "default", "--concurrency", "1", "--blocks", "1", "--limit", "2") == 0
    assert all("method" not in body["graft"] for body in replica.asked)
