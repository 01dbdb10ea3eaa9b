"""The evidence of a constraint on a real model, against all tokenisations: the end paid for, and not.

` (Paris|London|Lyon city)` after "The capital of France is" has 288 tokenisations under SmolLM2. Their probabilities
and those of EOS after each make an exact finite chain; SMC then runs on the chain, many seeds at a time, with the masks
that the real tokenizer gives (compared at every prefix).
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.demo import demo_target
from smcsample.lm.batch import Batch
from smcsample.lm.stream import LMStream
from smcsample.lm.token_bytes import ids_that_spell
from smcsample.potentials import LM, Choice, Constraint, Regex

pytestmark = [pytest.mark.model, pytest.mark.slow]
PROMPT = "The capital of France is"
TEXTS = (" Paris", " London", " Lyon city")
PATTERN = " (Paris|London|Lyon city)"
Ids = tuple[int, ...]


class Chain(smc.TabularLM):
    """A model over a few tokens whose next-token law depends on the whole prefix."""

    def follow(self, laws: dict[Ids, Tensor], names: dict[int, int]) -> Chain:
        """`names`: the chain's id of each token of the real model; `laws`: log-probabilities after each prefix."""
        object.__setattr__(self, "laws", laws)
        object.__setattr__(self, "names", names)
        return self

    def stream(self, batch: Batch) -> LMStream:
        return ChainStream(self, batch)


class ChainStream(LMStream):
    def __init__(self, lm: Chain, batch: Batch) -> None:
        super().__init__(lm.name, batch, torch.zeros(batch.n_rows, dtype=torch.long))
        self.lm, self.read = lm, [()] * batch.n_rows
        self.junk = torch.zeros(lm.vocab_size, dtype=torch.float64)

    def _forward(self, tokens: Tensor, keep: int) -> Tensor:
        logits = []
        for step in tokens.unbind(1):
            self.read = [(*ids, token) for ids, token in zip(self.read, step.tolist(), strict=True)]
            logits.append(torch.stack([self.lm.laws.get(ids[1:], self.junk) for ids in self.read]))
        return torch.stack(logits[-keep:], dim=1)

    def _select(self, ancestors: Tensor) -> None:
        self.read = [self.read[i] for i in ancestors.tolist()]


@cache
def tokenisations() -> list[Ids]:
    """Every way to spell each of the texts, in SmolLM2's tokens."""
    found, waiting = [], [(text.encode(), ()) for text in TEXTS]
    while waiting:
        rest, ids = waiting.pop()
        if not rest:
            found.append(ids)
        for n in range(1, len(rest) + 1):
            waiting += [(rest[n:], (*ids, token)) for token in ids_that_spell(demo_target()).get(rest[:n], [])]
    return found


@cache
def chain() -> tuple[Chain, dict[str, float]]:
    """The chain, and Z for both endings."""
    lm, every = demo_target(), sorted(tokenisations())
    (eos,) = lm.eos_ids
    used = sorted({token for ids in every for token in ids})
    names = {token: i for i, token in enumerate([*used, eos])}
    prompt = lm.encode(PROMPT)
    laws: dict[Ids, Tensor] = {}
    for first in range(0, len(every), 48):
        some = every[first : first + 48]
        longest = max(map(len, some))
        rows = torch.tensor([[*prompt, *ids, *[eos] * (longest - len(ids))] for ids in some])
        with torch.inference_mode():
            logits = lm.model(input_ids=rows, logits_to_keep=longest + 1).logits.double().log_softmax(-1)
        for row, ids in enumerate(some):
            for n in range(len(ids) + 1):
                known = logits[row, n, list(names)]
                other = torch.log1p(-known.exp().sum()).clamp_min(-700.0)
                laws[tuple(names[token] for token in ids[:n])] = torch.cat([known, other[None]])
    pieces = {ids[0]: piece.decode() for piece, ids in ids_that_spell(lm).items() if ids[0] in set(used)}
    tokens = [*(pieces[token] for token in used), "<eos>", "<other>"]
    v = len(tokens)
    model = Chain([1 / v] * v, [[1 / v] * v] * v, names[eos], tokens=tokens, name="chain").follow(laws, names)
    paid, free = [], []
    for ids in every:
        small = [names[token] for token in ids]
        log_p = sum(float(laws[tuple(small[:n])][small[n]]) for n in range(len(small)))
        free.append(log_p)
        paid.append(log_p + float(laws[tuple(small)][names[eos]]))
    z = {"constraint": math.fsum(map(math.exp, free)), "model": math.fsum(map(math.exp, paid))}
    return model, z


def test_all_tokenisations_are_found() -> None:
    model, z = chain()
    assert len(tokenisations()) == len(set(tokenisations())) == 288
    assert len(model.laws) == 584
    assert math.log(z["model"]) == pytest.approx(-18.9929, abs=0.01)


@pytest.mark.parametrize("constraint", [Regex(PATTERN), Choice(TEXTS)], ids=repr)
def test_masks_are_those_of_the_enumeration(constraint: Constraint) -> None:
    """At all 584 prefixes, for the real vocabulary and for the chain's."""
    model, _ = chain()
    following: dict[Ids, set[int]] = {}
    for ids in tokenisations():
        for n in range(len(ids) + 1):
            following.setdefault(ids[:n], set()).update(ids[n : n + 1])
    for lm, names in ((demo_target(), None), (model, model.names)):
        language = constraint.language(lm)
        state = {(): language.root()}
        for ids in sorted(following, key=len):
            named = [names[token] for token in ids] if names else ids
            if ids:
                state[ids] = language.child(state[ids[:-1]], named[-1])
            expected = {names[token] if names else token for token in following[ids]}
            assert set(language.mask([state[ids]])[0].nonzero()[:, 0].tolist()) == expected
            assert state[ids].accepting == (not expected)


@pytest.mark.parametrize("ends", ["constraint", "model"])
@pytest.mark.parametrize(("n", "k"), [(32, 0), (32, 7), (256, 1)])
def test_paying_for_the_end(n: int, k: int, ends: str) -> None:
    """The mean of Ẑ/Z over 200 seeds is 1 within 5 %; its standard error says that 5 % can be seen."""
    model, z = chain()
    runs = smc.sample(
        [[0]] * 200,
        LM(model) * Regex(PATTERN, ends=ends),
        n_particles=n,
        block_size=k,
        max_new_tokens=11,
        seed=list(range(200)),
    )
    ratio = torch.tensor([run.log_evidence for run in runs], dtype=torch.float64).exp() / z[ends]
    error = float(ratio.std()) / math.sqrt(len(runs))
    print(f"ends={ends} N={n} K={k}: {ratio.mean():.4f} ± {error:.4f}, max {ratio.max():.2f}")
    assert error < 0.02
    assert abs(float(ratio.mean()) - 1) < 0.05
    assert all(text in TEXTS for run in runs[:20] for text, w in zip(run.texts, run.weights, strict=True) if w > 0)
