"""Drawing and scoring tokens in plain PyTorch."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from smcsample.kernels.philox import exponential


def draw_tokens(log_weights: Float[Tensor, "row vocab"], words: Int[Tensor, "row vocab"]) -> Int[Tensor, " row"]:
    """One token per row with probability ∝ exp(log_weights), by Gumbel-max (`words`: 32 random bits per token).

    argmax_v (ℓ_v − log E_v) with E_v standard exponential. A token of weight −inf is never drawn; a row with no
    token of positive weight gives token 0, so the caller must look at its normaliser first.
    """
    return (log_weights - exponential(words).log()).argmax(dim=-1)
