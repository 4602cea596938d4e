"""The oracle verifies what the answer goes through, and no more than pays."""

from __future__ import annotations

import numpy as np

from graft_dist.bench import CADDTREE_CAP, Arm, expand_arms
from graft_dist.budget import DraftState, UtilityBudget
from graft_dist.cost_curve import CostCurve
from graft_dist.draft_tree import build_tree
from graft_dist.edge_scorer import MarginalScorer
from graft_dist.engine import Engine
from graft_dist.oracle import KnownAnswer
from graft_dist.policy import DecodingPolicy, plain
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import FakeDrafter

PROMPT = [5, 9, 30, 7]
STEEP = CostCurve((0, 1, 64), (10.0, 11.0, 80.0), "every node costs a little")
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def state(context_length: int) -> DraftState:
    return DraftState(0.0, 0.0, 0.0, context_length, 100, 0, 0)


def test_nodes_on_the_answers_way_bring_a_token_each() -> None:
    ids = np.array([[11, 12], [21, 22], [31, 32]], np.int32)
    scores = np.log(np.array([[[0.6, 0.3]], [[0.7, 0.2]], [[0.5, 0.4]]], np.float32))
    tree = build_tree(9, ids, scores, 14)
    answer = KnownAnswer()
    answer.tell([1, 2, 9, 12, 21, 99])
    gains = answer.marginals(tree, state(2))
    on_way = [node for node in range(1, tree.num_nodes + 1) if gains[node - 1] == 1]
    assert [tree.tokens[node] for node in on_way] == [12, 21]
    assert [tree.parents[node] for node in on_way] == [0, on_way[0]]
    assert gains.sum() == 2

    answer.tell([1, 2, 8, 12, 21, 99])  # the sequence has another root: what the scores say
    np.testing.assert_allclose(answer.marginals(tree, state(2)), np.exp(tree.scores[1:]), rtol=1e-6)
    answer.tell([1, 2, 9])  # nothing follows
    assert answer.marginals(tree, state(2)).sum() == 0


def test_decoding_with_it_gives_the_same_text_and_ends_each_tree_at_an_accepted_node(tiny_llama: Target) -> None:
    def decode(policy: DecodingPolicy, drafter: FakeDrafter | None) -> tuple[list[int], list[tuple[int, int]]]:
        engine = Engine(tiny_llama, drafter, policy, max_slots=1, record=drafter is not None)
        engine.add(PROMPT, PARAMS)
        tokens: list[int] = []
        rounds: list[tuple[int, int]] = []
        while engine.has_work:
            for event in engine.step():
                tokens += event.token_ids
                if event.round is not None and event.round.budget > 0:
                    accepted = list(event.round.accepted)
                    rounds.append((event.round.budget, accepted[-1] if accepted else 0))
        return tokens, rounds

    expected, _ = decode(plain(), None)
    drafter = FakeDrafter(tiny_llama, [PROMPT + expected], accuracy=0.6)
    answer = KnownAnswer()
    answer.tell([*PROMPT, *expected])
    budget = UtilityBudget(answer, STEEP, 30, "price", may_rest=False)
    tokens, rounds = decode(DecodingPolicy("oracle", MarginalScorer(), budget, 4), drafter)
    assert tokens == expected
    assert len(rounds) > 3
    # The last of the verified nodes was worth verifying, but where the answer was cut off by its length.
    assert all(budget == last for budget, last in rounds[:-1])


def test_its_arm_has_the_learned_policys_cap() -> None:
    assert expand_arms(["oracle"], [8], 7) == [Arm("oracle", CADDTREE_CAP)]
    assert expand_arms(["graft", "oracle"], [8], 7, {"graft": 64}) == [Arm("graft", 64), Arm("oracle", 64)]
    assert Arm("oracle", 64).name == "oracle"
