"""A weight-only int8 or int4 copy of a decoder, cheap enough to draft for the model it was copied from.

Only weights are rounded; activations keep 8 significant bits or more. (Rounding activations to int8 as well is what
`torch.ao` dynamic quantisation does, and it ruins decoders, whose activations have outliers.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from smcsample.lm.causal_lm import CausalLM
from smcsample.lm.packed import PackedLinear, dense_weight

_GROUP = 32
"""Inputs that share an int4 scale. Rows are padded with zeros to a multiple of it: torch's kernels read past the end of
rows that are not a multiple of 16 long."""


def quantized(model: CausalLM, bits: int = 8) -> CausalLM:
    """A weight-only `bits`-bit copy of a model, to draft for it: any model can draft for itself.

    See `quantize_linears` for what is copied, what is shared, and what it was measured to cost.

    Raises:
        ValueError: `bits` is neither 4 nor 8, or a weight is on the meta device.
    """
    return CausalLM(quantize_linears(model.model, bits), model.tokenizer, f"{model.name} int{bits}")


def quantize_linears(module: nn.Module, bits: int = 8) -> nn.Module:
    """A copy of `module` with every `nn.Linear`, packed or not, and transformers `Conv1D`, the output head too, in
    `bits`-bit integers.

    `module` is left as it was, and the copy shares the storage of everything that is not replaced (embeddings, norms,
    biases): changing those values in place changes both, moving or casting either one does not touch the other. The
    copy is for inference: none of its parameters requires a gradient.

    With `bits=8` a layer has one scale per output and takes 1 byte per weight. With `bits=4` groups of 32 inputs have a
    scale and an offset (0.6 bytes per weight, and on a CPU 0.6 more for the layout its kernel wants); the output head
    stays int8, for 4 bits there cost 0.09 of acceptance and save 0.02 to 0.04 of a float32 step.

    Measured with SmolLM2-135M (benchmarks/quantized.py --rivals, one core with AVX512): a decode step takes 0.74
    (`bits=8`) or 0.41 (`bits=4`) of float32's time for 1 row, 0.69 or 0.53 for 8 rows. The acceptance Σ min(p, q) is
    0.96 with `bits=8`. With `bits=4` it is 0.71, or 0.98 if the checkpoint is itself 4-bit in groups of 32 (that
    model's GGUF Q4_1). For fewer than 5 rows a bfloat16 × int8 product would be faster still, but would make a row's
    law depend on how many rows stand beside it. These times are of a model that is not packed: float32 layers that are
    (`smcsample.lm.packed`) are faster than int8 ones, whose step of 8 rows takes 1.2 times as long.

    Integers save time on a CPU only: elsewhere weights are dequantised at each call, for less memory and more time.
    Experts kept as one stacked parameter, and subclasses of `nn.Linear`, are not replaced.

    Raises:
        ValueError: `bits` is neither 4 nor 8, or a weight is on the meta device.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits={bits!r} is not a supported width: pass bits=8 (near-lossless) or bits=4 (smaller)")
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"module: the weight {name!r} is on the meta device; load the whole model into memory")
        # A Parameter of its own on the same storage: `Module.to` swaps `Parameter.data` in place, so one shared
        # Parameter would move the original along.
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    for part in module.modules():
        if (loader := vars(part).get("hf_quantizer")) is not None:  # nothing to copy, and not always copyable
            memo[id(loader)] = loader
        if isinstance(part, PackedLinear):  # is replaced, so its copy is never used
            memo[id(part.packed)] = part.packed
    clone = copy.deepcopy(module, memo)

    output_embeddings: Any = getattr(clone, "get_output_embeddings", None)  # every Hugging Face model has it
    head = None if output_embeddings is None else output_embeddings()
    replaced: dict[int, nn.Module] = {}  # a layer used in two places stays one layer
    for parent in [nn.ModuleDict({"root": clone}), *clone.modules()]:
        for name, child in parent._modules.items():
            weight = None if child is None else dense_weight(child)
            if child is None or weight is None:
                continue
            if id(child) not in replaced:
                replaced[id(child)] = QuantizedLinear(weight, child.bias, 8 if child is head else bits)
            parent._modules[name] = replaced[id(child)]
    return replaced.get(id(clone), clone)


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W in int8 (one scale per output) or int4 (a scale and an offset per 32 inputs).

    Args:
        weight: (out, in), floating; not kept.
        bias: (out,) or None; kept as it is, not copied.
        bits: 4 or 8.

    `scale` (and `offset`) are bfloat16, the kernels' type; weights are rounded to the grid *after* the scales are.
    Inputs of any floating type and shape (..., in); the output has the input's type.
    """

    codes: Int8[Tensor, "out in_padded"] | UInt8[Tensor, "out half_padded"]
    scale: Float[Tensor, "out groups"]
    offset: Float[Tensor, "out groups"] | None
    bias: nn.Parameter | None

    def __init__(self, weight: Float[Tensor, "out in"], bias: nn.Parameter | None, bits: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        with torch.no_grad():
            padded = F.pad(weight.detach().float(), (0, -self.in_features % _GROUP))
            codes, scale, offset = _to_int8(padded) if bits == 8 else _to_int4(padded)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)
        self.register_parameter("bias", bias)
        self._packed: tuple[Tensor, Tensor] | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The weights that this layer multiplies with."""
        if self.offset is None:
            weight = self.codes.to(dtype) * self.scale.to(dtype)
        else:
            grouped = self._nibbles().unflatten(1, (-1, _GROUP))
            weight = (grouped.to(dtype) - 8) * self.scale.to(dtype)[..., None] + self.offset.to(dtype)[..., None]
        return weight.reshape(self.out_features, -1)[:, : self.in_features]

    def _nibbles(self) -> UInt8[Tensor, "out in_padded"]:
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if x.device.type != "cpu":
            return F.linear(x, self.dequantize(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        rows = F.pad(x.reshape(-1, self.in_features), (0, -self.in_features % _GROUP)).contiguous()
        if len(rows) == 0:
            y = rows.new_zeros(0, self.out_features)
        elif self.bits == 4:
            y = self._int4(rows)
        elif _vnni():
            y = self._int8_planes(rows)
        else:
            y = torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), self.codes, self.scale.bfloat16().view(-1))
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _int8_planes(self, rows: Float[Tensor, "row in_padded"]) -> Float[Tensor, "row out"]:
        """Rows as top·(high + low/254)/127 with int8 planes high and low (16 bits together), so that the whole product
        runs on the CPU's int8 dot product and still rounds nothing but the weights."""
        n_rows = len(rows)
        rows = rows.float()
        top = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True)
        scaled = rows * (127 / top.clamp_min(1e-30))
        high = scaled.round()
        planes = torch.cat((high, (scaled - high).mul_(254).round_())).to(torch.int8)
        product = torch._int_mm(planes, self.codes.t())
        y = torch.add(product[:n_rows].float(), product[n_rows:], alpha=1 / 254)
        return y.mul_(top / 127).mul_(self.scale.view(-1))

    def _int4(self, rows: Float[Tensor, "row in_padded"]) -> Float[Tensor, "row out"]:
        if self._packed is None:  # the layout depends on the CPU, so it is never saved
            assert self.offset is not None
            rest = -self.out_features % 16  # the kernel wants outputs in sixteens
            codes = F.pad(self._nibbles().int(), (0, 0, 0, rest))
            table = F.pad(torch.stack((self.scale, self.offset), dim=-1).bfloat16(), (0, 0, 0, 0, 0, rest))
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            self._packed = codes, table.transpose(0, 1).contiguous()
        codes, table = self._packed
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.bfloat16(), codes, _GROUP, table)
        return y[:, : self.out_features]

    def _apply(self, *args: Any, **kwargs: Any) -> QuantizedLinear:
        self._packed = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, bias={self.bias is not None}"


def _to_int8(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, "out 1"], None]:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-30).bfloat16()
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale, None


def _to_int4(
    weight: Float[Tensor, "out in"],
) -> tuple[UInt8[Tensor, "out half"], Float[Tensor, "out groups"], Float[Tensor, "out groups"]]:
    """weight ≈ (code - 8)·scale + offset, two codes a byte, the first in the low half."""
    grouped = weight.unflatten(1, (-1, _GROUP))
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    scale = ((high - low) / 15).clamp_min(1e-30).bfloat16()
    offset = (low + 8 * scale.float()).bfloat16()
    codes = ((grouped - offset[..., None].float()) / scale[..., None] + 8).round_().clamp_(0, 15).to(torch.uint8)
    codes = codes.flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale, offset


def _vnni() -> bool:
    """Whether the CPU multiplies int8 fast (AVX512 VNNI). Not public in torch, so its absence means no."""
    return getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
