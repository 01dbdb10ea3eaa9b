"""Text of the answer as soon as it is certain: `stream`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from smcsample.cohorts import run_in_cohorts
from smcsample.lm.prompt import Prompt
from smcsample.lm.stream import Model
from smcsample.potentials import Potential
from smcsample.proposals import Proposal
from smcsample.request import Options, Request, check_request
from smcsample.sequence import Texts
from smcsample.text_posterior import TextPosterior


def stream(
    prompt: Prompt,
    target: Potential | Model,
    proposal: Proposal | Model | None = None,
    **options: Unpack[Options],
) -> TextStream:
    """Draw a continuation of one prompt as `sample` does, and give its text piece by piece.

        for piece in smc.stream("Once upon a time", LM(model) ** 4):
            print(piece, end="", flush=True)

    A piece comes as soon as all particles that can still become the answer begin with it, so none is ever taken back.
    With equal weights nobody is resampled away and everything comes at the end; a larger `ess_threshold` makes
    particles agree sooner.

    Args: those of `sample`, for one prompt.

    Raises:
        ValueError, TypeError: as `sample`, before any model runs; also a list of prompts, or a `move`.
        DeadPopulationError, FloatingPointError: on the way, as `sample` and `TextPosterior.text` do.
    """
    request = check_request(prompt, target, proposal, **options)
    if not request.single:
        raise ValueError(f"prompt is a list of {len(request.ids)} prompts; stream one at a time")
    if request.move is not None:
        raise ValueError(f"move = {request.move!r} changes text that was certain before; use `sample`, or leave it out")

    return TextStream(request)


class TextStream:
    """An iterator over the pieces of one answer; then `posterior` is there. Built by `stream`."""

    def __init__(self, request: Request) -> None:
        self._found: list[TextPosterior] = []
        self._pieces = filter(None, _pieces(request, self._found))

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def posterior(self) -> TextPosterior:
        """The posterior that the text was drawn from; its `text` is all pieces together.

        Raises:
            RuntimeError: the stream has not ended yet.
        """
        if not self._found:
            raise RuntimeError("the stream has not ended yet; iterate over it first")
        return self._found[0]


def _pieces(request: Request, found: list[TextPosterior]) -> Iterator[str]:
    # No method: the generator must not hold the stream, or one that is left early keeps its pages.
    certain = StableText()
    for cohort, finished in run_in_cohorts(request):
        if finished:
            found.append(finished[0])
            yield certain.rest(finished[0].text)
        else:
            tokens = shared_tokens(cohort.texts(0), cohort.step.log_weights[0])
            yield certain.further(request.models[0].decode(tokens))


def shared_tokens(texts: Texts, log_weights: Float[Tensor, " particle"]) -> list[int]:
    """The tokens that every particle of non-zero weight begins with. The answer will: it descends from one of them."""
    alive = log_weights > -torch.inf
    ids, lengths = texts.ids[alive], texts.lengths[alive]
    if len(ids) == 0:
        return []
    same = (ids == ids[0]).all(dim=0) & (torch.arange(ids.shape[1], device=ids.device) < lengths.min())
    return ids[0, : int(same.long().cumprod(dim=0).sum())].tolist()


class StableText:
    """Turns the texts of longer and longer prefixes into pieces. The end of a prefix that further tokens may still
    change, part of a character or a space that punctuation swallows, waits."""

    def __init__(self) -> None:
        self._given = ""

    def further(self, text: str) -> str:
        """What is new in the text of a prefix, as far as it is certain."""
        certain = text.rstrip("\ufffd").rstrip()
        return self._give(certain) if certain.startswith(self._given) else ""

    def rest(self, text: str) -> str:
        """What is new in the whole text."""
        if not text.startswith(self._given):
            raise RuntimeError(
                f"the tokenizer decodes the whole text to {text!r}, but a prefix of its tokens to {self._given!r}, so "
                "the text can't be streamed; use `sample`"
            )
        return self._give(text)

    def _give(self, text: str) -> str:
        piece, self._given = text[len(self._given) :], text
        return piece
