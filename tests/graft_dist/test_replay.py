"""Replay on rounds whose answers can be worked out by hand, and against what an engine really did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graft_dist.budget import (
    AcceptanceGain,
    BudgetPolicy,
    ExploringBudget,
    FixedBudget,
    Form,
    GainModel,
    PowerGain,
    StateCalibration,
    UtilityBudget,
)
from graft_dist.cost_curve import CostCurve
from graft_dist.draft_tree import DraftTree, build_tree, build_trees
from graft_dist.edge_scorer import EdgeScorer, MarginalScorer, Reading, TdesConfig, TdesNetwork, TdesScorer
from graft_dist.policy import DecodingPolicy
from graft_dist.replay import (
    ALL_TASKS,
    LOST,
    Outcomes,
    RecordedRounds,
    ReplayRow,
    choose_budgets,
    outcomes,
    replay,
    walk_rounds,
)
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import TINY_VOCAB_SIZE, FakeDrafter
from tests.graft_dist.policies import random_network
from tests.graft_dist.test_lossless import decode, prompts

# Under the marginals the tree is 1: 5, 2: 5 7, 3: 6, 4: 6 7, 5: 5 8, 6: 6 8.
IDS = [[5, 6], [7, 8]]
LOG_PROBS = [[-0.5, -1.0], [-0.25, -2.0]]


def rounds_of(followed: Sequence[Sequence[int]], num_left: Sequence[int], **changes: Any) -> RecordedRounds:
    """Rounds that all drafted IDS."""
    number = len(followed)
    fields: dict[str, Any] = {
        "groups": [("decoded", "code")] * number,
        "unit_ids": ["u"] * number,
        "sequence_ids": [f"s{index}" for index in range(number)],
        "round_indices": np.zeros(number, np.int32),
        "context_lengths": np.full(number, 10, np.int32),
        "root_tokens": np.full(number, 4, np.int64),
        "candidate_ids": np.array([IDS] * number, np.int32),
        "log_probs": np.array([LOG_PROBS] * number, np.float32),
        "followed": np.array(followed, np.int32),
        "num_left": np.array(num_left, np.int32),
        "rooms": np.full(number, 90, np.int32),
        "conf": np.full(number, 0.75, np.float32),
        "degen": np.full(number, 0.5, np.float32),
        "hist": np.full(number, 1.5, np.float32),
    }
    return RecordedRounds(**{**fields, **changes})


CASES = [
    # followed, num_left, room; then per budget: accepted, tokens, where it stops
    ([6, 7], 9, 90, {0: (0, 1, "cut"), 2: (0, 1, "cut"), 3: (1, 2, "wrong_parent"), 4: (2, 3, "depth_cap")}),
    ([5, 9], 9, 90, {0: (0, 1, "cut"), 1: (1, 2, "outside"), 6: (1, 2, "outside")}),
    ([9, 7], 9, 90, {0: (0, 1, "outside"), 6: (0, 1, "outside")}),
    # One token more is allowed: nothing below depth 1 could become output, and the second node is 6.
    ([5, 7], 2, 2, {0: (0, 1, "cut"), 1: (1, 2, "end"), 6: (1, 2, "end")}),
    # The answer stops with 7: as a node it has no bonus token, as a bonus token it is the last.
    ([5, 7], 2, 90, {1: (1, 2, "cut"), 2: (2, 2, "end"), 6: (2, 2, "end")}),
    ([6, -1], 1, 90, {1: (0, 1, "cut"), 3: (1, 1, "end"), 4: (1, 1, "end")}),
    ([5, -1], 1, 1, {0: (0, 1, "end"), 6: (0, 1, "end")}),
    # The last token is wanted under another parent: still a mismatch, as decoding counts it.
    ([6, 7], 2, 90, {3: (1, 2, "wrong_parent")}),
]


@pytest.mark.parametrize(("followed", "num_left", "room", "expected"), CASES)
def test_what_budgets_give(followed: list[int], num_left: int, room: int, expected: dict[int, tuple]) -> None:
    rounds = rounds_of([followed], [num_left], rooms=np.array([room], np.int32))
    walk = walk_rounds(rounds, MarginalScorer(), 6)
    for budget, answer in expected.items():
        found = outcomes(rounds, walk, np.array([budget]))
        assert (found.accepted[0], found.num_tokens[0], LOST[found.lost[0]]) == answer, budget


def test_a_depth_limit_of_the_policy() -> None:
    rounds = rounds_of([[6, 7]], [9])
    found = outcomes(rounds, walk_rounds(rounds, MarginalScorer(), 6, max_depth=1), np.array([6]))
    assert (found.accepted[0], LOST[found.lost[0]]) == (1, "depth_cap")


def test_the_report_by_hand() -> None:
    rounds = rounds_of(
        [[6, 7], [5, 9], [9, 7], [5, 7]],
        [9, 9, 9, 2],
        groups=[("decoded", "code"), ("decoded", "code"), ("decoded", "math"), ("dense", "code")],
    )
    policies = {"plain": FixedBudget(0), "fixed-3": FixedBudget(3), "fixed-9": FixedBudget(9)}
    cost = CostCurve((0, 1, 3, 6), (10.0, 20.0, 30.0, 60.0), "hand")
    report = replay([rounds], MarginalScorer(), policies, max_budget=9, cost=cost)
    found = {(row.kind, row.task, row.policy): row for row in report.rows}
    assert [row[:2] for row in found][::3] == [
        ("decoded", ALL_TASKS),
        ("decoded", "code"),
        ("decoded", "math"),
        ("dense", ALL_TASKS),
        ("dense", "code"),
    ]
    code = found["decoded", "code", "fixed-3"]
    # Tokens 2 + 2 in 60 ms. The oracle takes budget 1 for the second round (2 in 20) and drafts nothing for the first.
    assert (code.num_rounds, code.mat, code.mean_budget, code.mismatch_rate) == (2, 2.0, 3.0, 0.5)
    assert code.tokens_per_s == pytest.approx(4000 / 60)
    assert code.speedup == pytest.approx(4 / 6)
    assert code.regret == pytest.approx(1 - (4 / 60) / (3 / 30))
    assert code.lost == {"end": 0, "depth_cap": 0, "outside": 1, "wrong_parent": 1, "cut": 0}
    # The whole tree has 6 nodes: tokens 3 + 2 + 1 of three rounds.
    assert found["decoded", ALL_TASKS, "fixed-9"].mean_budget == 6
    assert found["decoded", ALL_TASKS, "fixed-9"].mat == pytest.approx(2.0)
    assert found["dense", "code", "plain"].mat == 1.0
    oracles = {(row.kind, row.task): row for row in report.oracles}
    assert oracles["decoded", "code"].tokens_per_s == pytest.approx(100)
    assert oracles["decoded", "math"].speedup == pytest.approx(1.0)


def test_the_context_has_its_price() -> None:
    """Rounds of [6, 7] and [5, 9] after 10 and 30 tokens, which cost 5 and 15 ms more."""
    rounds = rounds_of([[6, 7], [5, 9]], [9, 9], context_lengths=np.array([10, 30], np.int32))
    cost = CostCurve((0, 1, 3, 6), (10.0, 11.0, 30.0, 60.0), "hand", token_ms=0.5)
    policies = {"plain": FixedBudget(0), "fixed-1": FixedBudget(1)}
    report = replay([rounds], MarginalScorer(), policies, max_budget=6, cost=cost)
    plain, fixed = (row for row in report.rows if row.task == ALL_TASKS)
    assert plain.speedup == pytest.approx(1.0) and plain.tokens_per_s == pytest.approx(2000 / 40)
    assert fixed.tokens_per_s == pytest.approx(3000 / 42) and fixed.speedup == pytest.approx(3 / 42 * 40 / 2)
    # The best: no draft for the first round, one node for the second.
    oracle = next(row for row in report.oracles if row.task == ALL_TASKS)
    assert oracle.tokens_per_s == pytest.approx(3000 / 41) and oracle.speedup == pytest.approx(3 / 41 * 40 / 2)


def test_without_a_cost_there_are_no_rates() -> None:
    report = replay([rounds_of([[6, 7]], [9])], MarginalScorer(), {"fixed-3": FixedBudget(3)}, max_budget=3)
    assert report.oracles == []
    assert {(row.tokens_per_s, row.speedup, row.regret) for row in report.rows} == {(None, None, None)}
    assert replay([], MarginalScorer(), {}, max_budget=3).rows == []


def random_rounds(number: int, depth: int = 5, width: int = 4, seed: int = 0, vocab_size: int = 9) -> RecordedRounds:
    random = np.random.default_rng(seed)
    ids = np.array([[random.permutation(vocab_size)[:width] for _ in range(depth)] for _ in range(number)], np.int32)
    log_probs = np.log(random.dirichlet(np.full(width + 1, 0.4), (number, depth))[..., :width] + 1e-9)
    left = random.integers(1, 3 * depth, number)
    followed = random.integers(0, vocab_size, (number, depth))
    followed[np.arange(depth) >= left[:, None]] = -1
    return rounds_of(
        followed.tolist(),
        left.tolist(),
        candidate_ids=ids,
        log_probs=log_probs.astype(np.float32),
        rooms=(left + random.integers(0, 3, number)).astype(np.int32),
        groups=[("dense", "ab"[index % 2]) for index in range(number)],
    )


def test_the_oracle_is_the_best_of_all_choices() -> None:
    for seed in range(20):
        # Every second time the context costs as much again as a plain round.
        cost = CostCurve((0, 1, 8), (5.0, 6.0, 9.0), "hand", token_ms=0.5 * (seed % 2))
        table = cost.table(8, 10)
        rounds = random_rounds(4, depth=3, width=3, seed=seed, vocab_size=4)
        walk = walk_rounds(rounds, MarginalScorer(), 8)
        tokens = np.array([outcomes(rounds, walk, np.full(4, budget)).num_tokens for budget in range(9)])
        choices = np.array(list(itertools.product(range(9), repeat=4)))
        rates = tokens[choices, np.arange(4)].sum(axis=1) / table[choices].sum(axis=1)
        report = replay([rounds], MarginalScorer(), {}, max_budget=8, cost=cost)
        assert not report.oracles  # no policy, no group
        report = replay([rounds], MarginalScorer(), {"plain": FixedBudget(0)}, max_budget=8, cost=cost)
        assert report.oracles[0].tokens_per_s == pytest.approx(1000 * rates.max(), rel=2e-3)


def test_batches_add_up() -> None:
    whole = random_rounds(60)
    names = list(RecordedRounds.__dataclass_fields__)
    parts = [
        RecordedRounds(**{name: getattr(whole, name)[start : start + 25] for name in names if name != "hidden"})
        for start in range(0, 60, 25)
    ]
    policies = {"fixed-5": FixedBudget(5), "exploring": ExploringBudget((0, 3, 12), seed=2)}
    cost = CostCurve((0, 12), (5.0, 9.0), "hand")
    one, many = (replay(batches, MarginalScorer(), policies, max_budget=12, cost=cost) for batches in ([whole], parts))
    assert many.rows == [
        ReplayRow(**{**vars(row), **{name: pytest.approx(getattr(row, name)) for name in ("tokens_per_s", "speedup")}})
        for row in one.rows
    ]
    overall = [row for row in one.rows if row.task == ALL_TASKS]
    assert all(sum(row.lost.values()) == row.num_rounds == 60 for row in overall)
    by_task = [row for row in one.rows if row.policy == "fixed-5" and row.task != ALL_TASKS]
    assert sum(row.num_rounds for row in by_task) == 60


class CountingBudget:
    """Verifies as many nodes as it has been asked before."""

    needs_state = False

    def __init__(self) -> None:
        self.num_asked = 0

    def limits(self, states: Sequence[Any]) -> list[int]:
        self.num_asked += 1
        return [self.num_asked - 1]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[Any]) -> list[int]:
        return [tree.num_nodes for tree in trees]


def test_what_a_policy_remembers_is_kept_apart_by_kind() -> None:
    kinds = ["decoded", "dense", "dense", "decoded", "dense"]
    rounds = rounds_of([[6, 7]] * 5, [9] * 5, groups=[(kind, "code") for kind in kinds])
    given = CountingBudget()
    report = replay([rounds, rounds], MarginalScorer(), {"counting": given}, max_budget=6)
    means = {row.kind: row.mean_budget for row in report.rows if row.task == ALL_TASKS}
    # Budgets 0 1 2 3 for the four decoded rounds, 0 to 5 for the six dense ones.
    assert means == {"decoded": 1.5, "dense": 2.5}
    assert given.num_asked == 0, "the policy that was given is as it was"


class ConfidentBudget:
    """Drafts for rounds with an odd number only, and then cuts the tree to twice the confidence."""

    needs_state = True

    def limits(self, states: Sequence[Any]) -> list[int]:
        assert {state.conf for state in states} == {0.0}
        return [5 * (state.round_index % 2) for state in states]

    def choose(self, trees: Sequence[DraftTree], states: Sequence[Any]) -> list[int]:
        return [min(tree.num_nodes, int(2 * state.conf)) for tree, state in zip(trees, states, strict=True)]


def test_a_policy_sees_states_and_trees() -> None:
    rounds = rounds_of(
        [[6, 7]] * 3,
        [9] * 3,
        round_indices=np.array([0, 1, 3], np.int32),
        conf=np.array([1.0, 1.0, 3.0], np.float32),
    )
    walk = walk_rounds(rounds, MarginalScorer(), 6)
    assert choose_budgets(rounds, walk, [ConfidentBudget()], 6)[0].nodes.tolist() == [0, 2, 5]


class DraftingInVain:
    """Drafts for every round, and has nothing of it verified."""

    needs_state = False

    def limits(self, states: Sequence[Any]) -> list[int]:
        return [4] * len(states)

    def choose(self, trees: Sequence[DraftTree], states: Sequence[Any]) -> list[int]:
        return [0] * len(trees)


def test_a_draft_of_which_nothing_is_verified_is_paid_for() -> None:
    rounds = rounds_of([[6, 7]] * 3, [9] * 3)
    cost = CostCurve((0, 2, 6), (10.0, 15.0, 19.0), "hand")
    policies = {"plain": FixedBudget(0), "in vain": DraftingInVain(), "fixed 2": FixedBudget(2)}
    report = replay([rounds], MarginalScorer(), policies, max_budget=4, cost=cost)
    rows = {row.policy: row for row in report.rows if row.task == ALL_TASKS}
    assert rows["in vain"].mat == rows["plain"].mat == 1.0 and rows["in vain"].mean_budget == 0.0
    assert rows["plain"].tokens_per_s == pytest.approx(100.0)
    assert rows["in vain"].tokens_per_s == pytest.approx(1000 / 15), "as the smallest drafted round"


class PairScorer:
    """Scores that depend on the parent and grow along some paths: hashes of parent and child beside the marginals."""

    needs_hidden = False

    def score(self, root_tokens: Any, candidate_ids: Any, log_probs: Any, hidden: Any = None) -> Any:
        num_slots, _, width = candidate_ids.shape
        roots = np.repeat(np.asarray(root_tokens)[:, None, None], width, axis=2)
        above = np.concatenate([roots, candidate_ids[:, :-1]], axis=1).astype(np.int64)
        pairs = above[..., :, None] * 31 + candidate_ids[..., None, :]
        assert pairs.shape == (num_slots, candidate_ids.shape[1], width, width)
        return (log_probs[:, :, None, :] + (pairs * 2654435761 % 97) / 24 - 3).astype(np.float32)


def test_many_trees_are_those_of_one_by_one() -> None:
    rounds = random_rounds(30)
    limits = np.minimum(rounds.rooms - 1, 5).astype(np.int32)
    for scorer in (MarginalScorer(), PairScorer()):
        scores = scorer.score(rounds.root_tokens, rounds.candidate_ids, rounds.log_probs)
        trees = build_trees(rounds.root_tokens, rounds.candidate_ids, scores, 20, limits)
        for slot in range(30):
            alone = build_tree(4, rounds.candidate_ids[slot], scores[slot], 20, int(limits[slot]))
            for name in ("tokens", "parents", "depths", "scores", "ranks"):
                assert np.array_equal(getattr(trees.tree(slot), name), getattr(alone, name))
    with pytest.raises(ValueError, match="edge_scores"):
        build_trees(rounds.root_tokens, rounds.candidate_ids, scores[:, :, :2], 20, limits)
    with pytest.raises(ValueError, match="depth limits"):
        build_trees(rounds.root_tokens, rounds.candidate_ids, scores, 20, limits[:3])
    with pytest.raises(ValueError, match="at least 0"):
        build_trees(rounds.root_tokens, rounds.candidate_ids, scores, -1, limits)


# ---- against an engine

GREEDY = SamplingParams(max_new_tokens=30)
SAMPLED = SamplingParams(max_new_tokens=25, temperature=1.0, seed=5)
CUT_SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)


def as_rounds(
    records: Sequence[RoundRecord], prompt: list[int], output: list[int], reason: str, params: SamplingParams
) -> RecordedRounds:
    """Records of one sequence, what followed taken from its output."""
    depth = records[0].candidate_ids.shape[0]
    counts = [record.context_length - len(prompt) + 1 for record in records]
    left = [len(output) - count for count in counts]
    rooms = left if reason == "length" else [params.max_new_tokens - count for count in counts]
    return RecordedRounds(
        groups=[("decoded", "live")] * len(records),
        unit_ids=["u"] * len(records),
        sequence_ids=[record.sequence_id for record in records],
        round_indices=np.array([record.round_index for record in records], np.int32),
        context_lengths=np.array([record.context_length for record in records], np.int32),
        root_tokens=np.array([record.root_token for record in records], np.int64),
        candidate_ids=np.array([record.candidate_ids for record in records]),
        log_probs=np.array([record.candidate_log_probs for record in records]),
        followed=np.array([(output[count : count + depth] + [-1] * depth)[:depth] for count in counts], np.int32),
        num_left=np.array(left, np.int32),
        rooms=np.array(rooms, np.int32),
        conf=np.array([record.conf for record in records], np.float32),
        degen=np.array([record.degen for record in records], np.float32),
        hist=np.array([record.hist for record in records], np.float32),
        hidden=None if records[0].hidden is None else np.array([record.hidden for record in records], np.float32),
    )


@pytest.fixture(scope="module")
def live(tiny_target: Callable[[str], Target]) -> Callable[..., list[tuple]]:
    """Return a function that decodes the same requests with a policy: (records, rounds) of each sequence."""
    target = tiny_target("llama")
    asked = [(prompt, params) for params in (GREEDY, SAMPLED, CUT_SHORT) for prompt in prompts(target.vocab_size)]
    # A token that the answers hold ends some of them early, inside a path or as its bonus.
    first, _, _ = decode(target, None, DecodingPolicy("plain", MarginalScorer(), FixedBudget(0), 1), asked)
    stopping = SamplingParams(max_new_tokens=30, stop_token_ids=tuple({output[9] for output in first[:4]}))
    asked += [(prompt, stopping) for prompt, _ in asked[:4]]
    drafter = FakeDrafter(target, [[*prompt, *output] for (prompt, _), output in zip(asked, first, strict=False)])

    def run(policy: DecodingPolicy, max_slots: int = 3, **options: Any) -> list[tuple]:
        tokens, reasons, records = decode(target, drafter, policy, asked, max_slots=max_slots, record=True, **options)
        drafted = [[record for record in own if len(record.candidate_ids)] for own in records]
        return [
            (own, as_rounds(own, prompt, output, reason, params))
            for own, (prompt, params), output, reason in zip(drafted, asked, tokens, reasons, strict=True)
            if own
        ]

    return run


def tdes_scorer() -> TdesScorer:
    """Random weights, over random embeddings of the tiny vocabulary."""
    network, generator = TdesNetwork(TdesConfig(embedding_size=8, draft_depth=5)), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(network.weight.data, std=0.3, generator=generator)
    return TdesScorer(network, torch.randn(TINY_VOCAB_SIZE, 8, generator=generator))


SCORERS: list[EdgeScorer] = [MarginalScorer(), PairScorer(), tdes_scorer()]
BUDGETS = [FixedBudget(1), FixedBudget(6), FixedBudget(30), ExploringBudget((0, 2, 11, 40), seed=3)]


def replayed(
    records: Sequence[RoundRecord], rounds: RecordedRounds, scorer: EdgeScorer, budget: BudgetPolicy
) -> tuple[Any, Outcomes]:
    """Budgets and outcomes of a replay, which have to be what was recorded."""
    walk = walk_rounds(rounds, scorer, 40)
    budgets = choose_budgets(rounds, walk, [budget], 40)[0].nodes
    found = outcomes(rounds, walk, budgets)
    assert budgets.tolist() == [record.budget for record in records]
    assert found.accepted.tolist() == [len(record.accepted) for record in records]
    assert found.num_tokens.tolist() == [record.num_tokens for record in records]
    return budgets, found


@pytest.mark.parametrize("scorer", SCORERS, ids=["marginal", "pair", "tdes"])
def test_replay_finds_what_decoding_accepted(scorer: EdgeScorer, live: Callable[..., list[tuple]]) -> None:
    runs = [live(DecodingPolicy("live", scorer, budget, num_candidates=6)) for budget in BUDGETS]
    stops = set()
    for budget, run in zip(BUDGETS, runs, strict=True):
        for records, rounds in run:
            _, found = replayed(records, rounds, scorer, budget)
            is_mismatch = found.lost == LOST.index("wrong_parent")
            assert is_mismatch.tolist() == [record.is_mismatch for record in records]
            stops |= {LOST[index] for index in found.lost}
    assert stops == set(LOST), "a case that never came up proves nothing"


@pytest.mark.parametrize("scorer", SCORERS, ids=["marginal", "pair", "tdes"])
def test_replay_of_one_run_is_another_run_at_the_same_positions(
    scorer: EdgeScorer, live: Callable[..., list[tuple]]
) -> None:
    recorded = live(DecodingPolicy("recorded", MarginalScorer(), FixedBudget(3), num_candidates=6))
    num_compared = 0
    for budget in (9, 40):
        other = live(DecodingPolicy("other", scorer, FixedBudget(budget), num_candidates=6))
        for (records, rounds), (others, _) in zip(recorded, other, strict=True):
            walk = walk_rounds(rounds, scorer, 40)
            found = outcomes(rounds, walk, choose_budgets(rounds, walk, [FixedBudget(budget)], 40)[0].nodes)
            at = {record.context_length: record for record in others}
            for record, accepted, num_tokens in zip(records, found.accepted, found.num_tokens, strict=True):
                if record.context_length in at:
                    same = at[record.context_length]
                    assert (accepted, num_tokens) == (len(same.accepted), same.num_tokens)
                    num_compared += 1
    assert num_compared > 50


STATE = StateCalibration((0.4, -0.2, 0.1), (-6.0, -2.0, 0.0, 1.0), (0.01, 0.2, 0.6, 0.9))


# Weights of about the size of fitted ones, under which a round's history and degeneration change its budget.
POWER = PowerGain((-1.0, 1.0, 0.3, 0.1), (-0.5, 0.4, -0.2, 0.1), 2.0)


@pytest.mark.parametrize("form", ["ratio", "price"])
@pytest.mark.parametrize("gain", [AcceptanceGain(), AcceptanceGain(STATE), POWER], ids=["raw", "state", "power"])
@pytest.mark.parametrize("reading", ["conditional", "sum"])
def test_replay_finds_the_budgets_that_a_gated_scorer_and_costs_led_to(
    form: Form,
    gain: GainModel,
    reading: Reading,
    live: Callable[..., list[tuple]],
    tiny_target: Callable[[str], Target],
) -> None:
    """One sequence after the other: what stands together in a batch shares its budget, and replay has no batches."""
    hidden_size = tiny_target("llama").hidden_size
    network = random_network(8, 5, gate_hidden=hidden_size, reliance=True)
    embeddings = torch.randn(TINY_VOCAB_SIZE, 8, generator=torch.Generator().manual_seed(1))
    scorer = TdesScorer(network, embeddings, reading)
    curve = CostCurve((0, 1, 8, 40), (10.0, 12.0, 13.0, 24.0), "by hand", token_ms=0.01)
    asked, again = (UtilityBudget(gain, curve, 40, form, may_rest=False) for _ in range(2))
    run = live(DecodingPolicy("live", scorer, asked, num_candidates=6), max_slots=1, projection=torch.eye(hidden_size))
    seen = set()
    for records, rounds in run:
        budgets, _ = replayed(records, rounds, scorer, again)
        seen |= set(budgets.tolist())
    assert len(seen) > 3, "budgets that never differ prove nothing"
