"""`DecodeThread`: one engine on a thread of its own, fed from an event loop without ever blocking it.

Owns the round loop, the queue limit, cancellation, the swap of policies between two rounds, and what happens when
something fails. Knows asyncio, but neither HTTP nor Ray.

    event loop                                  decode thread
    submit() -> RequestStream  -- commands -->  engine.add, engine.abort, another policy
    await stream.next()        <-- events ----  engine.read_prompts(), .run_round(), over and over

A round that fails while drafting is decoded without a draft instead: the text is the same, only slower. One request's
own failure ends that request alone (see `Engine.step`). A round that fails even without a draft, and any failure of
the device, ends the thread: all its requests get an error, `check` fails, and Serve replaces the replica. So does a
round that does not come back: Serve lets a replica finish its requests first, and those would never end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graft_dist.engine import Engine, EngineError, SequenceEvent
from graft_dist.errors import is_device_failure
from graft_dist.policy import plain
from serve import errors
from serve.active_policy import ActivePolicy, MethodSwitch
from serve.observer import DecodeObserver, StepReport, Submission

_IDLE_BEAT_S = 0.5  # an idle loop comes round at least so often, to show that it lives
_LOOK_S = 1.0  # who waits for the thread looks so often whether it still lives
_SURE_S = 2.0  # after which a loop that was found stuck, and still is, is given up
_MAX_REST = 1024  # rounds without a draft after repeated failures, at most

Result = TypeVar("Result")

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Streamed:
    """An event of one of a request's sequences."""

    index: int  # which of the request's sequences
    event: SequenceEvent
    policy: ActivePolicy  # what decoded the step


class RequestStream:
    """The events of one request's sequences. Belongs to the event loop on which it was made."""

    def __init__(self, thread: DecodeThread, sequence_ids: list[str]) -> None:
        self._thread = thread
        self._sequence_ids = sequence_ids
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Streamed | Exception] = asyncio.Queue()
        self._is_over = False

    async def next(self) -> Streamed:
        """Wait for the next event. Raises `ApiError` when the request was refused or the engine has failed."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            self._end()
            raise item
        return item

    def cancel(self) -> None:
        """Take the request's sequences out of the batch before the next round; harmless when they have ended."""
        if not self._is_over:
            self._end()
            self._thread.abort(self._sequence_ids)

    def finished(self) -> None:
        """All sequences have had their last event: nothing is left to cancel."""
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._thread.forget(self)

    def deliver(self, items: Sequence[Streamed | Exception]) -> None:
        """Hand items over, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, items)
        except RuntimeError:
            logger.debug("the event loop of a request is closed")

    def _put(self, items: Sequence[Streamed | Exception]) -> None:
        for item in items:
            self._queue.put_nowait(item)


@dataclass(frozen=True)
class _Add:
    submissions: Sequence[Submission]
    stream: RequestStream


@dataclass(frozen=True)
class _Abort:
    sequence_ids: Sequence[str]


@dataclass(frozen=True)
class _Call:
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)

    def carry_out(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            result = self.work()
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


class DecodeThread:
    """Drives one engine. Methods are called from the event loop, unless they say otherwise.

    Args:
        make_engine: called on the thread; returns the engine and the policy to begin with.
        max_queue: sequences that may wait besides those that hold a slot.
        stuck_after_s: `check` fails when the loop has not come round for so long.
        retry_after_s: what refused clients are told to wait.
        observers: told of everything, on the decode thread.
    """

    def __init__(
        self,
        make_engine: Callable[[], tuple[Engine, ActivePolicy]],
        *,
        max_queue: int,
        stuck_after_s: float,
        retry_after_s: int = 1,
        observers: Sequence[DecodeObserver] = (),
    ) -> None:
        self._make_engine = make_engine
        self._max_queue = max_queue
        self._stuck_after_s = stuck_after_s
        self._retry_after_s = retry_after_s
        self._observers = list(observers)
        self._commands: queue.SimpleQueue[_Add | _Abort | _Call | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[RequestStream, int]] = {}  # of sequences in the engine; decode thread only
        self._methods: dict[str, str] = {}  # of sequences that asked for one; decode thread only
        self._recorded: set[str] = set()  # sequences whose rounds an observer wants; decode thread only
        self._count_lock = threading.Lock()
        self._num_sequences = 0
        self._open: set[RequestStream] = set()  # that somebody reads
        # Requests may be named by their senders, and sequences of all threads come together in one store.
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._beat = time.monotonic()
        self._silent_beat: float | None = None  # the last one when `check` found the loop stuck
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._rest = 0  # rounds without a draft that the next failure costs, half of it
        self._rest_left = 0
        self.num_draft_failures = 0
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="graft-decode", daemon=True)
        self._engine: Engine
        self._active: ActivePolicy
        self._switch: MethodSwitch

    # ---- for the event loop

    def start(self) -> None:
        """Start the thread and wait until the engine is there; raises whatever making it raised."""
        self._thread.start()
        self._ready.result()

    def observe(self, observer: DecodeObserver) -> None:
        """Tell one more observer of everything from now on; before the first request."""
        self._observers.append(observer)

    @property
    def active(self) -> ActivePolicy:
        """What decodes at the moment."""
        return self._active

    @property
    def limit(self) -> int:
        """Sequences that are decoded or wait, at most."""
        return self._engine.max_slots + self._max_queue

    @property
    def num_sequences(self) -> int:
        """Sequences that are decoded or wait."""
        return self._num_sequences

    @property
    def is_resting(self) -> bool:
        """Whether rounds go without a draft because drafting failed."""
        return self._rest_left > 0

    def new_sequence_id(self, request_id: str) -> str:
        """An id that no other sequence has, of this thread or any other."""
        return f"{request_id}-{self._name}.{next(self._numbers)}"

    def submit(self, submissions: Sequence[Submission]) -> RequestStream:
        """Queue a request's sequences, all or none. Raises `ApiError` when the queue is full or this replica ends.

        A sequence that the engine refuses (too long, ids outside the vocabulary) shows as an `ApiError` in the stream.
        """
        with self._count_lock:
            self.refuse_new(len(submissions))
            self._num_sequences += len(submissions)
        stream = RequestStream(self, [submission.sequence_id for submission in submissions])
        self._open.add(stream)
        self._commands.put(_Add(submissions, stream))
        if self._failure is not None:  # since it was asked above: nobody may be there to read the command
            stream.deliver([errors.internal()])
        return stream

    def forget(self, stream: RequestStream) -> None:
        """Nobody reads this stream any more."""
        self._open.discard(stream)

    def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences before the next round; ids that are gone are ignored. From any thread."""
        self._commands.put(_Abort(sequence_ids))

    async def swap(self, active: ActivePolicy) -> None:
        """Decode with another policy from the next round on; returns when it does. Raises as `call` does."""
        await self.call(lambda: self._use(active))

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run something on the decode thread, between two rounds: it has the models for itself meanwhile.

        Raises what `work` raises, and RuntimeError when the thread is dead, or stuck before it comes to it.
        """
        command = _Call(work)
        self._commands.put(command)
        waiting: asyncio.Future[Result] = asyncio.wrap_future(command.done)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                if self._failure is not None or not command.done.running():
                    self.check()
            return waiting.result()
        finally:
            waiting.cancel()

    def check(self) -> None:
        """Raise RuntimeError when the loop is dead, or has not come round for too long.

        If it still has not come round a little later, it is given up: all requests get an error, and there are no new
        ones. (Not at once: the whole process may just have been stopped for a while.)
        """
        if self._failure is not None:
            raise RuntimeError(f"the decode thread has failed: {self._failure!r}")
        if not self._thread.is_alive():
            raise RuntimeError("the decode thread has ended")
        silent_s = time.monotonic() - self._beat
        if silent_s > self._stuck_after_s:
            if self._silent_beat != self._beat:
                self._silent_beat = self._beat
                # Not left to the next `check`: Serve asks no more once it has decided to replace a replica.
                later = threading.Timer(_SURE_S, self._look_again, args=(self._beat,))
                later.daemon = True
                later.start()
            raise RuntimeError(f"the decode thread is stuck: no round for {silent_s:.0f} s")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; requests that still run get an error. From any thread."""
        self._is_stopping = True
        self._commands.put(None)
        self._thread.join(timeout_s)

    def refuse_new(self, count: int) -> None:
        """Raise the `ApiError` that `submit` would for so many sequences: to be asked before they are worked on."""
        if self._is_stopping:
            raise errors.draining(self._retry_after_s)
        if self._failure is not None:
            raise errors.internal("this replica has failed and is being replaced; try again", self._retry_after_s)
        if self._num_sequences + count > self.limit:
            raise errors.busy(self._num_sequences, self.limit, self._retry_after_s)

    def _look_again(self, beat: float) -> None:
        """Give a loop up that was found stuck, unless it has come round since. On a thread of its own."""
        if self._beat != beat or self._failure is not None:
            return
        self._failure = RuntimeError(f"it is stuck: no round for {time.monotonic() - beat:.0f} s")
        logger.error("the decode thread is given up, %s; its requests are ended", self._failure)
        for stream in list(self._open):
            stream.deliver([errors.internal()])

    # ---- on the decode thread

    def _run(self) -> None:
        try:
            self._engine, active = self._make_engine()
            self._use(active)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._beat = time.monotonic()
        self._ready.set_result(None)
        try:
            while self._take_commands() and self._failure is None:
                self._beat = time.monotonic()
                if self._engine.has_work:
                    self._step()
        except BaseException as error:
            self._failure = error
            logger.exception("the decode thread has failed")
        self._end_everything()

    def _use(self, active: ActivePolicy) -> None:
        self._active, self._switch = active, MethodSwitch(active)
        for sequence_id, method in self._methods.items():
            self._switch.choose_method(sequence_id, method)

    def _take_commands(self) -> bool:
        """Carry out what has been asked for; waits while there is nothing to decode. False: end the thread."""
        is_idle = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=is_idle, timeout=_IDLE_BEAT_S if is_idle else None)
            except queue.Empty:
                return True
            is_idle = False
            if command is None:
                return False
            if isinstance(command, _Add):
                self._add(command)
            elif isinstance(command, _Abort):
                for sequence_id in command.sequence_ids:
                    self._engine.abort(sequence_id)
            else:
                command.carry_out()

    def _add(self, command: _Add) -> None:
        added: list[str] = []
        try:
            for index, submission in enumerate(command.submissions):
                self._engine.add(submission.prompt_token_ids, submission.params, submission.sequence_id)
                added.append(submission.sequence_id)
                self._streams[submission.sequence_id] = (command.stream, index)
        except Exception as error:
            if isinstance(error, EngineError) or is_device_failure(error):
                command.stream.deliver([errors.internal()])
                raise
            for sequence_id in added:
                self._engine.abort(sequence_id)
                self._streams.pop(sequence_id)
            self._count_off(len(command.submissions))
            if isinstance(error, ValueError):
                command.stream.deliver([errors.bad_request(str(error), None)])
            else:  # no memory for it, say: the others go on
                logger.exception("%s: the request could not be queued", command.submissions[0].request_id)
                command.stream.deliver([errors.internal()])
            return
        for submission in command.submissions:
            if submission.method is not None:
                self._methods[submission.sequence_id] = submission.method
                self._switch.choose_method(submission.sequence_id, submission.method)
            for observer in list(self._observers):
                if self._tell(observer, "added", submission):
                    self._recorded.add(submission.sequence_id)

    def _step(self) -> None:
        started = time.perf_counter()
        self._engine.record = self._recorded
        first = self._engine.read_prompts()
        self._deliver(first)  # before the round, which first tokens need not wait for
        events, is_resting = self._round()
        step_s = time.perf_counter() - started
        self._deliver(events)
        active, engine, events = self._active, self._engine, [*first, *events]
        report = StepReport(events, engine.num_live, engine.num_waiting, step_s, active.label, active, is_resting)
        for observer in list(self._observers):
            self._tell(observer, "stepped", report)

    def _deliver(self, events: Sequence[SequenceEvent]) -> None:
        """Hand what came out to those who wait for it."""
        batches: dict[RequestStream, list[Streamed | Exception]] = {}
        for event in events:
            if event.sequence_id not in self._streams:
                continue  # refused together with another sequence of its request
            stream, index = self._streams[event.sequence_id]
            batches.setdefault(stream, []).append(Streamed(index, event, self._active))
            if event.finish_reason is not None:
                self._forget(event.sequence_id)
        for stream, items in batches.items():
            stream.deliver(items)

    def _round(self) -> tuple[list[SequenceEvent], bool]:
        """One round of the engine; without a draft while drafting has failed lately, which the second value says."""
        if self._rest_left > 0:
            self._rest_left -= 1
            self._engine.policy = plain()
            return self._engine.run_round(), True
        self._engine.policy = self._switch.policy
        try:
            events = self._engine.run_round()
        except Exception as error:
            if is_device_failure(error):
                raise
            self.num_draft_failures += 1
            self._rest = min(max(1, 2 * self._rest), _MAX_REST)
            self._rest_left = self._rest - 1
            logger.exception("a round failed; decoding without a draft for %d rounds", self._rest)
            self._engine.policy = plain()
            return self._engine.run_round(), True
        self._rest = 0
        return events, False

    def _forget(self, sequence_id: str) -> None:
        self._streams.pop(sequence_id)
        self._recorded.discard(sequence_id)
        self._methods.pop(sequence_id, None)
        self._switch.forget(sequence_id)
        self._count_off(1)

    def _count_off(self, count: int) -> None:
        with self._count_lock:
            self._num_sequences -= count

    def _tell(self, observer: DecodeObserver, what: str, report: Any) -> bool:
        try:
            return bool(getattr(observer, what)(report))
        except Exception:
            logger.exception("%s failed and is switched off", type(observer).__name__)
            self._observers.remove(observer)
            return False

    def _end_everything(self) -> None:
        """The loop has ended: everybody who waits is told."""
        reason = errors.internal() if self._failure is not None else errors.draining(self._retry_after_s)
        streams = {stream for stream, _ in self._streams.values()}
        self._failure = self._failure or RuntimeError("it was stopped")
        self._streams.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, _Add):
                streams.add(command.stream)
            elif isinstance(command, _Call) and command.done.set_running_or_notify_cancel():
                command.done.set_exception(RuntimeError("the decode thread has ended"))
        for stream in streams:
            stream.deliver([reason])
