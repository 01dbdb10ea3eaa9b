"""Which of its two implementations an operation runs: Triton on a GPU, the reference elsewhere, or what one says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from torch import Tensor

Runner = Literal["reference", "triton"]

_chosen: ContextVar[Runner | None] = ContextVar("runner", default=None)


@contextmanager
def runner(name: Runner) -> Iterator[None]:
    """Run every operation of the block in this implementation, whatever the device.

    `runner("triton")` on CPU tensors needs Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported).

    Raises:
        ValueError: neither "reference" nor "triton".
    """
    if name not in ("reference", "triton"):
        raise ValueError(f"runner = {name!r} is neither 'reference' nor 'triton'")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def use_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor runs in Triton."""
    return (_chosen.get() or ("triton" if tensor.is_cuda else "reference")) == "triton"
