"""Metropolis–Hastings on texts: the transition kernel itself, by walking every outcome of a move."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.metropolis import Chain, empty, grown, move
from smcsample.potentials import LM, Complete, MinTokens, Potential, bridge
from smcsample.proposals import Constrained, Draft
from tabular_models import EOS, draft_lm, probability, sequences, target_lm, unnormalised
from test_bridge import Vowels, masses
from test_round import Scripted
from tiny_models import tiny
from tracing import TracingSource, walk

P, Q = target_lm("p"), draft_lm("q")
# Ends often, and long texts are worth more: the toy that shows what a wrong ratio does.
ENDS = smc.TabularLM([0.3, 0.2, 0.5], [[0.35, 0.25, 0.4], [0.2, 0.3, 0.5], [0.5, 0.2, 0.3]], EOS, name="ends")

Text = tuple[int, ...]


def sequence_model(target: Potential, proposal: Draft, cap: int, groups: int) -> smc.SequenceModel:
    return smc.SequenceModel(
        [[0]] * groups, target, proposal.matched_to(target), block_size=1, max_new_tokens=cap, eos_ids=(EOS,)
    )


def log_q_of(proposal: Draft, target: Potential, text: Text, cap: int) -> list[float]:
    """The proposal's log-probability of each token, written without the library's drafter."""
    matched, last, found = proposal.matched_to(target), 0, []
    guided = isinstance(matched, Constrained)  # by `Complete`: at the cap there is nothing but EOS
    matched = matched.draft if guided else matched
    for n, token in enumerate(text, start=1):
        if guided and n == cap:
            found.append(0.0 if token == EOS else -math.inf)
            continue
        law = matched.model.transition[last] ** (1 / matched.law_at(n, n == cap).temperature)
        if n <= matched.min_tokens:
            law = law.clone()
            law[EOS] = 0.0
        found.append((law[token] / law.sum()).log().item())
        last = token
    return found


def kernel(target: Potential, proposal: Draft, gamma: dict[Text, float], horizon: int, cap: int) -> Tensor:
    """P[x, y], the probability that a move takes x to y, from every outcome of the library's `move`."""
    texts = [text for text, g in gamma.items() if g > 0]
    place = {text: i for i, text in enumerate(texts)}
    table = torch.zeros(len(texts), len(texts), dtype=torch.float64)
    waiting: list[tuple[int, list[int]]] = [(i, []) for i in range(len(texts))]
    while waiting:
        source = TracingSource([script for _, script in waiting], 1)
        ids = torch.tensor([[*texts[i], *[0] * (horizon - len(texts[i]))] for i, _ in waiting])
        log_q = torch.zeros(ids.shape, dtype=torch.float64)
        for row, (i, _) in enumerate(waiting):
            log_q[row, : len(texts[i])] = torch.tensor(log_q_of(proposal, target, texts[i], cap), dtype=torch.float64)
        lengths = torch.tensor([len(texts[i]) for i, _ in waiting])
        ended = torch.tensor([texts[i][-1] == EOS or len(texts[i]) == cap for i, _ in waiting])
        log_target = torch.tensor([math.log(gamma[texts[i]]) for i, _ in waiting], dtype=torch.float64)
        chain = Chain(ids, log_q, lengths, ended, log_target)
        moved = move(sequence_model(target, proposal, cap, len(waiting)), source, chain, 1).chain
        for (i, _), row, n, p in zip(
            waiting, moved.ids.tolist(), moved.lengths.tolist(), source.probability.tolist(), strict=True
        ):
            table[i, place[tuple(row[:n])]] += p
        waiting = [(waiting[group][0], script) for group, script in source.branches()]
    return table


def by_formula(
    gamma: dict[Text, float],
    log_q: dict[Text, list[float]],
    *,
    short_suffix: bool = False,
    no_length: bool = False,
) -> Tensor:
    """The same kernel written down from the formula, and with each of two mistakes of a public implementation: the
    suffix of x cut to the length of y's, and no |x|/|y|."""
    texts = [text for text, g in gamma.items() if g > 0]
    table = torch.zeros(len(texts), len(texts), dtype=torch.float64)
    for i, x in enumerate(texts):
        for m in range(len(x)):
            for j, y in enumerate(texts):
                if len(y) > m and x[:m] == y[:m]:
                    to = min(len(x), len(y)) if short_suffix else len(x)
                    ratio = math.log(gamma[y]) - math.log(gamma[x]) + sum(log_q[x][m:to]) - sum(log_q[y][m:])
                    ratio += 0.0 if no_length else math.log(len(x) / len(y))
                    go = math.exp(sum(log_q[y][m:]) + min(0.0, ratio)) / len(x)
                    table[i, j] += go
                    table[i, i] -= go
        table[i, i] += 1
    return table


TARGETS = {
    "p^4": (LM(ENDS) ** 4, Draft(ENDS), lambda ids: probability(ENDS, 0, ids) ** 4),
    "p^2, another draft": (LM(P) ** 2, Draft(Q, 1.3), lambda ids: probability(P, 0, ids) ** 2),
    "bridged": (LM(P) ** bridge(1, 3, tokens=4), Draft(P), lambda ids: probability(P, 0, ids) ** 3),
    "long": (
        LM(P) ** 2 * MinTokens(2),
        Draft(P),
        lambda ids: 0.0 if EOS in ids[:2] else probability(P, 0, ids) ** 2,
    ),
    "deferred": (
        LM(P) * Vowels(False, 0.5),
        Draft(Q),
        lambda ids: probability(P, 0, ids) * math.exp(Vowels(False, 0.5).value(ids)),
    ),
    "guided": (LM(P) * Complete(), Draft(Q), lambda ids: probability(P, 0, ids) * (ids[-1] == EOS)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_move_leaves_the_target_invariant(name: str) -> None:
    """π P = π, and detailed balance, to 1e-12; and P is the kernel of the formula."""
    target, proposal, value = TARGETS[name]
    cap = 3
    gamma = {ids: value(ids) for ids in sequences(cap, 3, EOS)}
    table = kernel(target, proposal, gamma, cap, cap)
    texts = [text for text, g in gamma.items() if g > 0]
    pi = torch.tensor([gamma[text] for text in texts], dtype=torch.float64)
    pi = pi / pi.sum()
    assert torch.allclose(table.sum(1), torch.ones(len(texts), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(pi @ table, pi, atol=1e-12, rtol=0)
    flow = pi[:, None] * table
    assert torch.allclose(flow, flow.T, atol=1e-12, rtol=0)
    log_q = {text: log_q_of(proposal, target, text, cap) for text in texts}
    assert torch.allclose(table, by_formula(gamma, log_q), atol=1e-12, rtol=0)
    away = torch.linalg.matrix_power(table, 400)[0]
    assert torch.allclose(away, pi, atol=1e-3)  # every text can be reached


def test_the_two_mistakes_of_a_public_implementation_break_invariance() -> None:
    """So the tests above would see them."""
    target, proposal, value = TARGETS["p^2, another draft"]
    gamma = {ids: value(ids) for ids in sequences(4, 3, EOS)}
    log_q = {text: log_q_of(proposal, target, text, 4) for text in gamma}
    pi = torch.tensor(list(gamma.values()), dtype=torch.float64)
    pi = pi / pi.sum()

    def drift(**mistake: bool) -> float:
        table = by_formula(gamma, log_q, **mistake)
        return (pi @ table - pi).abs().sum().item() / 2

    assert drift() < 1e-12
    assert drift(short_suffix=True) > 1e-2
    assert drift(no_length=True) > 1e-2


def test_a_move_leaves_the_target_of_unfinished_texts_invariant_too() -> None:
    """At horizon 2 of 3, under the exponents of the ramp there; and for a kernel that keeps texts unfinished."""
    alpha = bridge(1, 3, tokens=4)
    target, proposal = LM(P) ** alpha, Draft(Q)
    gamma = {ids: probability(P, 0, ids) ** (3.0 if ids[-1] == EOS else 2.0) for ids in sequences(2, 3, EOS)}
    table = kernel(target, proposal, gamma, 2, 3)
    log_q = {text: log_q_of(proposal, target, text, 3) for text in gamma}
    assert torch.allclose(table, by_formula(gamma, log_q), atol=1e-12, rtol=0)
    pi = torch.tensor(list(gamma.values()), dtype=torch.float64)
    assert torch.allclose(pi @ table, pi, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("block_size", "moves"), [(1, 1), (2, 2), (5, 2)])
def test_the_law_of_a_whole_run(block_size: int, moves: int) -> None:
    """The text after growing by blocks, with moves after each, has the law that the kernels compose to."""
    cap = 2
    target, proposal = LM(P) ** 2, Draft(Q, 1.3)
    outcomes = walk(
        lambda source, groups: smc.metropolis_hastings(
            [[0]] * groups,
            target,
            proposal,
            block_size=block_size,
            moves=moves,
            max_new_tokens=cap,
            source=source,
        ),
        1,
    )
    law: dict[Text, float] = {(): 1.0}
    for horizon in [*range(block_size, cap, block_size), cap]:
        texts = sequences(horizon, 3, EOS)
        log_q = {text: log_q_of(proposal, target, text, cap) for text in texts}
        before = torch.zeros(len(texts), dtype=torch.float64)
        for i, text in enumerate(texts):
            for start, p in law.items():
                done = start[-1:] == (EOS,)
                if text == start or (not done and text[: len(start)] == start):
                    before[i] += p * math.exp(sum(log_q[text][len(start) :]))
        gamma = {text: probability(P, 0, text) ** 2 for text in texts}
        after = before @ torch.linalg.matrix_power(by_formula(gamma, log_q), moves)
        law = dict(zip(texts, after.tolist(), strict=True))
    found = dict.fromkeys(law, 0.0)
    for outcome in outcomes:
        found[tuple(outcome.posterior.token_ids[0])] += outcome.probability
        assert outcome.posterior.log_target.item() == pytest.approx(
            2 * math.log(probability(P, 0, tuple(outcome.posterior.token_ids[0]))), abs=1e-12
        )
    assert found == pytest.approx(law, abs=1e-12)


def moved_outcomes(target: Potential, proposal: Draft | None, move: smc.MCMC, n: int, k: int, t: int, tau: float):
    def run(source: smc.Source, groups: int) -> list[smc.Posterior]:
        return smc.sample(
            [[0]] * groups,
            target,
            proposal,
            n_particles=n,
            block_size=k,
            max_new_tokens=t,
            ess_threshold=tau,
            move=move,
            source=source,
        )

    return walk(run, n)


@pytest.mark.parametrize(
    ("move", "n", "k", "t"),
    [
        (smc.MCMC(), 2, 0, 2),
        (smc.MCMC(), 1, 0, 3),
        (smc.MCMC(window=None), 1, 1, 4),
        (smc.MCMC(window=1), 2, 1, 3),
        (smc.MCMC(moves=2, window=1), 1, 0, 3),
        (smc.MCMC(every=2), 1, 0, 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["plain", "bridged"])
def test_moves_keep_the_particles_properly_weighted(name: str, move: smc.MCMC, n: int, k: int, t: int) -> None:
    """E[Ẑ·Σ W 1(x)] = γ(x) for every text, with moves in every round, whatever the resampling does."""
    exponent = bridge(1, 2, tokens=2) if name == "bridged" else 2
    paths = moved_outcomes(LM(P) ** exponent, Draft(Q, 1.3), move, n, k, t, tau=0.9)
    assert masses(paths) == pytest.approx(unnormalised({P: 2.0}, 0, t), rel=1e-12)


def test_moving_only_where_the_weights_called_for_resampling_would_be_biased() -> None:
    """Why `MCMC` moves every round. Two particles from a uniform law over three states of weight 1, 3 and 2, resampled
    where their ESS is below 1.7, then moved by a kernel that draws afresh from the target: E[Ẑ·f] of the first state is
    not its weight of 1/3 if only resampled particles move, and is if all do."""
    w = [1.0, 3.0, 2.0]
    mass = {"always": 0.0, "after resampling": 0.0}
    for a in range(3):
        for b in range(3):
            evidence = (w[a] + w[b]) / 2
            still = ((a == 0) * w[a] + (b == 0) * w[b]) / (w[a] + w[b])
            resampled = (w[a] + w[b]) ** 2 / (w[a] ** 2 + w[b] ** 2) < 1.7
            for rule in mass:
                moved = resampled or rule == "always"
                mass[rule] += evidence * (w[0] / sum(w) if moved else still) / 9
    assert mass["always"] == pytest.approx(1 / 3, abs=1e-12)
    assert abs(mass["after resampling"] - 1 / 3) > 0.03


@pytest.fixture(scope="module")
def llama() -> smc.CausalLM:
    return tiny("llama")


def test_after_a_move_the_rows_go_on_from_their_new_texts(llama: smc.CausalLM) -> None:
    """Laws of the next token against a plain forward over prompt and text, for prompts of unequal length, some of
    which leave; and texts do change."""
    changed = []

    class Watched(smc.MCMC):
        def apply(self, model: smc.SequenceModel, rows, t: int) -> None:
            before, ended = rows.ids.clone(), rows.batch.ended.clone()
            super().apply(model, rows, t)
            changed.append(bool((rows.ids != before).any()))
            assert torch.equal(rows.ids[ended], before[ended])
            table = rows.scorers[0].next_logits()
            drafts = rows.drafter.law_at(rows.ids.shape[1]).log_probs()
            for row in (~ended).nonzero()[:, 0].tolist():
                ids = torch.tensor([rows.batch.prompts[row // 6] + rows.ids[row].tolist()])
                with torch.no_grad():
                    logits = llama.model(ids).logits[0, -1, : llama.vocab_size]
                assert torch.allclose(table[row], 2 * logits.log_softmax(-1), atol=1e-4)
                assert torch.allclose(drafts[row], (2 * logits).log_softmax(-1), atol=1e-4)

    smc.sample(
        [[5], [6, 7, 8, 9], [3, 4]],
        LM(llama) ** 2,
        n_particles=6,
        block_size=2,
        max_new_tokens=12,
        move=Watched(window=4),
        seed=1,
    )
    assert sum(changed) >= 2


@pytest.mark.parametrize("kind", ["moves", "chains"])
def test_results_do_not_depend_on_the_company(kind: str) -> None:
    prompts, seeds = [[0], [1, 0, 1], [0, 1], [1]], [10, 11, 12, 13]

    def run(prompts: list[list[int]], seeds: list[int]) -> list[list[list[int]]]:
        options = {"max_new_tokens": 8, "seed": seeds}
        if kind == "chains":
            results = smc.metropolis_hastings(prompts, LM(P) ** 2, n_chains=5, block_size=3, moves=4, **options)
        else:
            results = smc.sample(
                prompts, LM(P) ** 2, Draft(Q), n_particles=5, block_size=1, move=smc.MCMC(moves=2), **options
            )
        return [result.token_ids for result in results]

    together = run(prompts, seeds)
    order = [2, 0, 3, 1]
    assert run([prompts[i] for i in order], [seeds[i] for i in order]) == [together[i] for i in order]
    assert [run([prompts[i]], [seeds[i]])[0] for i in range(4)] == together
    assert run(prompts, [20, 21, 22, 23]) != together


def test_chains_say_what_they_are_and_cost() -> None:
    chains = smc.metropolis_hastings([0], LM(P) ** 2, n_chains=30, block_size=2, moves=3, max_new_tokens=6, seed=1)
    assert chains.text == chains.texts[0]
    assert len(chains.texts) == 30
    assert set(chains.finish_reasons) == {"eos", "length"}
    assert 0 < chains.acceptance < 1
    assert chains.tokens > sum(map(len, chains.token_ids))
    votes = chains.vote(len)
    assert sum(votes.values()) == pytest.approx(1)
    assert list(votes.values()) == sorted(votes.values(), reverse=True)
    plain = smc.metropolis_hastings([0], LM(P) ** 2, n_chains=3, moves=0, max_new_tokens=6)
    assert plain.acceptance == 0
    assert plain.tokens == sum(map(len, plain.token_ids))


def test_a_chain_that_begins_where_the_target_is_zero_leaves_as_soon_as_it_can() -> None:
    """LM × MinTokens with a draft that may end at once: only the starting texts can be too short."""
    proposal = Draft(P, 1.0, min_tokens=0)
    options = {"n_chains": 200, "block_size": 9, "max_new_tokens": 6}
    short = smc.metropolis_hastings([0], LM(P) * MinTokens(2), proposal, moves=0, **options)
    assert torch.isinf(short.log_target).any()
    long = smc.metropolis_hastings([0], LM(P) * MinTokens(2), proposal, moves=12, **options)
    assert torch.isfinite(long.log_target).all()
    assert min(map(len, long.token_ids)) > 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_chains": 0}, ValueError, "n_chains = 0"),
        ({"block_size": 0}, ValueError, "block_size = 0"),
        ({"moves": -1}, ValueError, "moves = -1"),
        ({"max_new_tokens": 1 << 16}, ValueError, "max_new_tokens = 65536 is beyond"),
        ({"prompt": []}, ValueError, "empty list"),
        ({"proposal": Scripted([[0]])}, TypeError, "can't make Metropolis–Hastings moves"),
        ({"proposal": Draft(P, top_k=2)}, ValueError, "never draws tokens that"),
        ({"proposal": Draft(P, top_k=2, allow_truncation=True)}, ValueError, "may cut what the target allows"),
    ],
)
def test_bad_input(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        smc.metropolis_hastings(**({"prompt": [0], "target": LM(P) ** 2} | options))


@pytest.mark.parametrize(
    ("options", "message"), [({"moves": 0}, "moves = 0"), ({"window": 0}, "window = 0"), ({"every": 0}, "every = 0")]
)
def test_bad_moves(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smc.MCMC(**options)


def test_moves_need_a_proposal_with_a_law() -> None:
    with pytest.raises(TypeError, match="can't make"):
        smc.sample([0], LM(P), Scripted([[0]]), move=smc.MCMC())
    source = smc.Source(0, 1, 1)
    with pytest.raises(ValueError, match="65536"):
        grown(sequence_model(LM(P), Draft(P), 4, 1), source, empty(source), 1 << 16, 2)


class Spy(smc.Source):
    """Notes which numbers are asked for."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.asked: list[tuple[object, int]] = []

    def tokens(self, log_weights: Tensor, position: int, purpose: object, wanted: Tensor) -> Tensor:
        self.asked.append((purpose, position))
        return super().tokens(log_weights, position, purpose, wanted)


def test_no_number_is_used_twice() -> None:
    """Neither among the moves of a run nor between moves, drafts and bonuses."""
    for run in (
        lambda spy: smc.sample(
            [0], LM(P) ** 2, n_particles=20, block_size=1, max_new_tokens=9, move=smc.MCMC(moves=3), source=spy
        ),
        lambda spy: smc.metropolis_hastings(
            [0], LM(P) ** 2, n_chains=20, block_size=3, moves=4, max_new_tokens=9, source=spy
        ),
    ):
        spy = Spy(0, 1, 20)
        run(spy)
        assert len(spy.asked) > 40
        assert len(set(spy.asked)) == len(spy.asked)
