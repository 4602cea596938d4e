"""The lease: one holder at a time, silent ones are taken over, and a holder finds out that it was."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graft_dist.errors import GraftError
from jobs.lease import Holder, Lease, LeaseHeldError, LeaseLostError, hold, hold_all


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_run_holds_it_and_the_next_is_told_who(tmp_path: Path) -> None:
    first, second = Lease(tmp_path / "a" / "lease.json", "one"), Lease(tmp_path / "a" / "lease.json", "two")
    assert first.acquire() is None
    with pytest.raises(LeaseHeldError, match=r"run one is at work \(process \d+ on .*, last sign of life \d+ s ago\)"):
        second.acquire()
    first.release()
    assert second.acquire() is None


def test_names_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    assert Lease(tmp_path / "a.json", "one").acquire() is None
    assert Lease(tmp_path / "b.json", "one").acquire() is None


def test_a_silent_holder_is_taken_over_and_finds_out(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (Lease(tmp_path / "lease.json", name, stale_after_s=60, clock=clock) for name in ("one", "two"))
    first.acquire()
    clock.now += 59
    first.beat()
    clock.now += 59
    with pytest.raises(LeaseHeldError):
        second.acquire()
    clock.now += 1
    former = second.acquire()
    assert former is not None and former.run_id == "one"
    with pytest.raises(LeaseLostError, match="run one has lost its lease to run two"):
        first.check()
    first.release()  # not its own any more
    second.check()


def test_a_damaged_file_does_not_lock_everyone_out(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text("{")
    Lease(tmp_path / "lease.json", "one").acquire()
    assert json.loads((tmp_path / "lease.json").read_text())["run_id"] == "one"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GraftError, match=r"the lease .* cannot be written"):
        Lease(tmp_path / "file" / "x" / "lease.json", "one").acquire()


def test_a_lock_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "lease.json.lock").mkdir()
    with pytest.raises(GraftError, match=r"the lease .* cannot be written \("):
        Lease(tmp_path / "lease.json", "one").acquire()


def test_of_many_that_find_a_stale_lease_one_gets_it(tmp_path: Path) -> None:
    clock = Clock()
    Lease(tmp_path / "lease.json", "old", stale_after_s=60, clock=clock).acquire()
    clock.now += 61
    leases = [Lease(tmp_path / "lease.json", str(number), stale_after_s=60, clock=clock) for number in range(8)]
    start, got = threading.Barrier(len(leases)), []

    def try_it(lease: Lease) -> None:
        start.wait()
        try:
            lease.acquire()
            got.append(lease.run_id)
        except LeaseHeldError:
            pass

    threads = [threading.Thread(target=try_it, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_holding_gives_signs_of_life_and_gives_up_at_the_end(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease.json", Clock()
    beaten = threading.Event()

    class Watched(Lease):
        def beat(self) -> None:
            super().beat()
            beaten.set()

    with hold(Watched(path, "one", clock=clock), beat_s=0.01) as former:
        assert former is None
        clock.now += 5
        beaten.clear()
        assert beaten.wait(30)
        assert json.loads(path.read_text())["beat_at"] == 1005
        with pytest.raises(LeaseHeldError), hold(Lease(path, "two", clock=clock)):
            pass
    assert not path.exists()


def test_a_holder_is_told_by_its_own_thread_that_it_has_lost_the_lease(tmp_path: Path) -> None:
    path, lost = tmp_path / "lease.json", threading.Event()
    with hold(Lease(path, "one"), beat_s=0.01, on_lost=lost.set):
        Lease(path, "two", stale_after_s=0).acquire()
        assert lost.wait(30)
    assert json.loads(path.read_text())["run_id"] == "two"  # not taken from its new holder


def test_on_a_full_disk_nothing_is_left_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(Path, "replace", full)
        Lease(tmp_path / "lease.json", "one").acquire()
    assert {path.name for path in tmp_path.iterdir()} <= {"lease.json.lock"}
    Lease(tmp_path / "lease.json", "one").acquire()


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    first = Lease(path, "one")
    first.acquire()
    timer = threading.Timer(0.2, first.release)
    timer.start()
    with hold(Lease(path, "two"), wait_s=30, poll_s=0.01):
        assert json.loads(path.read_text())["run_id"] == "two"
    timer.join()


def test_a_holder_elsewhere_is_given_way_to_only_if_it_lives(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"

    def hold_elsewhere(beat_at: float) -> None:
        Lease(path, "far", stale_after_s=0).acquire()
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "beat_at": beat_at}))

    clock = Clock()
    hold_elsewhere(clock.now)

    class Next(Lease):
        def acquire(self) -> Holder | None:
            clock.now += 20  # while it polls, time passes, and with it the other's silence
            return super().acquire()

    said: list[str] = []
    with hold(Next(path, "next", stale_after_s=60, clock=clock), poll_s=0.01, say=said.append) as former:
        assert former is not None and former.run_id == "far"
    assert len(said) == 1 and said[0].endswith("; its next sign of life is waited for")

    hold_elsewhere(clock.now)

    class Beaten(Lease):
        def acquire(self) -> Holder | None:
            try:
                return super().acquire()
            finally:
                path.write_text(json.dumps({**json.loads(path.read_text()), "beat_at": clock.now + 1}))

    with (
        pytest.raises(LeaseHeldError, match="run far is at work"),
        hold(Beaten(path, "next", stale_after_s=60, clock=clock), poll_s=0.01),
    ):
        pass


def test_several_are_held_together_or_not_at_all(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "lease.json", tmp_path / "b" / "lease.json"]
    in_the_way = Lease(paths[1], "other")
    in_the_way.acquire()
    with pytest.raises(LeaseHeldError, match="run other is at work"), hold_all([Lease(path, "one") for path in paths]):
        pass
    assert not paths[0].exists()
    timer = threading.Timer(0.2, in_the_way.release)
    timer.start()
    with hold_all([Lease(path, "one") for path in paths], wait_s=30) as formers:
        assert formers == [] and all(json.loads(path.read_text())["run_id"] == "one" for path in paths)
    timer.join()
    assert not any(path.exists() for path in paths)


def test_a_killed_process_leaves_a_lease_that_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from jobs.lease import Lease, hold\n"
        "with hold(Lease(Path(sys.argv[1]), 'killed')):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "lease.json"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60).returncode == -9
    former = Lease(path, "next").acquire()
    assert former is not None and former.run_id == "killed"


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"processes": "another start"}, {"processes": ""}])
def test_a_process_of_another_machine_or_container_is_given_time(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "lease.json"
    Lease(path, "far").acquire()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change, "pid": 2**22 + 1}))
    with pytest.raises(LeaseHeldError, match="run far is at work"):
        Lease(path, "next").acquire()
    former = Lease(path, "next", stale_after_s=0).acquire()
    assert former is not None and former.run_id == "far"
