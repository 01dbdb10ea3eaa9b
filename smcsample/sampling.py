"""The front door: `sample`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Unpack, overload

from smcsample.cohorts import run_in_cohorts
from smcsample.lm.prompt import Prompt
from smcsample.lm.stream import Model
from smcsample.potentials import Potential
from smcsample.progress import RoundProgress
from smcsample.proposals import Proposal
from smcsample.request import Options, check_request
from smcsample.sequence import Move
from smcsample.source import Source
from smcsample.text_posterior import TextPosterior


@overload
def sample(
    prompt: Prompt,
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    *,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> TextPosterior: ...
@overload
def sample(
    prompt: Sequence[Prompt],
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    *,
    progress: bool | None = None,
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
    memory_budget: float | None = None,
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
        memory_budget: bytes that keys, values and next-token laws may take; prompts that do not fit wait for others to
            finish. Default: half of what is free.

    Returns:
        A `TextPosterior`, or a list of them for a list of prompts.

    Raises:
        ValueError, TypeError: bad input, before any model runs.
        FloatingPointError: a model or potential gave NaN or +inf; the message says which, and where.
        PotentialError: a user's function inside a potential failed.

    Whatever ends a run early, Ctrl-C or an error in a potential, the exception carries the list `posteriors`: those of
    the prompts that had finished, None for the others.
    """
    request = check_request(
        prompt,
        target,
        proposal,
        n_particles=n_particles,
        block_size=block_size,
        max_new_tokens=max_new_tokens,
        resampling=resampling,
        ess_threshold=ess_threshold,
        seed=seed,
        move=move,
        source=source,
        memory_budget=memory_budget,
    )
    posteriors: list[TextPosterior | None] = [None] * len(request.ids)
    show = sys.stderr.isatty() if progress is None else progress
    with RoundProgress(max_new_tokens, len(request.ids), disabled=not show) as bar:
        try:
            for cohort, finished in run_in_cohorts(request):
                for place, posterior in finished.items():
                    posteriors[place] = posterior
                bar.update(cohort)
        except BaseException as error:
            _keep(error, posteriors)
            raise
    done = [posterior for posterior in posteriors if posterior is not None]
    return done[0] if request.single else done


def _keep(error: BaseException, posteriors: list[TextPosterior | None]) -> None:
    error.posteriors = posteriors  # pyright: ignore[reportAttributeAccessIssue]
    done = sum(posterior is not None for posterior in posteriors)
    if len(posteriors) > 1:
        error.add_note(f"{done} of {len(posteriors)} prompts had finished: this exception's `posteriors` has them")
