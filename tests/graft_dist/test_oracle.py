"""The oracle verifies what the answer goes through, and no more than pays."""

from __future__ import annotations

import numpy as np

from graft_dist.bench import CADDTREE_CAP, Arm, expand_arms
from graft_dist.budget import DraftState
from graft_dist.cost_curve import CostCurve
from graft_dist.draft_tree import build_tree
from graft_dist.engine import Engine
from graft_dist.oracle import KnownAnswer
from graft_dist.policy import DecodingPolicy, plain
from graft_dist.policy_maker import PolicyMaker
from graft_dist.rounds import RoundRecord
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import FakeDrafter
from tests.graft_dist.policies import make_policy

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


def maker(target: Target, drafter: FakeDrafter, cost: CostCurve) -> PolicyMaker:
    """A maker that knows a policy of this pair, with the drafter's own scores and 4 candidates."""
    learned = make_policy(None, target_fingerprint=target.fingerprint, drafter_fingerprint=drafter.fingerprint)
    return PolicyMaker(target, drafter, 4, learned=learned, cost=cost)


def decode(target: Target, drafter: FakeDrafter | None, policy: DecodingPolicy) -> tuple[list[int], list[RoundRecord]]:
    engine = Engine(target, drafter, policy, max_slots=1, record=drafter is not None)
    engine.add(PROMPT, PARAMS)
    tokens: list[int] = []
    rounds: list[RoundRecord] = []
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids
            rounds += [] if event.round is None else [event.round]
    return tokens, rounds


def test_decoding_with_it_gives_the_same_text_and_ends_each_tree_at_an_accepted_node(tiny_llama: Target) -> None:
    expected, _ = decode(tiny_llama, None, plain())
    drafter = FakeDrafter(tiny_llama, [PROMPT + expected], accuracy=0.6)
    answer = KnownAnswer()
    answer.tell([*PROMPT, *expected])
    tokens, rounds = decode(tiny_llama, drafter, maker(tiny_llama, drafter, STEEP).oracle(answer, 30))
    assert tokens == expected
    ends = [(one.budget, int(one.accepted[-1]) if len(one.accepted) else 0) for one in rounds if one.budget > 0]
    assert len(ends) > 3
    # The last of the verified nodes was worth verifying, but where the answer was cut off by its length.
    assert all(budget == last for budget, last in ends[:-1])


def test_it_drafts_every_round_also_where_drafting_has_never_paid(tiny_llama: Target) -> None:
    expected, _ = decode(tiny_llama, None, plain())
    drafter = FakeDrafter(tiny_llama, [PROMPT + expected], accuracy=0.1)
    answer = KnownAnswer()
    answer.tell([*PROMPT, *expected])
    dear = CostCurve((0, 1, 64), (10.0, 60.0, 130.0), "a draft costs five plain rounds")
    tokens, rounds = decode(tiny_llama, drafter, maker(tiny_llama, drafter, dear).oracle(answer, 30))
    assert tokens == expected and len(rounds) > 15
    assert all(len(one.candidate_ids) for one in rounds[:-1])  # the last one may have no room for a tree
    assert any(one.budget for one in rounds[8:])  # what is right is verified, however seldom it was


def test_its_arm_has_the_learned_policys_cap() -> None:
    assert expand_arms(["oracle"], [8], 7) == [Arm("oracle", CADDTREE_CAP)]
    assert expand_arms(["graft", "oracle"], [8], 7, {"graft": 64}) == [Arm("graft", 64), Arm("oracle", 64)]
    assert Arm("oracle", 64).name == "oracle"
