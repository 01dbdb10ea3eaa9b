"""A model whose tokens spell texts in several ways, and its constrained targets by brute force on strings."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable

import pytest

import smcsample as smc
from smcsample.potentials import Potential
from smcsample.proposals import Draft
from tabular_models import probability
from tracing import walk_batch

TOKENS = ("a", "b", "<eos>", "ab", "ba")
EOS = 2
P = smc.TabularLM(
    [0.3, 0.2, 0.1, 0.25, 0.15],
    [
        [0.2, 0.3, 0.1, 0.15, 0.25],
        [0.35, 0.1, 0.2, 0.25, 0.1],
        [0.1, 0.2, 0.3, 0.15, 0.25],
        [0.25, 0.15, 0.05, 0.35, 0.2],
        [0.15, 0.3, 0.25, 0.1, 0.2],
    ],
    EOS,
    tokens=TOKENS,
    name="target",
)
Q = smc.TabularLM(
    [0.2] * 5,
    [
        [0.3, 0.1, 0.2, 0.25, 0.15],
        [0.2, 0.25, 0.15, 0.1, 0.3],
        [0.2] * 5,
        [0.1, 0.2, 0.3, 0.15, 0.25],
        [0.25, 0.2, 0.1, 0.3, 0.15],
    ],
    EOS,
    tokens=TOKENS,
    name="draft",
)
Law = dict[tuple[int, ...], float]


def language(pattern: str, longest: int) -> set[str]:
    """The texts over {a, b} that match, up to a length."""
    texts = ("".join(t) for n in range(longest + 1) for t in itertools.product("ab", repeat=n))
    return {text for text in texts if re.fullmatch(pattern, text)}


def constrained(allowed: Callable[[str], bool], begins: Callable[[str], bool], cap: int, ends: str) -> Law:
    """Every complete token sequence of the set, and whether an EOS closes it, by trying all of them.

    `allowed(text)`: it is in the set; `begins(text)`: some text of the set begins with it."""
    found: Law = {}
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        ids = waiting.pop()
        text = "".join(TOKENS[i] for i in ids)
        following = [t for t in range(5) if t != EOS and begins(text + TOKENS[t])]
        inside = allowed(text)
        if ids and inside and not following and ends == "constraint":
            found[ids] = 1.0
        elif len(ids) == cap:
            if inside:
                found[ids] = 1.0
        else:
            if inside:
                found[(*ids, EOS)] = 1.0
            waiting += [(*ids, t) for t in following]
    return found


def regex_law(pattern: str, cap: int, ends: str, weights: dict[smc.TabularLM, float], last: int) -> Law:
    """γ of the target ∏ LM ** α * Regex(pattern)."""
    texts = language(pattern, 2 * cap + 4)
    begun = {text[:n] for text in texts for n in range(len(text) + 1)}
    support = constrained(texts.__contains__, begun.__contains__, cap, ends)
    return {ids: math.prod(probability(lm, last, ids) ** a for lm, a in weights.items()) for ids in support}


def check(target: Potential, gamma: dict[int, Law], cap: int, **options: object) -> int:
    """Walk every outcome of two particles, for prompts of one token, and compare E[Ẑ Σ_n W_n 1{x_n = x}] with γ(x) of
    every text x: its law and, summed, E[Ẑ] = Z. Returns how many outcomes there were."""
    found: dict[int, Law] = {which: defaultdict(float) for which in range(len(gamma))}
    options = {"ess_threshold": 1.0, "block_size": 1, "proposal": Draft(Q, 1.3)} | options
    paths, total = 0, 0.0

    def run(source: smc.Source, prompts: list[list[int]]) -> list[smc.TextPosterior]:
        return smc.sample(prompts, target, n_particles=2, source=source, max_new_tokens=cap, **options)

    for which, p, posterior in walk_batch(run, [[last] for last in gamma], 2):
        paths, total = paths + 1, total + p
        z = p * math.exp(posterior.log_evidence)
        for ids, weight in zip(posterior.token_ids, posterior.weights.tolist(), strict=True):
            if weight > 0:
                found[which][tuple(ids)] += z * weight
    assert total == pytest.approx(len(gamma), abs=1e-10)
    for law, expected in zip(found.values(), gamma.values(), strict=True):
        assert law == pytest.approx({ids: g for ids, g in expected.items() if g > 0}, rel=1e-11)
    return paths
