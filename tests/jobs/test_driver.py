"""The driver loop with a fake pool and a fake log: what is tried again, set aside, committed, and how a run ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from jobs.driver import Driver, DriverSettings, Ending, Progress, RunResult
from jobs.work import Tally
from tests.jobs.fakes import FakeClock, FakeLog, FakePool, make_units


def drive(
    pool: FakePool, log: FakeLog, number: int = 6, settings: DriverSettings | None = None, **more: Any
) -> RunResult:
    return Driver(pool, log, make_units(number), settings or DriverSettings(), clock=FakeClock(0.01), **more).run()


def all_units(number: int) -> list[str]:
    return [f"u{index}" for index in range(number)]


def test_every_unit_is_committed_once() -> None:
    log = FakeLog()
    result = drive(FakePool(2), log)
    assert result.ending is Ending.COMPLETE
    assert sorted(log.units) == all_units(6)
    assert (result.num_units_committed, result.num_units_left, result.set_aside) == (6, 0, ())
    assert result.committed == Tally(12, 0, 120, 54, 108, 12, 600)
    assert result.committed.mat == 2.0


def test_nothing_to_do_is_a_complete_run_without_a_commit() -> None:
    log = FakeLog()
    assert drive(FakePool(1), log, number=0).ending is Ending.COMPLETE
    assert log.batches == []


def test_commits_come_in_batches_and_the_rest_at_the_end() -> None:
    log = FakeLog()
    drive(FakePool(1), log, number=7, settings=DriverSettings(commit_units=3, commit_interval_s=1e9))
    assert [len(batch) for batch in log.batches] == [3, 3, 1]


def test_a_finished_unit_does_not_wait_for_a_full_batch_for_ever() -> None:
    log = FakeLog()
    drive(FakePool(1), log, number=3, settings=DriverSettings(commit_units=100, commit_interval_s=0.0))
    assert [len(batch) for batch in log.batches] == [1, 1, 1]


def test_a_worker_gets_its_next_unit_while_the_last_one_still_decodes() -> None:
    pool = FakePool(1, calls_per_unit=3)
    drive(pool, FakeLog(), number=3)
    assert pool.calls[1] == (0, ("u0",), "u1", True)
    assert max(len(held) + (new is not None) for _, held, new, _ in pool.calls) == 2


def test_a_lost_workers_units_are_decoded_again_by_a_new_attempt() -> None:
    pool = FakePool(2, fate=lambda unit_id, attempt: "kill" if (unit_id, attempt) == ("u2", 1) else "ok")
    log = FakeLog()
    result = drive(pool, log)
    assert result.ending is Ending.COMPLETE
    assert sorted(log.units) == all_units(6)
    assert pool.attempts["u2"] == 2
    assert result.num_workers_lost == 1


def test_a_unit_that_kills_its_worker_is_set_aside_and_its_neighbours_are_not() -> None:
    pool = FakePool(2, fate=lambda unit_id, attempt: "kill" if unit_id == "u1" else "ok", calls_per_unit=3)
    log = FakeLog()
    result = drive(pool, log, number=8)
    assert result.ending is Ending.PARTIAL
    assert [(unit.unit_id, unit.attempts) for unit in result.set_aside] == [("u1", 3)]
    assert sorted(log.units) == [unit_id for unit_id in all_units(8) if unit_id != "u1"]


def test_suspects_are_tried_alone() -> None:
    pool = FakePool(1, fate=lambda unit_id, attempt: "kill" if unit_id == "u1" else "ok", calls_per_unit=4)
    result = drive(pool, FakeLog(), number=4)
    assert [unit.unit_id for unit in result.set_aside] == ["u1"]
    first_loss = next(index for index, call in enumerate(pool.calls) if call[2] == "u1")
    later = [(held, new, has_more) for _, held, new, has_more in pool.calls[first_loss + 1 :]]
    for held, new, has_more in later:
        if "u1" in (*held, new) or "u0" in (*held, new):
            assert len(held) + (new is not None) == 1
            assert not has_more


def test_a_worker_gets_on_with_its_unit_while_suspects_wait() -> None:
    # u0 fails (say, in writing) while u1 is still being decoded and the queue is empty: u0 is for an empty hand only.
    def fate(unit_id: str, attempt: int) -> str:
        is_last_call = len(pool.calls) == 2
        return "error: hiccup" if (unit_id, attempt) == ("u0", 1) and is_last_call else "ok"

    pool, log = FakePool(1, fate=fate, calls_per_unit=3), FakeLog()
    too_long = iter(range(100))
    result = drive(pool, log, number=2, stop_signal=lambda: None if next(too_long, 0) < 99 else Ending.TERMINATED)
    assert result.ending is Ending.COMPLETE
    assert log.units == ["u1", "u0"]
    assert pool.attempts["u0"] == 2


def test_a_restarted_worker_that_has_forgotten_its_units_costs_nothing_but_an_attempt() -> None:
    pool = FakePool(
        1, fate=lambda unit_id, attempt: "forget" if (unit_id, attempt) == ("u0", 1) else "ok", calls_per_unit=2
    )
    log = FakeLog()
    assert drive(pool, log, number=3).ending is Ending.COMPLETE
    assert sorted(log.units) == all_units(3)
    assert pool.attempts["u0"] == 2


def test_the_run_stops_when_its_first_units_all_fail_alike() -> None:
    pool = FakePool(2, fate=lambda unit_id, attempt: "error: no such tensor")
    log = FakeLog()
    result = drive(pool, log, number=50)
    assert result.ending is Ending.FAILED_ALIKE
    assert result.message == "the first 3 units all failed alike: error: no such tensor"
    assert log.batches == []
    assert len(pool.calls) < 10


def test_units_of_bad_lines_alone_are_no_success() -> None:
    """They are finished without a model, and say nothing about whether it works."""
    pool = FakePool(1, fate=lambda unit_id, attempt: "bad" if unit_id == "u0" else "error: no such tensor")
    result = drive(pool, FakeLog(), number=50)
    assert result.ending is Ending.FAILED_ALIKE and result.committed.num_sequences > 0


def test_units_that_fail_for_different_reasons_are_set_aside_one_by_one() -> None:
    pool = FakePool(1, fate=lambda unit_id, attempt: f"error {unit_id}")
    result = drive(pool, FakeLog(), number=4)
    assert result.ending is Ending.PARTIAL
    assert sorted(unit.unit_id for unit in result.set_aside) == all_units(4)


def test_the_same_error_after_a_success_does_not_stop_the_run() -> None:
    pool = FakePool(1, fate=lambda unit_id, attempt: "ok" if unit_id == "u0" else "error: the same")
    log = FakeLog()
    result = drive(pool, log, number=6)
    assert result.ending is Ending.PARTIAL
    assert log.units == ["u0"]
    assert len(result.set_aside) == 5


def test_workers_that_only_die_end_the_run() -> None:
    result = drive(FakePool(2, fate=lambda unit_id, attempt: "kill"), FakeLog(), number=100)
    assert result.ending is Ending.FAILED_ALIKE
    assert result.message is not None
    assert "workers were lost before any unit was finished" in result.message


def test_a_pool_without_workers_ends_the_run_with_what_is_finished_committed() -> None:
    pool, log = FakePool(1), FakeLog()

    def vanish(point: str) -> None:
        pool.is_gone = True

    result = drive(pool, log, number=4, failpoint=vanish)
    assert result.ending is Ending.CUT_OFF
    assert (result.message, result.num_units_left) == ("all gone", 3)
    assert log.units == ["u0"]


@pytest.mark.parametrize("ending", [Ending.TERMINATED, Ending.INTERRUPTED])
def test_asked_to_stop_the_driver_commits_what_is_finished(ending: Ending) -> None:
    log, asked = FakeLog(), Counter[str]()
    result = drive(
        FakePool(1),
        log,
        failpoint=lambda point: asked.update([point]),
        stop_signal=lambda: ending if asked["unit-finished"] == 2 else None,
    )
    assert result.ending is ending
    assert log.batches == [["u0", "u1"]]
    assert result.num_units_left == 4


def test_a_fenced_driver_stops_and_commits_nothing_more() -> None:
    log = FakeLog(fence_at=1)
    result = drive(FakePool(1), log, settings=DriverSettings(commit_units=2))
    assert result.ending is Ending.FENCED
    assert log.batches == [["u0", "u1"]]
    assert result.committed.num_sequences == 4


def test_a_full_disk_ends_the_run_with_what_is_finished_committed() -> None:
    pool, log = FakePool(1, lambda unit_id, attempt: "error: disk full" if unit_id == "u2" else "ok"), FakeLog()
    result = Driver(pool, log, make_units(6)).run()
    assert (result.ending, log.units) == (Ending.CUT_OFF, ["u0", "u1"])
    assert (result.num_units_left, result.set_aside) == (4, ())
    assert result.message == "the store cannot be written any more (error: disk full)"
    assert pool.attempts["u2"] == 1


def test_a_log_that_cannot_be_written_ends_the_run() -> None:
    pool, log = FakePool(1), FakeLog(fail_at=1)
    result = Driver(pool, log, make_units(6), DriverSettings(commit_units=2)).run()
    assert (result.ending, log.units) == (Ending.CUT_OFF, ["u0", "u1"])
    assert (result.num_units_committed, result.num_units_left) == (2, 4)
    assert result.message == "the log cannot be written"


def test_failpoints_come_before_and_after_each_commit() -> None:
    log, points = FakeLog(), list[tuple[str, int]]()
    drive(
        FakePool(1),
        log,
        number=2,
        settings=DriverSettings(commit_units=2),
        failpoint=lambda point: points.append((point, len(log.batches))),
    )
    assert points == [("unit-finished", 0), ("unit-finished", 0), ("before-commit", 0), ("after-commit", 1)]


def test_progress_says_how_far_and_how_long() -> None:
    seen: list[Progress] = []
    drive(FakePool(1), FakeLog(), number=5, settings=DriverSettings(progress_s=0.0), on_progress=seen.append)
    assert [progress.num_sequences_done for progress in seen][-1] == 10
    progress = Progress(
        10, 40, Tally(num_sequences=10, num_tokens=500), Tally(10, 0, 500, 200, 490, 210, 2_000_000), 20.0
    )
    assert progress.line() == "10/40 sequences, 25.0 tokens/s, MAT 2.45, 210 rows and 2.0 MB written, about 60 s left"
    assert "unknown time left" in Progress(0, 40, Tally(), Tally(), 1.0).line()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="max_attempts is 0"):
        DriverSettings(max_attempts=0)


def test_exit_codes_are_the_documented_ones() -> None:
    assert {ending.label: ending.value for ending in Ending} == {
        "complete": 0,
        "failed alike": 2,
        "partial": 3,
        "cut off": 4,
        "fenced": 75,
        "interrupted": 130,
        "terminated": 143,
    }
