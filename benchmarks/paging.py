"""What block tables cost: the time to keep them, and the pages that particles need.

    python benchmarks/paging.py time [--rounds 64]
    python benchmarks/paging.py memory [--prompt 512] [--new 256] [--seeds 30]

`time`: `smcsample.lm.paging` marks and sweeps when pages run out; the rival here counts, at every resampling, how many
rows name each page. Microseconds of process CPU time per round (open a page per row, resample all rows), one thread,
medians over interleaved repetitions. "Neither" never gets a page back, so the excess over it is what that costs.

`memory`: SmolLM2-135M's keys and values in float32, log-weights N(0, 1) per round, systematic resampling every round.
Peak pages in use, against pages(T) + c·N·log N, where pages(T) is what a single text needs.
"""

from __future__ import annotations

import math
import time as clock
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from smcsample.lm.kv_pool import PagePool
from smcsample.lm.paging import Pages
from smcsample.resampling import SCHEMES, resample

BYTES_PER_TOKEN = 46_080
"""30 layers × (K and V) × 3 heads × 64 × 4 bytes."""

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(width=120)


def ancestors_of(n: int, generator: torch.Generator) -> Tensor:
    """Systematic resampling of log-weights N(0, 1)."""
    log_w = torch.randn(1, n, dtype=torch.float64, generator=generator)
    u = torch.rand(1, SCHEMES["systematic"].uniforms(n, n), dtype=torch.float64, generator=generator)
    return resample(log_w, u.clamp(1e-12, 1 - 1e-12)).ancestors[0]


def opened(n: int, prompt: int, page_size: int, capacity: int) -> Pages:
    """Rows that share a prompt, as a stream opens them."""
    pages = Pages(PagePool(page_size, capacity))
    pages.open(1)
    pages.extend(torch.tensor([0]), prompt)
    pages.seal()
    pages.select(torch.zeros(n, dtype=torch.long))
    return pages


class Swept:
    """As built: it starts with as many pages as a stream does."""

    def __init__(self, n: int, prompt: int, page_size: int, rounds: int) -> None:
        self.pages = opened(n, prompt, page_size, -(-prompt // page_size) + 2 * n)
        self.rows = torch.arange(n)

    def round(self, ancestors: Tensor) -> None:
        self.pages.extend(self.rows, self.pages.page_size)
        self.pages.select(ancestors)


class Neither(Swept):
    """With pages enough never to look for any."""

    def __init__(self, n: int, prompt: int, page_size: int, rounds: int) -> None:
        self.pages = opened(n, prompt, page_size, -(-prompt // page_size) + n * rounds)
        self.rows = torch.arange(n)


class Counted(Neither):
    """And with a reference count per page beside, and the list of those that are free.

    Whole rows move, so a page's count changes by the number of offspring, less one, of each row that names it.
    """

    def __init__(self, n: int, prompt: int, page_size: int, rounds: int) -> None:
        super().__init__(n, prompt, page_size, rounds)
        self.counts = torch.zeros(self.pages.pool.capacity, dtype=torch.int64)
        self.counts[self.pages.tables[0].long()] = n
        self.free = self.rows[:0]

    def round(self, ancestors: Tensor) -> None:
        self.pages.extend(self.rows, self.pages.page_size)
        self.counts[self.pages.tables[:, -1].long()] = 1
        offspring = torch.bincount(ancestors, minlength=len(self.rows))
        changed = (offspring != 1).nonzero()[:, 0]
        named, more = self.pages.tables[changed].long(), offspring[changed] - 1
        self.counts.scatter_add_(0, named.flatten(), more[:, None].expand_as(named).flatten())
        touched = named[more < 0].flatten()
        self.free = torch.cat([self.free, touched[self.counts[touched] == 0].unique()])
        self.pages.select(ancestors)

    def check(self) -> None:
        """It must find the same pages as the tables name."""
        assert int((self.counts > 0).sum()) == self.pages.pool.in_use


@app.command()
def time(
    rounds: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 9,
) -> None:
    """Mark-and-sweep against reference counts."""
    torch.set_num_threads(1)
    table = Table(title=f"µs per round, a resampling every round, {rounds} rounds")
    for column in ("N", "prompt", "page", "table at the end", "neither", "mark and sweep", "reference counts"):
        table.add_column(column, justify="right")
    for n, (prompt, page_size) in product((8, 64, 256), ((512, 4), (512, 8), (512, 16), (4096, 8))):
        generator = torch.Generator().manual_seed(n)
        drawn = [ancestors_of(n, generator) for _ in range(rounds)]
        taken: dict[type[Swept], list[float]] = {Neither: [], Swept: [], Counted: []}
        for _ in range(repeats):
            for kind, seconds in taken.items():
                run = kind(n, prompt, page_size, rounds)
                start = clock.process_time()
                for ancestors in drawn:
                    run.round(ancestors)
                seconds.append(clock.process_time() - start)
                if isinstance(run, Counted):
                    run.check()
        shape = f"{n} × {-(-prompt // page_size) + rounds}"
        cells = [f"{1e6 * median(seconds) / rounds:.0f}" for seconds in taken.values()]
        table.add_row(str(n), str(prompt), str(page_size), shape, *cells)
    console.print(table)


@dataclass
class Peak:
    """Of one run: `used` pages at the most, `held` by the pool at the end, `alone`: what one text needs."""

    n: int
    k: int
    used: int
    held: int
    alone: int

    @property
    def c(self) -> float:
        """The least c with which this run keeps within alone + c·N·log N."""
        return (self.used - self.alone) / (self.n * math.log(self.n))


def peak(n: int, k: int, prompt: int, new: int, seed: int) -> Peak:
    generator, rounds, used = torch.Generator().manual_seed(seed), new // (k + 1), 0
    run = Swept(n, prompt, k + 1, rounds)
    pages = run.pages
    alone = -(-prompt // (k + 1)) + rounds
    for _ in range(rounds):
        pages.extend(run.rows, k + 1)
        used = max(used, pages.pool.in_use)
        pages.select(ancestors_of(n, generator))
    return Peak(n, k, used, pages.pool.capacity, alone)


@app.command()
def memory(
    prompt: Annotated[int, typer.Option(min=1)] = 512,
    new: Annotated[int, typer.Option(min=1)] = 256,
    seeds: Annotated[int, typer.Option(min=1)] = 30,
) -> None:
    """Peak pages in use, and what N separate caches would take."""
    runs = {(n, k): [peak(n, k, prompt, new, s) for s in range(seeds)] for n in (8, 64, 256) for k in (3, 7, 15)}
    worst = max(run.c for several in runs.values() for run in several)
    c = math.ceil(100 * worst) / 100
    for n in (8, 64, 256):
        least = [max(run.c for run in several) for (size, _), several in runs.items() if size == n]
        console.print(f"N = {n}: c must be {max(least):.2f} at least")
    table = Table(title=f"prompt {prompt}, {new} new tokens, {seeds} seeds (the largest peak); bound with c = {c}")
    for column in (
        "N",
        "K",
        "pages(T)",
        "peak",
        "bound",
        "c of this",
        "held",
        "MiB at the peak",
        "N caches, MiB",
        "saving",
    ):
        table.add_column(column, justify="right")
    for (n, k), several in runs.items():
        most = max(several, key=lambda run: run.used)
        mib = BYTES_PER_TOKEN * (k + 1) / 2**20
        separate = BYTES_PER_TOKEN * n * (prompt + new) / 2**20
        bound = most.alone + c * n * math.log(n)
        table.add_row(
            str(n),
            str(k),
            str(most.alone),
            str(most.used),
            f"{bound:.0f}",
            f"{most.c:.2f}",
            str(max(run.held for run in several)),
            f"{most.used * mib:.0f}",
            f"{separate:.0f}",
            f"{separate / (most.used * mib):.1f}×",
        )
    console.print(table)


if __name__ == "__main__":
    app()
