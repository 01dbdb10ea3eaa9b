"""Random numbers in Triton are those of PyTorch, bit for bit; counters can be read back, so none is used twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE
from random123 import RANDOM123
from smcsample.kernels import philox
from smcsample.kernels.ops import Counters, Purpose, words

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
device_functions = pytest.importorskip("smcsample.kernels.triton_philox")

WORD = 1 << 32
exponential, gumbels = device_functions.exponential, device_functions.gumbels
philox_block, uniform_float32 = device_functions.philox_block, device_functions.uniform_float32


@triton.jit
def block_kernel(place, purpose, first_block, out, BLOCKS: tl.constexpr):
    block = first_block + tl.arange(0, BLOCKS)
    seed, stream, particle, position = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    w0, w1, w2, w3 = philox_block(seed, stream, particle, position, purpose, block)
    at = out + 4 * tl.arange(0, BLOCKS)
    tl.store(at, w0.to(tl.int64))
    tl.store(at + 1, w1.to(tl.int64))
    tl.store(at + 2, w2.to(tl.int64))
    tl.store(at + 3, w3.to(tl.int64))


@triton.jit
def randint4x_kernel(seed, first_offset, out, BLOCKS: tl.constexpr):
    offset = tl.load(first_offset) + tl.arange(0, BLOCKS)
    w0, w1, w2, w3 = tl.randint4x(tl.load(seed), offset)
    at = out + 4 * tl.arange(0, BLOCKS)
    tl.store(at, w0.to(tl.uint32).to(tl.int64))
    tl.store(at + 1, w1.to(tl.uint32).to(tl.int64))
    tl.store(at + 2, w2.to(tl.uint32).to(tl.int64))
    tl.store(at + 3, w3.to(tl.uint32).to(tl.int64))


@triton.jit
def float_kernel(word, uniform, e, N: tl.constexpr):
    at = tl.arange(0, N)
    bits = tl.load(word + at).to(tl.uint32)
    tl.store(uniform + at, uniform_float32(bits))
    tl.store(e + at, exponential(bits))


@triton.jit
def gumbel_kernel(place, purpose, first_block, out, BLOCKS: tl.constexpr):
    seed, stream, particle, position = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    g = gumbels(seed, stream, particle, position, purpose, first_block, BLOCKS)
    tl.store(out + tl.arange(0, 4 * BLOCKS), g)


def triton_words(seed: int, stream: int, particle: int, position: int, purpose: int, block: int) -> list[int]:
    """The words of 8 blocks from `block` on."""
    place = torch.tensor([seed, stream, particle, position], device=DEVICE)
    out = torch.empty(32, dtype=torch.int64, device=DEVICE)
    block_kernel[(1,)](place, purpose, block, out, BLOCKS=8)
    return out.tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), RANDOM123)
def test_published_vectors(counter: tuple, key: tuple, expected: tuple) -> None:
    seed = key[0] | key[1] << 32
    seed -= (seed >> 63) << 64
    purpose, block = counter[0] >> 28, counter[0] & ((1 << 28) - 1)
    assert triton_words(seed, counter[3], counter[2], counter[1], purpose, block)[:4] == list(expected)


@pytest.mark.parametrize("seed", [0, 1, -1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("large", [False, True])
def test_words_of_the_counter(seed: int, large: bool) -> None:
    stream, particle, position = (WORD - 1, WORD - 2, WORD - 3) if large else (3, 1, 4)
    block, purpose = ((1 << 28) - 8, 15) if large else (0, int(Purpose.ANSWER))
    one = torch.ones(1, 1, dtype=torch.int64)
    at = philox.counter(torch.arange(block, block + 8)[None], purpose, position * one, particle * one, stream * one)
    key = (one * seed & philox.MASK, (one * seed >> 32) & philox.MASK)
    expected = torch.stack(philox.philox_4x32(at, key), dim=-1).flatten().tolist()
    assert triton_words(seed, stream, particle, position, purpose, block) == expected
    if not large:
        place = (torch.tensor([x]) for x in (seed, stream, particle, position))
        assert words(*place, Purpose.ANSWER, 32)[0].tolist() == expected


@pytest.mark.parametrize("offset", [0, 12345, (1 << 32) - 4, (1 << 40) - 8])
def test_randint4x_is_the_same_generator(offset: int) -> None:
    """`tl.randint4x(seed, offset)` is the counter (low word, high word, 0, 0)."""
    seed, first = torch.tensor([-987654321987654321]), torch.tensor([offset])
    out = torch.empty(32, dtype=torch.int64, device=DEVICE)
    randint4x_kernel[(1,)](seed.to(DEVICE), first.to(DEVICE), out, BLOCKS=8)
    at, zero = first + torch.arange(8), torch.zeros(8, dtype=torch.int64)
    key = (seed & philox.MASK, (seed >> 32) & philox.MASK)
    expected = torch.stack(philox.philox_4x32((at & philox.MASK, at >> 32, zero, zero), key), dim=-1)
    assert out.tolist() == expected.flatten().tolist()


def test_floats_of_the_words() -> None:
    """Uniforms to the bit; exponentials to a few units in the last place, where they can win a race (u < 1 − 2^-16)."""
    extremes = torch.tensor([0, 1, 255, 256, (1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, WORD - 256, WORD - 1])
    low = torch.arange(0, 1 << 20, 1 << 10)
    bits = torch.cat([extremes, low, torch.arange(7, WORD, WORD // 3014)])[:4096]
    bits = torch.cat([bits, bits.new_zeros(4096 - len(bits))])
    uniform, e = torch.empty(2, 4096, device=DEVICE)
    float_kernel[(1,)](bits.to(DEVICE), uniform, e, N=4096)
    assert torch.equal(uniform.cpu(), philox.uniform_float32(bits))
    expected, inside = philox.exponential(bits), bits < WORD - (1 << 16)
    assert torch.allclose(e.cpu()[inside], expected[inside], rtol=5e-7, atol=0)
    assert torch.allclose(e.cpu(), expected, rtol=1e-4, atol=0)


def test_gumbels_come_in_the_order_of_the_words() -> None:
    place = torch.tensor([-5, 2, 7, 9])
    out = torch.empty(64, device=DEVICE)
    gumbel_kernel[(1,)](place.to(DEVICE), int(Purpose.BONUS), 3, out, BLOCKS=16)
    expected = philox.gumbels(Counters(*place[:, None]), Purpose.BONUS, 76)[0, 12:]
    assert torch.allclose(out.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_gumbels_are_those_of_the_words_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Counters(*torch.arange(12).reshape(4, 3))
    bits = words(*place, Purpose.DRAFT, 1001)
    assert torch.equal(philox.gumbels(place, Purpose.DRAFT, 1001), -philox.exponential(bits).log())
    monkeypatch.setattr(philox, "CHUNK", 50)
    assert torch.equal(words(*place, Purpose.DRAFT, 1001), bits)


def read_back(counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Block, purpose, position, particle, stream of a counter."""
    return counter[0] & ((1 << 28) - 1), counter[0] >> 28, *counter[1:]


def test_coordinates_can_be_read_back_from_the_counter() -> None:
    """At every corner of the layout."""
    block, purpose, position, particle, stream = torch.cartesian_prod(
        torch.tensor([0, 1, (1 << 28) - 1]), torch.arange(16), *[torch.tensor([0, 1, 1 << 20, WORD - 1])] * 3
    ).T
    for p in range(16):
        of = purpose == p
        place = position[of], particle[of], stream[of]
        counter = philox.counter(block[of], p, *place)
        assert all(((word >= 0) & (word < WORD)).all() for word in counter)
        assert all(map(torch.equal, read_back(counter), (block[of], purpose[of], *place)))


def test_a_trillion_draws_share_no_number() -> None:
    """2^40 draws, 4096 positions of 1024 particles with 2^18 tokens each: the index of a draw can be read back from its
    counter and its word. A million of them and both ends."""
    index = torch.cat([torch.randint(1 << 40, (1_000_000,)), torch.tensor([0, (1 << 40) - 1])])
    token, particle, position = index & ((1 << 18) - 1), index >> 18 & 1023, index >> 28
    back = read_back(philox.counter(token >> 2, Purpose.DRAFT, position, particle, torch.zeros_like(index)))
    assert torch.equal((back[2] << 28) + (back[3] << 18) + (back[0] << 2) + (token & 3), index)
    assert not (back[1] | back[4]).any()


@pytest.mark.parametrize("name", ["stream", "particle", "position"])
@pytest.mark.parametrize("value", [-1, WORD])
def test_coordinates_out_of_range_are_refused(name: str, value: int) -> None:
    place = Counters(*torch.zeros(4, 2, dtype=torch.int64))._replace(**{name: torch.tensor([0, value])})
    with pytest.raises(ValueError, match=f"{name} = {value} is not in"):
        words(*place, Purpose.USER, 4)


def test_more_numbers_than_a_place_has_are_refused() -> None:
    with pytest.raises(ValueError, match="draw fewer"):
        philox.gumbels(Counters(*torch.zeros(4, 0, dtype=torch.int64)), Purpose.USER, (4 << 28) + 1)
