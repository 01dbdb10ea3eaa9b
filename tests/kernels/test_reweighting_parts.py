"""What the reweighting kernel is made of, one by one, on inputs that a whole launch cannot be given."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import permutations, product

import pytest
import torch

from kernel_device import DEVICE
from smcsample.kernels.reference import offspring
from smcsample.kernels.reference import reweighting as reference

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("smcsample.kernels.reweighting")


@triton.jit
def _weights(d, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, kernels.weights_of(tl.load(d + lane)))


def test_exp_is_accurate_and_the_same_in_both_runners() -> None:
    edges = [0.0, -5e-324, -1e-300, -1e-17, -0.5, -36.04, -36.05, reference.NEGLIGIBLE, -708.0, -1e308, -math.inf]
    halves = [-(k + 0.5) * math.log(2) for k in range(58)]  # where k·log 2 changes over
    near = [math.nextafter(x, y) for x in halves for y in (0.0, -99.0)]
    d = -40 * torch.rand(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    listed = torch.tensor(edges + halves + near, dtype=torch.float64)
    d[: len(listed)] = listed
    want = reference.weights_of(d)
    got = torch.empty_like(d, device=DEVICE)
    _weights[(1,)](d.to(DEVICE), got, SIZE=len(d), **kernels.OPTIONS)
    assert torch.equal(got.cpu(), want)

    assert want[0] == want[1] == want[2] == want[3] == 1
    assert bool((want[d <= reference.NEGLIGIBLE] == 0).all())
    assert bool((want[d > reference.NEGLIGIBLE] > 0).all())
    with localcontext(prec=40):
        for x, y in zip(d.tolist(), want.tolist(), strict=True):
            if y:
                assert abs(Decimal(y) - Decimal(x).exp()) < 2 * Decimal(math.ulp(y))
    assert reference.weights_of(torch.tensor([math.nan], dtype=torch.float64)) == 0


@triton.jit
def _floors(bits, total, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, kernels.scaled_floor(tl.load(bits + lane), tl.load(total + lane)))


def test_scaled_floor_is_exact() -> None:
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**52, (4096,), generator=g)
    total = torch.randint(0, 2**52 + 2**11, (4096,), generator=g)
    pairs = list(product((0, 1, 2**51 - 1, 2**51, 2**52 - 1), (0, 1, 2, 3, 2**31, 2**52 - 1, 2**52, 2**52 + 2**11)))
    bits[: len(pairs)], total[: len(pairs)] = torch.tensor(pairs).unbind(1)
    got = torch.empty_like(bits, device=DEVICE)
    _floors[(1,)](bits.to(DEVICE), total.to(DEVICE), got, SIZE=len(bits))
    want = [math.floor(Fraction(2 * k + 1, 2**53) * t) for k, t in zip(bits.tolist(), total.tolist(), strict=True)]
    assert got.tolist() == want
    assert offspring.scaled_floor((bits.double() + 0.5) * 2.0**-52, total).tolist() == want


@triton.jit
def _counts(units, points, keys, out, n, SCHEME: tl.constexpr, PAD: tl.constexpr, CHUNK: tl.constexpr):
    """The offspring of one case per program, with points (systematic: the first is the offset) and keys as given."""
    case = tl.program_id(0)
    lane = tl.arange(0, PAD)
    own = tl.load(units + lane, mask=lane < n, other=0)
    total = tl.sum(own, 0)
    point = tl.load(points + case * n + lane, mask=lane < n, other=total)
    if SCHEME == "systematic":
        key = tl.load(keys + case * n + lane, mask=lane < n, other=0)
        counts = kernels.systematic_counts(own, total, tl.load(points + case * n), key, lane, n, PAD, CHUNK)
    elif SCHEME == "stratified":
        counts = kernels.stratified_counts(own, total, point, lane, n)
    else:
        counts = kernels.multinomial_counts(own, point, lane, n, PAD, CHUNK)
    tl.store(out + case * n + lane, counts, mask=lane < n)


@pytest.mark.parametrize("units", [[2, 1, 2], [0, 4, 1], [1, 0, 0], [3, 2], [1, 1, 1], [6]])
@pytest.mark.parametrize("scheme", reference.UNIFORMS)
def test_unbiased_by_integrating_the_uniforms(scheme: str, units: list[int]) -> None:
    """Uniforms matter only through floor(u·total) and their order: with few units, run through all of it. Of the sort
    keys some are equal as well, which must not lose or double a particle."""
    n, total = len(units), sum(units)
    if scheme == "systematic":
        cases = [((v,) * n, order) for v in range(total) for order in permutations(range(n))]
    else:
        cases = [(points, (0,) * n) for points in product(range(total), repeat=n)]
    points, keys = (torch.tensor(x) for x in zip(*cases, strict=True))
    u = (points.double() + 0.5) / total
    if scheme == "systematic":
        u = torch.cat([u[:, :1], (keys.double() + 0.5) / n], dim=1)
    counts = getattr(offspring, f"{scheme}_counts")
    want = counts(torch.tensor(units).expand(len(cases), n).contiguous(), u, n)
    assert (total * want.sum(0)).tolist() == [n * unit * len(cases) for unit in units]
    assert bool((want.sum(1) == n).all())

    def triton_counts(keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(keys), n, dtype=torch.int64, device=DEVICE)
        moved = torch.tensor(units, device=DEVICE), points.to(DEVICE), keys.to(DEVICE)
        config = kernels.launch_config(n)
        _counts[(len(keys),)](*moved, out, n, SCHEME=scheme, PAD=config.pad, CHUNK=config.chunk)
        return out.cpu()

    assert torch.equal(triton_counts(keys), want)
    if scheme == "systematic":
        u[:, 1:] = 0.5
        want = counts(torch.tensor(units).expand(len(cases), n).contiguous(), u, n)
        assert torch.equal(triton_counts(torch.zeros_like(keys)), want)


COMPILE = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from smcsample.kernels.reweighting import OPTIONS, weights_of

@triton.jit
def kernel(d, out):
    lane = tl.arange(0, 128)
    weights = weights_of(tl.load(d + lane))
    tl.store(out + lane, weights / tl.sum(weights, 0))

for options in (OPTIONS, OPTIONS | {"enable_fp_fusion": True}):
    source = ASTSource(kernel, {"d": "*fp64", "out": "*fp64"}, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(len(re.findall(r"fma\\.rn\\.f64", ptx)), len(re.findall(r"mul\\.rn\\.f64", ptx)),
          len(re.findall(r"(?:mul|add|sub)\\.f64", ptx)), len(re.findall(r"div\\.rn\\.f64", ptx)))
"""


def test_nothing_is_contracted_in_machine_code(tmp_path) -> None:
    """PTX whose products and sums carry `.rn` is not contracted further (PTX ISA, "mul"), and division is IEEE 754."""
    script = tmp_path / "compile_weights.py"
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    as_launched, with_fusion = (tuple(map(int, line.split())) for line in run.stdout.splitlines())
    fused, products, may_contract, quotients = as_launched
    assert (fused, may_contract) == (0, 0)
    assert products >= 17
    assert quotients == 1
    assert with_fusion[0] > 0
