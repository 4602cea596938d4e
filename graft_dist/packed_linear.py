"""Linear layers whose weights are laid out once for oneDNN's matrix products: bfloat16 and float32 on a CPU.

PyTorch hands its libraries plain rows, and every product lays them out anew; for the few rows of a round that costs as
much as the product itself. Inductor's `freezing` prepacks weights in the same way, but needs half a minute of
compilation for every shape; this needs none. In bfloat16 the numbers are the same (the same kernels on the same
values), in float32 they differ in rounding, as they do between any two numbers of rows.

Owns the layer and the swap. The price is memory: plain weights stay beside packed ones, for everything that reads them.
"""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.nn.functional as F
from torch import nn

_TYPICAL_ROWS = 16
"""Rows that oneDNN chooses the layout for: those of a small draft tree. Others work with the same layout."""

_MOST_FLOAT32_ROWS = 100
"""In float32 more rows than these (a prompt) are multiplied faster by the plain weight: docs/performance.md."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` on a CPU that multiplies by a packed copy of its weight, bfloat16 or float32.

    Parameters and their names stay as they were; a change of them after packing is not seen. Where a gradient is wanted
    it computes as `nn.Linear` does.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
        self._most_rows = _MOST_FLOAT32_ROWS if linear.weight.dtype == torch.float32 else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out], both of the weight's dtype."""
        has_many_rows = self._most_rows is not None and input.numel() > self._most_rows * self.in_features
        if input.numel() == 0 or has_many_rows or (torch.is_grad_enabled() and input.requires_grad):
            return F.linear(input, self.weight, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module, but: Container[nn.Module] = ()) -> None:
    """Swap every plain linear layer of `model` that can be packed, in place; elsewhere nothing changes.

    Those in `but` stay: others multiply by their weights.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child not in but:  # subclasses (quantised, adapters) compute otherwise
                setattr(parent, name, packed(child))


def packed(linear: nn.Linear) -> nn.Linear:
    """A plain linear layer packed, or itself where it cannot be."""
    return PackedLinear(linear) if can_be_packed(linear) else linear


def can_be_packed(linear: nn.Linear) -> bool:
    """Whether oneDNN has packed products for its device and dtype."""
    return linear.weight.device.type == "cpu" and linear.weight.dtype in _packed_dtypes()


def _packed_dtypes() -> set[torch.dtype]:
    is_native = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if is_native is None or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return set()  # a build without oneDNN
    # Without bfloat16 instructions nothing would be gained there.
    return {torch.float32, torch.bfloat16} if is_native() else {torch.float32}
