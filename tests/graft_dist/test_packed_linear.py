"""Packed linear layers compute what plain ones do, and everything else about a model stays as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graft_dist.packed_linear import PackedLinear, pack_linears
from tests.conftest import PACKED_DTYPES

ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96, bias=False), nn.SiLU(), nn.Sequential(nn.Linear(96, 32))).to(dtype)


@PACKED_DTYPES
@pytest.mark.parametrize("shape", [(1, 48), (9, 48), (130, 48), (2, 3, 48), (0, 48)])
def test_packed_layers_give_the_same_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain, packed = model(dtype), model(dtype)
    pack_linears(packed)
    rows = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        expected, found = plain(rows), packed(rows)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])


@PACKED_DTYPES
def test_rows_that_do_not_lie_side_by_side_are_read_right(dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 40, bias=False).to(dtype)
    rows = torch.randn(3, 8, 64).to(dtype)
    with torch.no_grad():
        for some in (rows[:, 1:], rows.transpose(0, 1), rows[..., ::2]):
            own = linear if some.shape[-1] == 64 else nn.Linear(32, 40).to(dtype)
            expected = F.linear(some, own.weight, own.bias)
            torch.testing.assert_close(PackedLinear(own)(some), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])


@PACKED_DTYPES
def test_names_and_weights_stay_and_gradients_still_flow(dtype: torch.dtype) -> None:
    plain, packed = model(dtype), model(dtype)
    pack_linears(packed)
    assert {type(layer) for layer in packed.modules() if isinstance(layer, nn.Linear)} == {PackedLinear}
    states = [each.state_dict() for each in (plain, packed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows = [torch.ones(4, 48, dtype=dtype, requires_grad=True) for _ in range(2)]
    for each, own in zip((plain, packed), rows, strict=True):
        each(own).sum().backward()
    assert rows[0].grad is not None and rows[1].grad is not None
    torch.testing.assert_close(rows[1].grad, rows[0].grad)


def test_other_layers_and_dtypes_are_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    for each in (model(torch.float64), model(torch.float16), nn.Sequential(Scaled(8, 8))):
        pack_linears(each)
        assert not any(isinstance(layer, PackedLinear) for layer in each.modules())
