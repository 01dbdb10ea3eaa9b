"""How potentials read the text of rows: incremental, with tokens that hold part of a character, under selection."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import smcsample as smc
from smcsample.lm.batch import Batch
from smcsample.potentials import Where
from smcsample.potentials.text import RowTexts

SENTENCE = "né à Żółć: €5 😀👩‍👧 naïve ﷽ 日本語 \ufffd end"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: one token per byte, and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<eos>"])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


BYTES = byte_tokenizer()
EOS = BYTES.convert_tokens_to_ids("<eos>")


def decode(ids: Sequence[int]) -> str:
    return BYTES.decode(list(ids), skip_special_tokens=True)


class Decoder(smc.TabularLM):
    """A model of which only `decode` is of interest."""

    def __init__(self, function: Callable[[Sequence[int]], str]) -> None:
        super().__init__([1.0], [[1.0]])
        object.__setattr__(self, "decode", function)


def batch_of(rows: int, longest: int, function: Callable[[Sequence[int]], str] = decode, groups: int = 1) -> Batch:
    source = smc.Source(0, groups, rows // groups)
    return Batch([[EOS]] * groups, source, torch.tensor([EOS]), longest, Decoder(function))


def feed(texts: RowTexts, batch: Batch, ids: torch.Tensor, start: int) -> tuple[list[int], list[int]]:
    block = batch.block(ids, start)
    batch.ended = batch.ended | block.ends
    return texts.append(block)


def cuts(length: int, seed: int) -> list[int]:
    """Random block boundaries, 0 and `length` included."""
    inner = random.Random(seed).sample(range(1, length), random.Random(seed).randint(0, length - 1))
    return [0, *sorted(inner), length]


def whole(ids: list[int]) -> str:
    return decode(ids).rstrip("\ufffd")


@pytest.mark.parametrize("seed", range(12))
def test_prefixes_are_whole_characters_whatever_the_blocks(seed: int) -> None:
    """Three rows of bytes: a sentence, the same backwards by characters, and random bytes that form no characters."""
    sentence = BYTES(SENTENCE)["input_ids"]
    noise = [random.Random(seed).randrange(256) for _ in sentence]
    rows = [sentence, BYTES(SENTENCE[::-1])["input_ids"], noise]
    batch = batch_of(3, 10**6)
    texts = RowTexts(batch, "test")
    at = cuts(len(sentence), seed)
    for i, (start, stop) in enumerate(pairwise(at)):
        feed(texts, batch, torch.tensor(rows)[:, start:stop], start)
        asked = [0, 1, 2] if i % 3 else [2, 0]  # not every row every time
        assert texts.prefixes(asked) == [whole(rows[row][:stop]) for row in asked]
    assert texts.finals([0, 1, 2]) == [decode(row) for row in rows]
    assert texts.finals([0]) == [SENTENCE]


@pytest.mark.parametrize("seed", range(6))
def test_rows_follow_their_ancestors(seed: int) -> None:
    """Random selections, the last of them with fewer rows; each row reads as if it had been alone."""
    rng = random.Random(seed)
    batch = batch_of(8, 10**6, groups=2)
    texts = RowTexts(batch, "test")
    lines: list[list[int]] = [[] for _ in range(8)]
    for step in range(12):
        pieces = [BYTES(rng.choice(SENTENCE))["input_ids"] + BYTES(rng.choice(SENTENCE))["input_ids"] for _ in lines]
        k = min(map(len, pieces))
        feed(texts, batch, torch.tensor([piece[:k] for piece in pieces]), len(lines[0]))
        lines = [line + piece[:k] for line, piece in zip(lines, pieces, strict=True)]
        if step % 2:
            texts.prefixes(range(len(lines)))
        half = len(lines) // 2
        ancestors = [rng.randrange(half) for _ in range(half)] + [half + rng.randrange(half) for _ in range(half)]
        if step == 7:
            rows = batch.keep(torch.tensor([1]))
        else:
            rows = torch.tensor(ancestors)
            batch.select(rows)
        texts.select(rows)
        lines = [lines[row] for row in rows.tolist()]
        assert texts.prefixes(range(len(lines))) == [whole(line) for line in lines]
    assert len(lines) == 4


def test_tokens_after_the_end_are_not_text() -> None:
    batch = batch_of(3, 5)
    texts = RowTexts(batch, "test")
    a, b = BYTES("ab")["input_ids"]
    assert feed(texts, batch, torch.tensor([[a, EOS, b], [a, b, a], [EOS, a, a]]), 0) == ([0, 2], [1])
    assert feed(texts, batch, torch.tensor([[a, a], [b, b], [a, a]]), 3) == ([1], [])
    assert texts.finals([2, 1, 0]) == ["", "ababb", "a"]
    ids = RowTexts(batch, "test", on="tokens")
    batch.ended = torch.zeros(3, dtype=torch.bool)
    feed(ids, batch, torch.tensor([[a, EOS, b], [a, b, a], [EOS, a, a]]), 0)
    assert ids.finals([0, 2]) == [(a, EOS), (EOS,)]
    assert ids.prefixes([1]) == [(a, b, a)]


def test_delimiters_across_tokens() -> None:
    batch = batch_of(2, 10**6)
    texts = RowTexts(batch, "test")
    rows = torch.tensor([BYTES("one\n\ntwo\n\nthree")["input_ids"], BYTES("one two\n three.")["input_ids"]])
    feed(texts, batch, rows[:, :4], 0)
    assert texts.prefixes([0, 1], "\n\n") == [None, None]
    feed(texts, batch, rows[:, 4:5], 4)
    assert texts.prefixes([0, 1], "\n\n") == ["one\n\n", None]
    feed(texts, batch, rows[:, 5:], 5)
    assert texts.prefixes([0, 1], "\n\n") == ["one\n\ntwo\n\n", None]


def test_decoders_that_tidy_up_across_tokens() -> None:
    """A decoder that eats the space before a full stop: the text so far is that of the whole prefix."""
    words = ["x", " y", " ", ".", "<eos>"]

    def tidy(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids if i < 4).replace(" .", ".")

    batch = batch_of(1, 10**6, tidy)
    texts = RowTexts(batch, "test")
    ids = [0, 1, 2, 3, 1, 2, 2, 3, 0]
    for t, token in enumerate(ids):
        feed(texts, batch, torch.tensor([[token]]), t)
        assert texts.prefixes([0]) == [tidy(ids[: t + 1])]


def test_decoding_costs_grow_with_the_text_and_not_with_its_square() -> None:
    decoded = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    batch = batch_of(1, 10**6, counting)
    texts = RowTexts(batch, "test")
    ids = BYTES(SENTENCE * 40)["input_ids"]
    for start in range(0, len(ids) - 8, 8):
        feed(texts, batch, torch.tensor([ids[start : start + 8]]), start)
        texts.prefixes([0])
    assert decoded < 6 * len(ids)


def test_pairs_with_the_prompt() -> None:
    batch = batch_of(4, 9, groups=2)
    batch.prompts = [BYTES("one")["input_ids"], [*BYTES("two")["input_ids"], EOS]]
    texts, ids = RowTexts(batch, "test", with_prompt=True), RowTexts(batch, "test", "tokens", with_prompt=True)
    a = BYTES("a")["input_ids"][0]
    for reader in (texts, ids):
        batch.ended = torch.zeros(4, dtype=torch.bool)
        feed(reader, batch, torch.tensor([[a]] * 4), 0)
    assert texts.prefixes([1, 2]) == [("one", "a"), ("two", "a")]
    assert ids.prefixes([3]) == [((*BYTES("two")["input_ids"], EOS), (a,))]


def test_a_batch_that_cannot_decode_is_refused_by_name() -> None:
    batch = Batch([[0]], smc.Source(0, 1, 2), torch.tensor([EOS]), 4)
    with pytest.raises(ValueError, match=r"Where\(bool\) reads text, so the target or the proposal needs"):
        RowTexts(batch, Where(bool))
    RowTexts(batch, Where(bool), on="tokens")
