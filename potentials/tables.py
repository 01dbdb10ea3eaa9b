"""Factors that weigh single tokens, whatever comes before them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.lm.stream import Model
from smcsample.lm.token_bytes import ids_that_spell
from smcsample.potentials.base import Potential, Scorer
from smcsample.potentials.guide import Guide

Token = int | str


@dataclass(frozen=True, repr=False)
class Bias(Potential):
    """exp(Σ_t b(x_t)): every occurrence of a token multiplies the target by exp of its bias.

    The bias is part of the target and of the proposal, unlike a logit bias, which is renormalised away at every step.

    Args:
        biases: from token to log-weight, −inf included. A token is an id, or a string: then every id that spells just
            that. To weigh a text however it is tokenised, use a reward.

    Raises:
        TypeError: not a mapping from ids or strings to numbers.
        ValueError: no tokens, NaN or +inf; when a run starts: an id outside the vocabulary, a string that is no token.
    """

    biases: tuple[tuple[Token, float], ...]

    def __init__(self, biases: Mapping[Token, float]) -> None:
        if not isinstance(biases, Mapping):
            raise TypeError(f"biases is a {type(biases).__name__}; give a dict from tokens to log-weights")
        _check_tokens("biases", biases)
        for token, bias in biases.items():
            if not bias < math.inf:
                raise ValueError(f"biases gives {token!r} the log-weight {bias}; it must be finite or -inf")
        object.__setattr__(self, "biases", tuple(sorted(biases.items(), key=repr)))

    @property
    def guides(self) -> bool:
        return True

    def start(self, batch: Batch) -> TableScorer:
        return TableScorer(batch, _table(batch, self, dict(self.biases)))

    def guide(self, batch: Batch) -> TableGuide:
        return TableGuide(batch, _table(batch, self, dict(self.biases)))

    def __repr__(self) -> str:
        return f"Bias({dict(self.biases)!r})"


@dataclass(frozen=True, repr=False)
class Ban(Potential):
    """Texts without these tokens.

    Args:
        tokens: ids, or strings: then every id that spells just that. A banned word can still be spelt by other tokens;
            to keep a text out however it is tokenised, use a `Regex`, or `Where`.

    Raises:
        TypeError: not ids or strings.
        ValueError: no tokens; when a run starts: an id outside the vocabulary, a string that is no token.
    """

    tokens: tuple[Token, ...]

    def __init__(self, tokens: Token | Iterable[Token]) -> None:
        tokens = (tokens,) if isinstance(tokens, (int, str)) else tuple(tokens)
        _check_tokens("tokens", tokens)
        object.__setattr__(self, "tokens", tuple(sorted(set(tokens), key=repr)))

    @property
    def guides(self) -> bool:
        return True

    def start(self, batch: Batch) -> TableScorer:
        return TableScorer(batch, _table(batch, self, dict.fromkeys(self.tokens, -math.inf)))

    def guide(self, batch: Batch) -> TableGuide:
        return TableGuide(batch, _table(batch, self, dict.fromkeys(self.tokens, -math.inf)))

    def __repr__(self) -> str:
        return f"Ban({list(self.tokens)!r})"


class TableScorer(Scorer):
    """The same table for every row and position."""

    def __init__(self, batch: Batch, table: Float[Tensor, " vocab"]) -> None:
        self.batch, self.table = batch, table

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        return self.table[block.ids]

    def next_logits(self) -> Float[Tensor, "row vocab"]:
        return self.table.expand(self.batch.n_rows, -1)


class TableGuide(Guide):
    """The same table for every row and position."""

    def __init__(self, batch: Batch, table: Float[Tensor, " vocab"]) -> None:
        self.batch, self.values = batch, table

    def begin(self, start: int) -> None:
        """Nothing to follow."""

    def push(self, tokens: Int[Tensor, " row"], going: Bool[Tensor, " row"]) -> None:
        """Nothing to follow."""

    def table(self) -> Float[Tensor, "row vocab"]:
        return self.values.expand(self.batch.n_rows, -1)


def _check_tokens(name: str, tokens: Iterable[Token]) -> None:
    tokens = list(tokens)
    if not tokens:
        raise ValueError(f"{name} is empty; give at least one token, or leave the factor out")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, (int, str)):
            raise TypeError(f"{name} has {token!r}, a {type(token).__name__}; give token ids or strings")


def _table(batch: Batch, potential: Potential, values: dict[Token, float]) -> Float[Tensor, " vocab"]:
    model = batch.reader(potential)
    table = torch.zeros(model.vocab_size, dtype=torch.float64)
    for token, value in values.items():
        table[_ids(model, potential, token)] += value
    return table.to(batch.device)


def _ids(model: Model, potential: Potential, token: Token) -> list[int]:
    if isinstance(token, int):
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"{potential!r}: token id {token} is outside the vocabulary 0 … {model.vocab_size - 1}")
        return [token]
    ids = ids_that_spell(model).get(token.encode())
    if ids is None:
        raise ValueError(f"{potential!r}: no single token of {model.name} spells {token!r}; give ids, or use a Regex")
    return ids
