"""transformers' own methods say what it says without them, and its drafter of our weights proposes what ours does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graft_dist.bench import PEERS
from graft_dist.drafter import DFlashDrafter, DFlashModel
from graft_dist.engine import Engine
from graft_dist.generate import Request, answer_all
from graft_dist.peer import assistance
from graft_dist.policy import chain
from graft_dist.reference import Reference
from graft_dist.sampling import SamplingParams
from graft_dist.target import Target
from tests.conftest import tiny_drafter_config

GREEDY = SamplingParams(max_new_tokens=24)
# The end of the prompt stands in it before, so that lookup has something to copy.
REQUEST = Request("p", "chat", [7, 8, 9, 10, 11, 12, 13, 7, 8, 9])


@pytest.fixture(scope="module")
def drafter(tiny_llama: Target) -> DFlashDrafter:
    torch.manual_seed(3)
    return DFlashDrafter(DFlashModel(tiny_drafter_config(tiny_llama)), tiny_llama, "random")


@pytest.fixture(scope="module")
def reference(tiny_folder: Callable[[str], Path]) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    return Reference(model, GREEDY, eos_token_ids=(2,))


@pytest.mark.parametrize("method", PEERS)
def test_a_peer_gives_the_plain_answer_and_counts_its_rounds(
    method: str, drafter: DFlashDrafter, reference: Reference
) -> None:
    answer = reference.answer(REQUEST, 24, assistance(method, drafter))
    assert answer.token_ids == reference.generate(REQUEST.token_ids, [], 24)
    assert sum(answer.acceptance_lengths) == len(answer.token_ids) - 1
    assert (answer.num_drafted > 0) == (method != "hf")


def test_transformers_drafts_what_our_drafter_does(
    drafter: DFlashDrafter, reference: Reference, tiny_llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    propose = drafter.propose

    def watched(*arguments: Any) -> Any:
        proposal = propose(*arguments)
        ours.append(proposal.hidden[0].clone())
        return proposal

    monkeypatch.setattr(drafter, "propose", watched)
    helped = assistance("hf-dflash", drafter)
    assert helped.model is not None
    helped.model.register_forward_hook(lambda _model, _inputs, out: theirs.append(out.last_hidden_state[0, 1:]))
    peer = reference.answer(REQUEST, 24, helped)
    [own] = answer_all(Engine(tiny_llama, drafter, chain(), max_slots=1), [REQUEST], GREEDY)
    assert peer.token_ids == own.token_ids
    assert peer.acceptance_lengths == own.acceptance_lengths
    assert len(theirs) > 5
    for mine, other in zip(ours, theirs, strict=False):  # near the end the two stop drafting at other lengths
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
