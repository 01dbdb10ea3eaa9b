"""Many prompts: none's result depends on its company, finished ones cost nothing, and nothing is lost or leaked."""

from __future__ import annotations

import pytest
import torch

import smcsample as smc
from smcsample import cohorts, request
from smcsample.lm.batch import Batch
from smcsample.lm.decoder import Decoder
from smcsample.lm.paged import PagedStream
from smcsample.potentials import LM, Potential
from smcsample.potentials.base import Scorer
from smcsample.proposals import Draft
from smcsample.request import check_request
from tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [20, 21, 22, 4], [9, 3], [30, 31, 5]]
OPTIONS = {"n_particles": 4, "block_size": 3, "max_new_tokens": 19, "ess_threshold": 0.8}


def ending(seed: int = 0) -> smc.CausalLM:
    """A model that ends its texts at many lengths."""
    lm = tiny("llama", seed)
    with torch.no_grad():
        lm.model.lm_head.weight[0] += 0.15 * lm.model.lm_head.weight.norm(dim=1).mean()
    return lm


def same(one: smc.TextPosterior, other: smc.TextPosterior) -> None:
    assert one.token_ids == other.token_ids
    assert one.finish_reasons == other.finish_reasons
    assert torch.allclose(one.log_weights, other.log_weights, atol=1e-4)
    assert one.log_evidence == pytest.approx(other.log_evidence, abs=1e-4)
    assert torch.equal(one.genealogy, other.genealogy)
    assert torch.equal(one.history.resampled, other.history.resampled)


@pytest.mark.parametrize("target_of", [lambda a, b: LM(a) ** 2, lambda a, b: LM(a) * LM(b)])
def test_a_prompt_does_not_depend_on_its_batch(target_of) -> None:
    """Alone, in another order, in cohorts of one or two: the same. No token is near enough to a tie to differ."""
    a, b = ending(), ending(1)
    target, proposal = target_of(a, b), Draft(b, temperature=1.2)
    alone = [smc.sample(p, target, proposal, seed=[i], **OPTIONS) for i, p in enumerate(PROMPTS)]
    together = smc.sample(PROMPTS, target, proposal, seed=range(5), **OPTIONS)
    backwards = smc.sample(PROMPTS[::-1], target, proposal, seed=[4, 3, 2, 1, 0], **OPTIONS)[::-1]
    largest = max(check_request(PROMPTS, target, proposal, **OPTIONS).bytes_for(g) for g in range(5))
    for budget in (largest, 2.2 * largest):
        split = smc.sample(PROMPTS, target, proposal, seed=range(5), memory_budget=budget, **OPTIONS)
        for results in zip(alone, together, backwards, split, strict=True):
            for result in results[1:]:
                same(result, results[0])
    assert len({len(p.history.ess) for p in alone}) > 1  # they end at different times


def test_waiting_prompts_start_when_others_finish(monkeypatch) -> None:
    lm = ending()
    started: list[tuple[int, list[int]]] = []
    rounds = 0

    class Watched(cohorts.Cohort):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            started.append((rounds, self.groups))

        def advance(self):
            nonlocal rounds
            rounds += 1
            return super().advance()

    monkeypatch.setattr(cohorts, "Cohort", Watched)
    needed = check_request(PROMPTS, LM(lm), **OPTIONS)
    budget = sum(needed.bytes_for(g) for g in range(3))
    smc.sample(PROMPTS * 3, LM(lm), memory_budget=budget, **OPTIONS)
    assert started[0] == (0, [0, 1, 2])
    assert sorted(g for _, groups in started for g in groups) == list(range(15))
    assert [g for _, groups in started for g in groups] == list(range(15))  # first come, first served
    assert 3 < len(started) < 15
    assert started[-1][0] < rounds


def test_cohorts_stay_within_the_budget_and_share_pages(monkeypatch) -> None:
    lm = ending()
    pools, peak = [], 0.0
    forward = Decoder.forward

    def watched(decoder: Decoder, tokens, step, keep):
        nonlocal peak
        out = forward(decoder, tokens, step, keep)
        pools.append(step.pool)
        peak = max(peak, step.pool.capacity * step.pool.bytes_per_page)
        return out

    monkeypatch.setattr(Decoder, "forward", watched)
    needed = check_request(PROMPTS, LM(lm), **OPTIONS)
    budget = 1.01 * max(needed.bytes_for(g) for g in range(5))
    smc.sample(PROMPTS * 2, LM(lm), memory_budget=budget, **OPTIONS)
    assert len({id(pool) for pool in pools}) == 1
    assert peak <= budget
    assert pools[0].in_use == 0
    assert pools[0].users == []


def test_what_can_never_fit_is_refused_with_its_sizes() -> None:
    lm = tiny("llama")
    lm.model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"prompt 1: 9 tokens and 4 particles × 19 new tokens may take .* GB.*budget"):
        smc.sample(
            [[3], PROMPTS[0]], LM(lm), memory_budget=check_request([3], LM(lm), **OPTIONS).bytes_for(0), **OPTIONS
        )
    with pytest.raises(ValueError, match="memory_budget = 0 is not a positive"):
        smc.sample([3], LM(lm), memory_budget=0, **OPTIONS)


def test_the_default_budget_is_half_of_what_is_free(monkeypatch) -> None:
    monkeypatch.setattr(request, "available_memory", lambda device: 5e9)
    assert check_request([3], LM(tiny("llama")), **OPTIONS).memory_budget == 2.5e9
    assert request.available_memory(torch.device("cpu")) > 0


class Breaks(Potential):
    """Fails once a text is as long as `at`."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def start(self, batch: Batch) -> Scorer:
        potential = self

        class BreaksScorer(Scorer):
            def score(self, block):
                if block.stop >= potential.at:
                    raise potential.error
                return torch.zeros(block.ids.shape)

        return BreaksScorer()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("mine")])
def test_breaking_off_keeps_finished_prompts_and_gives_back_the_pages(error, monkeypatch) -> None:
    lm = ending()
    streams: list[PagedStream] = []
    stream = smc.CausalLM.stream
    monkeypatch.setattr(smc.CausalLM, "stream", lambda self, batch: streams.append(stream(self, batch)) or streams[-1])
    whole = smc.sample(PROMPTS, LM(lm) ** 2, Draft(lm), **OPTIONS)
    ends = [4 * len(posterior.history.ess) for posterior in whole]  # tokens after its last round
    at = sorted(ends)[1] + 1
    assert at <= 19, "some prompts must still be going on"
    streams.clear()
    with pytest.raises(type(error)) as caught:
        smc.sample(PROMPTS, LM(lm) ** 2 * Breaks(at, error), Draft(lm), **OPTIONS)
    kept = caught.value.posteriors
    assert [posterior is not None for posterior in kept] == [end < at for end in ends]
    assert 0 < sum(posterior is not None for posterior in kept) < 5
    for posterior, expected in zip(kept, whole, strict=True):
        if posterior is not None:
            same(posterior, expected)
    assert "prompts had finished" in caught.value.__notes__[0]
    assert streams
    assert all(s.pages.pool.in_use == 0 and s.pages.tables.numel() == 0 and not s.pages.pool.users for s in streams)


def test_tables_are_the_genealogy() -> None:
    """Two particles name the same page of a round exactly if they were one particle then."""
    lm = tiny("llama", eos=False)
    batches = []
    start = LM.start
    try:
        LM.start = lambda self, batch: batches.append(batch) or start(self, batch)
        tables = []
        for step in smc.run(
            smc.SequenceModel([[5, 6, 7, 8], [9]], LM(lm) ** 3, Draft(lm), block_size=3, max_new_tokens=24, eos_ids=()),
            6,
            n_groups=2,
            ess_threshold=1.0,
        ):
            tables.append(batches[0].stream(lm).pages.tables.clone())
            step_ancestors = step.ancestors
            if step.t == 0:
                lines = torch.arange(6).expand(2, 6)[:, None]
            else:
                lines = lines.gather(2, step_ancestors[:, None].expand(-1, lines.shape[1], -1))
                lines = torch.cat([lines, torch.arange(6).expand(2, 6)[:, None]], dim=1)
    finally:
        LM.start = start
    final = tables[-1].view(2, 6, -1)
    assert bool((step.log_weights.std(dim=1) > 0).all())
    for group, prompt_pages in ((0, 1), (1, 0)):
        pages = final[group, :, prompt_pages:]
        pages = pages[:, (pages >= 0).any(dim=0)]
        # One column per round: the bonus of a round waits for the next one.
        for column, line in zip(pages.T, lines[group], strict=True):
            assert torch.equal(column[:, None] == column, line[:, None] == line)
    assert any(len(set(line.tolist())) < 6 for line in lines[0])
