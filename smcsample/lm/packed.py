"""Linear layers with their weights in oneDNN's own layout: on a CPU, a few rows then cost about half as much.

PyTorch multiplies by row-major weights, which for the few rows of a decoding step is far from what the memory could
deliver; oneDNN's layout is made for it. SmolLM2-135M's layers on one core with AVX512, milliseconds per step of all of
them (benchmarks/packed.py):

    rows                      1     4     8     32    64
    PyTorch, float32         36    56    68    130   217
    packed, float32          34    28    39     94   169
    packed, bfloat16         13    14    20     50    89
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

ROWS = 8
"""What oneDNN is told to expect; the layout it then takes serves any number of rows (see the table above)."""


def packable(model: Any) -> bool:
    """Whether `pack_linears` can help: a CPU, a build with oneDNN, and a dtype that this CPU multiplies."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return model.dtype == torch.float32 or (model.dtype == torch.bfloat16 and bf16)


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` and transformers `Conv1D` in place: for inference only, and the dense weights go.

    The weights keep their values and results differ by rounding only. Subclasses of `nn.Linear` are left alone.
    """
    replaced: dict[int, PackedLinear] = {}  # a layer used in two places stays one layer
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            weight = None if child is None or isinstance(child, PackedLinear) else dense_weight(child)
            if child is not None and weight is not None:
                if id(child) not in replaced:
                    replaced[id(child)] = PackedLinear(weight, child._parameters["bias"])
                parent._modules[name] = replaced[id(child)]
    _return_freed_memory()


def _return_freed_memory() -> None:
    # The dense weights were many blocks between others, which glibc keeps: 400 MB of 540 for SmolLM2-135M.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def dense_weight(layer: Any) -> Float[Tensor, "out in"] | None:
    """The weight of a linear layer, None for any other. Subclasses may compute something else, so they do not count."""
    if type(layer) in (nn.Linear, PackedLinear):
        return layer.weight
    conv = sys.modules.get("transformers.pytorch_utils")  # not imported: no layer can be a Conv1D
    if conv is not None and type(layer) is conv.Conv1D:
        return layer.weight.t()
    return None


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W in oneDNN's layout, for inference.

    Args:
        weight: on a CPU, float32 or bfloat16; not kept.
        bias: kept as it is.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The weights, unpacked: a copy."""
        return self.packed.to_dense()

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
