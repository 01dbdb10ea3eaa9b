"""Constraints weigh every text properly: E[Ẑ] = Z and the posterior, by walking every outcome."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import pytest

import smcsample as smc
from constraint_models import EOS, TOKENS, Law, P, Q, check, constrained, regex_law
from smcsample.potentials import LM, Ban, Bias, Choice, Complete, Potential, Regex, StopAt
from smcsample.proposals import Constrained, Draft
from tabular_models import probability, sequences

CLOSES = "ab(a|ba)b?"
OPEN = "(ab|ba)*a?"


@pytest.mark.parametrize("ends", ["constraint", "model"])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_regex(k: int, ends: str) -> None:
    """Two prompts in one batch, so that groups leave at different rounds; resampled whenever weights differ. Texts end
    inside a block, on the bonus, and at the cap."""
    target = LM(P) * Regex(CLOSES, ends=ends)
    for cap in (2, 3, 4):
        check(target, {last: regex_law(CLOSES, cap, ends, {P: 1.0}, last) for last in (0, 3)}, cap, block_size=k)


@pytest.mark.parametrize("ends", ["constraint", "model"])
def test_regex_that_can_go_on(ends: str) -> None:
    target = LM(P) * Regex(OPEN, ends=ends)
    assert check(target, {4: regex_law(OPEN, 3, ends, {P: 1.0}, 4)}, 3) > 3000


@pytest.mark.parametrize("proposal", [Draft(Q, 1.0, guided=False), Draft(P), Constrained(Draft(Q, 0.8))], ids=repr)
def test_every_proposal_gives_the_same_target(proposal: Draft) -> None:
    """An unguided draft loses particles where a guided one does not; the mean is the same."""
    target = LM(P) ** 1.5 * LM(Q) ** 0.5 * Regex(CLOSES)
    check(target, {0: regex_law(CLOSES, 3, "constraint", {P: 1.5, Q: 0.5}, 0)}, 3, proposal=proposal)


@pytest.mark.parametrize("ends", ["constraint", "model"])
@pytest.mark.parametrize("k", [0, 2])
def test_choice(k: int, ends: str) -> None:
    """One text begins another."""
    law = {0: regex_law("ab|aba|bab", 3, ends, {P: 1.0}, 0)}
    check(LM(P) * Choice(["aba", "ab", "bab"], ends=ends), law, 3, block_size=k)


def test_two_constraints() -> None:
    """The one closes at "aba", where the other is in its set; texts outside either have weight zero."""
    both = LM(P) * Regex("ab(a|bb)") * Regex("[ab]*a", ends="model")
    one = regex_law("ab(a|bb)", 3, "constraint", {P: 1.0}, 0)
    gamma = {ids: g for ids, g in one.items() if "".join(TOKENS[i] for i in ids).endswith("a")}
    assert 0 < len(gamma) < len(one)
    for k in (0, 1, 2):
        check(both, {0: gamma}, 3, block_size=k)


def test_the_same_constraint_twice_and_its_power() -> None:
    gamma = {0: regex_law(CLOSES, 3, "constraint", {P: 1.0}, 0)}
    check(LM(P) * Regex(CLOSES) * Regex(CLOSES) ** 3, gamma, 3)


def texts(cap: int) -> list[tuple[int, ...]]:
    return sequences(cap, 5, EOS)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize(
    ("potential", "factor"),
    [
        (Ban(["b", 3]), lambda ids: float(not {1, 3} & set(ids))),
        (Bias({"ab": 0.7, 0: -0.4}), lambda ids: math.exp(0.7 * ids.count(3) - 0.4 * ids.count(0))),
        (Bias({"ab": 0.7, 1: -math.inf}) ** 2, lambda ids: (1 not in ids) * math.exp(1.4 * ids.count(3))),
        (Bias({EOS: -1.0}), lambda ids: math.exp(-1.0 * ids.count(EOS))),
    ],
    ids=lambda value: repr(value) if isinstance(value, Potential) else "",
)
def test_tables(potential: Potential, factor: Callable[[tuple[int, ...]], float], k: int) -> None:
    check(LM(P) * potential, {1: {ids: probability(P, 1, ids) * factor(ids) for ids in texts(2)}}, 2, block_size=k)


def stopped(stop: str, cap: int, last: int) -> Law:
    """p of every sequence that ends at its first token with the stop in the text, at EOS, or at the cap."""
    found = {}
    for n in range(1, cap + 1):
        for ids in itertools.product(range(5), repeat=n):
            so_far = ["".join(TOKENS[i] for i in ids[:m] if i != EOS) for m in range(n + 1)]
            over = [bool(re.search(stop, so_far[m])) or (m > 0 and ids[m - 1] == EOS) for m in range(n + 1)]
            if not any(over[:n]) and (over[n] or n == cap):
                found[ids] = probability(P, last, ids)
    return found


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize(("stops", "pattern"), [(("aa", "ba"), "aa|ba"), (re.compile("a.?a"), "a.?a")])
def test_stops_across_tokens(stops: tuple[str, ...], pattern: str, k: int) -> None:
    """ "a" + "ab" holds "aa"; the junk after it is neither weighted nor returned. The law has mass 1: with the target
    as its own proposal every weight is 1, and with another one the mean is."""
    law = stopped(pattern, 3 if k else 2, 1)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    check(LM(P) * StopAt(stops), {1: law}, 3 if k else 2, block_size=k, proposal=Draft(P) if k == 2 else Draft(Q, 1.3))


def test_a_stop_inside_a_constraint() -> None:
    """At "ab", where the regex could go on, StopAt ends the text; elsewhere the regex is as it was."""
    law = constrained(
        lambda text: re.fullmatch("(ab|ba)*a?", text) is not None and "ab" not in text[:-1],
        lambda text: "ab" not in text[:-1] and re.fullmatch("(ab|ba)*[ab]?", text) is not None,
        2,
        "model",
    )
    gamma: Law = {}
    for ids in law:
        first = next((m for m in range(1, len(ids) + 1) if "ab" in "".join(TOKENS[i] for i in ids[:m])), None)
        if first is None:
            gamma[ids] = probability(P, 0, ids)
    for ids in itertools.chain(itertools.product(range(5), repeat=1), itertools.product(range(5), repeat=2)):
        text, before = ("".join(TOKENS[i] for i in part) for part in (ids, ids[:-1]))
        if EOS not in ids and "ab" in text and "ab" not in before and re.fullmatch("(ab|ba)*a?", text):
            gamma[ids] = probability(P, 0, ids)
    for k in (0, 1):
        check(LM(P) * Regex(OPEN, ends="model") * StopAt("ab"), {0: gamma}, 2, block_size=k)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_length_cap_forces_eos(k: int) -> None:
    """Cut at the cap, the target is that of the prefix; with the end asked for, the weight pays p(EOS)."""
    whole = {ids: probability(P, 1, ids) for ids in texts(2)}
    assert sum(whole.values()) == pytest.approx(1, abs=1e-12)
    check(LM(P), {1: whole}, 2, block_size=k)
    complete = {ids: g for ids, g in whole.items() if ids[-1] == EOS}
    assert 0 < sum(complete.values()) < 0.5
    check(LM(P) * Complete(), {1: complete}, 2, block_size=k)


def test_complete_where_a_constraint_can_end_texts() -> None:
    """At the last place "a" may end a text by closing it, so EOS is not forced there."""
    gamma = regex_law(CLOSES, 3, "constraint", {P: 1.0}, 0)
    full = {
        ids: g
        for ids, g in gamma.items()
        if ids[-1] == EOS or re.fullmatch("ab(ab|bab)", "".join(TOKENS[i] for i in ids))
    }
    assert 0 < len(full) < len(gamma)
    for k in (0, 1, 3):
        check(LM(P) * Regex(CLOSES) * Complete(), {0: full}, 3, block_size=k)


def test_what_the_draft_cannot_reach_has_no_weight() -> None:
    """The draft never gives what the constraint asks for: its rows are lost, not let through by some other token."""
    blind = smc.TabularLM([0, 0.5, 0.5, 0, 0], [[0, 0.5, 0.5, 0, 0]] * 5, EOS, tokens=TOKENS, name="blind")
    posterior = smc.sample([0], LM(P) * Regex("ab"), Draft(blind, 1.0), block_size=2, max_new_tokens=4)
    assert posterior.status is smc.Status.DEAD
