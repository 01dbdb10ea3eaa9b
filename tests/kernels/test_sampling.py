"""Drawing and scoring tokens: both runners on every kind of row, float64 as judge.

Both runners race the same Gumbels, so they draw the same token, unless the two best perturbed logits are within RACE of
each other; `assert_same_draws` lets a token differ then, and only then.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_device import DEVICE, ON_GPU
from smcsample.kernels import ops
from smcsample.kernels.ops import Counters, Drawn, Purpose, Scored
from smcsample.kernels.philox import uniform_float32, words
from smcsample.kernels.reference import sampling as reference
from smcsample.lm.law import TokenLaw

pytest.importorskip("triton")
kernels = pytest.importorskip("smcsample.kernels.sampling")
truncation = pytest.importorskip("smcsample.kernels.truncation")

INF = math.inf
RACE = 8e-6
"""Float32 rounding of a race: a Gumbel (up to 22.9, half a unit is 1e-6) and a difference of logits, in two runners."""
MASS = 4e-6
"""Float32 rounding of the mass above a token."""
RUNNERS = ("reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("random", "tied", "one-hot", "padded", "huge", "tiny", "flat", "nothing")


def rows_of_every_kind(vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """One row of each of KINDS; not contiguous: the rows lie in a wider matrix, at an odd offset."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((len(KINDS), vocab + 7), 50.0)
    x = wide[:, 3 : 3 + vocab]
    x[:] = 4 * torch.randn(x.shape, generator=g)
    x[1] = x[1].round()
    x[2] = torch.full((vocab,), -INF).index_fill(0, torch.tensor([vocab // 2]), 2.0)
    x[3, vocab // 3 :] = -INF
    x[4] = 1e4 * torch.randn(vocab, generator=g).clamp(-3, 3)
    x[5] = 1e-4 * torch.randn(vocab, generator=g)
    x[6] = 1.5
    x[7] = -INF
    return wide.to(dtype)[:, 3 : 3 + vocab]


def places(rows: int, seed: int = 5) -> Counters:
    row = torch.arange(rows)
    return Counters(torch.full_like(row, seed - (1 << 62)), row % 3, row, row * 0 + 17)


def law_arguments(rows: int, vocab: int, seed: int = 1) -> dict[str, Any]:
    """A temperature and a mask that allows about half of the tokens."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocab // 32)), dtype=torch.int32, generator=g)
    return {"temperature": torch.rand(rows, generator=g) + 0.5, "mask": mask}


def on_device(x: Any) -> Any:
    if isinstance(x, Counters):
        return Counters(*(field.to(DEVICE) for field in x))
    if not isinstance(x, Tensor):
        return x
    if x.dim() == 2 and x.stride(0) not in (0, x.shape[1]):  # .to() would make it contiguous
        out = torch.empty(x.shape[0], x.stride(0), dtype=x.dtype, device=DEVICE)[:, : x.shape[1]]
        return out.copy_(x)
    return x.to(DEVICE)


def drawn_by_both(logits: Tensor, places: Counters, **law: Any) -> tuple[Drawn, Drawn]:
    expected = reference.draw_tokens(logits, places, Purpose.BONUS, **law)
    moved = {name: on_device(value) for name, value in law.items()}
    with ops.runner("triton"):
        drawn = ops.draw_tokens(on_device(logits), on_device(places), Purpose.BONUS, **moved)
    return expected, Drawn(*(field.cpu() for field in drawn))


def scored_by_both(logits: Tensor, *arguments: Any) -> tuple[Scored, Scored]:
    expected = reference.score_tokens(logits, *arguments)
    with ops.runner("triton"):
        scored = ops.score_tokens(on_device(logits), *map(on_device, arguments))
    return expected, Scored(*(field.cpu() for field in scored))


def law_of(
    logits: Tensor, temperature: Tensor | None = None, mask: Tensor | None = None, top_k: int | None = None, top_p=1.0
) -> Tensor:
    """The tempered, masked, cut logits as float64 numbers, token by token and row by row."""
    law = logits.float() if temperature is None else logits.float() / temperature[:, None]
    if mask is not None:
        allowed = [
            [int(word) >> (v % 32) & 1 for v in range(logits.shape[1]) for word in [row[v // 32]]] for row in mask
        ]
        law = law.masked_fill(torch.tensor(allowed) == 0, -INF)
    return ops.cut(law, top_k, top_p).double()


def exact_gumbels(places: Counters, vocab: int) -> Tensor:
    """In float64, of the same words."""
    return -torch.log(-torch.log1p(-uniform_float32(words(*places, Purpose.BONUS, vocab)).double()))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """1e-5 relative; near zero the rounding of a sum near one."""
    assert torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True), (actual, expected)


def assert_same_draws(logits: Tensor, places: Counters, **law: Any) -> None:
    expected, drawn = drawn_by_both(logits, places, **law)
    exact = law_of(logits, **law)
    nothing = exact.amax(dim=1) == -INF
    assert torch.equal(expected.tokens == -1, nothing)
    assert torch.equal(drawn.tokens == -1, nothing)
    race = exact - exact.amax(dim=1, keepdim=True) + exact_gumbels(places, logits.shape[1])
    for result in (expected, drawn):
        token = result.tokens.clamp(min=0)[:, None]
        for field, table in ((result.log_q, exact), (result.log_p, logits.double())):
            assert_close(field, table.log_softmax(dim=1).gather(1, token)[:, 0].masked_fill(nothing, -INF))
        assert (race.amax(dim=1) - race.gather(1, token)[:, 0])[~nothing].le(RACE).all()
    same = drawn.tokens == expected.tokens
    assert_close(drawn.log_q[same], expected.log_q[same])
    assert_close(drawn.log_p[same], expected.log_p[same])


LAWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "tempered": (("temperature",), {}),
    "masked": (("mask",), {}),
    "tempered and masked": (("temperature", "mask"), {}),
    "all": (("temperature", "mask"), {"top_k": 9, "top_p": 0.8}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("law", LAWS)
def test_both_runners_draw_the_same(law: str, dtype: torch.dtype) -> None:
    names, cuts = LAWS[law]
    logits = rows_of_every_kind(75 if cuts and not ON_GPU else 1100, dtype)
    every = law_arguments(*logits.shape)
    assert_same_draws(logits, places(len(logits)), **{name: every[name] for name in names}, **cuts)


SHAPES = [(1, 1), (3, 1), (1, 2), (1000 if ON_GPU else 200, 5), (1, 49_151), (2 if ON_GPU else 1, 50_257)]


@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_any_shape(rows: int, vocab: int) -> None:
    g = torch.Generator().manual_seed(rows + vocab)
    logits = 3 * torch.randn(rows, vocab, generator=g)
    logits[0, : vocab // 2] = -INF
    logits[:, -1] = 8.0  # the last token of an incomplete tile is often drawn
    law = law_arguments(rows, vocab)
    law["mask"][:, -1] |= 1 << (vocab - 1) % 32 if vocab % 32 else -(1 << 31)
    assert_same_draws(logits, places(rows), **law)
    tokens = torch.arange(rows) % vocab
    for actual, expected in zip(*scored_by_both(logits, tokens, law["temperature"], 2.5), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_a_row_may_be_split_in_any_way(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program walks over many tiles, or many over one; the last may have fewer."""
    monkeypatch.setattr(kernels, "MAX_SPLITS", splits)
    logits = torch.randn(2, 5 * 1024 - 300, generator=torch.Generator().manual_seed(3))
    law = law_arguments(*logits.shape)
    assert_same_draws(logits, places(2), **law)
    for actual, expected in zip(*scored_by_both(logits, torch.tensor([7, 4000]), None, 2.0), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("rows", [1, 3, 64, 700, 5000])
@pytest.mark.parametrize("vocab", [1, 1024, 1025, 49_151, 66_000, 262_144])
def test_every_tile_has_its_program(rows: int, vocab: int) -> None:
    launch = kernels.launch_config(torch.empty(rows, vocab, device="meta"))
    assert launch.splits <= kernels.MAX_SPLITS <= kernels.SPLITS.value
    assert (launch.splits - 1) * launch.tiles < -(-vocab // kernels.BLOCK.value) <= launch.splits * launch.tiles


def test_rows_that_share_memory_and_transposed_ones() -> None:
    one = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    assert_same_draws(one.expand(4, -1), places(4))
    with pytest.raises(ValueError, match="logits has stride 4 between tokens; make it contiguous"):
        ops.draw_tokens(torch.zeros(40, 4).T, places(4), Purpose.DRAFT)


def test_aligned_rows() -> None:
    """Rows that start at multiples of 16 bytes are loaded otherwise."""
    logits = torch.randn(2, 1040, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert kernels.launch_config(on_device(logits)).aligned
    assert not kernels.launch_config(on_device(rows_of_every_kind(1040, torch.bfloat16))).aligned
    assert_same_draws(logits, places(2))


def test_near_ties() -> None:
    """Logits that make all the perturbed ones equal but for rounding: the runners may disagree, within RACE."""
    logits = -exact_gumbels(places(8), 60).float()
    assert_same_draws(logits, places(8))
    assert_same_draws(logits + 100, places(8), temperature=torch.ones(8))  # shifted: rounded to 8e-6, as are the ties


def test_large_logits_do_not_round_the_gumbels_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1e7 a float32 is an integer. The race between equal ones must not see that: neither between lanes (the first
    rows) nor in the only lane that has tokens (the others)."""
    monkeypatch.setattr(kernels, "MAX_SPLITS", 1)
    small = torch.zeros(10, 5000)
    small[4:, torch.arange(5000) % kernels.BLOCK.value != 3] = -INF
    best = (small + exact_gumbels(places(10), 5000)).argmax(dim=1)
    for runner in RUNNERS:
        with ops.runner(runner):
            drawn = [ops.draw_tokens(on_device(x), on_device(places(10)), Purpose.BONUS) for x in (small, small + 1e7)]
        assert torch.equal(drawn[0].tokens.cpu(), best)
        assert torch.equal(drawn[1].tokens.cpu(), best)
        assert torch.equal(drawn[0].log_q, drawn[1].log_q)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("token", [0, 1, 31, 32, 37, 63, 64])
def test_the_layout_of_the_mask(runner: str, token: int) -> None:
    """Token v is bit v mod 32 of word v div 32, counted from the least significant."""
    bit = 1 << token % 32
    mask = torch.zeros(1, 3, dtype=torch.int32)
    mask[0, token // 32] = bit - (1 << 32) if bit == 1 << 31 else bit
    mask[0, 2] |= ~1  # tokens beyond the vocabulary
    with ops.runner(runner):
        drawn = ops.draw_tokens(
            torch.zeros(1, 65, device=DEVICE), on_device(places(1)), Purpose.DRAFT, mask=mask.to(DEVICE)
        )
    assert drawn.tokens.item() == token
    assert drawn.log_q.item() == 0.0
    assert drawn.log_p.item() == pytest.approx(-math.log(65), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (7, 1.0), (None, 0.6), (None, 0.999), (12, 0.5), (None, 1e-9)])
def test_both_runners_cut_at_the_same_logit(top_k: int | None, top_p: float, dtype: torch.dtype) -> None:
    """On every kind of row, but where the mass above a token is within MASS of top_p."""
    logits = rows_of_every_kind(70, dtype, seed=2)[:: 1 if ON_GPU else 2]
    law = law_arguments(*logits.shape)
    if top_p < 1:
        law["temperature"] = law["temperature"] * 1.7
    tempered = law_of(logits, **law).float()
    t, mask = on_device(law["temperature"]), on_device(law["mask"])
    thresholds = truncation.cut_thresholds(on_device(logits), t, mask, top_k, top_p, False).cpu()
    kept = (tempered >= (thresholds / law["temperature"])[:, None]) & (tempered > -INF)
    expected = [ops.cut(tempered, top_k, p) > -INF for p in (top_p, max(top_p - MASS, 1e-30), min(top_p + MASS, 1))]
    assert (kept.eq(expected[0]).all(1) | kept.eq(expected[1]).all(1) | kept.eq(expected[2]).all(1)).all()
    if top_p == 1:
        assert torch.equal(kept, expected[0])


def test_ties_at_a_cut_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 0.0, 1.0, -2.0]])
    for cut in ({"top_k": 2}, {"top_p": 0.8}):
        law = ops.cut(logits, **cut)
        assert (law > -INF).tolist() == [[True, True, True, False, True, False]]
        for runner in RUNNERS:
            with ops.runner(runner):
                drawn = ops.draw_tokens(logits.to(DEVICE), on_device(places(1)), Purpose.DRAFT, **cut)
            assert_close(drawn.log_q.cpu(), law.log_softmax(dim=1)[:, drawn.tokens.item()])


def test_cut_is_that_of_token_law_where_nothing_is_tied() -> None:
    logits = 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(4))
    for k, p in ((None, 0.3), (5, 1.0), (12, 0.9), (80, 0.99)):
        assert torch.equal(ops.cut(logits, k, p), TokenLaw(top_k=k, top_p=p).weights(logits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_runners_score_the_same(dtype: torch.dtype) -> None:
    """And float64 agrees; exponents below, at and above one."""
    logits = rows_of_every_kind(1100, dtype)[:7]
    alpha = torch.tensor([0.5, 1.0, 2.0, 4.0, 1.0, 7.5, 3.0])
    tokens = torch.tensor([0, 1099, 550, 5, 700, 64, 31])
    for temperature in (None, law_arguments(7, 1100)["temperature"]):
        exact = law_of(logits, temperature).log_softmax(dim=1)
        for result in scored_by_both(logits, tokens, temperature, alpha):
            assert_close(result.log_p, exact.gather(1, tokens[:, None])[:, 0])
            assert_close(result.log_power, (exact * alpha[:, None].double()).logsumexp(dim=1))
            assert result.log_power[alpha == 1].abs().max() == 0
        for result in scored_by_both(logits, tokens, temperature, 1.0):
            assert result.log_power.abs().max() == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_token_no_logits_and_tokens_that_are_none(runner: str) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    logits[3] = -INF
    logits[4, 7] = math.nan
    with ops.runner(runner):
        scored = ops.score_tokens(logits.to(DEVICE), torch.tensor([-1, 40, -2, 5, 5], device=DEVICE), None, 2.0)
    exact = logits.double().log_softmax(dim=1)
    log_p, log_power = (field.tolist() for field in scored)
    assert log_p[0] == 0.0
    assert log_power[0] == pytest.approx((2 * exact[0]).logsumexp(0).item(), rel=1e-5)
    assert math.isnan(log_p[1])
    assert math.isnan(log_p[2])
    assert (log_p[3], log_power[3]) == (-INF, -INF)
    assert math.isnan(log_p[4])
    assert math.isnan(log_power[4])


@pytest.mark.parametrize("runner", RUNNERS)
def test_drawing_and_scoring_agree_to_the_bit(runner: str) -> None:
    """So that a proposal equal to the target gives weights of exactly zero."""
    logits = rows_of_every_kind(2300, torch.float32)[:6].to(DEVICE)
    t = law_arguments(6, 2300)["temperature"].to(DEVICE)
    with ops.runner(runner):
        drawn = ops.draw_tokens(logits, on_device(places(6)), Purpose.DRAFT, t)
        assert torch.equal(ops.score_tokens(logits, drawn.tokens, t).log_p, drawn.log_q)
        assert torch.equal(ops.score_tokens(logits, drawn.tokens).log_p, drawn.log_p)


@pytest.mark.parametrize("runner", RUNNERS)
def test_no_rows(runner: str) -> None:
    logits = torch.zeros(0, 9, device=DEVICE)
    with ops.runner(runner):
        drawn = ops.draw_tokens(logits, on_device(places(0)), Purpose.DRAFT)
        scored = ops.score_tokens(logits, drawn.tokens, None, 2.0)
    assert [len(field) for field in (*drawn, *scored)] == [0] * 5


def test_float64_logits_stay_float64_in_the_reference_only() -> None:
    logits = torch.randn(3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    t = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    drawn = reference.draw_tokens(logits, places(3), Purpose.DRAFT, t)
    exact = (logits / t[:, None]).log_softmax(dim=1).gather(1, drawn.tokens[:, None])[:, 0]
    assert torch.allclose(drawn.log_q, exact, rtol=1e-13, atol=1e-13)
    assert torch.allclose(reference.score_tokens(logits, drawn.tokens, t).log_p, exact, rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match=r"logits is torch\.float64; the Triton kernels take"):
        kernels.draw_tokens(logits, places(3), Purpose.DRAFT)


FLOATS = st.sampled_from([-INF, -1e4, -30.0, -1.0, 0.0, 0.0, 0.5, 0.5, 1.0, 2.0, 1e4])


@settings(max_examples=200 if ON_GPU else 12)
@given(st.data())
def test_any_content(data: st.DataObject) -> None:
    rows, vocab = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 70))
    row = st.lists(FLOATS, min_size=vocab, max_size=vocab)
    dtype = data.draw(st.sampled_from(DTYPES))
    logits = torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows))).to(dtype)
    word = st.integers(-(1 << 31), (1 << 31) - 1)
    mask = [[data.draw(word) for _ in range(-(-vocab // 32))] for _ in range(rows)]
    law: dict[str, Any] = {}
    if data.draw(st.booleans()):
        law["temperature"] = torch.tensor([data.draw(st.sampled_from([0.1, 0.7, 1.0, 5.0])) for _ in range(rows)])
    if data.draw(st.booleans()):
        law["mask"] = torch.tensor(mask, dtype=torch.int32)
    if data.draw(st.booleans()):
        law["top_k"] = data.draw(st.integers(1, vocab + 1))
    assert_same_draws(logits, places(rows, data.draw(st.integers(0, 1 << 30))), **law)
    tokens = torch.tensor([data.draw(st.integers(-1, vocab - 1)) for _ in range(rows)])
    for actual, expected in zip(*scored_by_both(logits, tokens, law.get("temperature"), 3.0), strict=True):
        assert_close(actual, expected)


BAD: dict[str, dict[str, Any]] = {
    "top_k = 0": {"top_k": 0},
    r"top_p = 0\.0": {"top_p": 0.0},
    r"top_p = 1\.5": {"top_p": 1.5},
    "mask is": {"mask": torch.zeros(2, 2, dtype=torch.int32)},
    r"mask is torch\.int64": {"mask": torch.zeros(2, 1, dtype=torch.int64)},
    r"temperature is torch\.float64": {"temperature": torch.ones(2, dtype=torch.float64)},
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_of_drawing(message: str, runner: str) -> None:
    with ops.runner(runner), pytest.raises(ValueError, match=message):
        ops.draw_tokens(torch.zeros(2, 10), places(2), Purpose.DRAFT, **BAD[message])


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_bad_powers(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha = .* is not a positive number"):
        ops.score_tokens(torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64), None, alpha)


def test_an_empty_vocabulary_and_counters_of_other_rows() -> None:
    with pytest.raises(ValueError, match="vocabulary of 0 tokens"):
        ops.draw_tokens(torch.zeros(2, 0), places(2), Purpose.DRAFT)
    with pytest.raises(ValueError, match=r"counters\.seed is"):
        ops.draw_tokens(torch.zeros(2, 9), places(3), Purpose.DRAFT)
