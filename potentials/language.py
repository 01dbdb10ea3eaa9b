"""Sets of texts as machines that read tokens: states, the sets' common protocol, and the states of a batch's rows.

States are immutable and shared: rows with the same tokens stand in the same state, so a resampling copies references,
and what a state knows (the tokens it allows) is worked out once. A state holds its children and not its parent: once no
row stands above it, a branch that nobody took is freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from smcsample.lm.batch import Batch, Block


@dataclass(slots=True, eq=False)
class State:
    """Where a text stands in a set of texts.

    `accepting`: the text is in the set. `alive`: False if it begins no text of the set. `inner`: what the language
    needs to go on from here. `bits`: the tokens that may follow, one bit each, least significant first, end-of-sequence
    ids left out; None until asked for.
    """

    accepting: bool
    inner: Any
    alive: bool = True
    bits: NDArray[np.uint8] | None = None
    children: dict[int, State] = field(default_factory=dict)


DEAD = State(accepting=False, inner=None, alive=False)
"""The state of every text that begins no text of the set."""


class Language(ABC):
    """A set of texts over one model's tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @abstractmethod
    def root(self) -> State:
        """The state of the empty text, a new one at each call.

        Raises:
            ValueError: no text is in the set, or none that the tokens can spell.
        """

    @abstractmethod
    def step(self, state: State, token: int) -> State:
        """The state after one more token, `DEAD` if the token may not follow."""

    @abstractmethod
    def fill(self, states: list[State]) -> None:
        """Work out `bits` of these states."""

    def child(self, state: State, token: int) -> State:
        if not state.alive:
            return DEAD
        if token not in state.children:
            state.children[token] = self.step(state, token)
        return state.children[token]

    def know(self, states: Iterable[State]) -> None:
        """Fill whatever is not yet filled, all at once and each state once."""
        unknown = list({id(state): state for state in states if state.alive and state.bits is None}.values())
        if unknown:
            self.fill(unknown)

    def closes(self, states: list[State]) -> list[bool]:
        """Whether a text is complete here because it is in the set and no token may follow."""
        self.know(state for state in states if state.accepting)
        return [state.accepting and state.bits is not None and not state.bits.any() for state in states]

    def mask(self, states: list[State]) -> Bool[Tensor, "row vocab"]:
        """The tokens that may follow, end-of-sequence ids left out."""
        self.know(states)
        nothing = np.zeros((self.vocab_size + 7) // 8, dtype=np.uint8)
        packed = np.stack([nothing if state.bits is None else state.bits for state in states])
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=self.vocab_size, bitorder="little")).bool()


def packed(mask: Bool[Tensor, " vocab"]) -> NDArray[np.uint8]:
    """One bit per token, as `State.bits` holds them."""
    return np.packbits(mask.numpy(), bitorder="little")


class Tracker:
    """Where each row of a batch stands in a language; the batch moves it with the rows (`Follower`), and it can end
    texts where the language closes (`Stop`)."""

    def __init__(self, batch: Batch, language: Language) -> None:
        self.batch, self.language = batch, language
        self.states = [language.root()] * batch.n_rows
        self._read: tuple[int, list[list[State]]] | None = None

    def read(self, block: Block) -> list[list[State]]:
        """Commit a block: for every row the states before it and after each of its valid tokens, where EOS changes
        nothing. Reading the same block again gives the same answer."""
        if self._read is None or self._read[0] != block.start:
            paths = self._paths(block.ids, block.valid)
            self.states = [path[-1] for path in paths]
            self._read = block.start, paths
        return self._read[1]

    def completes(self, ids: Int[Tensor, "row step"], going: Bool[Tensor, "row step"]) -> Bool[Tensor, "row step"]:
        paths = self._paths(ids, going)
        closed = iter(self.language.closes([state for path in paths for state in path[1:]]))
        found = torch.zeros_like(going)
        for row, path in enumerate(paths):
            for step in range(len(path) - 1):
                found[row, step] = next(closed)
        return found

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self.states = [self.states[row] for row in ancestors.tolist()]
        self._read = None

    def table(self, states: list[State]) -> Float[Tensor, "row vocab"]:
        """0 for the tokens that may follow and, where the text may end, for the end-of-sequence ids; −inf elsewhere."""
        mask = self.language.mask(states)
        eos = self.batch.eos_ids.cpu()
        mask[:, eos] = torch.tensor([state.accepting for state in states])[:, None].expand(-1, len(eos))
        return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf).to(self.batch.device)

    def follow(self, state: State, token: int) -> State:
        """The state after one more token of any kind."""
        return state if token in self._eos else self.language.child(state, token)

    @property
    def _eos(self) -> set[int]:
        return set(self.batch.eos_ids.tolist())

    def _paths(self, ids: Int[Tensor, "row step"], going: Bool[Tensor, "row step"]) -> list[list[State]]:
        eos, paths = self._eos, []
        for state, tokens, count in zip(self.states, ids.tolist(), going.sum(dim=1).tolist(), strict=True):
            path = [state]
            for token in tokens[:count]:
                state = state if token in eos else self.language.child(state, token)
                path.append(state)
            paths.append(path)
        return paths
