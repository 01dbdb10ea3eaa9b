"""Every potential of the library over the tabular models, each with its weight of a finished text, by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import smcsample as smc
from smcsample.potentials import (
    LM,
    Ban,
    Bias,
    Complete,
    MinTokens,
    Potential,
    Regex,
    Reward,
    Twist,
    Where,
    bridge,
    normalised,
)
from tabular_models import EOS, draft_lm, probability, target_lm

SAID = ("a,", "b", "<eos>")
P, Q = (smc.TabularLM(lm.initial, lm.transition, EOS, tokens=SAID, name=lm.name) for lm in (target_lm(), draft_lm()))


class Factor(NamedTuple):
    """`weight(prompt, ids)`: what the factor multiplies the finished continuation `ids` by. `paired`: it is tested in
    products with all others that are (one of each kind)."""

    potential: Potential
    weight: Callable[[list[int], tuple[int, ...]], float]
    paired: bool = True


def said(ids: tuple[int, ...] | list[int]) -> str:
    return "".join(SAID[i] for i in ids if i != EOS)


def quality(text: str) -> float:
    """A reward without symmetry: order, length and letters all count."""
    letters = text.replace(",", "")
    return sum((0.7 if letter == "a" else -0.4) / (i + 1) for i, letter in enumerate(letters)) - 0.2 * ("ba" in text)


def qualities(texts: list[str]) -> list[float]:
    return [quality(text) for text in texts]


def token_qualities(completions: list[list[int]]) -> list[float]:
    return [0.3 * len(ids) - 0.5 * (ids[-1] == EOS) for ids in completions]


def pair_qualities(pairs: list[tuple[str, str]]) -> list[float]:
    return [len(completion) * 0.4 if prompt.startswith("b") else -quality(completion) for prompt, completion in pairs]


def hard_qualities(texts: list[str]) -> list[float]:
    """−inf for two texts that are prefixes of texts with a reward."""
    return [-math.inf if text in ("a,b", "b") else quality(text) for text in texts]


def no_bb(text: str) -> bool:
    return "bb" not in text


def ends_in_a(text: str) -> bool:
    return text.endswith("a,")


def even(pair: tuple[list[int], list[int]]) -> bool:
    return (len(pair[0]) + len(pair[1])) % 2 == 0


def look_ahead(texts: list[str]) -> list[float]:
    return [1.3 * quality(text) - 0.1 * len(text) for text in texts]


def token_look_ahead(completions: list[list[int]]) -> list[float]:
    return [0.6 * ids.count(1) - 0.35 * len(ids) for ids in completions]


def reward_weight(beta: float) -> Callable[[list[int], tuple[int, ...]], float]:
    return lambda prompt, ids: math.exp(quality(said(ids)) / beta)


FACTORS = {
    "LM": Factor(LM(Q), lambda prompt, ids: probability(Q, prompt[-1], ids)),
    "LM power": Factor(LM(Q) ** 0.5, lambda prompt, ids: probability(Q, prompt[-1], ids) ** 0.5, paired=False),
    "reward": Factor(Reward(qualities, 0.5), reward_weight(0.5), paired=False),
    "reward by round": Factor(Reward(qualities, 0.5, when="round"), reward_weight(0.5)),
    "reward by delimiter": Factor(Reward(qualities, 0.8, when=","), reward_weight(0.8)),
    "reward power": Factor(Reward(qualities, 0.5, "round") ** 0.7, reward_weight(0.5 / 0.7), paired=False),
    "reward on tokens": Factor(
        Reward(token_qualities, 2.0, when="round", on="tokens"),
        lambda prompt, ids: math.exp(token_qualities([list(ids)])[0] / 2),
        paired=False,
    ),
    "reward with prompt": Factor(
        Reward(pair_qualities, with_prompt=True),
        lambda prompt, ids: math.exp(pair_qualities([(said(prompt), said(ids))])[0]),
    ),
    "hard reward by round": Factor(
        Reward(hard_qualities, when="round"), lambda prompt, ids: math.exp(hard_qualities([said(ids)])[0])
    ),
    "twist": Factor(Twist(look_ahead), lambda prompt, ids: 1.0),
    "twist on tokens": Factor(Twist(token_look_ahead, on="tokens"), lambda prompt, ids: 1.0, paired=False),
    "where": Factor(Where(ends_in_a), lambda prompt, ids: float(ends_in_a(said(ids)))),
    "where, prefix-closed": Factor(Where(no_bb, prefix_closed=True), lambda prompt, ids: float(no_bb(said(ids)))),
    "where on pairs of ids": Factor(
        Where(even, on="tokens", with_prompt=True),
        lambda prompt, ids: float((len(prompt) + len(ids)) % 2 == 0),
        paired=False,
    ),
    "bridge": Factor(LM(Q) ** bridge(0.4, 1.5, tokens=2), lambda prompt, ids: probability(Q, prompt[-1], ids) ** 1.5),
    "normalised": Factor(
        LM(Q) ** normalised(2.0, tokens=2),
        lambda prompt, ids: probability(Q, prompt[-1], ids) ** (1 + min(1, 2 / len(ids))),
        paired=False,
    ),
    "at least two tokens": Factor(MinTokens(1), lambda prompt, ids: float(ids[0] != EOS)),
    "bias": Factor(Bias({0: 0.4, EOS: -0.7}), lambda prompt, ids: math.exp(0.4 * ids.count(0) - 0.7 * ids.count(EOS))),
    "ban": Factor(Ban([1]), lambda prompt, ids: float(1 not in ids), paired=False),
    "complete": Factor(Complete(), lambda prompt, ids: float(ids[-1] == EOS)),
    "regex": Factor(
        Regex("(a,|b)*b", ends="model"), lambda prompt, ids: float(bool(re.fullmatch("(a,|b)*b", said(ids))))
    ),
}
