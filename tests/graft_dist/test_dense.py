"""Dense rounds say what decoding would have drafted and computed at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graft_dist import dense
from graft_dist.dense import ANCHORS_AT_ONCE, dense_rounds, draft_blocks
from graft_dist.drafter import DFlashDrafter, DFlashModel, DraftProposal
from graft_dist.edge_scorer import hidden_projection
from graft_dist.target import Target
from tests.conftest import tiny_drafter_config

PROMPT = [5, 9, 44, 130, 17, 201, 8]
NUM_CANDIDATES = 6


@pytest.fixture(scope="module")
def drafter(tiny_llama: Target) -> DFlashDrafter:
    torch.manual_seed(3)
    config = tiny_drafter_config(tiny_llama)
    return DFlashDrafter(DFlashModel(config), tiny_llama, "random")


def output_tokens(number: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 320, number).tolist()


def test_candidates_are_those_that_decoding_drafts_at_each_position(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    tokens = [*PROMPT, *output_tokens(ANCHORS_AT_ONCE + 9)]
    rounds = dense_rounds(tiny_llama, drafter, "s", PROMPT, tokens[len(PROMPT) :], NUM_CANDIDATES)
    assert [record.context_length for record in rounds] == list(range(len(PROMPT), len(tokens) - 1))
    assert [record.round_index for record in rounds] == list(range(len(rounds)))
    positions = torch.arange(len(tokens))[None]
    features = tiny_llama.forward(torch.tensor([tokens]), positions, None, None, drafter.target_layer_ids).features
    for record in rounds[:: ANCHORS_AT_ONCE // 3]:
        cache = drafter.new_cache(1, len(tokens))
        cache.add()
        anchor = record.context_length
        proposal = drafter.propose(cache, features[:, :anchor], [anchor], [tokens[anchor]], NUM_CANDIDATES)
        assert record.root_token == tokens[anchor]
        np.testing.assert_array_equal(record.candidate_ids, proposal.candidate_ids[0])
        np.testing.assert_allclose(record.candidate_log_probs, proposal.log_probs[0], atol=1e-4)
        assert 0 < record.conf < 1


def test_logits_are_the_targets_own_given_the_tokens_that_followed(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    tokens = [*PROMPT, *output_tokens(12)]
    rounds = dense_rounds(tiny_llama, drafter, "s", PROMPT, tokens[len(PROMPT) :], NUM_CANDIDATES)
    logits = tiny_llama.model(input_ids=torch.tensor([tokens])).logits[0].detach()
    for record in rounds:
        anchor = record.context_length
        assert record.followed.tolist() == tokens[anchor + 1 : anchor + 1 + drafter.draft_depth]
        assert record.parent_logits.shape == (len(record.followed), NUM_CANDIDATES)
        for depth, row in enumerate(record.parent_logits):
            expected = logits[anchor + depth]
            np.testing.assert_allclose(row, expected[record.candidate_ids[depth].tolist()].numpy(), atol=1e-4)
            assert record.parent_logsumexp[depth] == pytest.approx(float(expected.logsumexp(-1)), abs=1e-4)
    assert len(rounds[-1].followed) == 1


def test_a_later_token_changes_no_candidate_before_it(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    first = output_tokens(10)
    second = [*first[:7], (first[7] + 1) % 320, *first[8:]]
    ours = dense_rounds(tiny_llama, drafter, "s", PROMPT, first, NUM_CANDIDATES)
    theirs = dense_rounds(tiny_llama, drafter, "s", PROMPT, second, NUM_CANDIDATES)
    for a, b in zip(ours[:7], theirs[:7], strict=True):
        np.testing.assert_allclose(a.candidate_log_probs, b.candidate_log_probs, atol=1e-5)
    assert not np.allclose(ours[7].candidate_log_probs, theirs[7].candidate_log_probs, atol=1e-5)


@pytest.mark.parametrize("output", [[], [7]])
def test_an_answer_without_a_continuation_has_no_dense_round(
    tiny_llama: Target, drafter: DFlashDrafter, output: list[int]
) -> None:
    assert dense_rounds(tiny_llama, drafter, "s", PROMPT, output, NUM_CANDIDATES) == []


def test_hidden_states_are_those_that_the_gate_sees_when_decoding(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    """Projected, and in float16's precision; without a projection there are none."""
    projection = hidden_projection(drafter.fingerprint, tiny_llama.hidden_size, 5)
    output = output_tokens(6)
    tokens = [*PROMPT, *output]
    rounds = dense_rounds(tiny_llama, drafter, "s", PROMPT, output, NUM_CANDIDATES, projection)
    positions = torch.arange(len(tokens))[None]
    features = tiny_llama.forward(torch.tensor([tokens]), positions, None, None, drafter.target_layer_ids).features
    for record in rounds:
        cache = drafter.new_cache(1, len(tokens))
        cache.add()
        anchor = record.context_length
        proposal = drafter.propose(cache, features[:, :anchor], [anchor], [tokens[anchor]], NUM_CANDIDATES)
        assert record.hidden is not None and record.hidden.shape == (4, 5) and record.hidden.dtype == np.float32
        np.testing.assert_allclose(record.hidden, proposal.hidden[0] @ projection, atol=5e-3)
    assert dense_rounds(tiny_llama, drafter, "s", PROMPT, output, NUM_CANDIDATES)[0].hidden is None


def test_a_dense_round_has_no_tree_and_no_timings(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    record = dense_rounds(tiny_llama, drafter, "s", PROMPT, [4, 5, 6], NUM_CANDIDATES)[0]
    assert record.kind == "dense"
    assert (len(record.tree_tokens), record.budget, record.num_tokens, record.verify_ns, record.is_mismatch) == (
        0, 0, 0, 0, False,
    )  # fmt: skip


def test_there_is_none_where_decoding_would_not_draft(
    tiny_llama: Target, drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that ends beyond the drafter's positions is left out, one that has no finite scores too."""
    output, limit = output_tokens(20), len(PROMPT) + drafter.draft_depth + 5
    monkeypatch.setattr(DFlashDrafter, "max_positions", limit)
    rounds = dense_rounds(tiny_llama, drafter, "s", PROMPT, output, NUM_CANDIDATES)
    assert [record.context_length + drafter.draft_depth for record in rounds] == list(range(limit - 5, limit))
    whole = [*output, *output_tokens(9)]
    assert dense_rounds(tiny_llama, drafter, "s", [*PROMPT, *whole], output, NUM_CANDIDATES) == []
    monkeypatch.undo()

    def spoilt(*arguments: object) -> DraftProposal:
        proposal = draft_blocks(*arguments)  # type: ignore[arg-type]
        proposal.log_probs[3] = np.nan
        return proposal

    monkeypatch.setattr(dense, "draft_blocks", spoilt)
    rounds = dense_rounds(tiny_llama, drafter, "s", PROMPT, output, NUM_CANDIDATES)
    assert [record.round_index for record in rounds] == [0, 1, 2, *range(4, len(output) - 1)]


def test_more_candidates_than_there_are_words_are_all_of_them(tiny_llama: Target, drafter: DFlashDrafter) -> None:
    (record,) = dense_rounds(tiny_llama, drafter, "s", PROMPT, [4, 5], 10_000)
    assert record.candidate_ids.shape == (drafter.draft_depth, tiny_llama.vocab_size)
