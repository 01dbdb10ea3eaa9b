"""What the rows of a batch say: their tokens, and the text of these as far as it has whole characters.

The text of a finished row is `decode(ids)`, what the posterior shows. The text of a prefix is `decode(ids)` without the
replacement characters at its end, which stand for the bytes of a character still to come. Prefixes are read
incrementally, as inference servers do it: only the tokens since the whole character before last are decoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block

Item: TypeAlias = str | tuple[int, ...] | tuple[str, str] | tuple[tuple[int, ...], tuple[int, ...]]
"""What a user's function sees of one row, hashable: a completion's text or ids, or with its prompt in front."""

UNFINISHED = "\ufffd"
"""What a decoder puts for bytes that are no whole character."""


class Read(NamedTuple):
    """How far a row has been read: `text` is that of `ids[:stop]`; `anchor` and `stop` are between characters."""

    text: str = ""
    anchor: int = 0
    stop: int = 0


class RowTexts:
    """The completions of a batch's rows, as text or as token ids; a scorer holds one and moves it in its `select`.

    Args:
        batch: the rows.
        asker: the potential, for messages.
        on: "text" or "tokens".
        with_prompt: items are pairs (prompt, completion).

    Raises:
        ValueError: text is asked for, and the batch has no model to decode with.
    """

    def __init__(self, batch: Batch, asker: object, on: str = "text", with_prompt: bool = False) -> None:
        self._decoder = batch.reader(asker).decode if on == "text" else None
        self._batch, self._on, self._with_prompt = batch, on, with_prompt
        self._ids = torch.zeros(batch.n_rows, 0, dtype=torch.long, device=batch.device)
        self._lengths = torch.zeros(batch.n_rows, dtype=torch.long, device=batch.device)
        self._read = [Read()] * batch.n_rows
        self._prompts: dict[tuple[int, ...], str] = {}

    def append(self, block: Block) -> tuple[list[int], list[int]]:
        """Learn a block; the rows whose text ends inside it, and those that got tokens and go on."""
        self._ids = torch.cat([self._ids, block.ids], dim=1)
        self._lengths = self._lengths + block.valid.sum(dim=1)
        grown = block.valid.any(dim=1)
        return (grown & block.ends).nonzero()[:, 0].tolist(), (grown & ~block.ends).nonzero()[:, 0].tolist()

    def finals(self, rows: Sequence[int]) -> list[Item]:
        """The whole completions of finished rows, an end-of-sequence id included in the ids."""
        ids = self._tokens(rows, 0)
        said = [tuple(tokens) if self._on == "tokens" else self._decode(tokens) for tokens in ids]
        return [self._item(row, what) for row, what in zip(rows, said, strict=True)]

    def prefixes(self, rows: Sequence[int], delimiter: str | None = None) -> list[Item | None]:
        """The completions so far; with a delimiter, up to its last occurrence, or None before the first."""
        if self._on == "tokens":
            return [self._item(row, tuple(tokens)) for row, tokens in zip(rows, self._tokens(rows, 0), strict=True)]
        first = min((self._read[row].anchor for row in rows), default=0)
        items: list[Item | None] = []
        for row, tokens in zip(rows, self._tokens(rows, first), strict=True):
            text = self._follow(row, tokens[self._read[row].anchor - first :])
            if delimiter is not None:
                text = text[: text.rfind(delimiter) + len(delimiter)] if delimiter in text else None
            items.append(None if text is None else self._item(row, text))
        return items

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Row i continues row `ancestors[i]`."""
        self._ids, self._lengths = self._ids[ancestors], self._lengths[ancestors]
        self._read = [self._read[row] for row in ancestors.tolist()]

    def _follow(self, row: int, window: list[int]) -> str:
        """The row's text in whole characters; `window` holds its tokens from its anchor on."""
        read = self._read[row]
        stop = read.anchor + len(window)
        known, now = self._decode(window[: read.stop - read.anchor]), self._decode(window)
        whole = now.rstrip(UNFINISHED)
        if whole.startswith(known):
            text = read.text + whole[len(known) :]
        else:  # a decoder that tidies up across tokens: only the whole prefix tells its text
            now = self._decode(self._tokens([row], 0)[0])
            text = whole = now.rstrip(UNFINISHED)
        if whole == now:
            self._read[row] = Read(text, read.stop, stop)
        return text

    def _tokens(self, rows: Sequence[int], first: int) -> list[list[int]]:
        if len(rows) == 0:
            return []
        lengths = self._lengths[list(rows)].tolist()
        ids = self._ids[list(rows), first:].tolist()
        return [tokens[: length - first] for tokens, length in zip(ids, lengths, strict=True)]

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._decoder is not None
        return self._decoder(ids) if len(ids) > 0 else ""

    def _item(self, row: int, completion: str | tuple[int, ...]) -> Item:
        if not self._with_prompt:
            return completion
        prompt = tuple(self._batch.prompts[row // self._batch.n_particles])
        if isinstance(completion, tuple):
            return prompt, completion
        if prompt not in self._prompts:
            self._prompts[prompt] = self._decode(prompt)
        return self._prompts[prompt], completion


def at_last_token(block: Block, rows: Sequence[int], values: Sequence[float]) -> Float[Tensor, "row step"]:
    """`values` at the last valid token of these rows, in float64; 0 elsewhere."""
    score = torch.zeros(block.ids.shape, dtype=torch.float64, device=block.ids.device)
    if len(rows) > 0:
        last = block.valid.long().sum(dim=1)[list(rows)] - 1
        score[list(rows), last] = torch.tensor(values, dtype=torch.float64, device=score.device)
    return score
