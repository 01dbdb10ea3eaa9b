"""The front door: `sample`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack, overload

import torch

from smcsample.algorithm import Step, check_run, run
from smcsample.checks import integer
from smcsample.history import histories
from smcsample.lm.compatible import check_compatible, check_ids
from smcsample.lm.prompt import Prompt, split
from smcsample.lm.stream import Model
from smcsample.potentials import LM, Potential
from smcsample.progress import RoundProgress
from smcsample.proposals import Draft, Proposal, default_proposal
from smcsample.sequence import Move, SequenceModel
from smcsample.source import Source
from smcsample.text_posterior import TextPosterior


class Options(TypedDict, total=False):
    """The keyword arguments of `sample`, for type checkers."""

    n_particles: int
    block_size: int
    max_new_tokens: int
    resampling: str
    ess_threshold: float
    seed: int | Sequence[int]
    move: Move | None
    progress: bool | None
    source: Source | None


class Prepared(NamedTuple):
    """What a run needs, checked: token ids of every prompt, whether a single prompt was given, a target, a proposal
    matched to it, and all models, the target's first."""

    ids: list[list[int]]
    single: bool
    target: Potential
    proposal: Proposal
    models: list[Model]


@overload
def sample(
    prompt: Prompt, target: Potential | Model, proposal: Proposal | Model | None = None, **options: Unpack[Options]
) -> TextPosterior: ...
@overload
def sample(
    prompt: Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    **options: Unpack[Options],
) -> list[TextPosterior]: ...
def sample(
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
    progress: bool | None = None,
    source: Source | None = None,
) -> TextPosterior | list[TextPosterior]:
    """Draw continuations of a prompt from a composed target, as N weighted particles.

    Each round the proposal drafts `block_size` tokens per particle, every factor of the target scores them, one bonus
    token comes from the target itself, and particles are resampled when their weights have grown too unequal
    (SMC speculative decoding: Emara et al. 2026, arXiv 2604.15672).

    Args:
        prompt: text, chat messages, token ids, or a list of these. Text is tokenised as it is; for a chat model's
            template pass messages, `[{"role": "user", "content": "…"}]`.
        target: what to draw from: a product of potentials such as `LM(m) ** 4`. A bare model m stands for `LM(m)`.
        proposal: what drafts, such as `Draft(small_model)`; a bare model stands for that. Default: the target's own
            model at temperature T/α, for `LM(m, T) ** α`.
        n_particles: N, particles per prompt: more is closer to the target.
        block_size: K, drafted tokens per round (a round emits K + 1). Larger is faster with a cheap draft, and adds
            variance. 0: every token is a bonus token, drawn from the target's own next-token law.
        max_new_tokens: length cap. A text cut there counts as a sample of the target's prefixes of that length.
        resampling: a scheme of `smcsample.resampling.SCHEMES`.
        ess_threshold: τ in [0, 1]: a prompt's particles are resampled when their ESS is below τ·N.
        seed: one integer (prompt i is stream i of it), or one per prompt (then a prompt's result does not depend on
            its place in the list).
        move: makes particles differ again after resampling: `MCMC(…)`.
        progress: show a progress bar on stderr. Default: only on a terminal.
        source: where random numbers come from, instead of a seed.

    Returns:
        A `TextPosterior`, or a list of them for a list of prompts.

    Raises:
        ValueError, TypeError: bad input, before any model runs.
        FloatingPointError: a model or potential gave NaN or +inf; the message says which, and where.
    """
    check_run(n_particles, len(split(prompt)[0]), resampling, ess_threshold, source)
    block_size = integer("block_size", block_size, 0, "use 0 to draw every token from the target's own law")
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, "ask for at least one token")
    ids, single, target, proposal, models = prepare(prompt, target, proposal, max_new_tokens)
    main = models[0]

    model = SequenceModel(
        ids,
        target,
        proposal,
        block_size=block_size,
        max_new_tokens=max_new_tokens,
        eos_ids=main.eos_ids,
        move=move,
    )
    source = source or Source(seed, len(ids), n_particles, main.device)
    steps: list[Step] = []
    final = None
    show = sys.stderr.isatty() if progress is None else progress
    with RoundProgress(max_new_tokens, len(ids), disabled=not show) as bar:
        for final in run(
            model, n_particles, n_groups=len(ids), resampling=resampling, ess_threshold=ess_threshold, source=source
        ):
            steps.append(replace(final, state=None))
            bar.update(final)
    assert final is not None
    assert final.state is not None
    texts = model.texts(final.state)
    posteriors = [
        TextPosterior(ids[g], texts[g], main, history, source.take(torch.tensor([g], device=source.device)))
        for g, history in enumerate(histories(steps))
    ]
    return posteriors[0] if single else posteriors


def prepare(
    prompt: Prompt | Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None,
    max_new_tokens: int,
) -> Prepared:
    """The arguments of `sample`, checked and completed by the defaults.

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
