"""Where texts end: at a string or a pattern, and not at the length cap."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.guide import Guide
from smcsample.potentials.language import Language, State, Tracker

if TYPE_CHECKING:
    from smcsample.lm.stream import Model


@dataclass(frozen=True, repr=False)
class StopAt(Potential):
    """The text ends with the first token after which it contains one of the stops; nothing is paid for that end.

    Stops are looked for in the generated text, not in the prompt, and may lie across tokens. The token that completes a
    stop is part of the text whole: `StopAt(".")` may give "Yes.\\n" if a token ".\\n" came. An EOS before any stop ends
    the text as usual. `finish_reasons` says "stop".

    Args:
        stops: a string, several, or a compiled pattern (`re.compile(…)`), which is searched in the text so far: a `$`
            in it means "so far".

    Raises:
        TypeError: something else.
        ValueError: no stops, an empty one, a pattern that the empty text has already.
    """

    stops: tuple[str, ...] | re.Pattern[str]

    def __init__(self, stops: str | Sequence[str] | re.Pattern[str]) -> None:
        if not isinstance(stops, re.Pattern):
            stops = (stops,) if isinstance(stops, str) else tuple(stops)
            if not all(isinstance(stop, str) for stop in stops):
                raise TypeError(f"stops = {stops!r}; give a string, a list of strings, or re.compile(…)")
            if not stops or "" in stops:
                raise ValueError(f"stops = {list(stops)!r}; give at least one string, and no empty one")
        elif not isinstance(stops.pattern, str):
            raise TypeError(f"stops = {stops!r} is a pattern of bytes; give one of text")
        elif stops.search(""):
            raise ValueError(f"stops = {stops!r} matches the empty text, which would end before its first token")
        object.__setattr__(self, "stops", stops)

    def start(self, batch: Batch) -> StopScorer:
        def make() -> Tracker:
            tracker = Tracker(batch, StopLanguage(self.stops, batch.reader(self)))
            batch.add_stop(tracker)
            return tracker

        return StopScorer(batch.shared(self, make))

    def __repr__(self) -> str:
        return f"StopAt({self.stops if isinstance(self.stops, re.Pattern) else list(self.stops)!r})"


class StopScorer(Scorer):
    """Follows the tokens; weighs nothing."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        self.tracker.read(block)
        return torch.zeros(block.ids.shape, dtype=torch.float64, device=block.ids.device)


class StopLanguage(Language):
    """Every text; it closes where it contains a stop. A state keeps the token ids."""

    def __init__(self, stops: tuple[str, ...] | re.Pattern[str], model: Model) -> None:
        super().__init__(model.vocab_size)
        self.stops, self.model = stops, model

    def root(self) -> State:
        return State(accepting=False, inner=())

    def step(self, state: State, token: int) -> State:
        ids = (*state.inner, token)
        text = self.model.decode(ids).rstrip("\ufffd")  # the last token may end inside a character
        if isinstance(self.stops, re.Pattern):
            found = self.stops.search(text) is not None
        else:
            found = any(stop in text for stop in self.stops)
        return State(accepting=found, inner=ids)

    def fill(self, states: list[State]) -> None:
        """Any token may follow: there is no mask to work out."""

    def closes(self, states: list[State]) -> list[bool]:
        return [state.accepting for state in states]


@dataclass(frozen=True)
class Complete(Potential):
    """1[the text is not cut at the length cap].

    Without it a text that is cut there is a sample of the target's prefixes of that length. With it the target is that
    of complete texts of at most `max_new_tokens` tokens, their EOS included: at the last place proposals draw EOS, and
    the weight pays its probability (unless a constraint or a `StopAt` can end texts there, too).
    """

    @property
    def guides(self) -> bool:
        return True

    def start(self, batch: Batch) -> CompleteScorer:
        return CompleteScorer(batch)

    def guide(self, batch: Batch) -> CompleteGuide:
        return CompleteGuide(batch)


class CompleteScorer(Scorer):
    """−inf for the last token of a text that is cut."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.position = batch, 0
        self.vocab_size = batch.reader(Complete()).vocab_size

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        self.position = block.stop
        eos = torch.isin(block.ids, self.batch.eos_ids) & block.valid
        cut = block.ends & ~block.stopped & ~eos.any(dim=1)
        score = torch.zeros(block.ids.shape, dtype=torch.float64, device=block.ids.device)
        score[:, -1] = score[:, -1].masked_fill(cut, -torch.inf)
        return score

    def next_logits(self) -> Float[Tensor, "row vocab"]:
        return last_place(self.batch, self.position, self.vocab_size)


class CompleteGuide(Guide):
    """Knows the position."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.position = batch, 0
        self.vocab_size = batch.reader(Complete()).vocab_size

    def begin(self, start: int) -> None:
        self.position = start

    def push(self, tokens: Int[Tensor, " row"], going: Bool[Tensor, " row"]) -> None:
        self.position += 1

    def table(self) -> Float[Tensor, "row vocab"]:
        return last_place(self.batch, self.position, self.vocab_size)


def last_place(batch: Batch, position: int, vocab_size: int) -> Float[Tensor, "row vocab"]:
    """−inf for all but EOS at the last position before the cap, if nothing else can end a text there."""
    table = torch.zeros(vocab_size, device=batch.device)
    if position == batch.max_new_tokens - 1 and not batch.has_stops:
        table = table.fill_(-torch.inf).index_fill_(0, batch.eos_ids, 0.0)
    return table.expand(batch.n_rows, -1)
