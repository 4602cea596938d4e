"""`graft bench-serve --soak`: long mixed load on a running server, with clients that leave and policies that change.

Every prompt becomes one *question*: an endpoint, a length, stop strings, one answer or two, greedy or sampled with a
seed. Before the load each question is asked once, alone. Under load the same questions come again and again, streamed
or not, and every whole answer has to be the reference: text, reason, token count. The reference is what an `Auditor`
decodes by itself, token for token, and another answer is judged by it when the load is over: a tie is counted, anything
else is a problem. Without one, the reference is the server's own answer before the load.

    requests.jsonl  one row per request
    samples.jsonl   memory and open files of the replicas and of the proxies beside them, over time
    others.jsonl    each answer that was not the reference, once, and how often it came
    soak.json       counts, growth, problems; soak.md says the same in words
    run.json        settings, server, machine, versions, commit, command

Judging may take long; all that the run saw is written before it.

A request is lost if it gets neither its whole answer nor, for a server that is full, the advice to come back, which it
follows. Problems (a lost request, another answer, a swap that failed, a replica that died, growth) end the run with 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from graft_dist.audit import Difference, Kind
from graft_dist.errors import GraftError
from graft_dist.prompts import BadPrompt, Prompt
from jobs.load_client import Ask, LoadClient, Outcome, Reply
from jobs.out_file import to_json, write_aside
from jobs.process_growth import MIN_SAMPLES, Growth, ProcessSample, growths, sample_process
from jobs.serve_bench import Server, about_server, check_folder, find_model, start_folder, usable

_MAX_TRIES = 60  # of a request that a full server sends away
_SWAP_PATIENCE_S = 120.0
_IDLE_LOOKS = 40  # half a second apart, for a server that nobody asks any more
_REPLICA_LOOKS = 8  # requests of one such look: each is answered by some replica
_SHOWN_PROBLEMS = 30  # all are in soak.json
_BLIND_LOOKS = 3  # looks at the replicas in a row that fail: a busy dashboard may miss one
_SWAP_AGAIN_S = 1.0  # after which a swap that could not be asked for is asked for once more
_JUDGED_FROM_S = 60.0  # a run of so long that could not look at its replicas often enough has shown nothing
_TOLD_EVERY_S = 60.0  # how far the run is
_STOPS = ((), (), ("\n\n",), (". ",), (",", ";"))


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """How long and how hard."""

    minutes: float
    concurrency: int
    max_new_tokens: int
    seed: int
    leave_share: float  # of the requests whose client leaves before the end
    swap_every_s: float
    sample_every_s: float
    tolerates_ties: bool  # without an auditor: other answers are counted but are no problem


@dataclass(frozen=True)
class ReplicaControl:
    """What a soak does to the application itself; both may block, and are called on a thread.

    swap: gives the running application another policy and returns what that is called; None: nothing is swapped. After
        one that raised, the next call asks for the same policy.
    pids: process ids of the replicas on this machine.
    """

    swap: Callable[[], str] | None
    pids: Callable[[], list[int]]


@dataclass(frozen=True)
class Question:
    """A request that is asked again and again, but for `stream`."""

    name: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Told:
    """What a question was answered; by choice where there are several."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    num_tokens: int | None
    token_ids: tuple[tuple[int, ...], ...] = ()  # only for an auditor

    @classmethod
    def by(cls, reply: Reply) -> Told:
        return cls(reply.texts, reply.finish_reasons, reply.num_tokens, reply.token_ids)


@dataclass(frozen=True)
class OtherAnswer:
    """An answer that is not the reference: a line of `others.jsonl`."""

    question: str
    number: int  # how often it came
    answer: Told


@dataclass(frozen=True)
class Judgement:
    """What an auditor says about an answer that is not the reference."""

    differences: tuple[Difference, ...] = ()  # in tokens, ties and bugs
    faults: tuple[str, ...] = ()  # sentences: what is wrong with an answer in itself

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the answer."""
        return not self.faults and all(difference.kind is not Kind.BUG for difference in self.differences)


class Auditor(Protocol):
    """Who knows the right answers without asking the server. Its methods may take their time."""

    name: str  # how the answers were found: "plain decoding in float32"

    def check(self, system_fingerprint: str) -> None:
        """Raise `GraftError` if the server decodes another target."""
        ...

    def answers(self, asked: Sequence[Question]) -> dict[str, Told]:
        """The right answers by question."""
        ...

    def judge(self, question: Question, told: Told) -> Judgement:
        """Whether another answer is as good as the right one."""
        ...


@dataclass(frozen=True)
class SoakRow:
    """One request: a line of `requests.jsonl`."""

    question: str
    at_s: float  # when it was first sent, since the start
    is_streamed: bool
    num_answers: int
    is_sampled: bool
    is_to_leave: bool
    num_tries: int
    outcome: str
    ttft_ms: float | None
    total_s: float
    num_tokens: int | None
    output_sha256: str | None
    is_as_before: bool | None  # None without a whole answer
    detail: str | None


@dataclass
class SoakReport:
    """What a soak found; `problems` is empty if all was well."""

    seconds: float
    num_requests: int
    outcomes: dict[str, int]
    num_rejections: int  # answered by "come back later", and then answered
    num_tokens: int
    reference: str  # what answers were compared with
    num_compared: int
    num_differing: int
    num_ties: int  # of those that differ: rounding explains them
    differences: list[dict[str, Any]]  # each other answer once, as judged, with the number of times it came
    swaps: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)


def run_soak(
    server: Server,
    plan: SoakPlan,
    prompts: Sequence[Prompt | BadPrompt],
    control: ReplicaControl,
    out: Path,
    auditor: Auditor | None = None,
) -> int:
    """Load the server for `plan.minutes`, at least until every question was asked once.

    Returns the exit code: 0, or 1 if there was a problem. Raises `GraftError` if the soak cannot begin.
    """
    good = usable(prompts)
    check_folder(out)
    return asyncio.run(_soak(server, plan, good, control, out, auditor))


async def _soak(
    server: Server,
    plan: SoakPlan,
    prompts: Sequence[Prompt],
    control: ReplicaControl,
    out: Path,
    auditor: Auditor | None,
) -> int:
    async with server.client() as client:
        model = await find_model(client, server.model)
        settings = asdict(plan) | {"model": model, "num_prompts": len(prompts), "timeout_s": server.timeout_s}
        about = {"settings": settings, "server": await about_server(client)}
        start_folder(out, about)
        asked = questions(prompts, model, plan.max_new_tokens, plan.seed, tells_ids=auditor is not None)
        soak = _Soak(client, plan, asked, control, auditor)
        await soak.begin()
        try:
            await soak.run()
        finally:  # also after Ctrl-C: what was seen until then
            write_aside(out / "requests.jsonl", _to_lines(soak.rows))
            write_aside(out / "samples.jsonl", _to_lines(soak.samples))
            write_aside(out / "others.jsonl", _to_lines(soak.others()))
            report = soak.report()
            write_aside(out / "soak.json", to_json(asdict(report)))
            write_aside(out / "soak.md", render_report(report, plan))
            print(render_report(report, plan), end="")
            print(f"rows and report: {out}", file=sys.stderr)
    return 1 if report.problems else 0


def questions(
    prompts: Sequence[Prompt], model: str, max_new_tokens: int, seed: int, tells_ids: bool = False
) -> list[Question]:
    """One question per prompt, a function of the arguments; neighbours differ in as much as possible."""
    made = []
    for index, prompt in enumerate(prompts):
        draw = random.Random(f"{seed}:{prompt.id}")
        is_sampled = draw.random() < 0.3
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": draw.randint(max(1, max_new_tokens // 4), max_new_tokens),
            "temperature": 0.8 if is_sampled else 0.0,
            "seed": seed + index,
        }
        stop = draw.choice(_STOPS)
        if stop:
            body["stop"] = list(stop)
        if draw.random() < 0.2:
            body["n"] = 2
        if tells_ids:
            body["graft"] = {"token_ids": True}
        kind = "text" if index % 4 == 3 else "chat"
        if kind == "text":
            body["prompt"] = prompt.turns[-1]
        else:
            body["messages"] = [{"role": "user", "content": turn} for turn in prompt.turns]
        made.append(Question(prompt.id, kind, body))
    return made


class _Soak:
    """One run: asks, swaps, watches, and judges in the end."""

    def __init__(
        self,
        client: LoadClient,
        plan: SoakPlan,
        asked: Sequence[Question],
        control: ReplicaControl,
        auditor: Auditor | None,
    ) -> None:
        self.client, self.plan, self.questions, self.control = client, plan, list(asked), control
        self.auditor = auditor
        self.rows: list[SoakRow] = []
        self.samples: list[ProcessSample] = []
        self.swaps: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._references: dict[str, Told] = {}
        self._others: Counter[tuple[str, Told]] = Counter()  # answers that are not the reference
        self._typical_s = 1.0  # of a whole answer, for clients that leave before it
        self._num_asked = self._num_rejections = 0
        self._num_blind = 0  # looks at the replicas that failed, since the last one that did not
        self._draw = random.Random(plan.seed)
        self.seconds = 0.0
        self._start = time.perf_counter()
        self._deadline = self._start

    async def begin(self) -> None:
        """Find the references, and ask every question alone on an idle server.

        Raises `GraftError` if one is not answered, or the auditor knows another target.
        """
        if self.auditor is not None:
            self.auditor.check(await self._known_fingerprint())
            self._references = self.auditor.answers(self.questions)
        for question in self.questions:
            reply, _ = await self._ask(Ask(question.kind, question.body))
            if reply.outcome != Outcome.ok:
                raise GraftError(f"the server does not answer {question.name}: {reply.detail or reply.outcome}")
            if self.auditor is None:
                self._references[question.name] = Told.by(reply)
            self._typical_s = max(0.05, 0.5 * self._typical_s + 0.5 * reply.total_s)

    async def run(self) -> None:
        """Load, swap and watch until the time is over, every question was asked and every answer is in."""
        self._start = time.perf_counter()
        self._deadline = self._start + 60 * self.plan.minutes
        is_over = asyncio.Event()
        watch = asyncio.create_task(_every(self.plan.sample_every_s, self._sample, is_over))
        swap = asyncio.create_task(_every(self.plan.swap_every_s, self._swap, is_over))
        tell = asyncio.create_task(_every(_TOLD_EVERY_S, self._tell, is_over))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.plan.concurrency):
                    group.create_task(self._user())
            is_over.set()  # a swap that is under way is waited for, and judged
        finally:
            self.seconds = self._now()
            tell.cancel()
            if not is_over.is_set():
                watch.cancel()
                swap.cancel()
            ends = await asyncio.gather(watch, swap, return_exceptions=True)
            self.problems += [f"the soak itself failed: {end!r}" for end in ends if isinstance(end, Exception)]
        await self._check_idle()

    async def _tell(self) -> None:
        """Say how far the run is."""
        found = f"{len(self.rows)} requests, {len(self.swaps)} swaps, {len(self.problems)} problems"
        print(f"soak: {self._now() / 60:.0f} of {self.plan.minutes:g} min, {found}", file=sys.stderr, flush=True)

    async def _check_idle(self) -> None:
        """After the last answer, and the clients that left, no sequence may hold or wait for a slot."""
        problem = ""
        for _ in range(_IDLE_LOOKS):
            try:
                found = [await self.client.get("/healthz") for _ in range(_REPLICA_LOOKS)]
            except GraftError as error:
                self.problems.append(f"in the end {error}")
                return
            if None in found:
                problem = "in the end the server is not healthy (/healthz)"
            else:
                most = max(health.get("sequences", 0) for health in found)
                if most == 0:
                    return
                problem = f"the server still has {most} sequences although nobody asks anything"
            await asyncio.sleep(0.5)
        self.problems.append(problem)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _user(self) -> None:
        while time.perf_counter() < self._deadline or self._num_asked < len(self.questions):
            if self._num_asked % len(self.questions) == 0:
                self._draw.shuffle(self.questions)
            question = self.questions[self._num_asked % len(self.questions)]
            self._num_asked += 1
            is_to_leave = self._draw.random() < self.plan.leave_share
            leave_after_s = self._draw.uniform(0.0, self._typical_s) if is_to_leave else None
            body = dict(question.body)
            if self._draw.random() < 0.6:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            at_s = self._now()
            reply, num_tries = await self._ask(Ask(question.kind, body, leave_after_s))
            self._judge(question, body, at_s, is_to_leave, reply, num_tries)

    async def _ask(self, ask: Ask) -> tuple[Reply, int]:
        """Ask, and come back when the server is full; the last reply and how often it was asked."""
        for num_tries in itertools.count(1):
            reply = await self.client.ask(ask)
            is_invited = reply.outcome == Outcome.rejected and reply.retry_after_s is not None
            if not is_invited or num_tries == _MAX_TRIES:
                return reply, num_tries
            self._num_rejections += 1
            await asyncio.sleep(min(reply.retry_after_s or 0.0, 10.0))
        raise AssertionError

    def _judge(
        self, question: Question, body: dict[str, Any], at_s: float, is_to_leave: bool, reply: Reply, num_tries: int
    ) -> None:
        is_whole = reply.outcome == Outcome.ok
        is_as_before = Told.by(reply) == self._references[question.name] if is_whole else None
        if not is_whole and not (is_to_leave and reply.outcome == Outcome.left):
            self.problems.append(f"{question.name} at {at_s:.1f} s was lost: {reply.outcome} ({reply.detail})")
        if is_as_before is False:
            self._others[question.name, Told.by(reply)] += 1
        if is_as_before is False and self.auditor is None and not self.plan.tolerates_ties:
            difference = _difference(self._references[question.name], Told.by(reply))
            self.problems.append(f"{question.name} at {at_s:.1f} s was answered otherwise than before: {difference}")
        self.rows.append(
            SoakRow(
                question=question.name,
                at_s=round(at_s, 3),
                is_streamed="stream" in body,
                num_answers=body.get("n", 1),
                is_sampled=body["temperature"] > 0,
                is_to_leave=is_to_leave,
                num_tries=num_tries,
                outcome=reply.outcome.value,
                ttft_ms=None if reply.ttft_s is None else round(1e3 * reply.ttft_s, 3),
                total_s=round(reply.total_s, 6),
                num_tokens=reply.num_tokens,
                output_sha256=hashlib.sha256("\0".join(reply.texts).encode()).hexdigest() if is_whole else None,
                is_as_before=is_as_before,
                detail=reply.detail,
            )
        )

    async def _swap(self) -> None:
        if self.control.swap is None:
            return
        at_s = self._now()
        try:
            before = await self._known_fingerprint()
            name = await self._ask_to_swap(self.control.swap)
            after = await self._changed_from(before)
        except Exception as error:  # whatever it is, the load goes on and the report says it
            self.problems.append(f"the swap at {at_s:.1f} s failed: {_one_line(error)}")
            return
        took_s = round(self._now() - at_s, 3)
        self.swaps.append({"at_s": round(at_s, 3), "took_s": took_s, "policy": name, "system_fingerprint": after})

    async def _ask_to_swap(self, swap: Callable[[], str]) -> str:
        """Ask for another policy, once more if that fails: a busy dashboard may not answer."""
        try:
            return await asyncio.to_thread(swap)
        except Exception as error:
            print(f"a swap could not be asked for, once more: {_one_line(error)}", file=sys.stderr, flush=True)
        await asyncio.sleep(_SWAP_AGAIN_S)
        return await asyncio.to_thread(swap)

    async def _fingerprint(self) -> str | None:
        """What the server decodes with; None if it does not say."""
        found = (await self.client.get("/version") or {}).get("system_fingerprint")
        return None if found is None else str(found)

    async def _known_fingerprint(self) -> str:
        found = await self._fingerprint()
        if found is None:
            raise GraftError("the server does not say what it decodes with (/version)")
        return found

    async def _changed_from(self, before: str) -> str:
        """Wait until another policy is in force. Raises `GraftError` if none is, or it was refused."""
        deadline = time.perf_counter() + _SWAP_PATIENCE_S
        while time.perf_counter() < deadline:
            after = await self._fingerprint()
            if after is not None and after != before:
                if after.endswith("+refused"):
                    raise GraftError("the policy was refused; /healthz has the reason")
                return after
            await asyncio.sleep(0.2)
        raise GraftError(f"no other policy is in force after {_SWAP_PATIENCE_S:g} s")

    async def _sample(self) -> None:
        try:
            pids = await asyncio.to_thread(self.control.pids)
        except Exception as error:
            self._num_blind += 1
            if self._num_blind == _BLIND_LOOKS:
                at = f"{_BLIND_LOOKS} times in a row, at {self._now():.1f} s"
                self.problems.append(f"the replicas are not known, {at}: {_one_line(error)}")
            return
        self._num_blind = 0
        for pid in pids:
            sample = sample_process(pid, self._now())
            if sample is not None:
                self.samples.append(sample)

    def others(self) -> list[OtherAnswer]:
        """The answers that were not the reference."""
        return [OtherAnswer(name, number, told) for (name, told), number in self._others.items()]

    def _judge_others(self) -> list[tuple[str, int, Judgement]]:
        """What the auditor says of each other answer: question, how often it came, judgement."""
        if self.auditor is None:
            return []
        asked = {question.name: question for question in self.questions}
        others = self.others()
        judged = []
        for index, other in enumerate(others, start=1):
            print(f"judging other answers: {index} of {len(others)}", file=sys.stderr, flush=True)
            try:
                judgement = self.auditor.judge(asked[other.question], other.answer)
            except Exception as error:  # whatever it is, the others are judged
                judgement = Judgement(faults=(f"it could not be judged ({type(error).__name__}: {_one_line(error)})",))
            judged.append((other.question, other.number, judgement))
        return judged

    def report(self) -> SoakReport:
        """Judge what the run left."""
        problems = list(self.problems)
        compared = [row for row in self.rows if row.is_as_before is not None]
        first, last = (_pids_at(self.samples, end) for end in (0, -1))
        gone = sorted(first - last)
        if gone:
            problems.append(f"replicas died: process {', '.join(map(str, gone))}")
        found = growths(self.samples)
        problems += [_growth_line(growth) for growth in found if growth.has_grown]
        if not found and self.seconds >= _JUDGED_FROM_S:
            problems.append(
                f"memory and open files were not judged: {len(self.samples)} looks at replicas on this machine, "
                f"{MIN_SAMPLES} of a process are needed after warming up"
            )
        if not compared:
            problems.append("no answer was compared: the run was too short")
        judged = self._judge_others()
        problems += [
            _judged_line(name, number, judgement) for name, number, judgement in judged if not judgement.is_tie
        ]
        return SoakReport(
            seconds=round(self.seconds, 3),
            num_requests=len(self.rows),
            outcomes=dict(sorted(Counter(row.outcome for row in self.rows).items())),
            num_rejections=self._num_rejections,
            num_tokens=sum(row.num_tokens or 0 for row in self.rows),
            reference="the same question's answer before the load" if self.auditor is None else self.auditor.name,
            num_compared=len(compared),
            num_differing=sum(row.is_as_before is False for row in compared),
            num_ties=sum(number for _, number, judgement in judged if judgement.is_tie),
            differences=[
                {"question": name, "number": number, "is_tie": judgement.is_tie} | asdict(judgement)
                for name, number, judgement in judged
            ],
            swaps=self.swaps,
            growth=[asdict(growth) | {"has_grown": growth.has_grown} for growth in found],
            problems=problems,
        )


async def _every(period_s: float, act: Callable[[], Awaitable[None]], is_over: asyncio.Event) -> None:
    """Act at once, and again and again until it is over."""
    while not is_over.is_set():
        await act()
        with suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), period_s)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _judged_line(name: str, number: int, judgement: Judgement) -> str:
    """The problem of an answer that rounding does not explain."""
    found = list(judgement.faults)
    for difference in judgement.differences:
        if difference.kind is Kind.BUG:
            found.append(
                f"output token {difference.position} is {difference.method_token}, {difference.reference_token} is "
                f"right, margin {difference.margin:.3g} (a tie up to {difference.allowed:.3g})"
            )
    return f"{name} was answered otherwise {number} times: {'; '.join(found)}"


def _difference(before: Told, now: Told) -> str:
    """The first thing in which two answers differ."""
    for first, second in zip(before.texts, now.texts, strict=False):
        if first != second:
            pairs = itertools.zip_longest(first, second)
            at = next(index for index, (one, other) in enumerate(pairs) if one != other)
            return f"character {at} on is {second[at : at + 20]!r}, it was {first[at : at + 20]!r}"
    if len(before.texts) != len(now.texts):
        return f"{len(now.texts)} answers, it was {len(before.texts)}"
    if before.finish_reasons != now.finish_reasons:
        return f"the reason to end is {now.finish_reasons}, it was {before.finish_reasons}"
    return f"{now.num_tokens} tokens, it was {before.num_tokens}"


def _pids_at(samples: Sequence[ProcessSample], end: int) -> set[int]:
    """The processes of the first or the last look."""
    if not samples:
        return set()
    return {sample.pid for sample in samples if abs(sample.at_s - samples[end].at_s) < 1.0}


def _growth_line(growth: Growth) -> str:
    return (
        f"process {growth.pid}: {growth.quantity} grew by {growth.growth:.1f} around a median of {growth.median:.1f}; "
        f"{growth.allowed:.1f} is allowed"
    )


def render_report(report: SoakReport, plan: SoakPlan) -> str:
    """`soak.md`."""
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in report.outcomes.items())
    lines = [
        f"{report.seconds:.0f} s at concurrency {plan.concurrency}: {report.num_requests} requests ({outcomes}), "
        f"{report.num_rejections} times sent away and asked again, {report.num_tokens} tokens, "
        f"{len(report.swaps)} policy swaps.",
        "",
        f"{report.num_compared} whole answers were compared with {report.reference}; {report.num_differing} differ"
        + (f", {report.num_ties} of them by a tie." if report.differences else "."),
        "",
        "| process | quantity | samples | median | growth | noise | allowed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for growth in report.growth:
        cells = [growth["pid"], growth["quantity"], growth["num_samples"]]
        numbers = [f"{growth[name]:.1f}" for name in ("median", "growth", "noise", "allowed")]
        lines.append(f"| {' | '.join(map(str, [*cells, *numbers]))} |")
    if not report.growth:
        lines.append("| too few samples to judge | | | | | | |")
    more = len(report.problems) - _SHOWN_PROBLEMS
    lines += ["", "Problems:" if report.problems else "No problems."]
    lines += [f"* {line}" for line in report.problems[:_SHOWN_PROBLEMS]] + [f"* and {more} more"] * (more > 0)
    return "\n".join(lines) + "\n"


def _to_lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
