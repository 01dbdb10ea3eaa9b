"""Quantised copies: faithful to the model they were copied from, and harmless to it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from smcsample.lm.quantized import QuantizedLinear, quantize_linears

# 40, 56 and 50 are no multiples of 32 (inputs) or 16 (outputs): padding is always exercised.
VOCABULARY = 50


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=40,
        n_layer=2,
        n_head=4,
        n_inner=56,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


MODELS = {"llama": llama, "llama-tied": lambda: llama(tied=True), "gpt2": gpt2}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]()


def log_probs(model: nn.Module, rows: int = 6) -> Tensor:
    tokens = torch.randint(VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(tokens).logits.log_softmax(-1)


# Largest differences measured: int8 0.044, int4 0.50 (llama; less for the others).
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.1), (4, 1.0)])
def test_close_to_the_original_which_stays_untouched(model: nn.Module, bits: int, bound: float) -> None:
    before, state = log_probs(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draft = quantize_linears(model, bits)
    difference = (log_probs(draft) - before).abs().max().item()
    assert 0 < difference < bound
    assert torch.equal(log_probs(model), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(part, QuantizedLinear) for part in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_every_linear_layer_is_replaced_and_the_rest_is_shared(model: nn.Module) -> None:
    draft = quantize_linears(model, bits=4)
    kinds = {type(part).__name__ for part in draft.modules()}
    assert not kinds & {"Linear", "Conv1D"}
    layers = [part for part in draft.modules() if isinstance(part, QuantizedLinear)]
    assert draft.get_output_embeddings().bits == 8
    assert [layer.bits for layer in layers].count(4) == len(layers) - 1
    originals = dict(model.named_parameters())
    kept = dict(draft.named_parameters())
    assert draft.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    for name, parameter in kept.items():
        assert parameter.data_ptr() == originals[name].data_ptr(), name
        assert parameter is not originals[name]
        assert not parameter.requires_grad
    buffers = dict(model.named_buffers())
    for name, buffer in draft.named_buffers():
        if name in buffers:
            assert buffer.data_ptr() == buffers[name].data_ptr(), name


@pytest.mark.parametrize("bits", [4, 8])
def test_moving_or_casting_the_copy_leaves_the_original(bits: int) -> None:
    model = llama()
    before = log_probs(model)
    draft = quantize_linears(model, bits)
    log_probs(draft)
    draft.to(torch.bfloat16)
    assert log_probs(draft).dtype == torch.bfloat16
    draft.to("meta")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert torch.equal(log_probs(model), before)


@pytest.mark.parametrize("bits", [4, 8])
def test_pickle_copy_and_state_dict(bits: int) -> None:
    draft = quantize_linears(llama(), bits)
    expected = log_probs(draft)
    assert torch.equal(log_probs(pickle.loads(pickle.dumps(draft))), expected)
    assert torch.equal(log_probs(copy.deepcopy(draft)), expected)
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    other = quantize_linears(other, bits)
    log_probs(other)
    other.load_state_dict(draft.state_dict())
    assert torch.equal(log_probs(other), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_layer_multiplies_with_its_dequantised_weight(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(41, 23)
    quantised = quantize_linears(layer, bits)
    assert isinstance(quantised, QuantizedLinear)
    weight = quantised.dequantize()
    span = layer.weight.max(dim=1).values - layer.weight.min(dim=1).values
    assert ((weight - layer.weight).abs().max(dim=1).values <= span / (15 if bits == 4 else 127)).all()
    for shape in [(41,), (0, 41), (1, 41), (2, 3, 41), (20, 41)]:
        x = torch.randn(shape).to(dtype)
        y = quantised(x)
        assert y.dtype == dtype
        assert y.shape == (*shape[:-1], 23)
        exact = x.float() @ weight.t() + layer.bias
        torch.testing.assert_close(y.float(), exact, rtol=0, atol=0.03)


@pytest.mark.skipif(not hasattr(torch, "_int_mm"), reason="this torch has no int8 matrix product")
def test_planes_lose_nothing_to_outliers() -> None:
    torch.manual_seed(0)
    layer = QuantizedLinear(torch.randn(24, 64), None, 8)
    x = torch.randn(5, 64)
    x[:, 3] *= 300  # what ruins 8-bit activations
    x[4] = 0
    y, exact = layer._int8_planes(x), x @ layer.dequantize().t()
    torch.testing.assert_close(y, exact, rtol=1e-3, atol=0.3)
    assert torch.equal(y[4], torch.zeros(24))
    assert layer._int8_planes(torch.full((1, 64), float("nan"))).isnan().all()


def test_a_layer_used_twice_stays_one_layer() -> None:
    layer = nn.Linear(32, 32)
    draft = quantize_linears(nn.Sequential(layer, nn.ReLU(), layer))
    assert draft[0] is draft[2]


@pytest.mark.parametrize("bits", [0, 2, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=r"bits=.* is not a supported width: pass bits=8"):
        quantize_linears(nn.Linear(4, 4), bits)


def test_meta_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight '0\.weight' is on the meta device"):
        quantize_linears(nn.Sequential(nn.Linear(4, 4, device="meta")))
