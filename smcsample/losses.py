"""Losses over weighted completions, differentiable in a policy's parameters; the weights are constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from smcsample.lm.causal_lm import CausalLM

if TYPE_CHECKING:
    from smcsample.rlhf import Samples

KINDS = ("weighted_sft", "reinforce_loo")


def loss(samples: Samples, model: CausalLM | nn.Module, kind: str = "weighted_sft", temperature: float = 1.0) -> Tensor:
    """A scalar whose gradient in `model`'s parameters is one of these, π the model, per prompt:

    - "weighted_sft": −Σ_n W_n log π(x_n), weighted maximum likelihood; it estimates KL(σ‖π) up to a constant (Khalifa
      et al. 2021). At the π that drafted the target `LM(π) * Reward(r, β)` its gradient is −∇ log Z, that of the soft
      value.
    - "reinforce_loo": −Σ_n u_n (r_n − b_n) log π(x_n), the policy gradient of E_p[r] with a leave-one-out baseline
      b_n = Σ_{m≠n} u_m r_m / Σ_{m≠n} u_m (Kool et al. 2019; Ahmadian et al. 2024). u_n ∝ W_n p(x_n)/γ(x_n) takes the
      weights of the target back to those of its language model's law p, and is 1/N when p itself was sampled; texts of
      weight zero are left out. It needs a target with one `Reward`.

    Different completions go through the model once, in one batch padded on the right; log π is a sum over tokens, an
    end-of-sequence token among them.

    Args:
        samples: completions of one prompt.
        model: a `CausalLM`, or the Hugging Face model itself.
        temperature: of π.

    Raises:
        ValueError: an unknown kind; no language model or no single reward in the target, or fewer than two particles
            of positive weight, for "reinforce_loo".
        DeadPopulationError: no particle has any weight.
    """
    samples.require_alive()
    if kind == "weighted_sft":
        coefficients = samples.weights
    elif kind == "reinforce_loo":
        coefficients = _leave_one_out(samples)
    else:
        raise ValueError(f"kind = {kind!r} is unknown; use one of {', '.join(KINDS)}")
    log_probs = completion_log_probs(model, samples.prompt_ids, samples.token_ids, temperature)
    totals = torch.stack([tokens.sum() for tokens in log_probs])
    return -(coefficients.to(totals) * totals).sum()


def completion_log_probs(
    model: CausalLM | nn.Module,
    prompt_ids: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> list[Float[Tensor, " token"]]:
    """log π of each token of each completion, in float32 or wider, with gradients; one forward of the model.

    Raises:
        TypeError: a model that is neither a `CausalLM` nor a torch module.
        ValueError: no completion, or an empty one or an empty prompt.
    """
    if isinstance(model, CausalLM):
        module, vocab_size = model.model, model.vocab_size
    elif isinstance(model, nn.Module):
        module, vocab_size = model, None
    else:
        raise TypeError(f"model is a {type(model).__name__}; give a CausalLM or a Hugging Face model")
    if len(prompt_ids) == 0 or len(token_ids) == 0 or any(len(ids) == 0 for ids in token_ids):
        raise ValueError("prompt_ids and every one of token_ids need at least one token")
    device, longest = next(module.parameters()).device, max(map(len, token_ids))
    texts = torch.zeros(len(token_ids), longest, dtype=torch.long, device=device)
    mask = torch.zeros_like(texts)
    for row, ids in enumerate(token_ids):
        texts[row, : len(ids)] = torch.tensor(ids, device=device)
        mask[row, : len(ids)] = 1
    prompt = torch.tensor(prompt_ids, device=device).expand(len(texts), -1)
    logits = module(
        input_ids=torch.cat([prompt, texts], dim=1), attention_mask=torch.cat([torch.ones_like(prompt), mask], dim=1)
    ).logits
    logits = logits[:, len(prompt_ids) - 1 : -1, :vocab_size]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_probs = logits.log_softmax(dim=-1).gather(-1, texts[:, :, None])[:, :, 0]
    return [row[: len(ids)] for row, ids in zip(log_probs, token_ids, strict=True)]


def _leave_one_out(samples: Samples) -> Float[Tensor, " completion"]:
    """Σ of u_n (r_n − b_n) over the particles of each completion."""
    if samples.log_ratio is None or len(samples.rewards) != 1:
        raise ValueError(
            f"kind = 'reinforce_loo' needs a target with a language model and exactly one Reward, not {samples.target}"
        )
    alive = samples.index >= 0
    if int(alive.sum()) < 2:
        raise ValueError("kind = 'reinforce_loo' needs at least two particles of positive weight, for the baseline")
    (rewards,) = samples.rewards.values()
    rewards = rewards[alive]
    u = (samples.particle_log_weights - samples.log_ratio)[alive].softmax(dim=0)
    share, value = 1 - u, (u * rewards).sum() - u * rewards  # of all the others
    top = int(u.argmax())  # only here can most of the digits cancel
    rest = torch.arange(len(u)) != top
    share[top], value[top] = u[rest].sum(), (u * rewards)[rest].sum()
    baseline = value / share
    terms = u * (rewards - baseline)
    if not bool(torch.isfinite(terms).all()):
        raise ValueError("kind = 'reinforce_loo': one particle has all the weight, so there is no baseline for it")
    return torch.zeros(len(samples), dtype=terms.dtype).index_add(0, samples.index[alive], terms)
