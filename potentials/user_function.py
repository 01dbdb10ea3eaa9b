"""Calling functions that users wrote: once per batch, on what is new, and with errors that say which texts it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from smcsample.potentials.text import Item

CACHED = 1 << 14
"""Values kept per run; the oldest go first."""


class PotentialError(RuntimeError):
    """A user's function inside a potential raised, or returned what can be no weight. What `smcsample.sample` had
    finished by then is in its `posteriors`."""


class Values:
    """`evaluate`, called with a list of items that have not been seen, each once.

    Args:
        evaluate: a list of different items → one float for each.
    """

    def __init__(self, evaluate: Callable[[list[Item]], list[float]]) -> None:
        self._evaluate = evaluate
        self._known: dict[Item, float] = {}

    def __call__(self, items: Sequence[Item]) -> list[float]:
        new = [item for item in dict.fromkeys(items) if item not in self._known]
        if new:
            self._known |= zip(new, self._evaluate(new), strict=True)
        values = [self._known[item] for item in items]
        while len(self._known) > CACHED:
            del self._known[next(iter(self._known))]
        return values


def call_on_list(name: str, f: Callable[[list[Any]], Any], items: list[Item], *, zero: bool) -> list[float]:
    """`f(items)` as floats. `zero`: whether −inf, weight zero, is a legal value.

    Raises:
        PotentialError: f raised, or did not return one number per item, or one that is NaN or +inf.
    """
    given = [_as_lists(item) for item in items]
    try:
        values = f(given)
    except Exception as error:
        raise PotentialError(
            f"potential {name}: f raised {type(error).__name__}: {error}, given {_shown(items)}"
        ) from error
    n, shape = len(items), getattr(values, "shape", None)
    if isinstance(values, (Tensor, np.ndarray)) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        what = f"{type(values).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"
        raise PotentialError(f"potential {name}: f returned a {what}, not a list of {n} numbers, given {_shown(items)}")
    if len(values) != n:
        raise PotentialError(f"potential {name}: f returned {len(values)} values, not {n}, given {_shown(items)}")
    numbers = [v.item() if isinstance(v, (Tensor, np.ndarray)) and v.ndim == 0 else v for v in values]
    for value, item in zip(numbers, items, strict=True):
        if not isinstance(value, Real):
            kind = type(value).__name__
            raise PotentialError(
                f"potential {name}: f returned {value!r}, a {kind} and no number, for {_shown([item])}"
            )
        if math.isnan(value) or value == math.inf or (value == -math.inf and not zero):
            legal = "finite or -inf" if zero else "finite (use Where to forbid texts)"
            raise PotentialError(f"potential {name}: f returned {value} for {_shown([item])}; it must be {legal}")
    return [float(value) for value in numbers]


def call_on_each(name: str, predicate: Callable[[Any], Any], items: list[Item]) -> list[float]:
    """log 1[predicate(item)] for each.

    Raises:
        PotentialError: predicate raised, or returned no bool.
    """
    values = []
    for item in items:
        try:
            value = predicate(_as_lists(item))
        except Exception as error:
            raise PotentialError(
                f"potential {name}: predicate raised {type(error).__name__}: {error}, given {_shown([item])}"
            ) from error
        if not isinstance(value, (bool, np.bool_)):
            raise PotentialError(
                f"potential {name}: predicate returned {value!r} for {_shown([item])}; return True or False "
                "(wrap what is merely truthy in bool(…))"
            )
        values.append(0.0 if value else -math.inf)
    return values


def formula(potential: Any, *always: str) -> str:
    """How a potential reads: `Name(function, beta=0.1)`. Its first field is the function; of the others, those named in
    `always` and those that differ from their default are shown."""
    function, *others = fields(potential)
    f = getattr(potential, function.name)
    shown = [
        f", {field.name}={value!r}"
        for field in others
        if (value := getattr(potential, field.name)) != field.default or field.name in always
    ]
    return f"{type(potential).__name__}({getattr(f, '__name__', None) or repr(f)}{''.join(shown)})"


def _as_lists(item: Any) -> Any:
    """An `Item` as users expect it: token ids as lists."""
    if isinstance(item, str):
        return item
    if item and not isinstance(item[0], int):
        return tuple(part if isinstance(part, str) else list(part) for part in item)
    return list(item)


def _shown(items: list[Item]) -> str:
    texts = [text if len(text) <= 80 else f"{text[:79]}…" for text in (repr(_as_lists(item)) for item in items[:5])]
    if len(items) == 1:
        return texts[0]
    return f"{len(items)} of them: [{', '.join(texts)}{', …' if len(items) > 5 else ''}]"
