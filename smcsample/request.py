"""What a run was asked for, checked before any model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

from smcsample.algorithm import check_run
from smcsample.checks import integer
from smcsample.lm.compatible import check_compatible, check_ids
from smcsample.lm.prompt import Prompt, split
from smcsample.lm.stream import Model
from smcsample.potentials import LM, Potential
from smcsample.proposals import Draft, Proposal, default_proposal
from smcsample.sequence import Move
from smcsample.source import Source

LOGIT_COPIES = 3
"""Float32 tables of a round's next-token laws that exist at once, as measured (benchmarks/engine.py --memory)."""


class Options(TypedDict, total=False):
    """The keyword arguments of `sample` and `stream`, for type checkers."""

    n_particles: int
    block_size: int
    max_new_tokens: int
    resampling: str
    ess_threshold: float
    seed: int | Sequence[int]
    move: Move | None
    source: Source | None
    memory_budget: float | None


class Prepared(NamedTuple):
    """Token ids of every prompt, whether a single prompt was given, a target, a proposal matched to it, and all models,
    the target's first."""

    ids: list[list[int]]
    single: bool
    target: Potential
    proposal: Proposal
    models: list[Model]


@dataclass(frozen=True)
class Request:
    """A run's arguments in their final form; see `smcsample.sample`. `ids`: one list of token ids per prompt."""

    ids: list[list[int]]
    single: bool
    target: Potential
    proposal: Proposal
    models: list[Model]
    n_particles: int
    block_size: int
    max_new_tokens: int
    resampling: str
    ess_threshold: float
    source: Source
    memory_budget: float
    move: Move | None

    def bytes_for(self, group: int) -> float:
        """An upper bound on the memory of one prompt: keys and values of particles that share nothing but the prompt,
        in a pool that grew by half, and the laws of a round. A move follows the texts twice more beside the run."""
        round_tokens = self.block_size + 1
        generated = self.n_particles * (self.max_new_tokens + round_tokens)
        total = 0.0
        for model in self.models:
            total += 1.5 * model.bytes_per_token * (len(self.ids[group]) + round_tokens + generated)
            total += 4 * LOGIT_COPIES * self.n_particles * round_tokens * model.vocab_size
        return total if self.move is None else 3 * total


def check_request(
    prompt: Prompt | Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    *,
    n_particles: int = 8,
    block_size: int = 7,
    max_new_tokens: int = 128,
    resampling: str = "systematic",
    ess_threshold: float = 0.5,
    seed: int | Sequence[int] = 0,
    move: Move | None = None,
    source: Source | None = None,
    memory_budget: float | None = None,
) -> Request:
    """The request these arguments make; see `smcsample.sample`.

    Raises:
        ValueError, TypeError: bad input.
    """
    check_run(n_particles, len(split(prompt)[0]), resampling, ess_threshold, source)
    block_size = integer("block_size", block_size, 0, "use 0 to draw every token from the target's own law")
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    ids, single, target, proposal, models = prepare(prompt, target, proposal, max_new_tokens)
    if move is not None:
        move.check(proposal)
    source = source or Source(seed, len(ids), n_particles, models[0].device)
    if memory_budget is None:
        memory_budget = 0.5 * available_memory(models[0].device)
    elif not memory_budget > 0:
        raise ValueError(
            f"memory_budget = {memory_budget} is not a positive number of bytes; None: half of what is free"
        )
    request = Request(
        ids,
        single,
        target,
        proposal,
        models,
        n_particles,
        block_size,
        max_new_tokens,
        resampling,
        ess_threshold,
        source,
        memory_budget,
        move,
    )
    for group in range(len(ids)):
        name = "prompt" if single else f"prompt {group}"
        if request.bytes_for(group) > memory_budget:
            raise ValueError(
                f"{name}: {len(ids[group])} tokens and {n_particles} particles × {max_new_tokens} new tokens may take "
                f"{_gigabytes(request.bytes_for(group))}, more than memory_budget = {_gigabytes(memory_budget)}; use "
                "fewer particles, fewer tokens or a larger budget"
            )
    return request


def available_memory(device: torch.device) -> float:
    """Bytes free for new tensors on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kilobytes[0] if kilobytes else 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def prepare(
    prompt: Prompt | Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None,
    max_new_tokens: int,
) -> Prepared:
    """What to draw from and with what, checked and completed by the defaults.

    Raises:
        ValueError, TypeError: as `sample`.
    """
    prompts, single = split(prompt)
    target = target if isinstance(target, Potential) else LM(target)
    if proposal is None:
        proposal = default_proposal(target)
    elif not isinstance(proposal, Proposal):
        proposal = Draft(proposal)
    proposal = proposal.matched_to(target)
    models = _models(target, proposal)
    names = ["prompt"] if single else [f"prompt {i}" for i in range(len(prompts))]
    ids = [_encoded(one, name, models, max_new_tokens) for one, name in zip(prompts, names, strict=True)]
    return Prepared(ids, single, target, proposal, models)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _models(target: Potential, proposal: Proposal) -> list[Model]:
    """Every model of the run, the target's first.

    Raises:
        ValueError: no model, models that do not fit together, or several in the target that end texts differently.
    """
    models = list(dict.fromkeys((*target.models, *proposal.models)))
    if not models:
        raise ValueError(
            f"target {target!r} with proposal {proposal!r} names no language model; add LM(model) or Draft(model)"
        )
    check_compatible(models)
    first = models[0]
    for other in target.models:
        if other.eos_ids != first.eos_ids:
            raise ValueError(
                f"the target's models end texts differently: {first.name} at {first.eos_ids}, {other.name} at "
                f"{other.eos_ids}; use models that agree (a draft alone may differ)"
            )
    return models


def _encoded(prompt: Prompt, name: str, models: list[Model], max_new_tokens: int) -> list[int]:
    try:
        ids = models[0].encode(prompt)
        check_ids(ids, models, max_new_tokens)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return ids
