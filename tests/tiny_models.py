"""Tiny random Hugging Face models with a tokenizer, made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import smcsample as smc

WORDS = ["<eos>", "<pad>", *"abcdefghijklmnopqrstuvwxyz", *(f"w{i}" for i in range(36))]
V = len(WORDS)


@cache
def tokenizer(size: int = V, eos: bool = True) -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(WORDS[:size])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<pad>"} | ({"eos_token": "<eos>"} if eos else {})
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
# Windows are short and caps are low, so that a model that forgets about them gives quite other logits.
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2 with a window of 5": lambda: Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=12),
    "mistral with a window of 6": lambda: MistralConfig(**SHAPE, sliding_window=6),
    "phi3": lambda: Phi3Config(**SHAPE),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=8),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, head_dim=8, query_pre_attn_scalar=12, sliding_window=6, attn_logit_softcapping=1.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=0),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE),
    "opt": lambda: OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=24),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


def tiny(kind: str = "llama", seed: int = 0, eos: bool = True, **changes: Any) -> smc.CausalLM:
    """A random model; its weights are scaled so that laws are far from uniform. Without `eos` no id ends a text."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    if not eos:
        model.generation_config.eos_token_id = None
    return smc.load_model((model, tokenizer(eos=eos)))
