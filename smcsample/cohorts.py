"""Many prompts on limited memory: cohorts of prompts that run in lockstep, and the queue of those that wait.

A prompt whose particles have all ended leaves its cohort at once. When enough memory is free again, the next prompts of
the queue start as a new cohort beside the old ones. They share the models' pages, and not their forwards: prompts at
different points of their texts would need rounds of different lengths, and then what a prompt draws would depend on
its company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from smcsample.algorithm import Step, run
from smcsample.history import history
from smcsample.lm.kv_pool import PagePool
from smcsample.request import Request
from smcsample.sequence import Rows, SequenceModel, Texts
from smcsample.text_posterior import TextPosterior


class Cohort:
    """Some groups of a request, side by side. `going`: those that have not finished. `step`: the newest one."""

    step: Step[Rows]

    def __init__(self, request: Request, groups: list[int], pools: dict[Any, PagePool]) -> None:
        self._request, self.groups = request, groups
        self._model = SequenceModel(
            [request.ids[g] for g in groups],
            request.target,
            request.proposal,
            block_size=request.block_size,
            max_new_tokens=request.max_new_tokens,
            eos_ids=request.models[0].eos_ids,
            pools=pools,
            move=request.move,
        )
        everyone = len(groups) == len(request.ids)
        self._source = request.source if everyone else request.source.take(self._tensor(groups))
        self._run = run(
            self._model,
            request.n_particles,
            n_groups=len(groups),
            resampling=request.resampling,
            ess_threshold=request.ess_threshold,
            source=self._source,
        )
        self._steps: list[Step[Rows]] = []
        self.going = set(range(len(groups)))

    def advance(self) -> dict[int, TextPosterior]:
        """One round; the posteriors of the prompts that it finished, by their place in the request."""
        self.step = next(self._run)
        self._steps.append(replace(self.step, state=None))
        ended = self.step.last.nonzero()[:, 0].tolist()
        self.going -= set(ended)
        return {self.groups[g]: self._posterior(g) for g in ended}

    def texts(self, g: int) -> Texts:
        """The tokens so far of its `g`-th group."""
        assert self.step.state is not None
        return self._model.texts(self.step.state, [g])[g]

    @property
    def bytes(self) -> float:
        """Memory that its unfinished prompts may need."""
        return sum(self._request.bytes_for(self.groups[g]) for g in self.going)

    def release(self) -> None:
        """Give the pages back."""
        self._run.close()
        self._model.release()

    def _posterior(self, g: int) -> TextPosterior:
        source = self._source.take(self._tensor([g]))
        main = self._request.models[0]
        return TextPosterior(self._request.ids[self.groups[g]], self.texts(g), main, history(self._steps, g), source)

    def _tensor(self, groups: list[int]) -> torch.Tensor:
        return torch.tensor(groups, device=self._request.source.device)


def run_in_cohorts(request: Request) -> Iterator[tuple[Cohort, dict[int, TextPosterior]]]:
    """Run a request, a round of one cohort at a time. Whatever happens, all pages are given back."""
    waiting = deque(range(len(request.ids)))
    needed = {g: request.bytes_for(g) for g in waiting}
    pools: dict[Any, PagePool] = {}
    active: list[Cohort] = []
    try:
        while waiting or active:
            free = request.memory_budget - sum(cohort.bytes for cohort in active)
            # Small cohorts make small batches, so a new one starts when half of the memory is free or none will wait.
            if not active or free >= min(request.memory_budget / 2, sum(needed[g] for g in waiting)):
                starting: list[int] = []
                while waiting and needed[waiting[0]] <= free:
                    starting.append(waiting.popleft())
                    free -= needed[starting[-1]]
                if starting:
                    active.append(Cohort(request, starting, pools))
            for cohort in list(active):
                yield cohort, cohort.advance()
                if not cohort.going:
                    active.remove(cohort)
                    cohort.release()
    finally:
        for cohort in active:
            cohort.release()
