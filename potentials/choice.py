"""One of a few given texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from smcsample.lm.token_bytes import ids_that_spell, token_bytes
from smcsample.potentials.constraint import Constraint, Ends, check_ends, shown_ends
from smcsample.potentials.language import DEAD, Language, State

if TYPE_CHECKING:
    from smcsample.lm.stream import Model


@dataclass(frozen=True, repr=False)
class Choice(Constraint):
    """The whole continuation is one of these texts, in any tokenisation.

    A text begins where the prompt ends: after "The answer is" most models want `Choice([" yes", " no"])`. Where one
    text begins another, as " no" and " not", the model's EOS decides whether the shorter one ends there.

    Args:
        texts: the texts; their order does not matter.
        ends: "constraint" or "model", see `smcsample.potentials.constraint`.

    Raises:
        TypeError: not several strings.
        ValueError: no texts, or an empty one; when a run starts: a tokenizer that can't be read, or tokens that can't
            spell any of the texts.
    """

    texts: tuple[str, ...]
    ends: Ends = "constraint"

    def __init__(self, texts: Iterable[str], ends: Ends = "constraint") -> None:
        if isinstance(texts, str):
            raise TypeError(f"texts = {texts!r} is one string; give a list of strings")
        texts = tuple(texts)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"texts = {list(texts)!r}; give a list of strings")
        if not texts or "" in texts:
            raise ValueError(f"texts = {list(texts)!r}; give at least one text, and no empty one")
        check_ends(ends)
        object.__setattr__(self, "texts", tuple(sorted(set(texts))))
        object.__setattr__(self, "ends", ends)

    def language(self, model: Model) -> ChoiceLanguage:
        return ChoiceLanguage(self, model)

    def __repr__(self) -> str:
        return f"Choice({list(self.texts)!r}{shown_ends(self.ends)})"


class ChoiceLanguage(Language):
    """A state is what is left of each text that is still possible."""

    def __init__(self, choice: Choice, model: Model) -> None:
        super().__init__(model.vocab_size)
        self.choice, self.bytes, self.ids = choice, token_bytes(model), ids_that_spell(model)
        self.longest = max(map(len, self.ids))

    def root(self) -> State:
        state = State(accepting=False, inner=frozenset(text.encode() for text in self.choice.texts))
        if not any(self._spelt(rest, self.ids) for rest in state.inner):
            raise ValueError(f"the model's tokens can spell none of {self.choice!r}; every weight would be zero")
        return state

    def step(self, state: State, token: int) -> State:
        piece = self.bytes[token]
        rest = frozenset(text[len(piece) :] for text in state.inner if piece and text.startswith(piece))
        return State(accepting=b"" in rest, inner=rest) if rest else DEAD

    def fill(self, states: list[State]) -> None:
        for state in states:
            mask = np.zeros(self.vocab_size, dtype=bool)
            for text in state.inner:
                for n in range(1, min(len(text), self.longest) + 1):
                    mask[self.ids.get(text[:n], [])] = True
            state.bits = np.packbits(mask, bitorder="little")

    @staticmethod
    def _spelt(text: bytes, ids: dict[bytes, list[int]]) -> bool:
        """Whether some tokens one after the other are this text."""
        reached = {0}
        for end in range(1, len(text) + 1):
            if any(start in reached and text[start:end] in ids for start in range(end)):
                reached.add(end)
        return len(text) in reached
