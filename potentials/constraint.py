"""Constraints: the target restricted to a set of texts, with masks that keep proposals inside it.

A text of the set can end in two ways, and which one is meant changes the target:

`ends="constraint"` (default). Where the text is in the set and no token may follow, it ends there: nothing is paid for
an end. Where it is in the set and could go on, it ends if the model says so: EOS is a token like any other, with its
probability. So `Regex("(Paris|London)")` is the law p restricted to the two texts as prefixes, and `Regex("[0-9]+")`
has the model decide on the number of digits.

`ends="model"`. A text ends with the model's EOS only, always paid: the target is p restricted to complete texts that
are in the set. For a model that would rather go on, that is a factor such as exp(−18.8) for SmolLM2 after "The capital
of France is Paris".

Paying for the end has a trap. A finished particle has paid, an unfinished one has not, so resampling on the way kills
the finished ones. For ` (Paris|London|Lyon city)` after "The capital of France is", with EOS paid where it comes, token
by token, N = 256 and 600 seeds, Ẑ/Z had mean 0.41 ± 0.08, median 0.000 and maximum 30: unbiased and useless, and worse
than with N = 32. So the increment of an EOS is kept for the end of the group's run (`Potential.defers_end`): the target
is the same, the resampling compares prefixes with prefixes, and Ẑ/Z has mean 1.000 ± 0.001, median 0.999, maximum 1.1.
(`tests/test_paying_for_the_end.py` has the chain of all 288 tokenisations.)

A text cut at the length cap outside the set has weight zero. If no text of the set fits, the run's status is DEAD.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.guide import Guide
from smcsample.potentials.language import Language, State, Tracker

if TYPE_CHECKING:
    from smcsample.lm.stream import Model

Ends = Literal["constraint", "model"]


class Constraint(Potential):
    """1[the text is in a set], as a factor of the target and as a mask for proposals. Subclasses say which set."""

    ends: Ends

    @abstractmethod
    def language(self, model: Model) -> Language:
        """The set of texts over the tokens of `model`.

        Raises:
            ValueError: a tokenizer whose tokens can't be read as text.
        """

    def start(self, batch: Batch) -> ConstraintScorer:
        return ConstraintScorer(self._tracker(batch))

    def guide(self, batch: Batch) -> ConstraintGuide:
        return ConstraintGuide(self._tracker(batch), closes=self.ends == "constraint")

    @property
    def guides(self) -> bool:
        return True

    @property
    def defers_end(self) -> bool:
        return True

    def _tracker(self, batch: Batch) -> Tracker:
        def make() -> Tracker:
            tracker = Tracker(batch, self.language(batch.reader(self)))
            if self.ends == "constraint":
                batch.add_stop(tracker)
            return tracker

        return batch.shared(self, make)


def check_ends(ends: str) -> None:
    if ends not in get_args(Ends):
        raise ValueError(f"ends = {ends!r} is neither 'constraint' nor 'model'")


def shown_ends(ends: Ends) -> str:
    """For a `repr`: nothing if it is the default."""
    return "" if ends == "constraint" else f", ends={ends!r}"


class ConstraintScorer(Scorer):
    """0 for tokens that keep the text in reach of the set, −inf for others and for texts that end outside it."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        paths = self.tracker.read(block)
        eos = torch.isin(block.ids, self.tracker.batch.eos_ids).tolist()
        ends = block.ends.tolist()
        score = torch.zeros(block.ids.shape, dtype=torch.float64)
        for row, path in enumerate(paths):
            for step, state in enumerate(path[1:]):
                over = step == len(path) - 2 and ends[row]
                wrong = not state.accepting if over or eos[row][step] else not state.alive
                if wrong:
                    score[row, step] = -torch.inf
        return score.to(block.ids.device)

    def next_logits(self) -> Float[Tensor, "row vocab"]:
        return self.tracker.table(self.tracker.states)


class ConstraintGuide(Guide):
    """Looks ahead from the states that the rows have committed."""

    def __init__(self, tracker: Tracker, closes: bool) -> None:
        self.tracker, self.closes = tracker, closes
        self.states: list[State] = []

    def begin(self, start: int) -> None:
        self.states = list(self.tracker.states)

    def push(self, tokens: Int[Tensor, " row"], going: Bool[Tensor, " row"]) -> None:
        self.states = [
            self.tracker.follow(state, token) if goes else state
            for state, token, goes in zip(self.states, tokens.tolist(), going.tolist(), strict=True)
        ]

    def table(self) -> Float[Tensor, "row vocab"]:
        return self.tracker.table(self.states)

    def allows(self, rows: Int[Tensor, " asked"], tokens: Int[Tensor, " asked"]) -> Bool[Tensor, " asked"]:
        eos = torch.isin(tokens, self.tracker.batch.eos_ids).tolist()
        answers = []
        for row, token, ends in zip(rows.tolist(), tokens.tolist(), eos, strict=True):
            state = self.states[row]
            answers.append(state.accepting if ends else self.tracker.follow(state, token).alive)
        return torch.tensor(answers, dtype=torch.bool, device=tokens.device)

    def complete(self) -> Bool[Tensor, " row"] | None:
        if not self.closes:
            return None
        return torch.tensor(self.tracker.language.closes(self.states), device=self.tracker.batch.device)
