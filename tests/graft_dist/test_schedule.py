"""Schedule: its ticks, above all around changes of clocks, and the sentences that refuse what cannot work."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from pydantic import ValidationError

from graft_dist.config import load_config, targets_folder
from graft_dist.schedule import Schedule

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> datetime:
    """A moment in UTC, such as "2026-03-29 01:00"."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def first(schedule: Schedule, after: str, number: int) -> list[str]:
    return [f"{tick:%m-%d %H:%M}" for tick in islice(schedule.ticks(at(after)), number)]


def test_ticks_are_wall_clock_times_of_the_zone_in_utc() -> None:
    daily = Schedule(cron="0 3 * * *", timezone="Europe/Berlin")
    assert first(daily, "2026-01-10 12:00", 2) == ["01-11 02:00", "01-12 02:00"]
    assert first(daily, "2026-07-10 12:00", 2) == ["07-11 01:00", "07-12 01:00"]
    assert first(Schedule(cron="15 8 * * 1", timezone="Asia/Shanghai"), "2026-12-01 00:00", 1) == ["12-07 00:15"]


def test_a_tick_is_not_its_own_successor() -> None:
    assert first(Schedule(cron="0 3 * * *"), "2026-01-10 03:00", 1) == ["01-11 03:00"]
    assert first(Schedule(cron="0 3 * * *"), "2026-01-10 02:59", 1) == ["01-10 03:00"]


def test_in_the_gap_of_spring_a_fixed_hour_comes_right_after_it_and_once() -> None:
    # On 29 March 2026 Berlin's clocks go from 02:00 to 03:00, which is 01:00 UTC.
    daily = Schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert first(daily, "2026-03-27 12:00", 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]
    twice = Schedule(cron="15,45 2 * * *", timezone="Europe/Berlin")
    assert first(twice, "2026-03-28 12:00", 3) == ["03-29 01:00", "03-30 00:15", "03-30 00:45"]


def test_in_the_repeated_hour_of_autumn_a_fixed_hour_comes_once() -> None:
    # On 25 October 2026 Berlin's clocks go from 03:00 back to 02:00, which is 01:00 UTC.
    daily = Schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    assert first(daily, "2026-10-24 12:00", 2) == ["10-25 00:30", "10-26 01:30"]
    for after in ("2026-10-25 00:30", "2026-10-25 00:59", "2026-10-25 01:15", "2026-10-25 01:45"):
        assert first(daily, after, 1) == ["10-26 01:30"], after


def test_jobs_of_every_few_minutes_go_on_through_both_changes() -> None:
    half_hourly = Schedule(cron="*/30 * * * *", timezone="Europe/Berlin")
    for day in ("2026-03-29", "2026-10-25"):
        ticks = list(islice(half_hourly.ticks(at(f"{day} 00:00")), 8))
        assert [later - earlier for earlier, later in pairwise(ticks)] == [timedelta(minutes=30)] * 7


@pytest.mark.parametrize(
    "cron", ["30 2 * * *", "15,45 2 * * *", "0 */2 * * *", "*/20 * * * *", "0 0 * * *", "5 1-4 * * *"]
)
@pytest.mark.parametrize(
    ("zone", "start"),
    [("Europe/Berlin", "2026-03-28 12:00"), ("Europe/Berlin", "2026-10-24 12:00"),
     ("America/New_York", "2026-03-07 18:00"), ("America/New_York", "2026-10-31 18:00"),
     ("Australia/Lord_Howe", "2026-04-04 06:00"), ("Australia/Lord_Howe", "2026-10-03 06:00")],
)  # fmt: skip
def test_whenever_one_looks_the_next_tick_is_the_same(cron: str, zone: str, start: str) -> None:
    schedule = Schedule(cron=cron, timezone=zone)
    begin = at(start)
    ticks = list(islice(schedule.ticks(begin), 200))
    assert ticks == sorted(set(ticks))
    for minutes in range(0, 36 * 60, 7):
        moment = begin + timedelta(minutes=minutes)
        assert next(schedule.ticks(moment)) == next(tick for tick in ticks if tick > moment), moment


def test_due_leaves_out_what_is_too_late() -> None:
    schedule = Schedule(cron="0 * * * *", max_lateness_minutes=150)
    assert schedule.due(at("2026-05-01 09:00"), at("2026-05-01 09:59")) == []
    assert schedule.due(at("2026-05-01 09:00"), at("2026-05-01 10:00")) == [at("2026-05-01 10:00")]
    assert schedule.due(at("2026-04-01 09:00"), at("2026-05-01 10:10")) == [
        at("2026-05-01 08:00"), at("2026-05-01 09:00"), at("2026-05-01 10:00"),
    ]  # fmt: skip


def test_pauses_double() -> None:
    schedule = Schedule(cron="0 3 * * *", backoff_minutes=10)
    assert [schedule.backoff(attempt) for attempt in range(3)] == [timedelta(minutes=m) for m in (10, 20, 40)]


def test_the_delay_of_a_tick_is_the_same_for_everybody_and_differs_between_targets() -> None:
    schedule, tick = Schedule(cron="0 3 * * *", jitter_s=600), at("2026-05-01 03:00")
    assert schedule.delay("a", tick) == schedule.delay("a", tick.astimezone(BERLIN))
    drawn = {schedule.delay(f"target-{number}", tick) for number in range(100)}
    assert len(drawn) > 50
    assert timedelta(0) <= min(drawn) < timedelta(minutes=2) and timedelta(minutes=8) < max(drawn) <= timedelta(
        minutes=10
    )
    assert Schedule(cron="0 3 * * *").delay("a", tick) == timedelta(0)


def test_a_delay_as_long_as_a_tick_is_waited_for_is_refused() -> None:
    with pytest.raises(ValidationError, match="jitter_s 60 would put ticks off until they are given up"):
        Schedule(cron="0 3 * * *", jitter_s=60, max_lateness_minutes=1)
    assert Schedule(cron="0 3 * * *", jitter_s=59, max_lateness_minutes=1).jitter_s == 59


def test_the_command_holds_the_configuration_as_one_word() -> None:
    schedule = Schedule(cron="0 3 * * *")
    assert schedule.command("targets/x.yaml") == "python jobs/retrain.py --config targets/x.yaml"
    assert schedule.command("my targets/x;y.yaml") == "python jobs/retrain.py --config 'my targets/x;y.yaml'"
    assert Schedule(cron="0 3 * * *", entrypoint="python -m jobs.retrain").command("x") == "python -m jobs.retrain"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("cron", "0 3 * *", "five cron fields"),
        ("cron", "*/5 * * * * *", "five cron fields"),
        ("cron", "61 3 * * *", "bad minute"),
        ("cron", "0 3 30 2 *", "bad day-of-month"),
        ("cron", "0 3 * FEB/2 8", "bad"),
        ("timezone", "Mars/Olympus", "IANA time zone"),
        ("timezone", "../etc/passwd", "IANA time zone"),
        ("timezone", "", "IANA time zone"),
        ("entrypoint", "", "starts with python"),
        ("entrypoint", "rm -rf data", "starts with python"),
        ("entrypoint", "python jobs/retrain.py; rm -rf data", "starts with python"),
        ("entrypoint", "python jobs/retrain.py --config $HOME/x", "starts with python"),
        ("entrypoint", "python jobs/retrain.py --config {file}", "starts with python"),
        ("entrypoint", "python jobs/retrain.py --config 'x", "starts with python"),
    ],
)
def test_what_cannot_work_is_refused(key: str, value: str, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Schedule.model_validate({"cron": "0 3 * * *"} | {key: value})


def test_shipped_schedules_come_at_most_daily() -> None:
    schedules = [load_config(file).schedule for file in targets_folder().glob("*.yaml")]
    found = [schedule for schedule in schedules if schedule is not None]
    assert len(found) >= 2
    for schedule in found:
        ticks = list(islice(schedule.ticks(at("2026-12-01 00:00")), 3))
        assert ticks[1] - ticks[0] >= timedelta(days=1)
