"""What a policy is learned from: the sequences of a store that may be used, and for what each of them is.

A drafter knows the sequences that it was trained on, so what it drafts there says nothing about new text: only prompts
that no drafter of ours is trained on are used (`is_held_out`). Those are split once more, by another part of the same
hash: rounds to fit on, to choose by, and to judge by. Both splits look at the user's words alone, so that a prompt
never changes sides as data grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from graft_dist.config import TargetConfig
from graft_dist.draft_head import read_draft_vocabulary
from graft_dist.drafter import checkpoint_folder, fingerprint, read_config, read_tensors
from graft_dist.errors import StoreError
from graft_dist.learning.saba import CostFits
from graft_dist.policy import DataIdentity
from graft_dist.prompt_text import PromptReader
from graft_dist.prompts import LearningSplit, is_held_out, learning_split
from graft_dist.replay import RecordedRounds, SequenceName
from graft_dist.target import read_fingerprint, read_tokenizer
from storage import TrajectoryStore, connect
from storage.learning_rounds import (
    RecordedSequence,
    RoundShape,
    Source,
    count_sequences,
    hidden_size_of,
    num_of_other_drafters,
    prompts_of,
    recorded_sequences,
    shapes_of,
    source_of,
)
from storage.recorded_rounds import Selection, recorded_rounds
from storage.trajectories import Snapshot

SPLITS: tuple[LearningSplit, ...] = ("fit", "tune", "test")
_LEAST_PROMPTS: Mapping[LearningSplit, int] = {"tune": 2, "test": 1}  # budgets are fitted to halves of the former


@dataclass(frozen=True)
class LearningData:
    """The usable sequences of one snapshot, all drafted by one drafter with one shape."""

    snapshot: Snapshot
    source: Source
    drafter_fingerprint: str
    hidden_size: int  # of the drafter
    shape: RoundShape
    splits: Mapping[LearningSplit, Sequence[RecordedSequence]]
    num_trained_on: int  # sequences left out: the drafter may have been trained on their prompts
    num_unreadable: int  # sequences left out: their prompts cannot be read back
    num_of_other_drafters: int  # sequences left out: another drafter proposed their rounds

    def num_rounds(self, *splits: LearningSplit) -> int:
        """Decoded and dense rounds of some splits."""
        return sum(each.num_decoded + each.num_dense for split in splits for each in self.splits[split])

    def prompt_of(self, split: LearningSplit) -> dict[SequenceName, str]:
        """Sequences of a split, each with a name of what was asked: prompt ids are unique within a run only."""
        return {sequence.key: sequence.prompt_name for sequence in self.splits[split]}

    def halves(self, split: LearningSplit) -> list[dict[SequenceName, str]]:
        """`prompt_of` the sequences with decoded rounds in two parts, each with half of the prompts."""
        names = {each.key: each.prompt_name for each in self.splits[split] if each.num_decoded > 0}
        first = set(sorted(set(names.values()))[::2])
        return [{key: name for key, name in names.items() if (name in first) == side} for side in (True, False)]

    def identity(self, costs: Iterable[CostFits]) -> DataIdentity:
        """What a policy keeps of it, and of the rounds that its costs were fitted to, which may be of more runs."""
        every = [sequence for split in SPLITS for sequence in self.splits[split]]
        return DataIdentity(
            store=self.snapshot.name,
            run_ids=tuple(sorted({sequence.run_id for sequence in every})),
            num_shards=len(self.snapshot.rounds_files),
            num_sequences=len(every),
            num_decoded_rounds=sum(sequence.num_decoded for sequence in every),
            num_dense_rounds=sum(sequence.num_dense for sequence in every),
            num_held_out_rounds=self.num_rounds("tune", "test"),
            cost_run_ids=tuple(sorted({run_id for one in costs for run_id in one.run_ids})),
        )


def decoded_rounds(data: LearningData, root: str, slug: str, split: LearningSplit) -> Iterator[RecordedRounds]:
    """Stream a split's decoded rounds in one order, with hidden states if the data's shape has them."""
    shape = data.shape
    selection = Selection(
        target=slug,
        prompt_ids=sorted({sequence.prompt_id for sequence in data.splits[split]}),
        kind="decoded",
        drafter=data.drafter_fingerprint,
    )
    # Sums of numbers depend on their order a little: a run that is resumed has to find what the first start found.
    with closing(connect(root, threads=1, snapshot=data.snapshot)) as connection:
        for rounds in recorded_rounds(connection, selection, with_hidden=shape.num_hidden > 0):
            num_hidden = 0 if rounds.hidden is None else rounds.hidden.shape[2]
            if (*rounds.candidate_ids.shape[1:], num_hidden) == (shape.depth, shape.width, shape.num_hidden):
                yield rounds


def open_snapshot(root: str, versions: tuple[int, int] | None) -> Snapshot:
    """The store's newest snapshot, or that of an earlier start (versions of sequences and rounds).

    Raises:
        StoreError: there is no store.
    """
    store = TrajectoryStore(root)
    if not store.exists:
        raise StoreError(f"there is no trajectory store at {store.root}: a collect job creates one when it starts")
    return store.snapshot() if versions is None else store.snapshot(*versions)


def read_learning_data(
    config: TargetConfig, root: str, snapshot: Snapshot, *, every_prompt: bool, min_rounds: int, needs_hidden: bool
) -> LearningData:
    """Find the usable sequences and split them.

    Args:
        every_prompt: also use prompts that a drafter of ours would have been trained on.
        min_rounds: fewer rounds to fit on are refused.
        needs_hidden: only rounds that were recorded with the drafter's hidden states.

    Raises:
        StoreError: another target, only other drafters, no usable sequence, or too few rounds; one sentence.
    """
    folder = checkpoint_folder(config.drafter, config.drafter_revision)
    drafter = read_config(folder)
    vocabulary = read_draft_vocabulary(folder, drafter.vocab_size)
    drafter_fingerprint = fingerprint(drafter, read_tensors(folder)[0], vocabulary)
    with closing(connect(root, snapshot=snapshot)) as connection:
        source = source_of(connection, config.slug)
        where: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        target_fingerprint = read_fingerprint(config.target, **where)
        if target_fingerprint != source.target_fingerprint:
            raise StoreError(
                f"the store's rounds of {config.slug} were decoded by target {source.target_fingerprint[:12]}, the "
                f"configuration's target is {target_fingerprint[:12]}: use another store for it"
            )
        if drafter_fingerprint not in source.drafter_fingerprints:
            raise StoreError(
                f"the store's rounds of {config.slug} were drafted by {', '.join(source.drafter_fingerprints)}, the "
                f"configuration's drafter is {drafter_fingerprint}: collect rounds with it first"
            )
        num_hidden = hidden_size_of(connection, config.slug, drafter_fingerprint) if needs_hidden else 0
        if needs_hidden and num_hidden == 0:
            raise StoreError(
                "--gate-rank needs rounds with the drafter's hidden states, and the store has none: collect with "
                "--hidden"
            )
        shapes = shapes_of(connection, config.slug, drafter_fingerprint, num_hidden)
        shape = _shape(shapes, drafter.draft_depth, num_hidden)
        sequences = recorded_sequences(connection, config.slug, drafter_fingerprint, shape)
        num_others = num_of_other_drafters(connection, config.slug, drafter_fingerprint)
        asked = {sequence.prompt_name: sequence for sequence in sequences}
        uses = _uses(config, prompts_of(connection, config.slug, asked.values()), every_prompt)
    splits, num_trained_on, num_unreadable = _split(sequences, uses)
    data = LearningData(
        snapshot=snapshot,
        source=source,
        drafter_fingerprint=drafter_fingerprint,
        hidden_size=drafter.hidden_size,
        shape=shape,
        splits=splits,
        num_trained_on=num_trained_on,
        num_unreadable=num_unreadable,
        num_of_other_drafters=num_others,
    )
    _check_enough(data, len(sequences), min_rounds)
    return data


def count_recorded(
    config: TargetConfig, root: str, *, since: float, every_prompt: bool, min_rounds: int, needs_hidden: bool
) -> int:
    """How many sequences recorded from traffic since then (seconds since 1970) a policy can be learned from.

    Raises:
        GraftError: nothing can be learned from the store, in one sentence.
    """
    snapshot = open_snapshot(root, None)
    with closing(connect(root, snapshot=snapshot)) as connection:
        if count_sequences(connection, config.slug, "traffic", since) == 0:
            return 0
    data = read_learning_data(
        config, root, snapshot, every_prompt=every_prompt, min_rounds=min_rounds, needs_hidden=needs_hidden
    )
    sequences = (sequence for split in SPLITS for sequence in data.splits[split])
    return sum(each.source == "traffic" and each.written_at >= since for each in sequences)


def _shape(shapes: Sequence[tuple[int, int, int]], depth: int, num_hidden: int) -> RoundShape:
    """The most frequent shape that a tree can be learned on."""
    fitting = [(rows, width) for rows, width, _ in shapes if rows == depth and width >= 2]
    if not fitting:
        found = ", ".join(f"{rows} x {width}" for rows, width, _ in shapes)
        raise StoreError(
            f"the store has rounds of {found} candidates (depths x candidates each), the drafter proposes {depth} "
            "depths and a tree needs at least 2 candidates: collect with --method ddtree"
        )
    return RoundShape(*fitting[0], num_hidden)


def _uses(
    config: TargetConfig, prompts: Iterable[tuple[RecordedSequence, tuple[int, ...]]], every_prompt: bool
) -> dict[str, LearningSplit | None]:
    """What each prompt that can be read back is for, by its name; None: the drafter may have been trained on it."""
    where: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    reader = PromptReader(read_tokenizer(config.target, **where), config.system_prompt, config.enable_thinking)
    uses: dict[str, LearningSplit | None] = {}
    for sequence, token_ids in prompts:
        turns = reader.turns(token_ids)
        if turns is not None:
            uses[sequence.prompt_name] = learning_split(turns) if every_prompt or is_held_out(turns) else None
    return uses


def _split(
    sequences: Sequence[RecordedSequence], uses: Mapping[str, LearningSplit | None]
) -> tuple[dict[LearningSplit, list[RecordedSequence]], int, int]:
    """The sequences by split, and how many are left out: of prompts the drafter may know, and of unreadable ones."""
    splits: dict[LearningSplit, list[RecordedSequence]] = {split: [] for split in SPLITS}
    num_trained_on = 0
    for sequence in sequences:
        use = uses.get(sequence.prompt_name)
        if use is not None:
            splits[use].append(sequence)
        elif sequence.prompt_name in uses:
            num_trained_on += 1
    return splits, num_trained_on, len(sequences) - num_trained_on - sum(map(len, splits.values()))


def _check_enough(data: LearningData, num_sequences: int, min_rounds: int) -> None:
    if not any(data.splits.values()):
        raise StoreError(
            f"none of the {num_sequences} sequences can be learned from: the drafter may have been trained on the "
            f"prompts of {data.num_trained_on}, and those of {data.num_unreadable} cannot be read back with this "
            "configuration; collect held-out prompts, or give --all-prompts if the drafter was trained elsewhere"
        )
    num_fit = data.num_rounds("fit")
    if num_fit < min_rounds:
        raise StoreError(f"there are only {num_fit} rounds to fit on, and --min-rounds asks for {min_rounds}")
    for split, least in _LEAST_PROMPTS.items():
        num_prompts = len({sequence.prompt_name for sequence in data.splits[split] if sequence.num_decoded > 0})
        if num_prompts < least:
            raise StoreError(
                f"{num_prompts} prompts of the {split} split have decoded rounds, and {least} are needed to compare "
                "policies: collect more prompts"
            )
