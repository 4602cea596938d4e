"""A lease: one run at a time for a name, over all processes and machines that share a folder.

The lease is a file that says who holds it and when the holder last gave a sign of life. A holder that falls silent for
`stale_after_s`, or whose process is seen to have ended, has lost it: the next run takes over, and the old holder,
should it wake up, finds out at its next beat or `check`. Changes to the file happen under a lock of the operating
system that is held for an instant only, so that two runs cannot both find a stale lease and take it.

The clocks of machines that share the folder must agree to well within `stale_after_s`.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from graft_dist.errors import GraftError
from jobs.out_file import write_aside


class LeaseHeldError(GraftError):
    """Another run holds the lease, and has given a sign of life lately."""

    def __init__(self, message: str, beat_at: float, is_near: bool) -> None:
        super().__init__(message)
        self.beat_at = beat_at  # seconds since 1970: the last sign of life
        self.is_near = is_near  # its process is seen, and needs to give none


class LeaseLostError(GraftError):
    """The lease went to another run, since this one gave no sign of life for too long."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease."""

    token: str  # unique to one acquisition
    run_id: str
    host: str
    pid: int
    acquired_at: float  # seconds since 1970
    beat_at: float  # seconds since 1970: the last sign of life
    processes: str = ""  # where `pid` counts, see `_processes`

    @property
    def is_near(self) -> bool:
        """Whether this process sees that one's number, if it is there."""
        return self.processes != "" and (self.host, self.processes) == (platform.node(), _processes())


class Lease:
    """One run's claim; see `hold` for the usual way to use it."""

    def __init__(
        self, path: Path, run_id: str, *, stale_after_s: float = 120.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.stale_after_s = stale_after_s
        self._clock = clock
        self._token = uuid.uuid4().hex
        self._lock = FileLock(path.with_name(path.name + ".lock"))

    def acquire(self) -> Holder | None:
        """Take the lease; returns the holder it was taken over from, if one had fallen silent.

        Raises:
            LeaseHeldError: another run that gives signs of life holds it.
            GraftError: it can never be written where it is.
            OSError: it cannot be written now: the disk is full, say.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._take()
        except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise GraftError(f"the lease {self.path} cannot be written ({error.strerror or error})") from error

    def _take(self) -> Holder | None:
        with self._lock:
            holder, now = self._read(), self._clock()
            if holder is not None and self._is_alive(holder, now):
                raise LeaseHeldError(
                    f"run {holder.run_id} is at work (process {holder.pid} on {holder.host}, last sign of life "
                    f"{max(0.0, now - holder.beat_at):.0f} s ago)",
                    holder.beat_at,
                    holder.is_near,
                )
            self._write(Holder(self._token, self.run_id, platform.node(), os.getpid(), now, now, _processes()))
        return holder

    def beat(self) -> None:
        """Give a sign of life. Raises `LeaseLostError` when another run has taken over."""
        with self._lock:
            holder = self._read()
            if holder is None or holder.token != self._token:
                by = "" if holder is None else f" to run {holder.run_id} on {holder.host}"
                raise LeaseLostError(f"run {self.run_id} has lost its lease{by}: it was silent for too long")
            self._write(Holder(**{**asdict(holder), "beat_at": self._clock()}))

    check = beat
    """What to call before a step that only the holder may do."""

    def release(self) -> None:
        """Give the lease up, if it is still this run's."""
        with self._lock:
            holder = self._read()
            if holder is not None and holder.token == self._token:
                self.path.unlink()

    def _is_alive(self, holder: Holder, now: float) -> bool:
        if holder.token == self._token or now - holder.beat_at >= self.stale_after_s:
            return False
        # Of a process that can be seen there is no need to wait for the silence to grow long.
        return not holder.is_near or Path(f"/proc/{holder.pid}").exists()

    def _read(self) -> Holder | None:
        """The holder; None without one, or where the file says nothing that can be read."""
        try:
            return Holder(**json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return None  # written by nobody of ours: files are renamed into place whole

    def _write(self, holder: Holder) -> None:
        write_aside(self.path, json.dumps(asdict(holder)))


def _processes() -> str:
    """Names the start of the system and the namespace in which this process has its number; "" where neither is told.

    Two containers, or two machines, may well have the same name, and then one's process numbers say nothing to the
    other.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@contextmanager
def hold(
    lease: Lease,
    *,
    wait_s: float = 0.0,
    beat_s: float = 10.0,
    poll_s: float = 1.0,
    say: Callable[[str], None] = lambda _: None,
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[Holder | None]:
    """Hold the lease for a block of code, with signs of life from a thread of their own.

    Yields the silent holder that it was taken over from, or None. That thread calls `on_lost`, once, when another run
    has taken over. Raises what `Lease.acquire` does; `LeaseHeldError` when another run holds it after `wait_s` seconds
    and is seen to be alive: of one elsewhere the next sign of life is waited for, which is said once, since a job that
    is started again after its machine's restart would else give way to its own ghost.
    """
    deadline = time.monotonic() + wait_s
    first_beat: float | None = None
    is_waiting = False
    while True:
        try:
            former = lease.acquire()
            break
        except LeaseHeldError as held:
            now = time.monotonic()
            first_beat = held.beat_at if first_beat is None else first_beat
            is_alive = held.is_near or held.beat_at != first_beat
            if now >= deadline and (is_alive or now >= deadline + lease.stale_after_s):
                raise
            if now >= deadline and not is_waiting:
                is_waiting = True
                say(f"{held}; its next sign of life is waited for")
            time.sleep(poll_s if now >= deadline else min(poll_s, deadline - now))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(beat_s):
            with suppress(OSError):  # a full disk may be empty again at the next beat
                try:
                    lease.beat()
                except LeaseLostError:
                    on_lost()
                    return

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield former
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            lease.release()


@contextmanager
def hold_all(
    leases: Sequence[Lease],
    *,
    wait_s: float = 0.0,
    beat_s: float = 10.0,
    say: Callable[[str], None] = lambda _: None,
    on_lost: Callable[[], None] = lambda: None,
) -> Iterator[list[Holder]]:
    """Hold several leases, taken in the order given; `wait_s` is for all of them together.

    Yields the silent holders that were taken over from. Whoever takes the same leases must take them in the same order.
    `on_lost` is called once, however many are lost. Raises as `hold` does, and holds none then.
    """
    deadline, told = time.monotonic() + wait_s, threading.Lock()

    def tell_once() -> None:
        if told.acquire(blocking=False):
            on_lost()

    with ExitStack() as held:
        found = [
            held.enter_context(
                hold(lease, wait_s=max(0.0, deadline - time.monotonic()), beat_s=beat_s, say=say, on_lost=tell_once)
            )
            for lease in leases
        ]
        yield [former for former in found if former is not None]
