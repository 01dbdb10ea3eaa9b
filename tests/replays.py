"""A stand-in for `torch.cuda.graph` that shows on a CPU what a graph gets wrong: what it replays reads the buffers and
pools it was recorded with, and writes its output where the last replay did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from smcsample.lm.kv_pool import PagePool


def recorded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A `smcsample.lm.graphs.Capture`."""
    pools: list[tuple[Tensor, Tensor]] = []
    real = PagePool.layer

    def noted(pool: PagePool, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        pools.append(real(pool, layer, like))
        return pools[-1]

    with _layer(noted):
        out = run().clone()

    def replay() -> Tensor:
        addresses = iter(pools)
        with _layer(lambda *_: next(addresses)):
            out.copy_(run())
        return out

    return replay


@contextmanager
def _layer(function: Callable[..., Any]) -> Iterator[None]:
    real, PagePool.layer = PagePool.layer, function
    try:
        yield
    finally:
        PagePool.layer = real
