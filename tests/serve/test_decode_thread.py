"""The decode thread: what fails, who leaves, what is full, what is swapped. Without Ray and without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from graft_dist.budget import FixedBudget
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.engine import Engine
from graft_dist.policy import DecodingPolicy, ddtree, plain
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from serve.active_policy import ActivePolicy
from serve.decode_thread import DecodeThread, RequestStream
from serve.errors import ApiError
from serve.observer import StepReport, Submission
from tests.serve.conftest import RECITAL, RecitingDrafter, recite

LENGTH = len(RECITAL.encode())
CHOICES = {"plain": plain(), "ddtree": ddtree(6, 4)}


class Watcher:
    """Remembers what it is told; `wants` says for which sequences it wants records."""

    def __init__(self, wants: str = "nothing") -> None:
        self.wants = wants
        self.submissions: list[Submission] = []
        self.reports: list[StepReport] = []
        self.is_broken = False

    def added(self, submission: Submission) -> bool:
        self.submissions.append(submission)
        return submission.sequence_id.startswith(self.wants)

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)
        if self.is_broken:
            raise OSError("no room")


class Bench:
    """A decode thread over the reciting target, with its parts at hand to break."""

    def __init__(self, target: Target, policy: DecodingPolicy, **options: Any) -> None:
        self.target = target
        self.drafter = RecitingDrafter(target, accuracy=1.0)
        self.watcher = Watcher()
        self.made_on: str | None = None
        max_slots = options.pop("max_slots", 4)

        def make_engine() -> tuple[Engine, ActivePolicy]:
            self.made_on = threading.current_thread().name
            self.engine = Engine(target, self.drafter, policy, max_slots=max_slots, max_length=256)
            return self.engine, ActivePolicy(policy.name, None, None, policy, CHOICES)

        options = {"max_queue": 8, "stuck_after_s": 60.0, "observers": [self.watcher]} | options
        self.thread = DecodeThread(make_engine, **options)
        self.thread.start()

    def submit(self, prompt: str = "recite", method: str | None = None, **params: Any) -> RequestStream:
        ids = self.target.tokenizer.encode(prompt)
        fields = {"max_new_tokens": LENGTH, "seed": 0} | params
        sequence_id = self.thread.new_sequence_id(prompt)
        return self.thread.submit([Submission(sequence_id, prompt, ids, SamplingParams(**fields), method)])


async def read(stream: RequestStream) -> str:
    """The whole text; raises what the stream raises, and RuntimeError for an error of the sequence."""
    text = ""
    while True:
        event = (await stream.next()).event
        text += event.text
        if event.finish_reason in ("error", "abort"):
            raise RuntimeError(event.error or event.finish_reason)
        if event.finish_reason is not None:
            return text


async def empty(thread: DecodeThread) -> None:
    """Wait until nothing is decoded or waits."""
    async with asyncio.timeout(30):
        while thread.num_sequences:
            await asyncio.sleep(0.005)


@pytest.fixture
def make(reciting_target: Target) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def start(policy: DecodingPolicy | None = None, **options: Any) -> Bench:
        benches.append(Bench(reciting_target, policy or ddtree(6, 4), **options))
        return benches[-1]

    yield start
    for bench in benches:
        bench.thread.stop()


def test_answers_side_by_side(make: Callable[..., Bench]) -> None:
    bench = make()

    async def run() -> list[str]:
        return await asyncio.gather(*(read(bench.submit(max_new_tokens=LENGTH + number)) for number in range(8)))

    assert asyncio.run(run()) == [recite(LENGTH + number) for number in range(8)]
    assert bench.made_on == "graft-decode"
    assert max(report.num_live for report in bench.watcher.reports) == 4  # slots are shared, the rest waited
    assert bench.thread.num_sequences == 0


def test_sequences_of_all_threads_have_different_names(make: Callable[..., Bench]) -> None:
    threads = [make().thread, make().thread]
    assert len({thread.new_sequence_id("request") for thread in threads for _ in range(2)}) == 4


def test_making_the_engine_fails(reciting_target: Target) -> None:
    def make_engine() -> tuple[Engine, ActivePolicy]:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        DecodeThread(make_engine, max_queue=1, stuck_after_s=1.0).start()


def test_the_loop_goes_on_while_a_round_takes_its_time(make: Callable[..., Bench]) -> None:
    bench = make()
    release, is_inside = threading.Event(), threading.Event()
    step = bench.engine.run_round

    def slow() -> Any:
        is_inside.set()
        assert release.wait(30)
        return step()

    bench.engine.run_round = slow  # type: ignore[method-assign]

    async def run() -> str:
        stream = bench.submit()
        await asyncio.to_thread(is_inside.wait, 30)
        for _ in range(50):  # the loop turns although a round is under way
            await asyncio.sleep(0)
        release.set()
        return await read(stream)

    assert asyncio.run(run()) == RECITAL


# ---- limits


def test_a_full_queue_refuses_all_of_a_request(make: Callable[..., Bench]) -> None:
    bench = make(max_slots=1, max_queue=2)
    ids = bench.target.tokenizer.encode("recite")
    params = SamplingParams(max_new_tokens=200, seed=0)

    async def run() -> None:
        streams = [bench.submit(max_new_tokens=200) for _ in range(2)]
        two = [Submission(f"two-{number}", "two", ids, params, None) for number in range(2)]
        with pytest.raises(ApiError) as caught:
            bench.thread.submit(two)
        assert (caught.value.status, caught.value.outcome) == (429, "busy")
        assert "Retry-After" in caught.value.headers()
        assert bench.thread.num_sequences == 2
        third = bench.submit(max_new_tokens=3)
        for stream in streams:
            stream.cancel()
        assert await read(third) == recite(3)
        await empty(bench.thread)

    asyncio.run(run())


def test_a_request_that_the_engine_refuses_leaves_nothing_behind(make: Callable[..., Bench]) -> None:
    bench = make()
    params = SamplingParams(max_new_tokens=3)
    good = Submission("good", "r", bench.target.tokenizer.encode("recite"), params, None)
    bad = Submission("bad", "r", [999_999], params, None)

    async def run() -> None:
        stream = bench.thread.submit([good, bad])
        with pytest.raises(ApiError, match="outside the vocabulary") as caught:
            await stream.next()
        assert caught.value.status == 400
        await empty(bench.thread)
        assert await read(bench.submit()) == RECITAL

    asyncio.run(run())


def test_a_first_token_does_not_wait_for_the_round(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    run_round, has_come = bench.engine.run_round, threading.Event()

    def held() -> Any:
        assert has_come.wait(30)
        return run_round()

    monkeypatch.setattr(bench.engine, "run_round", held)

    async def run() -> str:
        stream = bench.submit()
        first = (await stream.next()).event
        assert first.round is None and len(first.token_ids) == 1
        has_come.set()
        return first.text + await read(stream)

    assert asyncio.run(run()) == recite(LENGTH)


def test_stopping_refuses_new_requests_and_tells_the_others(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    step, is_stopped = bench.engine.run_round, threading.Event()

    def waiting() -> Any:
        assert is_stopped.wait(30)
        return step()

    monkeypatch.setattr(bench.engine, "run_round", waiting)

    async def run() -> None:
        stream = bench.submit(max_new_tokens=200)
        bench.thread.stop(timeout_s=0.0)
        is_stopped.set()
        for refused in (bench.submit, lambda: read(stream)):
            with pytest.raises(ApiError) as caught:
                await refused()
            assert caught.value.status == 503 and "Retry-After" in caught.value.headers()

    asyncio.run(run())


# ---- leaving


def test_a_cancelled_request_is_gone_after_one_round(make: Callable[..., Bench]) -> None:
    bench = make(plain())
    step, rounds_after = bench.engine.run_round, []
    is_cancelled = threading.Event()

    def counting() -> Any:
        if is_cancelled.is_set():
            rounds_after.append(bench.engine.num_live)
        return step()

    bench.engine.run_round = counting  # type: ignore[method-assign]

    async def run() -> None:
        stream = bench.submit(max_new_tokens=240)
        await stream.next()
        stream.cancel()
        is_cancelled.set()
        await empty(bench.thread)
        assert await read(bench.submit(max_new_tokens=4)) == recite(4)

    asyncio.run(run())
    # The round under way when it left, at most, still had it.
    assert rounds_after[:2].count(1) <= 1


def test_a_request_that_waits_can_leave_as_well(make: Callable[..., Bench]) -> None:
    bench = make(max_slots=1)

    async def run() -> None:
        first, second = bench.submit(max_new_tokens=60), bench.submit(max_new_tokens=60)
        second.cancel()
        assert await read(first) == recite(60)
        await empty(bench.thread)

    asyncio.run(run())


# ---- failing: one request fails in each phase, and its neighbours do not notice


def neighbours(bench: Bench, victim: str = "fail") -> tuple[list[str], BaseException | str]:
    """Two requests around a victim: the texts of the two, and what the victim got."""

    async def run() -> tuple[list[str], BaseException | str]:
        before = asyncio.create_task(read(bench.submit("before", max_new_tokens=60)))
        failing = asyncio.create_task(read(bench.submit(victim, max_new_tokens=40)))
        after = asyncio.create_task(read(bench.submit("after", max_new_tokens=50)))
        got = (await asyncio.gather(failing, return_exceptions=True))[0]
        return [await before, await after], got

    return asyncio.run(run())


GOOD = [recite(60), recite(50)]


def slot_of(bench: Bench, name: str) -> int | None:
    live = [sequence.sequence_id for sequence in bench.engine._live]
    return next((slot for slot, sequence_id in enumerate(live) if sequence_id.startswith(name)), None)


def test_prefill_fails(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    prefill, victim = bench.target.prefill, bench.target.tokenizer.encode("fail")

    def failing(token_ids: Sequence[int], *others: Any) -> Any:
        if list(token_ids) == victim:
            raise RuntimeError("prefill")
        return prefill(token_ids, *others)

    monkeypatch.setattr(bench.target, "prefill", failing)
    good, got = neighbours(bench)
    assert good == GOOD and isinstance(got, RuntimeError) and "prefill" in str(got)
    bench.thread.check()


def test_queueing_fails(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    add = bench.engine.add

    def failing(prompt: Any, params: Any, sequence_id: str) -> str:
        if sequence_id.startswith("fail"):
            raise MemoryError("no room")
        return add(prompt, params, sequence_id)

    monkeypatch.setattr(bench.engine, "add", failing)
    good, got = neighbours(bench)
    assert good == GOOD and isinstance(got, ApiError) and got.status == 500
    asyncio.run(empty(bench.thread))
    bench.thread.check()


def test_drafting_fails(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    propose = bench.drafter.propose

    def failing(*arguments: Any) -> Any:
        if slot_of(bench, "fail") is not None:
            raise RuntimeError("draft")
        return propose(*arguments)

    monkeypatch.setattr(bench.drafter, "propose", failing)
    good, got = neighbours(bench)
    assert good == GOOD and got == recite(40)  # without a draft the text is the same
    assert bench.thread.num_draft_failures > 0
    bench.thread.check()


@pytest.mark.parametrize("stage", ["scorer", "budget"])
def test_the_policy_fails(make: Callable[..., Bench], stage: str) -> None:
    class Failing:
        needs_hidden = needs_state = False

        def score(self, *arguments: Any) -> Any:
            if stage == "scorer":
                raise RuntimeError("score")
            return MarginalScorer().score(*arguments)

        def limits(self, states: Any) -> list[int]:
            return FixedBudget(6).limits(states)

        def choose(self, trees: Any, states: Any) -> list[int]:
            raise RuntimeError("choose")

    failing = Failing()
    bench = make(DecodingPolicy("failing", failing, failing, 4))
    good, got = neighbours(bench)
    assert good == GOOD and got == recite(40)
    # Rounds with a draft are tried again, ever more seldom.
    assert 1 < bench.thread.num_draft_failures < 12
    bench.thread.check()


def test_verification_fails(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    verify = bench.engine._verify

    def failing(trees: Any, first: int = 0) -> Any:
        slot = slot_of(bench, "fail")
        if slot is not None and first <= slot < first + len(trees):
            raise RuntimeError("verify")
        return verify(trees, first)

    monkeypatch.setattr(bench.engine, "_verify", failing)
    good, got = neighbours(bench)
    assert good == GOOD and isinstance(got, RuntimeError) and "verify" in str(got)
    bench.thread.check()


@pytest.mark.parametrize("what", ["accept", "detokenise"])
def test_acceptance_or_detokenising_fails(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    bench = make()
    from graft_dist import active_sequence, engine

    if what == "accept":
        accept = engine.accept

        def failing(tree: Any, next_token: Any) -> Any:
            if slot_of(bench, "fail") is not None and tree is marked.get("tree"):
                raise RuntimeError("accept")
            return accept(tree, next_token)

        marked: dict[str, Any] = {}
        own = bench.engine._accept

        def marking(slot: int, tree: Any, verified: Any) -> Any:
            marked["tree"] = tree if slot == slot_of(bench, "fail") else None
            return own(slot, tree, verified)

        monkeypatch.setattr(engine, "accept", failing)
        monkeypatch.setattr(bench.engine, "_accept", marking)
    else:
        push = active_sequence.TextStream.push
        streams = {}

        def breaking(self: Any, token_ids: Any) -> Any:
            live = [s for s in bench.engine._sequences() if s.sequence_id.startswith("fail")]
            if live and live[0]._stream is self and streams.setdefault("count", 0) > 2:
                raise RuntimeError("detokenise")
            streams["count"] = streams.get("count", 0) + 1
            return push(self, token_ids)

        monkeypatch.setattr(active_sequence.TextStream, "push", breaking)
    good, got = neighbours(bench)
    assert good == GOOD and isinstance(got, RuntimeError) and what in str(got)
    bench.thread.check()


@pytest.mark.parametrize("stage", ["draft", "verify", "accept"])
def test_a_failing_device_ends_the_thread(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    bench = make()

    def failing(*arguments: Any, **options: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if stage == "draft":
        monkeypatch.setattr(bench.drafter, "propose", failing)
    elif stage == "verify":
        monkeypatch.setattr(bench.engine, "_verify", failing)
    else:
        from graft_dist import engine

        monkeypatch.setattr(engine, "accept", failing)

    async def run() -> None:
        results = await asyncio.gather(read(bench.submit()), read(bench.submit()), return_exceptions=True)
        assert all(isinstance(result, ApiError) and result.status == 500 for result in results)
        with pytest.raises(ApiError) as caught:
            bench.submit()
        assert caught.value.status == 500

    asyncio.run(run())
    with pytest.raises(RuntimeError, match="failed"):
        bench.thread.check()


def test_a_loop_that_does_not_come_round_is_stuck(make: Callable[..., Bench]) -> None:
    bench = make(stuck_after_s=1.0)
    release = threading.Event()

    async def until_stuck() -> None:
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeError, match="stuck"):
                while True:
                    await asyncio.sleep(0.02)
                    bench.thread.check()

    async def run() -> None:
        assert await read(bench.submit()) == RECITAL  # the first round compiles, which takes as long as it takes
        hanging = asyncio.create_task(bench.thread.call(lambda: release.wait(30)))
        await asyncio.sleep(0)
        stream = bench.submit()
        await until_stuck()
        release.set()  # it was only slow: found so once, nobody has lost anything
        assert await hanging
        assert await read(stream) == RECITAL
        bench.thread.check()

    asyncio.run(run())


def test_the_requests_of_a_stuck_loop_end(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Serve, which lets a replica finish its requests before it ends it, would wait as long as one may run."""
    monkeypatch.setattr("serve.decode_thread._SURE_S", 0.1)
    bench = make(stuck_after_s=1.0)
    are_asked, release = threading.Event(), threading.Event()

    async def run() -> None:
        first = asyncio.create_task(bench.thread.call(lambda: are_asked.wait(300)))
        await asyncio.sleep(0)
        left, *streams = [bench.submit() for _ in range(5)]
        left.cancel()  # its client has gone
        hanging = asyncio.create_task(bench.thread.call(lambda: release.wait(300)))
        await asyncio.sleep(0)
        are_asked.set()  # so that the loop hangs with the requests taken, before their first round
        assert await first
        readers = [asyncio.create_task(stream.next()) for stream in streams]
        async with asyncio.timeout(20):
            while not all(reader.done() for reader in readers):
                with suppress(RuntimeError):
                    bench.thread.check()
                await asyncio.sleep(0.02)
        for reader in readers:
            error = reader.exception()
            assert isinstance(error, ApiError) and error.status == 500
        with pytest.raises(ApiError) as caught:
            bench.submit()
        assert caught.value.status == 500
        release.set()  # too late: it stays given up
        assert await hanging
        with pytest.raises(RuntimeError, match="stuck"):
            bench.thread.check()

    asyncio.run(run())


def test_a_call_whose_caller_has_gone_is_not_carried_out(make: Callable[..., Bench]) -> None:
    bench = make()
    release = threading.Event()

    async def run() -> str:
        busy = asyncio.create_task(bench.thread.call(lambda: release.wait(30)))
        await asyncio.sleep(0)
        late = asyncio.create_task(bench.thread.swap(ActivePolicy("late", None, None, plain())))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        release.set()
        assert await busy
        return await read(bench.submit())

    assert asyncio.run(run()) == RECITAL
    assert bench.thread.active.label == "ddtree"
    bench.thread.check()


def test_nobody_waits_for_a_dead_or_stuck_thread(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.decode_thread._LOOK_S", 0.05)
    other = ActivePolicy("other", None, None, plain())
    stuck, dead = make(stuck_after_s=1.0), make()
    release = threading.Event()

    async def run() -> None:
        hanging = asyncio.create_task(stuck.thread.call(lambda: release.wait(30)))  # at work, so it is waited for
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="stuck"):
            await stuck.thread.swap(other)
        release.set()
        assert await hanging
        dead.thread.stop()
        with pytest.raises(RuntimeError, match=r"failed|ended"):
            await dead.thread.swap(other)

    asyncio.run(run())


def test_an_observer_that_fails_is_switched_off(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.watcher.is_broken = True

    async def run() -> None:
        assert await read(bench.submit()) == RECITAL
        assert await read(bench.submit()) == RECITAL

    asyncio.run(run())
    assert len(bench.watcher.reports) == 1
    bench.thread.check()


# ---- policies


def test_policies_are_swapped_in_the_middle_of_an_answer(make: Callable[..., Bench]) -> None:
    bench = make(plain())

    async def run() -> tuple[str, list[str]]:
        stream, text, labels = bench.submit(max_new_tokens=120), "", []
        while True:
            streamed = await stream.next()
            text += streamed.event.text
            labels.append(streamed.policy.label)
            if len(labels) == 5:
                await bench.thread.swap(ActivePolicy("trees", 7, "abcd", ddtree(6, 4)))
            if streamed.event.finish_reason is not None:
                return text, labels

    text, labels = asyncio.run(run())
    assert text == recite(120)
    assert labels[:5] == ["plain"] * 5 and labels[-1] == "trees"
    assert len(labels) < 120  # trees accept more than one token a round
    assert {report.policy_label for report in bench.watcher.reports} == {"plain", "trees"}


def test_methods_share_rounds_and_keep_their_budgets(make: Callable[..., Bench]) -> None:
    bench = make(ddtree(2, 4))

    async def run() -> list[str]:
        methods = [None, "plain", "ddtree", "unknown"]
        return await asyncio.gather(*(read(bench.submit(str(method), method, max_new_tokens=60)) for method in methods))

    assert asyncio.run(run()) == [recite(60)] * 4
    budgets: dict[str, set[int]] = {}
    batch_sizes = set()
    for report in bench.watcher.reports:
        for event in report.events:
            if event.trace is not None and event.finish_reason is None:
                budgets.setdefault(event.sequence_id.rsplit("-", 1)[0], set()).add(event.trace.budget)
                batch_sizes.add(event.trace.batch_size)
    assert max(batch_sizes) > 1
    assert budgets["plain"] == {0} and max(budgets["None"]) == max(budgets["unknown"]) == 2
    assert max(budgets["ddtree"]) == 6


def test_rounds_are_recorded_only_while_somebody_wants_them(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.watcher.wants = "record"

    async def run() -> None:
        assert await read(bench.submit("before")) == RECITAL
        assert await read(bench.submit("record")) == RECITAL
        assert await read(bench.submit("later")) == RECITAL

    asyncio.run(run())
    recorded = {
        event.sequence_id.split("-")[0] for report in bench.watcher.reports for event in report.events if event.round
    }
    assert recorded == {"record"}
