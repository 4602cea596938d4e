"""TrafficRecorder: a sampled share of a replica's requests, kept as trajectories, at no request's expense.

Off by default: what it writes are users' prompts and answers. A unit of the store holds some finished requests of one
policy, marked `source = 'traffic'` and `task = 'traffic'`; each replica commits its own units, as a run of its own.

The decode thread, which it watches as a `DecodeObserver`, only appends to a bounded buffer; encoding, files and commits
are the recorder's own thread's. When the buffer is full, or the store refuses or is gone, sequences are dropped and
counted, and nothing else happens. What a killed replica had not committed is lost.

While a sampled request is decoded the engine keeps the records of its batch's rounds (`Engine.record`).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graft_dist.engine import SequenceEvent
from graft_dist.rounds import FinishReason, RoundRecord, SequenceRecord, SequenceSummary
from serve.active_policy import ActivePolicy
from serve.observer import StepReport, Submission
from serve.serve_args import TrafficRecording
from storage import FileInfo, Provenance, TrajectoryStore, UnitKey, new_attempt

logger = logging.getLogger("ray.serve")

SOURCE = "traffic"
_MAX_SEED = 2**63 - 1  # what the store's column holds
_BYTES_PER_TOKEN = 4
_ROUND_BYTES = 2000  # of a round record's Python objects, beside its arrays


@dataclass(frozen=True)
class PolicyName:
    """Which policy decoded a sequence."""

    name: str  # "graft"
    fingerprint: str | None


def policy_name(active: ActivePolicy, method: str | None) -> PolicyName:
    """What decodes a request that asked for `method`, or for none."""
    chosen = active.chosen(method)
    return PolicyName(chosen.name, active.fingerprint if chosen is active.policy else None)


_RESTING = PolicyName("plain", None)  # decodes while drafting rests


@dataclass(frozen=True)
class RecorderCounts:
    """Sequences since the replica started; every one that was offered is recorded, dropped or pending."""

    offered: int
    recorded: int
    pending: int
    dropped: dict[str, int]  # by reason: see `TrafficRecorder`


class RecordedSequence:
    """One sampled sequence while it is decoded; each event is handed to it. Not thread-safe."""

    def __init__(self, submission: Submission) -> None:
        self.rounds: list[RoundRecord] = []
        self.num_bytes = _BYTES_PER_TOKEN * len(submission.prompt_token_ids)
        self._submission = submission
        self._policies: set[PolicyName] = set()
        self._output_token_ids: list[int] = []
        self._end: tuple[FinishReason, SequenceSummary | None, str | None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the last event has been taken."""
        return self._end is not None

    @property
    def is_whole(self) -> bool:
        """Whether each of its rounds was recorded."""
        return self._end is not None and self._end[1] is not None and self._end[1].num_rounds == len(self.rounds)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was decoded, as when a client leaves the queue: there is nothing to learn then."""
        return not self._output_token_ids

    @property
    def policy(self) -> PolicyName | None:
        """What decoded it; None if that was swapped meanwhile, so that its rounds belong to nobody."""
        return next(iter(self._policies)) if len(self._policies) == 1 else None

    def take(self, event: SequenceEvent, report: StepReport) -> None:
        """Keep what one step, under the policy in force, brought this sequence."""
        own = policy_name(report.active, self._submission.method)
        self._policies.add(_RESTING if report.is_resting else own)
        self._output_token_ids += event.token_ids
        self.num_bytes += _BYTES_PER_TOKEN * len(event.token_ids)
        if event.round is not None:
            self.rounds.append(event.round)
            arrays = (value for value in vars(event.round).values() if isinstance(value, np.ndarray))
            self.num_bytes += _ROUND_BYTES + sum(array.nbytes for array in arrays)
        if event.finish_reason is not None:
            self._end = event.finish_reason, event.summary, event.error

    def record(self) -> SequenceRecord:
        """The finished sequence's row."""
        assert self._end is not None
        reason, summary, error = self._end
        params = self._submission.params
        return SequenceRecord(
            sequence_id=self._submission.sequence_id,
            prompt_id=self._submission.request_id,
            task=SOURCE,
            prompt_token_ids=list(self._submission.prompt_token_ids),
            output_token_ids=self._output_token_ids,
            finish_reason=reason,
            sampling=params,
            seed=params.seed if params.seed is not None and params.seed <= _MAX_SEED else None,
            num_rounds=summary.num_rounds if summary else 0,
            num_drafted=summary.num_drafted if summary else 0,
            num_accepted=summary.num_accepted if summary else 0,
            prefill_s=summary.prefill_s if summary else 0.0,
            decode_s=summary.decode_s if summary else 0.0,
            error=error,
        )


class TrafficRecorder:
    """Takes finished sequences from the decode thread and leaves them in the store. See the module's docstring.

    Args:
        settings: where, how much, how often.
        provenance: the replica's models, hardware and software; policy and source are filled in per unit.
        tokenizer_sha256: with the target's fingerprint, what all data of a target in one store must share.
        tell: called with what became of some sequences ("recorded", or the reason why they were dropped) and their
            number, from either thread. Reasons: "full" (buffer), "store" (it refused, or is gone), "policy" (swapped
            meanwhile), "rounds" (not all were recorded).
        draw: uniform numbers in [0, 1) that decide which requests are sampled.
    """

    def __init__(
        self,
        settings: TrafficRecording,
        provenance: Provenance,
        tokenizer_sha256: str,
        tell: Callable[[str, int], None] = lambda outcome, number: None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.run_id = f"serve-{uuid.uuid4().hex[:12]}"
        self._provenance = replace(provenance, source=SOURCE)
        self._dataset = {
            "target_fingerprint": provenance.target_fingerprint,
            "tokenizer_sha256": tokenizer_sha256,
        }
        self._tell, self._draw = tell, draw
        self._store = TrajectoryStore(settings.store)
        self._seq: int | None = None  # of the next commit; None: the store has to be asked
        self._num_units = 0
        self._is_failing = False
        self._live: dict[str, RecordedSequence] = {}  # decode thread only
        self._is_wanted = False  # the request whose sequences are being added; decode thread only
        self._queue: queue.SimpleQueue[RecordedSequence | None] = queue.SimpleQueue()  # None: write what there is
        self._lock = threading.Lock()  # of the counters; never held during input or output
        self._offered = self._recorded = self._pending = self._pending_bytes = 0
        self._dropped: Counter[str] = Counter()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="traffic-recorder", daemon=True)
        self._thread.start()

    # ---- the decode thread's side: never waits

    def added(self, submission: Submission) -> bool:
        """Choose whether the request is one of the share; all its sequences are, or none."""
        if submission.index == 0:  # not by its id: a client may give all its requests the same
            self._is_wanted = self._draw() < self.settings.share
        if self._is_wanted:
            sequence = self._live[submission.sequence_id] = RecordedSequence(submission)
            with self._lock:
                self._pending_bytes += sequence.num_bytes
        return self._is_wanted

    def stepped(self, report: StepReport) -> None:
        """Keep what the step brought the sampled sequences, and hand over those that have ended."""
        for event in report.events:
            sequence = self._live.get(event.sequence_id)
            if sequence is None:
                continue
            num_bytes = sequence.num_bytes
            try:
                sequence.take(event, report)
            except Exception:  # no memory for it, say: this sequence is lost, the others are not
                logger.exception("a sequence cannot be recorded")
                self._drop(self._live.pop(event.sequence_id), "rounds")
                continue
            if self._grow(sequence.num_bytes - num_bytes):
                self._drop(self._live.pop(event.sequence_id), "full")
            elif sequence.is_finished:
                self._hand_over(self._live.pop(event.sequence_id))

    def _grow(self, num_bytes: int) -> bool:
        """Count memory. True if there is no room for so much more, or nobody to write it."""
        with self._lock:
            self._pending_bytes += num_bytes
            return self._is_closing or self._pending_bytes > self.settings.max_pending_mb * 1e6

    def _hand_over(self, sequence: RecordedSequence) -> None:
        if sequence.is_empty:
            with self._lock:
                self._pending_bytes -= sequence.num_bytes
        elif sequence.policy is None:
            self._drop(sequence, "policy")
        elif not sequence.is_whole:
            self._drop(sequence, "rounds")
        else:
            with self._lock:
                self._offered += 1
                self._pending += 1
            self._queue.put(sequence)

    def _drop(self, sequence: RecordedSequence, reason: str) -> None:
        with self._lock:
            self._offered += 1
            self._pending_bytes -= sequence.num_bytes
            self._dropped[reason] += 1
        self._tell(reason, 1)

    @property
    def counts(self) -> RecorderCounts:
        """What became of the sequences so far."""
        with self._lock:
            return RecorderCounts(self._offered, self._recorded, self._pending, dict(self._dropped))

    @property
    def pending_mb(self) -> float:
        """Memory that sequences occupy which are decoded or not written yet, estimated."""
        with self._lock:
            return self._pending_bytes / 1e6

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is pending and end the thread; one that hangs in a dead store is left behind after `timeout_s`."""
        with self._lock:
            self._is_closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    # ---- the recorder's own thread

    def _run(self) -> None:
        while True:
            batch, is_last = self._next_batch()
            if batch:
                self._keep(batch)
            if is_last:
                return

    def _next_batch(self) -> tuple[list[RecordedSequence], bool]:
        """Sequences until they make a unit, the oldest has waited long enough, or the recorder is closed (True)."""
        batch: list[RecordedSequence] = []
        deadline: float | None = None
        while len(batch) < self.settings.unit_sequences:
            try:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                sequence = self._queue.get(timeout=left)
            except queue.Empty:
                break
            if sequence is None:
                return batch, True
            batch.append(sequence)
            deadline = deadline or time.monotonic() + self.settings.flush_s
        return batch, False

    def _keep(self, batch: list[RecordedSequence]) -> None:
        try:
            self._commit(batch)
        except Exception as error:  # whatever a disk, a network or another program does to the store: requests go on
            self._seq = None
            self._settle(batch, is_recorded=False)
            self._tell("store", len(batch))
            if not self._is_failing:
                logger.warning("traffic is not recorded until the store works again: %s", error)
            self._is_failing = True
            return
        self._settle(batch, is_recorded=True)
        self._tell("recorded", len(batch))
        if self._is_failing:
            logger.warning(
                "traffic is recorded again; %d sequences were dropped so far", sum(self.counts.dropped.values())
            )
        self._is_failing = False

    def _settle(self, batch: Sequence[RecordedSequence], *, is_recorded: bool) -> None:
        with self._lock:
            self._pending -= len(batch)
            self._pending_bytes -= sum(sequence.num_bytes for sequence in batch)
            if is_recorded:
                self._recorded += len(batch)
            else:
                self._dropped["store"] += len(batch)

    def _commit(self, batch: Sequence[RecordedSequence]) -> None:
        if self._seq is None:
            self._seq = self._store.begin(self.run_id, self._provenance.target, self._dataset)
        files: list[FileInfo] = []
        for policy in dict.fromkeys(sequence.policy for sequence in batch):
            assert policy is not None
            files += self._write_unit(policy, [sequence for sequence in batch if sequence.policy == policy])
        self._store.commit(files, self.run_id, self._seq)
        self._seq += 1

    def _write_unit(self, policy: PolicyName, sequences: Sequence[RecordedSequence]) -> list[FileInfo]:
        self._num_units += 1
        key = UnitKey(unit_id=f"{self.run_id}-{self._num_units}", attempt=new_attempt(), run_id=self.run_id)
        provenance = replace(self._provenance, policy=policy.name, policy_fingerprint=policy.fingerprint)
        records = [sequence.record() for sequence in sequences]
        return self._store.write_unit(key, provenance, records, [each for one in sequences for each in one.rounds])
