"""Packed linear layers: the same weights, the same results but for rounding, and models that go on working."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import smcsample as smc
from smcsample.lm.packed import PackedLinear, pack_linears, packable
from smcsample.lm.quantized import QuantizedLinear, quantize_linears
from smcsample.potentials import LM
from tiny_models import tiny, tokenizer

BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randomised(layer: Any) -> Any:
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


LAYERS = {
    "linear": lambda: nn.Linear(37, 19, bias=False),
    "linear with a bias": lambda: nn.Linear(24, 65),
    "conv1d": lambda: Conv1D(51, 17),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_layer_computes_what_the_layer_did(kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not BF16:
        pytest.skip("this CPU does not multiply bfloat16")
    layer = randomised(LAYERS[kind]()).to(dtype)
    dense = layer.weight.detach().clone() if isinstance(layer, nn.Linear) else layer.weight.detach().t().clone()
    holder, before = nn.Sequential(layer), copy.deepcopy(layer)
    pack_linears(holder)
    packed = holder[0]
    assert isinstance(packed, PackedLinear)
    assert torch.equal(packed.weight, dense)
    assert packed.weight.dtype == dtype
    assert (packed.bias is None) == (layer.bias is None)
    for shape in ((1,), (8,), (33,), (3, 5), (2, 3, 4)):
        x = torch.randn(*shape, dense.shape[1]).to(dtype)
        y, wanted = packed(x), before(x)
        assert y.shape == wanted.shape
        assert y.dtype == dtype
        rtol, atol = (2e-2, 2e-1) if dtype == torch.bfloat16 else (1e-5, 1e-4)
        torch.testing.assert_close(y, wanted, rtol=rtol, atol=atol)


class Doubling(nn.Linear):
    """Not a plain linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_only_plain_layers_are_packed_and_a_shared_one_stays_one() -> None:
    shared = nn.Linear(6, 6)
    module = nn.ModuleDict(
        {"a": shared, "inner": nn.Sequential(nn.ReLU(), shared), "twice": Doubling(6, 6), "no": None}
    )
    x = torch.randn(4, 6)
    wanted, doubled = shared(x), module["twice"](x)
    pack_linears(module)
    assert isinstance(module["a"], PackedLinear)
    assert module["inner"][1] is module["a"]
    assert type(module["twice"]) is Doubling
    torch.testing.assert_close(module["inner"][1](x), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(module["twice"](x), doubled)
    once = module["a"]
    pack_linears(module)  # again: nothing is left to do
    assert module["a"] is once


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("gemma", True), ("gpt2", True), ("phi3", False)])
def test_a_packed_model_gives_the_same_logits_and_texts(kind: str, tied: bool) -> None:
    dense = tiny(kind)
    model = copy.deepcopy(dense.model)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    packed = smc.load_model((model, tokenizer()), pack=True)
    linears = [part for part in model.modules() if isinstance(part, (nn.Linear, Conv1D))]
    assert linears == []
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert torch.equal(model.get_output_embeddings().weight, dense.model.get_output_embeddings().weight)
    assert torch.equal(model.get_input_embeddings().weight, dense.model.get_input_embeddings().weight)

    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        assert (model(ids).logits - dense.model(ids).logits).abs().max() < 1e-4
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    torch.manual_seed(1)
    wanted = dense.model.generate(ids, **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, **options), wanted)
    options = {"n_particles": 4, "block_size": 3, "max_new_tokens": 12, "seed": 3}
    ours, theirs = (smc.sample([5, 6, 7], LM(lm) ** 2, **options) for lm in (packed, dense))
    assert ours.token_ids == theirs.token_ids
    assert (ours.log_weights - theirs.log_weights).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_model_is_quantised_as_the_dense_one(kind: str, bits: int) -> None:
    model = tiny(kind).model
    wanted = quantize_linears(model, bits)
    packed = copy.deepcopy(model)
    pack_linears(packed)
    quantised = quantize_linears(packed, bits)
    layers = [part for part in quantised.modules() if isinstance(part, QuantizedLinear)]
    expected = [part for part in wanted.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) == len(expected) > 0
    for ours, theirs in zip(layers, expected, strict=True):
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scale, theirs.scale)
    assert any(isinstance(part, PackedLinear) for part in packed.modules())  # left as it was
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(quantised(ids).logits, wanted(ids).logits)
        assert (packed(ids).logits - model(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(("pack", "packed"), [(None, True), (True, True), (False, False)])
def test_a_model_loaded_here_is_packed_unless_told_not_to(pack: bool | None, packed: bool, tmp_path: Path) -> None:
    lm = tiny("llama")
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    loaded = smc.load_model(tmp_path, device="cpu", pack=pack)
    assert any(isinstance(part, PackedLinear) for part in loaded.model.modules()) == packed
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert (loaded.model(ids).logits - lm.model(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(("pack", "packed"), [(None, False), (True, True), (False, False)])
def test_a_model_given_loaded_is_packed_only_if_told_to(pack: bool | None, packed: bool) -> None:
    loaded = smc.load_model((tiny("llama").model, tokenizer()), pack=pack)
    assert any(isinstance(part, PackedLinear) for part in loaded.model.modules()) == packed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_packing_where_it_does_not_help_is_an_error(dtype: torch.dtype) -> None:
    model = tiny("llama").model.to(dtype)
    assert not packable(model)
    with pytest.raises(ValueError, match=rf"pack = True, but it does not help {dtype} on cpu.*leave it out"):
        smc.load_model((model, tokenizer()), pack=True)
    assert not any(isinstance(part, PackedLinear) for part in model.modules())


def test_bfloat16_is_packed_only_where_the_cpu_multiplies_it() -> None:
    model = tiny("llama").model
    assert packable(model)
    assert packable(model.bfloat16()) == BF16
