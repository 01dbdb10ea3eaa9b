"""Models that can't be followed are refused at loading, by name and with the reason; others stay as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaForCausalLM, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import smcsample as smc
from smcsample.potentials import LM
from tiny_models import CONFIGS, SHAPE, V, tiny, tokenizer


def falcon() -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    return FalconForCausalLM(FalconConfig(**SHAPE))


def gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2))


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4))


def lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))


def llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    layers = ["chunked_attention", "full_attention"]
    return Llama4ForCausalLM(
        Llama4TextConfig(**SHAPE, head_dim=8, num_local_experts=2, layer_types=layers, attention_chunk_size=4)
    )


def latent_attention() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    changes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SHAPE, "num_key_value_heads": 4}, **changes, first_k_dense_replace=2)
    )


class Reticent(MistralForCausalLM):
    """Its mask slides; its attention function hears nothing of it. The trial is too short for that to show."""

    def __init__(self) -> None:
        super().__init__(CONFIGS["mistral with a window of 6"]())
        self.config.sliding_window = 100
        untold = copy.deepcopy(self.config)
        untold.sliding_window = None
        for layer in self.model.layers:
            layer.self_attn.config = untold


class Placeless(LlamaForCausalLM):
    """Counts positions itself."""

    def __init__(self) -> None:
        super().__init__(CONFIGS["llama"]())

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return super().forward(input_ids, use_cache=use_cache)


class Twice(LlamaForCausalLM):
    """Attends in its first layer only, twice."""

    def __init__(self) -> None:
        super().__init__(CONFIGS["llama"]())
        self.model.layers[1].self_attn = self.model.layers[0].self_attn


class Again(LlamaForCausalLM):
    """Attends twice in its first layer."""

    def __init__(self) -> None:
        super().__init__(CONFIGS["llama"]())
        attention: Any = self.model.layers[0].self_attn
        once = attention.forward
        attention.forward = lambda *args, **options: [once(*args, **options) for _ in range(2)][1]


def biased() -> Any:
    """A Llama with an attention function of the user's own, which prefers what is near."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        bias = torch.where(distance >= 0, -1.0 * distance, -torch.inf)
        return sdpa_attention_forward(module, q, k, v, bias[None, None], **options)

    AttentionInterface.register("nearer", attend)
    model = tiny("llama").model
    model.config._attn_implementation = "nearer"
    return model


REFUSED = {
    falcon: "FalconForCausalLM.*computes its attention itself instead of calling transformers' AttentionInterface",
    gpt_oss: r"GptOssForCausalLM.*the keywords \['s_aux'\], which attention to pages does not know",
    mamba: "MambaForCausalLM.*keeps more than keys and values",
    lfm2: r"Lfm2ForCausalLM.*keeps more than keys and values \(layers: conv\)",
    t5: "T5ForConditionalGeneration.*encoder–decoder.*needs a decoder-only model",
    llama4: r"Llama4ForCausalLM.*\(layers: chunked_attention\)",
    latent_attention: r"DeepseekV3ForCausalLM.*its keys \(1, 4, 4, 16\) and values \(1, 4, 4, 8\) differ in shape",
    Reticent: "Reticent.*a sliding window in layer 0 that it does not tell its attention function",
    Placeless: "Placeless.*takes no position_ids",
    Twice: r"Twice.*has 2 layers but attended 2 times, in layers \[0\]",
    Again: r"Again.*has 2 layers but attended 3 times, in layers \[0, 1\]",
    biased: r"LlamaForCausalLM.*gives other logits when its layers attend to pages \(off by",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_by_name_with_the_reason(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="^model mine .*" + REFUSED[make]):
        smc.load_model((model, tokenizer()), name="mine")
    assert model.config._attn_implementation == before


def test_attention_that_forgets_what_it_is_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but numbers shows it: a soft-cap that does not arrive."""
    from smcsample.lm import attention

    def forgets(*args: Any, softcap: float | None = None, **options: Any) -> Any:
        return attend(*args, **options)

    attend = attention.attend
    model = tiny("gemma2").model
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 50  # scores far above the cap
    smc.load_model((model, tokenizer()))
    monkeypatch.setattr(attention, "attend", forgets)
    with pytest.raises(ValueError, match="gives other logits"):
        smc.load_model((model, tokenizer()))


@pytest.mark.parametrize(("kind", "implementation"), [("llama", "sdpa"), ("gpt2", "eager"), ("gemma2", "eager")])
def test_the_model_works_as_before(kind: str, implementation: str) -> None:
    """After loading and sampling, and after a forward that failed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=implementation).eval()
    fresh = copy.deepcopy(model)
    lm = smc.load_model((model, tokenizer()))
    smc.sample([5, 6, 7], LM(lm), n_particles=3, max_new_tokens=4)
    assert model.config._attn_implementation == implementation
    assert as_used(model) == as_used(fresh)

    def fails(*args: Any) -> None:
        seen.append(model.config._attn_implementation)
        raise RuntimeError("the lights went out")

    seen: list[str] = []
    handle = model.get_submodule("transformer.h.1" if kind == "gpt2" else "model.layers.1").register_forward_pre_hook(
        fails
    )
    with pytest.raises(RuntimeError, match="the lights went out"):
        smc.sample([5, 6, 7], LM(lm), n_particles=3, max_new_tokens=4)
    handle.remove()
    assert seen[0] not in ("eager", "sdpa")  # it failed while it attended to pages
    assert model.config._attn_implementation == implementation
    assert as_used(model) == as_used(fresh)


def as_used(model: Any) -> list[list[int]]:
    """What a user's own call of it gives: two unequal prompts, sampled."""
    torch.manual_seed(1)
    ids, mask = torch.tensor([[1, 1, 5, 6, 7], [8, 9, 10, 11, 12]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    return model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=20).tolist()
