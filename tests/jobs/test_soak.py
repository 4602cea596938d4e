"""A soak passes a server that keeps its word and names what a bad one does; whole runs against a real HTTP server."""

import asyncio
import itertools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graft_dist.audit import Difference, Kind
from graft_dist.errors import GraftError
from graft_dist.prompts import BadPrompt, Prompt
from jobs.serve_bench import Server
from jobs.soak import Judgement, Question, ReplicaControl, SoakPlan, Told, questions, run_soak
from tests.jobs.scripted_server import event, head, json_answer, serving

PROMPTS = [Prompt(f"p{index}", "chat", (f"Question {index}?",)) for index in range(40)]
BAD = BadPrompt("bad:1", 1, "not JSON")
PLAN = SoakPlan(
    minutes=0.001, concurrency=3, max_new_tokens=8, seed=0, leave_share=0.2, swap_every_s=0.05, sample_every_s=0.02,
    tolerates_ties=False,
)  # fmt: skip


class Replica:
    """Answers as a good server does, until a fault is given: called with the number of the completion, may answer."""

    def __init__(self, fault: Callable[[int], bytes | None] = lambda number: None, text: str = "same") -> None:
        self.fault, self.text = fault, text
        self.version = 0
        self.num_stuck = 0
        self.is_dead = self.is_ill = self.is_silent = False
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count()

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.counts[path] += 1
        if self.is_dead:
            return
        fixed: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/version": {"version": "1", "system_fingerprint": f"graft-{self.version}"},
            "/healthz": {"sequences": self.num_stuck},
        }
        if path in fixed:
            fails = (path == "/healthz" and self.is_ill) or (path == "/version" and self.is_silent)
            status = "503 Failed" if fails else "200 OK"
            writer.write(json_answer(fixed[path], status))
            return
        number = next(self._numbers)
        fault = self.fault(number)
        await asyncio.sleep(0.005)
        writer.write(self._whole(path, body) if fault is None else fault)
        await writer.drain()

    def _whole(self, path: str, body: dict[str, Any]) -> bytes:
        asked = body.get("prompt") or body["messages"][0]["content"]
        texts = [f"{self.text} {asked} {index}" for index in range(body.get("n", 1))]
        is_chat = path.endswith("/chat/completions")
        usage = {"completion_tokens": 3 * len(texts)}
        if not body.get("stream"):
            key = (lambda text: {"message": {"content": text}}) if is_chat else (lambda text: {"text": text})
            choices = [key(text) | {"index": at, "finish_reason": "stop"} for at, text in enumerate(texts)]
            return json_answer({"choices": choices, "usage": usage})
        parts = [head()]
        for at, text in enumerate(texts):
            for piece in (text[:4], text[4:]):
                delta = {"delta": {"content": piece}} if is_chat else {"text": piece}
                parts.append(event(choices=[{"index": at, "finish_reason": None} | delta]))
            parts.append(
                event(choices=[{"index": at, "finish_reason": "stop"} | ({"delta": {}} if is_chat else {"text": ""})])
            )
        return b"".join([*parts, event(choices=[], usage=usage), b"data: [DONE]\n\n"])

    def swap(self) -> str:
        self.version += 1
        return f"v{self.version}"


def soak(
    replica: Replica, out: Path, pids: Callable[[], list[int]] = lambda: [os.getpid()], plan: SoakPlan = PLAN,
    prompts: Sequence[Prompt | BadPrompt] = PROMPTS, auditor: "Knowing | None" = None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    with serving(replica.answer) as server:
        code = run_soak(
            Server(url=server.url, model=None, timeout_s=60.0), plan, prompts, ReplicaControl(replica.swap, pids), out,
            auditor,
        )  # fmt: skip
    return code, json.loads((out / "soak.json").read_text())


def test_a_server_that_keeps_its_word_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replica = Replica()
    code, report = soak(replica, tmp_path / "out", prompts=[*PROMPTS, BAD])
    assert code == 0 and report["problems"] == [], report["problems"]
    assert set(report["outcomes"]) <= {"ok", "left"} and report["num_differing"] == 0
    assert report["num_compared"] == report["outcomes"]["ok"] > 20
    assert report["swaps"][0]["system_fingerprint"] == "graft-1"
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == report["num_requests"]
    for column in ("is_streamed", "is_sampled", "is_to_leave", "num_answers"):
        assert len({row[column] for row in rows}) == 2, column
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {sample["pid"] for sample in samples} == {os.getpid()}
    assert replica.counts["/v1/completions"] and replica.counts["/v1/chat/completions"]
    shown = capsys.readouterr()
    assert "No problems." in shown.out and "bad:1 is left out" in shown.err
    assert "soak: 0 of 0.001 min, 0 requests" in shown.err
    assert (tmp_path / "out" / "soak.md").read_text() in shown.out
    assert json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["minutes"] == PLAN.minutes


# Two questions are asked for reference before the load, so the third completion is the first under load.
FEW = PROMPTS[:2]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (head() + event(choices=[{"index": 0, "delta": {"content": "sa"}}]), "was lost: cut"),
        (json_answer({"error": {"message": "out of luck"}}, "500 Oh"), "was lost: refused (HTTP 500: out of luck)"),
        (json_answer({"error": {"message": "going"}}, "503 Draining"), "was lost: rejected"),
        (b"", "was lost: unreachable"),
    ],
)
def test_a_lost_request_is_named(fault: bytes, sentence: str, tmp_path: Path) -> None:
    plan = replace(PLAN, leave_share=0.0)
    code, report = soak(Replica(lambda number: fault if number == 2 else None), tmp_path, plan=plan, prompts=FEW)
    assert code == 1 and len(report["problems"]) == 1
    assert sentence in report["problems"][0]


def test_a_full_server_is_asked_again_and_nothing_is_lost(tmp_path: Path) -> None:
    full = json_answer({"error": {"message": "full"}}, "429 Full", "Retry-After: 0\r\n")
    plan = replace(PLAN, leave_share=0.0)
    code, report = soak(Replica(lambda number: full if number in (2, 3, 4) else None), tmp_path, plan=plan, prompts=FEW)
    assert code == 0 and report["num_rejections"] == 3 and set(report["outcomes"]) == {"ok"}


@pytest.mark.parametrize("tolerates_ties", [False, True])
def test_another_answer_is_named_or_counted(tolerates_ties: bool, tmp_path: Path) -> None:
    replica = Replica()
    replica.fault = lambda number: setattr(replica, "text", "other") if number == 2 else None
    plan = replace(PLAN, leave_share=0.0, tolerates_ties=tolerates_ties)
    code, report = soak(replica, tmp_path, plan=plan, prompts=FEW)
    assert report["num_differing"] == report["num_compared"] >= 2
    assert code == (0 if tolerates_ties else 1)
    assert ("was answered otherwise than before" in str(report["problems"])) is not tolerates_ties


class Knowing:
    """An auditor that knows what a good replica answers, and takes `tie` for as good."""

    name = "what is right"

    def __init__(self, tie: str = "") -> None:
        self.tie = tie

    def check(self, system_fingerprint: str) -> None:
        if not system_fingerprint.startswith("graft-"):
            raise GraftError("another target")

    def answers(self, asked: Sequence[Question]) -> dict[str, Told]:
        return {question.name: self._right(question) for question in asked}

    def _right(self, question: Question) -> Told:
        assert question.body["graft"] == {"token_ids": True}
        number = question.body.get("n", 1)
        prompt = question.body.get("prompt") or question.body["messages"][0]["content"]
        return Told(tuple(f"same {prompt} {at}" for at in range(number)), ("stop",) * number, 3 * number)

    def judge(self, question: Question, told: Told) -> Judgement:
        kind = Kind.TIE if self.tie and told.texts[0].startswith(self.tie) else Kind.BUG
        return Judgement((Difference(question.name, 4, 7, 8, 0.5, 0.1, kind),))


def test_answers_are_compared_with_the_auditors_and_others_judged(tmp_path: Path) -> None:
    plan = replace(PLAN, leave_share=0.0)
    code, report = soak(Replica(), tmp_path / "good", plan=plan, prompts=FEW, auditor=Knowing())
    assert (code, report["reference"], report["num_differing"]) == (0, "what is right", 0)
    # A server that is consistently wrong agrees with itself, and not with the auditor.
    code, report = soak(Replica(text="other"), tmp_path / "bad", plan=plan, prompts=FEW, auditor=Knowing())
    assert code == 1 and report["num_differing"] == report["num_compared"] >= 2 and report["num_ties"] == 0
    assert (
        "was answered otherwise" in report["problems"][0] and "output token 4 is 8, 7 is right" in report["problems"][0]
    )
    assert sum(one["number"] for one in report["differences"]) == report["num_compared"]
    code, report = soak(Replica(text="tied"), tmp_path / "tie", plan=plan, prompts=FEW, auditor=Knowing("tied"))
    assert code == 0 and report["num_ties"] == report["num_differing"] == report["num_compared"] >= 2
    assert "of them by a tie" in (tmp_path / "tie" / "soak.md").read_text()


def test_an_answer_that_cannot_be_judged_hides_nothing(tmp_path: Path) -> None:
    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    class Failing(Knowing):
        def judge(self, question: Question, told: Told) -> Judgement:
            self.rows, self.others = lines("requests.jsonl"), lines("others.jsonl")  # they are there already
            if question.name == "p0":
                raise RuntimeError("out of memory")
            return super().judge(question, told)

    auditor, plan = Failing("tied"), replace(PLAN, leave_share=0.0)
    code, report = soak(Replica(text="tied"), tmp_path, plan=plan, prompts=FEW, auditor=auditor)
    assert code == 1 and len(auditor.rows) == report["num_requests"]
    numbers = {other["question"]: other["number"] for other in auditor.others}
    assert set(numbers) == {"p0", "p1"} and report["num_ties"] == numbers["p1"]
    assert all(other["answer"]["texts"][0].startswith("tied") for other in auditor.others)
    assert report["problems"] == [
        f"p0 was answered otherwise {numbers['p0']} times: it could not be judged (RuntimeError: out of memory)"
    ]


def test_nothing_is_swapped_while_the_server_does_not_say_what_is_in_force(tmp_path: Path) -> None:
    replica = Replica()
    replica.is_silent = True
    code, report = soak(replica, tmp_path, prompts=FEW)
    assert code == 1 and replica.version == 0 and report["swaps"] == []
    assert all("failed: the server does not say what it decodes with" in problem for problem in report["problems"])
    with pytest.raises(GraftError, match="does not say what it decodes with"):
        soak(replica, tmp_path / "audited", prompts=FEW, auditor=Knowing())


def test_a_sequence_that_is_left_a_replica_that_dies_and_a_swap_that_fails_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.soak._IDLE_LOOKS", 1)
    replica = Replica()
    replica.num_stuck = 2
    other = subprocess.Popen(["sleep", "600"])
    lives = iter([[os.getpid(), other.pid], *[[os.getpid()]] * 10_000])

    def refuse() -> str:
        raise GraftError("no such policy")

    replica.swap = refuse  # type: ignore[method-assign]
    plan = replace(PLAN, minutes=0.03, leave_share=0.0)  # the first look and the last are more than a second apart
    try:
        code, report = soak(replica, tmp_path, lambda: next(lives), plan=plan, prompts=FEW)
    finally:
        other.kill()
        other.wait()
    assert code == 1
    for sentence in ("failed: no such policy", f"replicas died: process {other.pid}", "still has 2 sequences"):
        assert sentence in str(report["problems"])


def test_one_failed_look_or_swap_is_no_problem_and_several_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.soak._SWAP_AGAIN_S", 0.0)
    replica = Replica()
    num_looks = num_swaps = 0

    def pids() -> list[int]:
        nonlocal num_looks
        num_looks += 1
        if num_looks % 3 != 0:  # two of three, never three in a row
            raise GraftError("the dashboard does not answer")
        return [os.getpid()]

    def swap() -> str:
        nonlocal num_swaps
        num_swaps += 1
        if num_swaps % 2 == 1:
            raise GraftError("the dashboard does not answer")
        return Replica.swap(replica)

    replica.swap = swap  # type: ignore[method-assign]
    code, report = soak(replica, tmp_path / "once", pids)
    assert code == 0 and num_looks > 1 and num_swaps > 1
    assert len(report["swaps"]) == replica.version == num_swaps // 2

    def blind() -> list[int]:
        raise GraftError("the dashboard does not answer")

    code, report = soak(Replica(), tmp_path / "often", blind, plan=replace(PLAN, minutes=0.02, sample_every_s=0.01))
    (problem,) = report["problems"]  # said once
    assert code == 1 and "the replicas are not known, 3 times in a row" in problem


def test_a_long_run_that_could_not_look_at_the_replicas_has_shown_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.soak._JUDGED_FROM_S", 0.0)
    code, report = soak(Replica(), tmp_path, list, prompts=FEW)
    assert code == 1 and "memory and open files were not judged: 0 looks" in report["problems"][0]


def test_a_server_that_is_ill_in_the_end_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.soak._IDLE_LOOKS", 1)
    replica = Replica()
    replica.is_ill = True
    code, report = soak(replica, tmp_path, prompts=FEW)
    assert code == 1 and report["problems"] == ["in the end the server is not healthy (/healthz)"]


def test_a_server_that_dies_under_load_is_reported(tmp_path: Path) -> None:
    replica = Replica()
    replica.fault = lambda number: setattr(replica, "is_dead", True) if number == 2 else None
    code, report = soak(replica, tmp_path, plan=replace(PLAN, leave_share=0.0), prompts=PROMPTS[:2])
    assert code == 1
    for sentence in ("was lost: unreachable", "in the end no server answers"):
        assert sentence in str(report["problems"])


def test_a_server_that_does_not_answer_a_question_alone_cannot_be_soaked(tmp_path: Path) -> None:
    refusal = json_answer({"error": {"message": "no such model"}}, "400 No")
    with pytest.raises(GraftError, match="does not answer p0: HTTP 400: no such model"):
        soak(Replica(lambda number: refusal), tmp_path)


def test_questions_are_a_function_of_the_prompts_and_differ_in_all_that_matters() -> None:
    made = questions(PROMPTS, "tiny", max_new_tokens=32, seed=3)
    assert made == questions(PROMPTS, "tiny", 32, 3) != questions(PROMPTS, "tiny", 32, 4)
    assert {question.kind for question in made} == {"chat", "text"}
    assert {question.body.get("n", 1) for question in made} == {1, 2}
    assert {question.body["temperature"] for question in made} == {0.0, 0.8}
    assert any("stop" in question.body for question in made) and not all("stop" in question.body for question in made)
    assert all(8 <= question.body["max_tokens"] <= 32 for question in made)
