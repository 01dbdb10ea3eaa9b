"""Small models with no symmetry, and their targets by enumeration, written without the library."""

from __future__ import annotations

import itertools
import math

import smcsample as smc

EOS = 2


def target_lm(name: str = "target") -> smc.TabularLM:
    return smc.TabularLM([0.5, 0.3, 0.2], [[0.55, 0.3, 0.15], [0.2, 0.45, 0.35], [0.6, 0.1, 0.3]], EOS, name=name)


def draft_lm(name: str = "draft") -> smc.TabularLM:
    return smc.TabularLM([0.25, 0.35, 0.4], [[0.3, 0.45, 0.25], [0.5, 0.3, 0.2], [0.1, 0.7, 0.2]], EOS, name=name)


def sequences(max_new_tokens: int, vocab: int, eos: int) -> list[tuple[int, ...]]:
    """Every finished continuation: ended by its first EOS, or cut at the cap."""
    found = []
    for length in range(1, max_new_tokens + 1):
        for ids in itertools.product(range(vocab), repeat=length):
            ended = ids[-1] == eos
            if eos not in ids[:-1] and (ended or length == max_new_tokens):
                found.append(ids)
    return found


def probability(lm: smc.TabularLM, last: int | None, ids: tuple[int, ...]) -> float:
    """∏ p(x_t | x_{t−1}) after a prompt that ends in `last`."""
    p, table = 1.0, lm.transition.tolist()
    for token in ids:
        p *= (lm.initial.tolist() if last is None else table[last])[token]
        last = token
    return p


def unnormalised(weights: dict[smc.TabularLM, float], last: int, max_new_tokens: int) -> dict[tuple[int, ...], float]:
    """∏_i p_i(x)^α_i of every finished continuation."""
    (vocab, eos), *_ = {(lm.vocab_size, lm.eos_ids[0]) for lm in weights}
    return {
        ids: math.prod(probability(lm, last, ids) ** a for lm, a in weights.items())
        for ids in sequences(max_new_tokens, vocab, eos)
    }
