"""`graft drift`, and what a retraining run asks before it begins: has acceptance dropped since the champion's training?

Training is what the champion says that it was trained on, as far as the store still holds it; recent is what was
recorded since the champion was registered: users' requests, or what jobs collected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import duckdb

from graft_dist.config import TargetConfig
from graft_dist.drift import Acceptance, Drift, DriftRow, Verdict, judge
from graft_dist.policy import GraftPolicy
from graft_dist.replay import SequenceName
from graft_dist.retraining import DriftRule
from jobs.learning_data import SPLITS, LearningData, open_snapshot, read_learning_data
from jobs.out_file import to_json
from storage import connect
from storage.learning_rounds import RecordedSequence, count_sequences, recorded_sequences
from storage.recorded_rounds import Selection, recorded_rounds
from storage.registry import CHAMPION, PolicyVersion, Registry
from storage.trajectories import Snapshot

_MOST_ROUNDS = 20_000  # of each side that are replayed; more hardly narrow the interval

_SAMPLED_DIFFERENCE = 0.1  # in the shares of sampled answers, from which on it is said

_HEADER = f"{'rounds of':<10}{'task':<14}{'prompts':>8}{'rounds':>8}{'MAT':>7}{'mismatch':>10}{'confidence':>12}"


@dataclass(frozen=True, kw_only=True)
class DriftRequest:
    """What to compare."""

    config: TargetConfig
    rule: DriftRule
    store: str
    tracking_uri: str
    every_prompt: bool  # training also used prompts that a drafter of ours would have been trained on
    source: str = "traffic"  # of recent rounds: traffic or collect
    since: datetime | None = None  # of recent rounds; None: since the champion was registered


def run_drift(request: DriftRequest, format: str) -> int:
    """Compare and print; returns the exit code."""
    drift = find_drift(request)
    print(to_json(asdict(drift)).rstrip("\n") if format == "json" else _as_table(drift))
    return 0


def find_drift(request: DriftRequest) -> Drift:
    """Compare recent rounds with those that the champion was trained on.

    Raises:
        GraftError: the registry or the store cannot be read.
    """
    slug = request.config.slug
    registry = Registry(request.tracking_uri)
    champion = next((version for version in registry.versions(slug) if CHAMPION in version.aliases), None)
    if champion is None:
        return _unknown("there is no champion yet")
    since = request.since or champion.created_at
    snapshot = open_snapshot(request.store, None)
    # Before anything large is read.
    with closing(connect(request.store, snapshot=snapshot)) as connection:
        num_recent = count_sequences(connection, slug, request.source, since.timestamp())
    if num_recent == 0:
        return Drift(Verdict.unseen, f"no drift seen (no {request.source} was recorded since {_shown(since)})")
    policy = GraftPolicy.load(registry.fetch(slug, champion.version))
    return _compare(request, champion, policy, snapshot, since)


def _compare(
    request: DriftRequest, champion: PolicyVersion, policy: GraftPolicy, snapshot: Snapshot, since: datetime
) -> Drift:
    data = read_learning_data(
        request.config,
        request.store,
        snapshot,
        every_prompt=request.every_prompt,
        min_rounds=0,
        needs_hidden=False,
    )
    if policy.drafter_fingerprint != data.drafter_fingerprint:
        return _unknown(f"champion v{champion.version} was trained for another drafter")
    slug = request.config.slug
    with closing(connect(request.store, snapshot=snapshot)) as connection:
        # Not of the usable sequences alone: what users ask need not be readable, nor be held out.
        everything = recorded_sequences(connection, slug, data.drafter_fingerprint, data.shape)
        recent = [each for each in everything if each.source == request.source and each.written_at >= since.timestamp()]
        training = _trained_on(data, policy, champion.created_at, {each.key for each in recent})
        if not training:
            return _unknown(f"the store no longer holds the rounds that champion v{champion.version} was trained on")
        found = _replayed(connection, slug, recent, request.config.budget)
        if found.num_rounds < request.rule.min_rounds:
            return Drift(
                Verdict.unseen,
                f"no drift seen ({found.num_rounds} rounds of {request.source} since {_shown(since)}, and "
                f"{request.rule.min_rounds} are asked for)",
            )
        drift = judge(_replayed(connection, slug, training, request.config.budget), found, request.rule)
    return replace(drift, sentence=drift.sentence + _sampling_note(training, recent))


def _trained_on(
    data: LearningData, policy: GraftPolicy, registered_at: datetime, recent: set[SequenceName]
) -> list[RecordedSequence]:
    """What the policy was trained on and can be replayed: decoded rounds alone can.

    A run may have gone on after that, as a server's does: its later rows are not.
    """
    return [
        each
        for split in SPLITS
        for each in data.splits[split]
        if each.run_id in policy.data.run_ids
        and each.written_at < registered_at.timestamp()
        and each.key not in recent
        and each.num_decoded > 0
    ]


def _replayed(
    connection: duckdb.DuckDBPyConnection, slug: str, sequences: Iterable[RecordedSequence], budget: int
) -> Acceptance:
    """The decoded rounds of some sequences, drawn in the order of a shuffle that is always the same."""
    drawn: list[RecordedSequence] = []
    num_rounds = 0
    for sequence in sorted(sequences, key=lambda each: _hash(each.sequence_id)):
        if num_rounds >= _MOST_ROUNDS:
            break
        drawn.append(sequence)
        num_rounds += sequence.num_decoded
    selection = Selection(target=slug, prompt_ids=sorted({each.prompt_id for each in drawn}), kind="decoded")
    prompt_of = {each.key: each.prompt_name for each in drawn}
    return Acceptance.of(recorded_rounds(connection, selection), prompt_of, budget)


def _sampling_note(training: Sequence[RecordedSequence], recent: Sequence[RecordedSequence]) -> str:
    """Said where it matters: sampled tokens are harder to foresee, whatever is asked."""
    before, now = (sum(each.is_sampled for each in side) / len(side) for side in (training, recent))
    if abs(now - before) < _SAMPLED_DIFFERENCE:
        return ""
    return f"; {now:.0%} of recent answers were sampled, {before:.0%} in training, which alone changes acceptance"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unknown(reason: str) -> Drift:
    return Drift(Verdict.unknown, f"drift cannot be measured ({reason})")


def _shown(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _as_table(drift: Drift) -> str:
    return "\n".join([*([_HEADER] if drift.rows else []), *map(_line, drift.rows), drift.sentence])


def _line(row: DriftRow) -> str:
    return (
        f"{row.side:<10}{row.task:<14}{row.num_prompts:>8}{row.num_rounds:>8}{row.mat:>7.2f}{row.mismatch_rate:>10.1%}"
        f"{row.conf:>12.3f}"
    )
