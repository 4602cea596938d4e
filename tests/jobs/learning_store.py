"""A trajectory store whose best edge scorer is known: every token has one successor, and the drafter sees two stories.

At each position the candidates of all depths hold the true story and a decoy, in random order, so that marginals often
put one story's token under the other's. Who knows which token follows which finds every true path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from graft_dist.config import TargetConfig
from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.prompts import Prompt, is_held_out, learning_split, render
from graft_dist.rounds import RoundRecord, SequenceRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from storage import Provenance, TrajectoryStore, UnitKey

NUM_WORDS = 24
FIRST_WORD = 10
DEPTH, WIDTH = 4, 4
NUM_HIDDEN = 8
LENGTH = 48  # output tokens of a sequence
BUDGETS = (2, 4, 8, 12)


def successors() -> np.ndarray:
    """The word that follows each word: one cycle through all of them."""
    order = np.random.default_rng(7).permutation(NUM_WORDS)
    follows = np.empty(NUM_WORDS, np.int64)
    follows[order] = np.roll(order, -1)
    return follows


def prompt_texts(num_prompts: int) -> list[str]:
    """Held-out texts of every split, in turns; the last two are such as a drafter was trained on."""
    texts = [f"tell story {number}" for number in range(40 * num_prompts)]
    by_split = {
        split: [text for text in texts if is_held_out([text]) and learning_split([text]) == split]
        for split in ("fit", "tune", "test")
    }
    wanted = [by_split[("fit", "fit", "tune", "test")[number % 4]].pop(0) for number in range(num_prompts - 2)]
    return wanted + [text for text in texts if not is_held_out([text])][:2]


def write_store(  # noqa: PLR0913
    root: Path,
    config: TargetConfig,
    target: Target,
    drafter_fingerprint: str,
    num_prompts: int = 42,
    *,
    run_id: str = "run-1",
    source: str = "collect",
    misses: float = 0.0,
    slower: int = 1,
    dense_only: bool = False,
) -> None:
    """Commit a run of one unit: decoded and dense rounds of every prompt, or dense ones alone.

    `misses`: how often the drafter has not the true story among a depth's candidates; `slower` multiplies the time of
    verifying.
    """
    random = np.random.default_rng(0)
    follows = successors()
    sequences: list[SequenceRecord] = []
    rounds: list[RoundRecord] = []
    for number, text in enumerate(prompt_texts(num_prompts)):
        name, task = f"{run_id}-{number:03d}", ("code", "chat")[number // 4 % 2]
        ids = render(target.tokenizer, Prompt(name, task, (text,)))
        words = [int(random.integers(NUM_WORDS))]
        while len(words) < LENGTH:
            words.append(int(follows[words[-1]]))
        own = _rounds(name, len(ids), words, follows, random, misses)
        own = [replace(record, verify_ns=slower * record.verify_ns) for record in own]
        own = [record for record in own if record.kind == "dense" or not dense_only]
        rounds += own
        decoded = [record for record in own if record.kind == "decoded"]
        sequences.append(
            SequenceRecord(
                sequence_id=name,
                prompt_id=f"prompt-{number}",
                task=task,
                prompt_token_ids=list(ids),
                output_token_ids=[FIRST_WORD + word for word in words],
                finish_reason="length",
                sampling=SamplingParams(max_new_tokens=LENGTH),
                seed=None,
                num_rounds=len(decoded),
                num_drafted=sum(record.budget for record in decoded),
                num_accepted=sum(len(record.accepted) for record in decoded),
                prefill_s=0.1,
                decode_s=1.0,
            )
        )
    provenance = Provenance(
        target=config.slug,
        target_spec=config.target,
        target_fingerprint=target.fingerprint,
        drafter_fingerprint=drafter_fingerprint,
        policy="exploring",
        policy_fingerprint="p-1",
        hardware="test CPU, 1 thread, float32",
        software="graft-dist",
        source=source,
    )
    store = TrajectoryStore(root)
    dataset = {"target_fingerprint": target.fingerprint, "tokenizer_sha256": target.tokenizer_sha256}
    turn = store.begin(run_id, config.slug, dataset)
    key = UnitKey(unit_id=f"unit-of-{run_id}", attempt=f"attempt-of-{run_id}", run_id=run_id)
    store.commit(store.write_unit(key, provenance, sequences, rounds), run_id, turn)


def _rounds(
    name: str, num_prompt: int, words: list[int], follows: np.ndarray, random: np.random.Generator, misses: float
) -> list[RoundRecord]:
    rounds: list[RoundRecord] = []
    at = 0
    while at + DEPTH + 2 < LENGTH:
        rounds.append(_decoded(name, len(rounds), num_prompt, at, words, follows, random, misses))
        at += rounds[-1].num_tokens
    dense = [_dense(name, at, num_prompt, words, follows, random) for at in range(0, LENGTH - DEPTH - 2, 3)]
    return rounds + dense


def _candidates(
    root: int, follows: np.ndarray, random: np.random.Generator, misses: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """[D, K] ids and log-probabilities."""
    true, decoy = int(follows[root]), int(random.integers(NUM_WORDS))
    ids, log_probs = np.zeros((DEPTH, WIDTH), np.int32), np.zeros((DEPTH, WIDTH), np.float32)
    for depth in range(DEPTH):
        others = [word for word in random.permutation(NUM_WORDS).tolist() if word not in (true, decoy)]
        pair = [true, decoy] if true != decoy else [true, others.pop()]
        if misses > 0 and random.random() < misses:
            pair[0] = others.pop()
        ids[depth] = FIRST_WORD + np.array([*random.permutation(pair), *others[: WIDTH - 2]])
        log_probs[depth] = np.log([0.48, 0.42, 0.06, 0.04])
        true, decoy = int(follows[true]), int(follows[decoy])
    return ids, log_probs


def _hidden(words: list[int], at: int, random: np.random.Generator) -> np.ndarray:
    """[D, H'] numbers that say whether the wanted word is an even one, in noise."""
    hidden = random.normal(size=(DEPTH, NUM_HIDDEN))
    hidden[:, 0] += [3.0 * (words[at + 1 + depth] % 2) for depth in range(DEPTH)]
    return hidden.astype(np.float16).astype(np.float32)


def _logits(parents: list[int], ids: np.ndarray, follows: np.ndarray) -> np.ndarray:
    rows = [
        np.where(ids[depth] == FIRST_WORD + follows[parent - FIRST_WORD], 6.0, 0.0)
        for depth, parent in enumerate(parents)
    ]
    return np.array(rows, np.float32).reshape(-1, WIDTH)


def _decoded(
    name: str,
    index: int,
    num_prompt: int,
    at: int,
    words: list[int],
    follows: np.ndarray,
    random: np.random.Generator,
    misses: float,
) -> RoundRecord:
    root, budget = FIRST_WORD + words[at], int(random.choice(BUDGETS))
    ids, log_probs = _candidates(words[at], follows, random, misses)
    scores = MarginalScorer().score(np.array([root]), ids[None], log_probs[None])
    tree = build_tree(root, ids, scores[0], budget, DEPTH)
    path, node = [], 0
    for word in words[at + 1 :]:
        child = tree.child(node, FIRST_WORD + word)
        if child is None:
            break
        path.append(child)
        node = child
    parents = [root, *tree.tokens[path].tolist()][:DEPTH]
    node_ms = 1_000_000 * (4 + 0.05 * tree.num_nodes) + random.integers(0, 50_000)
    return RoundRecord(
        sequence_id=name,
        round_index=index,
        context_length=num_prompt + at,
        root_token=root,
        candidate_ids=ids,
        candidate_log_probs=log_probs,
        conf=0.48,
        degen=float(random.random()),
        hidden=_hidden(words, at, random),
        hist=0.0 if index == 0 else 2.0,
        budget=tree.num_nodes,
        tree_tokens=tree.tokens,
        tree_parents=tree.parents,
        tree_depths=tree.depths,
        target_tokens=(FIRST_WORD + follows[tree.tokens - FIRST_WORD]).astype(np.int32),
        accepted=np.array(path, np.int32),
        num_tokens=len(path) + 1,
        parent_logits=_logits(parents, ids, follows),
        parent_logsumexp=np.full(len(parents), 6.1, np.float32),
        draft_ns=1_000_000,
        build_ns=100_000,
        verify_ns=int(node_ms),
        commit_ns=100_000,
        batch_size=1,
        batch_rows=tree.num_nodes + 1,
    )


def _dense(
    name: str, at: int, num_prompt: int, words: list[int], follows: np.ndarray, random: np.random.Generator
) -> RoundRecord:
    ids, log_probs = _candidates(words[at], follows, random)
    followed = [FIRST_WORD + word for word in words[at + 1 : at + 1 + DEPTH]]
    nothing = np.zeros(0, np.int32)
    return RoundRecord(
        sequence_id=name,
        round_index=at,
        context_length=num_prompt + at,
        root_token=FIRST_WORD + words[at],
        candidate_ids=ids,
        candidate_log_probs=log_probs,
        conf=0.48,
        degen=0.0,
        hist=0.0,
        hidden=_hidden(words, at, random),
        budget=0,
        tree_tokens=nothing,
        tree_parents=nothing,
        tree_depths=nothing,
        target_tokens=nothing,
        accepted=nothing,
        num_tokens=0,
        parent_logits=_logits([FIRST_WORD + words[at], *followed][:DEPTH], ids, follows),
        parent_logsumexp=np.full(DEPTH, 6.1, np.float32),
        draft_ns=0,
        build_ns=0,
        verify_ns=0,
        commit_ns=0,
        batch_size=0,
        batch_rows=0,
        kind="dense",
        followed=np.array(followed, np.int32),
    )
