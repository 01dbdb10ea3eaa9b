"""The exact law of a resampling scheme on given weights, for N ≤ 5: no Monte Carlo, no tolerance to tune.

`resample` is a function of uniforms that is constant on finitely many boxes. `law` cuts the unit cube into those boxes
(the cuts are the scheme's textbook thresholds, in the fixed-point weights), calls the real `resample` once with one
representative of every box, and adds up the boxes' volumes by outcome. Permutations are enumerated likewise.

The cuts are ours, not read off the code under test. If it had others, representatives at different places of the boxes
would come out differently: compare `law(..., at=1e-6)`, `law(..., at=0.5)` and `law(..., at=1 - 1e-6)`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from smcsample.resampling import fixed_point, resample, scheme
from smcsample.weights import normalise

Box = tuple[float, tuple[float, ...]]  # volume, representative
NEGLIGIBLE = 2.0**-51  # narrower boxes are joined to their neighbour
BELOW_ONE = 1 - 2.0**-53


class Outcome(NamedTuple):
    """One possible result: `ancestors` of length n and the log-weights they carry."""

    probability: float
    ancestors: tuple[int, ...]
    log_w: tuple[float, ...]


def law(scheme_name: str, log_w: Tensor, n: int | None = None, at: float = 0.5) -> list[Outcome]:
    """Every outcome of `resample` on one group of log-weights `[N]` with its probability, accurate to about 1e-15.

    Args:
        scheme_name: a key of `SCHEMES`.
        log_w: log-weights `[N]`, N ≤ 5; all `-inf` gives the one outcome of a dead group.
        n: particles to draw; N by default.
        at: where in its box a representative lies, 0 < at < 1.
    """
    size = log_w.shape[0]
    n = size if n is None else n
    if bool((log_w == -math.inf).all()):
        boxes = [(1.0, (0.5,) * scheme(scheme_name).uniforms(size, n))]
    else:
        if scheme_name == "fearnhead_clifford":
            boxes = list(_fearnhead_clifford((log_w.double() - log_w.max()).tolist(), n, at))
        else:
            boxes = list(_BOXES[scheme_name](fixed_point(normalise(log_w)[None], n)[0].tolist(), n, at))
    u = torch.tensor([point for _, point in boxes], dtype=torch.float64).reshape(len(boxes), -1)
    result = resample(log_w.expand(len(boxes), size), u, n, scheme_name)
    probability: dict[tuple, float] = defaultdict(float)
    for (volume, _), ancestors, new in zip(boxes, result.ancestors.tolist(), result.log_w.tolist(), strict=True):
        probability[tuple(ancestors), tuple(new)] += volume
    return [Outcome(p, ancestors, new) for (ancestors, new), p in probability.items()]


def counts(outcomes: list[Outcome], size: int) -> tuple[Tensor, Tensor]:
    """Probabilities `[outcome]` and offspring counts `[outcome, particle]`."""
    probability = torch.tensor([o.probability for o in outcomes], dtype=torch.float64)
    rows = [[o.ancestors.count(i) for i in range(size)] for o in outcomes]
    return probability, torch.tensor(rows, dtype=torch.float64)


def expected_weight(outcomes: list[Outcome], size: int) -> Tensor:
    """What the offspring of each particle weigh on average, as a share of the total: W_i if unbiased."""
    total = torch.zeros(size, dtype=torch.float64)
    for outcome in outcomes:
        for ancestor, new in zip(outcome.ancestors, outcome.log_w, strict=True):
            total[ancestor] += outcome.probability * math.exp(new) / len(outcome.ancestors)
    return total


def _intervals(cuts: Iterable[float], at: float) -> list[Box]:
    """The pieces of (0, 1) between `cuts`; cuts outside, or on top of each other, count for nothing."""
    edges = [0.0]
    edges += [cut for cut in sorted(cuts) if NEGLIGIBLE < cut < 1 - NEGLIGIBLE]
    edges = [edge for edge, before in zip(edges, [-1.0, *edges], strict=False) if edge - before > NEGLIGIBLE]
    return [
        (high - low, (min(low + at * (high - low), BELOW_ONE),))
        for low, high in zip(edges, [*edges[1:], 1.0], strict=True)
    ]


def _boxes(sides: Iterable[list[Box]]) -> Iterator[Box]:
    """The product of boxes."""
    for pieces in product(*sides):
        yield math.prod(volume for volume, _ in pieces), tuple(x for _, point in pieces for x in point)


def _ends(units: list[int]) -> list[int]:
    """0, w_0, w_0 + w_1, …: prefix sums."""
    ends = [0]
    for unit in units:
        ends.append(ends[-1] + unit)
    return ends


def _choice(units: list[int], at: float) -> list[Box]:
    """One uniform that picks a particle in proportion to `units`."""
    ends = _ends(units)
    return _intervals((end / ends[-1] for end in ends), at)


def _multinomial(units: list[int], n: int, at: float) -> Iterator[Box]:
    return _boxes([_choice(units, at)] * n)


def _residual(units: list[int], n: int, at: float) -> Iterator[Box]:
    total = sum(units)
    rest = [n * unit % total for unit in units]
    rest = [0 if total - part <= 2 * n else part for part in rest]
    drawn = round(sum(rest) / total)
    return _boxes([_choice(rest, at) if drawn else [(1.0, (0.5,))]] * drawn + [[(1.0, (0.5,))]] * (n - drawn))


def _stratified(units: list[int], n: int, at: float) -> Iterator[Box]:
    ends = _ends(units)
    return _boxes(_intervals(((n * end - k * ends[-1]) / ends[-1] for end in ends), at) for k in range(n))


def _systematic_in_order(units: list[int], n: int, at: float) -> Iterator[Box]:
    ends = _ends(units)
    return iter(_intervals((n * end % ends[-1] / ends[-1] for end in ends), at))


def _systematic(units: list[int], n: int, at: float) -> Iterator[Box]:
    size = len(units)
    for order in permutations(range(size)):
        keys = [0.0] * size
        for place, particle in enumerate(order):
            keys[particle] = (place + at) / size
        for volume, point in _systematic_in_order([units[i] for i in order], n, at):
            yield volume / math.factorial(size), (*point, *keys)


def _ssp(units: list[int], n: int, at: float) -> Iterator[Box]:
    """Who wins a match decides who carries on, not with how much: every match has one threshold."""
    total = sum(units)
    parts, sides = [n * unit % total for unit in units], []
    while len(parts) > 1:
        matches = list(zip(parts[::2], parts[1::2], strict=False))
        for left, right in matches:
            both = left + right
            odds = (total - right) / (2 * total - both) if both >= total else left / both if both else 0.0
            sides.append(_intervals([odds], at))
        parts = [(left + right) % total for left, right in matches] + parts[2 * len(matches) :]
    return _boxes(sides)


def _killing(units: list[int], n: int, at: float) -> Iterator[Box]:
    redraw = _choice(units, at)
    for keep in product(*([True, False] if unit < max(units) else [True] for unit in units)):
        odds = [unit / max(units) for unit in units]
        volume = math.prod(p if kept else 1 - p for p, kept in zip(odds, keep, strict=True))
        keep_u = tuple(at * p if kept else p + at * (1 - p) for p, kept in zip(odds, keep, strict=True))
        if volume and all(0 < u < 1 for u in keep_u):
            for redraw_volume, redraw_u in _boxes([(1.0, (0.5,))] if kept else redraw for kept in keep):
                yield volume * redraw_volume, keep_u + redraw_u


def _fearnhead_clifford(log_w: list[float], n: int, at: float) -> Iterator[Box]:
    """In decimals: what is kept may outweigh the rest by more than float64 can tell."""
    ordered = sorted((Decimal(x).exp() for x in log_w), reverse=True)
    kept = 0
    while kept < n and (n - kept) * ordered[kept] >= sum(ordered[kept:]):
        kept += 1
    rest = sum(ordered[kept:])
    if not rest:
        return iter([(1.0, (0.5,) * (1 + len(ordered)))])
    units = [int(weight / rest * 2**80) for weight in ordered[kept:]]
    return _systematic([0] * kept + units, n - kept, at)


_BOXES = {
    "multinomial": _multinomial,
    "residual": _residual,
    "stratified": _stratified,
    "systematic": _systematic,
    "systematic_in_order": _systematic_in_order,
    "ssp": _ssp,
    "killing": _killing,
}
