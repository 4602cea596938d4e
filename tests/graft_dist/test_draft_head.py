"""The drafter's head over a part of the vocabulary: what is proposed, what is read, and that answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graft_dist.dense import dense_rounds
from graft_dist.draft_head import FILE_NAME, DraftHead, read_draft_vocabulary
from graft_dist.drafter import DFlashDrafter, load_drafter, save_drafter
from graft_dist.errors import DrafterError, TargetError
from graft_dist.policy import ddtree, plain
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.graft_dist.test_drafter import tiny_model
from tests.graft_dist.test_lossless import decode, prompts

SOME = list(range(3, 320, 4))


def test_a_part_of_the_vocabulary_gives_the_best_tokens_of_that_part(tiny_llama: Target) -> None:
    hidden = torch.randn(2, 3, tiny_llama.hidden_size, generator=torch.Generator().manual_seed(0))
    proposal = DraftHead(tiny_llama, SOME).propose(hidden, 5)
    logits = tiny_llama.lm_head(hidden)[..., SOME]
    expected = logits.log_softmax(dim=-1).sort(dim=-1, descending=True)
    np.testing.assert_array_equal(proposal.candidate_ids, np.array(SOME)[expected.indices[..., :5].numpy()])
    np.testing.assert_allclose(proposal.log_probs, expected.values[..., :5].detach().numpy(), atol=1e-5)


def test_no_more_candidates_than_tokens(tiny_llama: Target) -> None:
    hidden = torch.zeros(1, 2, tiny_llama.hidden_size)
    assert DraftHead(tiny_llama, [4, 9]).propose(hidden, 16).candidate_ids.shape == (1, 2, 2)


def test_the_biases_of_a_head_come_along(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(tiny_llama.hidden_size, tiny_llama.vocab_size)
    monkeypatch.setattr(tiny_llama, "_head", head)
    hidden = torch.randn(4, tiny_llama.hidden_size)
    torch.testing.assert_close(tiny_llama.lm_head_of(torch.tensor(SOME))(hidden), head(hidden)[:, SOME])


def test_a_head_that_cannot_be_taken_apart_is_refused(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llama, "_head", SimpleNamespace())
    with pytest.raises(TargetError, match="SimpleNamespace, whose rows cannot be taken apart"):
        DraftHead(tiny_llama, SOME)


def test_answers_do_not_depend_on_it(tiny_llama: Target) -> None:
    requests = [
        (prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for prompt in prompts(tiny_llama.vocab_size)
    ]
    expected = decode(tiny_llama, None, plain(), requests)[0]
    assert any(token not in SOME for answer in expected for token in answer)
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "untrained", SOME)
    for num_candidates in (16, 100):  # the second: more than it has tokens
        got, _, records = decode(tiny_llama, drafter, ddtree(60, num_candidates), requests, max_slots=3, record=True)
        assert got == expected
        drafted = {int(token) for per in records for record in per for token in record.tree_tokens[1:]}
        assert drafted and drafted <= set(SOME)


def test_dense_rounds_have_it_too(tiny_llama: Target) -> None:
    drafter = DFlashDrafter(tiny_model(tiny_llama), tiny_llama, "untrained", SOME)
    rounds = dense_rounds(tiny_llama, drafter, "s", [5, 9, 44], list(range(10, 20)), num_candidates=100)
    assert rounds and all(set(record.candidate_ids.flatten().tolist()) == set(SOME) for record in rounds)


def test_it_is_read_with_the_checkpoint_and_part_of_its_fingerprint(tiny_llama: Target, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_drafter(tiny_model(tiny_llama), folder, tokenizer_sha256=tiny_llama.tokenizer_sha256)
    assert read_draft_vocabulary(folder, tiny_llama.vocab_size) is None
    prints = {load_drafter(folder, tiny_llama).fingerprint}
    for token_ids in (SOME, SOME[1:]):
        (folder / FILE_NAME).write_text(json.dumps(token_ids))
        assert read_draft_vocabulary(folder, tiny_llama.vocab_size) == token_ids
        drafter = load_drafter(folder, tiny_llama)
        prints.add(drafter.fingerprint)
        ids = drafter.head.propose(torch.zeros(1, 1, tiny_llama.hidden_size), 320).candidate_ids
        assert sorted(ids.flatten().tolist()) == token_ids
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ("{}", "not a list of token ids"),
        ("[]", "not a list of token ids"),
        ("[1, true]", "not a list of token ids"),
        ("[1, 2.0]", "not a list of token ids"),
        ("[2, 1]", "must rise"),
        ("[1, 1]", "must rise"),
        ("[-1, 1]", "token ids -1 to 1, the target's vocabulary is 320"),
        ("[1, 320]", "token ids 1 to 320, the target's vocabulary is 320"),
    ],
)
def test_what_is_no_draft_vocabulary_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(DrafterError, match=message):
        read_draft_vocabulary(tmp_path, 320)
