"""Linear layers whose weights are laid out once for oneDNN's matrix products: bfloat16 on a CPU.

PyTorch hands oneDNN plain rows, and every product lays them out anew; for the few rows of a round that costs as much as
the product itself. Inductor's `freezing` prepacks weights in the same way, but needs half a minute of compilation for
every shape; this needs none. The numbers that come out are the same: the same kernels on the same values.

Owns the layer and the swap. The price is memory: plain weights stay beside packed ones, for everything that reads them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_TYPICAL_ROWS = 16
"""Rows that oneDNN chooses the layout for: those of a small draft tree. Others work with the same layout."""


class PackedLinear(nn.Linear):
    """An `nn.Linear` in bfloat16 on a CPU that multiplies by a packed copy of its weight.

    Parameters and their names stay as they were; a change of them after packing is not seen. Where a gradient is wanted
    it computes as `nn.Linear` does.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out], bfloat16."""
        if input.numel() == 0 or (torch.is_grad_enabled() and input.requires_grad):
            return F.linear(input, self.weight, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module) -> None:
    """Swap every plain linear layer of `model` that can be packed, in place; elsewhere nothing changes."""
    # Builds without oneDNN have neither; without bfloat16 instructions nothing would be gained.
    is_native = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if is_native is None or not is_native() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses (quantised layers, adapters) compute something else.
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))
