"""One configuration a kernel is launched with, as ahead-of-time compilation needs it."""

from __future__ import annotations

from typing import Any, NamedTuple


class CompileTarget(NamedTuple):
    """A Triton function and everything that specialises it.

    `signature`: argument name → Triton type ("*bf16", "i32", …); `constexprs`: argument name → value; `divisible`: the
    arguments whose value or address is a multiple of 16.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    divisible: tuple[str, ...]
