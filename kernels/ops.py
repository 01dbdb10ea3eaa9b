"""The public names of `smcsample.kernels`."""

from __future__ import annotations

from smcsample.kernels.philox import Purpose, philox_4x32, uniform_float32, uniform_float64, words
from smcsample.kernels.reference.sampling import draw_tokens
from smcsample.kernels.runner import runner

__all__ = ["Purpose", "draw_tokens", "philox_4x32", "runner", "uniform_float32", "uniform_float64", "words"]
