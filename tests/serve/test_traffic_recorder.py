"""Recorded traffic is whole and marked; a store that fails, or one that is too slow, costs records and nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from graft_dist.engine import Engine, SequenceEvent
from graft_dist.policy import ddtree, plain
from graft_dist.rounds import SequenceSummary
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from serve.active_policy import ActivePolicy
from serve.observer import StepReport, Submission
from serve.serve_args import TrafficRecording
from serve.traffic_recorder import RecordedSequence, RecorderCounts, TrafficRecorder
from storage import TrajectoryStore, connect, run_query
from tests.conftest import FakeDrafter
from tests.storage.records import DATASET, PROVENANCE, make_round

GRAFT = replace(ddtree(8, 4), name="graft")
ACTIVE = ActivePolicy("v7", 7, "p-7", GRAFT, {"plain": plain(), "ddtree": ddtree(4, 4), "graft": GRAFT})
SUMMARY = SequenceSummary(1, 2, 1, 0.25, 1.5, 0.1, 0.1, 1.0, 0.3)


def submission(name: str, request: str | None = None, method: str | None = None, **params: object) -> Submission:
    return Submission(name, request or f"req-{name}", [1, 2, 3], SamplingParams(**params), method)  # type: ignore[arg-type]


def report(*events: SequenceEvent, active: ActivePolicy = ACTIVE, is_resting: bool = False) -> StepReport:
    return StepReport(list(events), 1, 0, 0.1, active.label, active, is_resting)


def decode(recorder: TrafficRecorder, name: str, method: str | None = None, **changes: object) -> None:
    """A sequence of one round, in two steps."""
    recorder.added(submission(name, method=method, seed=7))
    recorder.stepped(report(SequenceEvent(name, [4], "", None)))
    event = SequenceEvent(name, [5, 8], "", None, "stop", round=make_round(name, 0), summary=SUMMARY)
    recorder.stepped(report(replace(event, **changes)))  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., TrafficRecorder]]:
    """A function that makes recorders with given settings and closes them in the end."""
    made: list[TrafficRecorder] = []

    def recorder(told: list[tuple[str, int]] | None = None, **changes: object) -> TrafficRecorder:
        settings = TrafficRecording(**{"store": str(tmp_path / "store"), "share": 1.0, "flush_s": 3600.0} | changes)
        listed = [] if told is None else told
        tell = lambda *each: listed.append(each)  # noqa: E731
        made.append(TrafficRecorder(settings, PROVENANCE, DATASET["tokenizer_sha256"], tell))
        return made[-1]

    yield recorder
    for each in made:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_unit_is_committed_and_marked(make: Callable[..., TrafficRecorder]) -> None:
    recorder = make(unit_sequences=2)
    decode(recorder, "a")
    decode(recorder, "b")
    until(lambda: recorder.counts.recorded == 2)
    assert recorder.counts == RecorderCounts(offered=2, recorded=2, pending=0, dropped={})
    columns = "source, task, policy, policy_fingerprint, prompt_id, seed, finish_reason, output_token_ids"
    found = run_query(recorder.settings.store, f"SELECT {columns} FROM sequences ORDER BY prompt_id").to_pylist()
    assert [row["prompt_id"] for row in found] == ["req-a", "req-b"]
    assert found[0] == {
        "source": "traffic", "task": "traffic", "policy": "graft", "policy_fingerprint": "p-7", "prompt_id": "req-a",
        "seed": 7, "finish_reason": "stop", "output_token_ids": [4, 5, 8],
    }  # fmt: skip
    (run,) = run_query(recorder.settings.store, "runs").to_pylist()
    assert (run["run_id"], run["sources"], run["num_units"]) == (recorder.run_id, "traffic", 1)


def test_rounds_without_a_draft_are_not_the_policys(make: Callable[..., TrafficRecorder]) -> None:
    """As they are for a while after drafting has failed."""
    recorder = make()
    for name, resting in (("whole", (True, True)), ("part", (True, False))):
        recorder.added(submission(name))
        recorder.stepped(report(SequenceEvent(name, [4], "", None), is_resting=resting[0]))
        end = SequenceEvent(name, [5, 8], "", None, "stop", round=make_round(name, 0), summary=SUMMARY)
        recorder.stepped(report(end, is_resting=resting[1]))
    recorder.close()
    assert recorder.counts.dropped == {"policy": 1}
    sql = "SELECT prompt_id, policy, policy_fingerprint FROM sequences"
    found = run_query(recorder.settings.store, sql).to_pylist()
    assert found == [{"prompt_id": "req-whole", "policy": "plain", "policy_fingerprint": None}]


def test_closing_writes_the_rest_in_a_unit_per_method(make: Callable[..., TrafficRecorder]) -> None:
    recorder = make()
    decode(recorder, "a")
    decode(recorder, "b", method="plain")
    decode(recorder, "c", method="graft")  # asks for what is in force anyway
    assert recorder.counts.pending == 3
    recorder.close()
    assert recorder.counts.recorded == 3
    sql = "SELECT policy, policy_fingerprint, count(*) AS n FROM sequences GROUP BY ALL ORDER BY 1"
    assert [tuple(row.values()) for row in run_query(recorder.settings.store, sql).to_pylist()] == [
        ("graft", "p-7", 2), ("plain", None, 1),
    ]  # fmt: skip
    decode(recorder, "d")  # nobody would write it any more
    assert recorder.counts.dropped == {"full": 1}


def test_a_smaller_unit_is_written_when_it_has_waited_long_enough(make: Callable[..., TrafficRecorder]) -> None:
    recorder = make(flush_s=0.01)
    decode(recorder, "a")
    until(lambda: recorder.counts.recorded == 1)


def test_two_replicas_share_a_store(make: Callable[..., TrafficRecorder]) -> None:
    recorders = [make(unit_sequences=1), make(unit_sequences=1)]
    for index in range(4):
        for which, recorder in enumerate(recorders):
            decode(recorder, f"{which}-{index}")
    for recorder in recorders:
        recorder.close(timeout_s=60)
        assert recorder.counts.recorded == 4
    (count,) = run_query(recorders[0].settings.store, "SELECT count(DISTINCT sequence_id) AS n FROM rounds").to_pylist()
    assert count == {"n": 8}


def test_an_unwritable_store_only_counts_drops_and_a_mended_one_is_used(
    make: Callable[..., TrafficRecorder], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, int]] = []
    (tmp_path / "store").write_text("a file where the folder should be")
    recorder = make(told, unit_sequences=1)
    decode(recorder, "a")
    decode(recorder, "b")
    until(lambda: len(told) == 2)
    assert told == [("store", 1), ("store", 1)] and recorder.counts.dropped == {"store": 2}
    assert sum("not recorded until" in message for message in caplog.messages) == 1
    (tmp_path / "store").unlink()
    decode(recorder, "c")
    until(lambda: "recorded again; 2 sequences were dropped" in caplog.text)
    assert recorder.counts.recorded == 1


def test_a_full_disk_leaves_nothing_behind(
    make: Callable[..., TrafficRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[tuple[str, int]] = []
    recorder = make(told, unit_sequences=1)
    monkeypatch.setattr("storage.parquet_files.os.fsync", full)
    decode(recorder, "a")
    until(lambda: told == [("store", 1)])
    assert not [path for path in (tmp_path / "store").rglob("*") if path.name.startswith(("unit-", "rounds-"))]


def test_another_models_store_is_left_alone(make: Callable[..., TrafficRecorder], tmp_path: Path) -> None:
    TrajectoryStore(tmp_path / "store").begin("job", "tiny", {**DATASET, "tokenizer_sha256": "another"})
    recorder = make(unit_sequences=1)
    decode(recorder, "a")
    until(lambda: recorder.counts.dropped == {"store": 1})
    with connect(tmp_path / "store") as connection:
        assert connection.sql("SELECT count(*) FROM sequences").fetchall() == [(0,)]


def test_a_hanging_store_fills_the_buffer_and_never_stops_the_decoder(
    make: Callable[..., TrafficRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_mended, is_reached = threading.Event(), threading.Event()
    honest = TrajectoryStore.begin

    def hang(store: TrajectoryStore, run_id: str, target: str, dataset: dict[str, str]) -> int:
        is_reached.set()
        is_mended.wait()
        return honest(store, run_id, target, dataset)

    monkeypatch.setattr(TrajectoryStore, "begin", hang)
    told: list[tuple[str, int]] = []
    recorder = make(told, unit_sequences=1, max_pending_mb=3.5 * size_of_one(make) / 1e6)
    decode(recorder, "a")
    assert is_reached.wait(60)
    for name in "bcde":  # what is being written counts as well, so that memory is bounded whatever the store does
        decode(recorder, name)
    assert told == [("full", 1), ("full", 1)] and recorder.counts == RecorderCounts(5, 0, 3, {"full": 2})
    recorder.close(timeout_s=0.01)  # returns although its thread hangs
    is_mended.set()
    until(lambda: recorder.counts.recorded == 3)


def size_of_one(make: Callable[..., TrafficRecorder]) -> float:
    """Bytes that `decode` makes of a sequence."""
    recorder = make()
    decode(recorder, "a")
    return recorder.pending_mb * 1e6


def test_what_cannot_be_labelled_truly_is_dropped(make: Callable[..., TrafficRecorder]) -> None:
    told: list[tuple[str, int]] = []
    recorder = make(told)
    recorder.added(submission("swapped"))
    recorder.stepped(report(SequenceEvent("swapped", [4], "", None)))
    last = SequenceEvent("swapped", [5, 8], "", None, "stop", round=make_round("swapped", 0), summary=SUMMARY)
    recorder.stepped(report(last, active=replace(ACTIVE, fingerprint="p-8")))
    decode(recorder, "half", round=None)
    assert told == [("policy", 1), ("rounds", 1)]
    recorder.added(submission("left"))
    recorder.stepped(report(SequenceEvent("left", [], "", None, "abort", summary=SUMMARY)))  # nothing to learn from
    assert recorder.counts == RecorderCounts(offered=2, recorded=0, pending=0, dropped={"policy": 1, "rounds": 1})


def test_a_sequence_that_grows_too_large_or_cannot_be_kept_is_dropped_while_it_is_decoded(
    make: Callable[..., TrafficRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    recorder = make(told, max_pending_mb=2.5 * size_of_one(make) / 1e6)
    for name in ("long", "broken"):
        recorder.added(submission(name))
    for index in range(4):
        recorder.stepped(report(SequenceEvent("long", [5, 8], "", None, round=make_round("long", index))))
    assert told == [("full", 1)]
    honest = RecordedSequence.take

    def failing(sequence: RecordedSequence, event: SequenceEvent, active: ActivePolicy) -> None:
        if event.sequence_id == "broken":
            raise MemoryError("no room")
        honest(sequence, event, active)

    monkeypatch.setattr(RecordedSequence, "take", failing)
    recorder.stepped(report(SequenceEvent("broken", [4], "", None)))
    assert told == [("full", 1), ("rounds", 1)] and recorder.pending_mb == 0
    decode(recorder, "good")
    recorder.close()
    assert recorder.counts == RecorderCounts(3, 1, 0, {"full": 1, "rounds": 1})


def test_the_share_is_of_requests_with_all_their_sequences() -> None:
    draws = iter([0.0, 0.25, 0.24])
    settings = TrafficRecording(store="unused", share=0.25)
    recorder = TrafficRecorder(settings, PROVENANCE, "k", draw=lambda: next(draws))
    names = ("r1", "r2", "r3")
    wanted = [recorder.added(replace(submission(f"{name}-{n}", "same id"), index=n)) for name in names for n in (0, 1)]
    assert wanted == [True, True, False, False, True, True]
    recorder.stepped(report(SequenceEvent("r2-0", [], "", None, "stop", summary=SUMMARY)))
    recorder.close()
    assert not Path("unused").exists()  # no sequence, no store


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1.5}, {"store": ""}, {"sahre": 0.5}, {"unit_sequences": 0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrafficRecording(**{"store": "s", "share": 0.5} | wrong)


def test_what_an_engine_decodes_is_recorded_whole(make: Callable[..., TrafficRecorder], tiny_llama: Target) -> None:
    """Sampled and greedy requests, one of them aborted, with a seed that no column could hold."""
    engine = Engine(tiny_llama, FakeDrafter(tiny_llama), GRAFT, max_slots=3, record=True)
    recorder = make()
    params = {
        "greedy": {"max_new_tokens": 9, "ignore_eos": True},
        "sampled": {"max_new_tokens": 9, "ignore_eos": True, "temperature": 1.0, "seed": 2**64 - 1},
        "aborted": {"max_new_tokens": 200, "ignore_eos": True, "stop": ("no such text",)},
    }
    for name, fields in params.items():
        asked = submission(name, **fields)
        engine.add([5, 6, len(name)], asked.params, name)
        recorder.added(replace(asked, prompt_token_ids=[5, 6, len(name)]))
    num_ended = 0
    while engine.has_work:
        events = engine.step()
        recorder.stepped(report(*events))
        num_ended += sum(event.finish_reason is not None for event in events)
        if num_ended == 2:
            engine.abort("aborted")
    recorder.close(timeout_s=60)
    assert recorder.counts == RecorderCounts(3, 3, 0, {})
    sql = """
        SELECT s.sequence_id, s.finish_reason, s.seed, len(s.output_token_ids) - 1 AS decoded,
            sum(r.num_tokens)::BIGINT AS in_rounds
        FROM sequences s JOIN rounds r USING (unit_id, attempt, sequence_id) GROUP BY ALL ORDER BY 1
    """
    rows = run_query(recorder.settings.store, sql).to_pylist()
    assert [(row["sequence_id"], row["finish_reason"]) for row in rows] == [
        ("aborted", "abort"), ("greedy", "length"), ("sampled", "length"),
    ]  # fmt: skip
    assert all(row["decoded"] == row["in_rounds"] for row in rows) and {row["seed"] for row in rows} == {None}
    for name in ("summary", "acceptance", "gain", "mismatch", "throughput", "timings"):
        assert run_query(recorder.settings.store, name).num_rows > 0
