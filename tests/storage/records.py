"""Hand-made records for the storage tests: small, whole, and different from each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft_dist.rounds import RoundRecord, SequenceRecord
from graft_dist.sampling import SamplingParams
from storage import FileInfo, Provenance, TrajectoryStore, UnitKey, connect

DATASET = {"target_fingerprint": "t-1", "tokenizer_sha256": "k-1"}
PROVENANCE = Provenance(
    target="tiny",
    target_spec="org/tiny",
    target_fingerprint="t-1",
    drafter_fingerprint="d-1",
    policy="ddtree",
    policy_fingerprint="p-1",
    hardware="cpu",
    software="graft-dist 0.1.0",
)


def committed_units(store: TrajectoryStore) -> set[str]:
    """The ids of the units that readers see."""
    with connect(str(store.root), threads=1) as connection:
        return {row[0] for row in connection.execute("SELECT DISTINCT unit_id FROM sequences").fetchall()}


def make_round(sequence_id: str, round_index: int, **changes: Any) -> RoundRecord:
    """A round of D = 2, K = 3 that verified nodes 5 and 7 below the root and accepted the first; two tokens."""
    fields: dict[str, Any] = {
        "sequence_id": sequence_id,
        "round_index": round_index,
        "context_length": 10 + 2 * round_index,
        "root_token": 4,
        "candidate_ids": np.array([[5, 6, 9], [7, 8, 9]], np.int32),
        "candidate_log_probs": np.array([[-0.5, -1.5, -2.5], [-0.25, -2.0, -3.0]], np.float32),
        "conf": 0.75,
        "degen": 0.5,
        "hist": 1.5,
        "budget": 2,
        "tree_tokens": np.array([4, 5, 7], np.int32),
        "tree_parents": np.array([-1, 0, 1], np.int32),
        "tree_depths": np.array([0, 1, 2], np.int32),
        "target_tokens": np.array([5, 8, 1], np.int32),
        "accepted": np.array([1], np.int32),
        "num_tokens": 2,
        "parent_logits": np.array([[3.0, 2.0, 1.0], [1.0, 4.0, 0.5]], np.float32),
        "parent_logsumexp": np.array([3.5, 4.5], np.float32),
        "draft_ns": 1_000_000,
        "build_ns": 100_000,
        "verify_ns": 4_000_000,
        "commit_ns": 900_000,
        "batch_size": 1,
        "batch_rows": 3,
    }
    return RoundRecord(**{**fields, **changes})


def undrafted(sequence_id: str, round_index: int, **changes: Any) -> RoundRecord:
    """A round that decoded plainly: nothing drafted, one token."""
    return make_round(
        sequence_id,
        round_index,
        candidate_ids=np.zeros((0, 3), np.int32),
        candidate_log_probs=np.zeros((0, 3), np.float32),
        budget=0,
        tree_tokens=np.array([4], np.int32),
        tree_parents=np.array([-1], np.int32),
        tree_depths=np.array([0], np.int32),
        target_tokens=np.array([5], np.int32),
        accepted=np.zeros(0, np.int32),
        num_tokens=1,
        parent_logits=np.zeros((0, 3), np.float32),
        parent_logsumexp=np.zeros(0, np.float32),
        **changes,
    )


def make_sequence(sequence_id: str, num_rounds: int, **changes: Any) -> SequenceRecord:
    fields: dict[str, Any] = {
        "sequence_id": sequence_id,
        "prompt_id": f"prompt-{sequence_id}",
        "task": "code",
        "prompt_token_ids": [1, 2, 3],
        "output_token_ids": [4, 5, 6, 7],
        "finish_reason": "stop",
        "sampling": SamplingParams(temperature=0.5, top_p=0.9, seed=7),
        "seed": 7,
        "num_rounds": num_rounds,
        "num_drafted": 2 * num_rounds,
        "num_accepted": num_rounds,
        "prefill_s": 0.25,
        "decode_s": 1.5,
    }
    return SequenceRecord(**{**fields, **changes})


def write_unit(
    store: TrajectoryStore,
    unit_id: str,
    attempt: str,
    *,
    num_sequences: int = 2,
    num_rounds: int = 3,
    run_id: str = "run",
    target: str = "tiny",
) -> list[FileInfo]:
    """One attempt at a unit of `num_sequences` sequences with `num_rounds` rounds each, written and not committed."""
    ids = [f"{unit_id}.{index}" for index in range(num_sequences)]
    return store.write_unit(
        UnitKey(unit_id=unit_id, attempt=attempt, run_id=run_id),
        dataclasses.replace(PROVENANCE, target=target),
        [make_sequence(name, num_rounds) for name in ids],
        [make_round(name, index) for name in ids for index in range(num_rounds)],
    )


class _Killed(Exception):
    """Stands for a kill between the two commits."""


class _Dying(TrajectoryStore):
    def _not_in(self, *_: Any) -> Any:
        raise _Killed


def commit_rounds_only(store: TrajectoryStore, files: list[FileInfo], seq: int) -> None:
    """What a driver of the run "run" leaves that is killed between its two commits."""
    with pytest.raises(_Killed):
        _Dying(store.path).commit(files, "run", seq)


def commit_replayable(root: Path) -> None:
    """A store of rounds for replay: a code prompt that stopped, a chat prompt at its limit, two that were aborted."""
    store = TrajectoryStore(root)
    turn = store.begin("run", "tiny", DATASET)
    prompt = {"prompt_token_ids": list(range(10)), "sampling": SamplingParams(max_new_tokens=20)}
    sequences = [
        make_sequence("code-1", 3, output_token_ids=[4, 5, 7, 9, 8], **prompt),
        make_sequence("chat-1", 1, task="chat", output_token_ids=[4, 6, 7], finish_reason="length", **prompt),
        make_sequence("gone-1", 1, task="chat", output_token_ids=[4, 5, 7], finish_reason="abort", **prompt),
        make_sequence("gone-2", 1, task="chat", output_token_ids=[4, 6, 8, 1], finish_reason="abort", **prompt),
    ]
    nothing = np.zeros(0, np.int32)
    dense = dict.fromkeys(("tree_tokens", "tree_parents", "tree_depths", "target_tokens", "accepted"), nothing)
    dense |= {"kind": "dense", "followed": np.array([7, 9], np.int32), "context_length": 11, "root_token": 5}
    rounds = [
        make_round("code-1", 0),
        undrafted("code-1", 1, batch_rows=1, draft_ns=0),
        make_round("code-1", 2, context_length=13, root_token=9, batch_rows=5, verify_ns=8_000_000),
        make_round("code-1", 1, **dense),
        make_round("chat-1", 0),
        make_round("gone-1", 0),
        make_round("gone-2", 0),
    ]
    key = UnitKey(unit_id="u", attempt="a", run_id="run")
    store.commit(store.write_unit(key, PROVENANCE, sequences, rounds), "run", turn)
