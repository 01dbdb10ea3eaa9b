"""The bytes each token of a model stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from smcsample.lm.tabular import TabularLM

if TYPE_CHECKING:
    from smcsample.lm.stream import Model

_known: WeakKeyDictionary[Any, tuple[bytes, ...]] = WeakKeyDictionary()
_spelling: WeakKeyDictionary[Any, dict[bytes, list[int]]] = WeakKeyDictionary()


def token_bytes(model: Model) -> tuple[bytes, ...]:
    """The bytes of every token, in the order of the ids; b"" for control tokens and ends of sequence.

    Text is the concatenation of these bytes, so it may be cut anywhere, inside a character too.

    Raises:
        ValueError: a tokenizer that is neither byte-level (GPT-2, Llama 3, Qwen, …) nor a SentencePiece model (Llama 2,
            Gemma, …): its tokens are not pieces of text.
    """
    if model not in _known:
        _known[model] = _of_tabular(model) if isinstance(model, TabularLM) else _of_tokenizer(model)
    return _known[model]


def ids_that_spell(model: Model) -> dict[bytes, list[int]]:
    """For every byte string that is a token, the ids that spell it: more than one in some vocabularies."""
    if model not in _spelling:
        ids: dict[bytes, list[int]] = {}
        for i, piece in enumerate(token_bytes(model)):
            if piece:
                ids.setdefault(piece, []).append(i)
        _spelling[model] = ids
    return _spelling[model]


def _of_tabular(model: TabularLM) -> tuple[bytes, ...]:
    return tuple(b"" if i in model.eos_ids else token.encode() for i, token in enumerate(model.tokens))


def _of_tokenizer(model: Any) -> tuple[bytes, ...]:
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    kind = _kind(json.loads(backend.to_str()).get("decoder")) if backend is not None else None
    if kind is None:
        raise ValueError(
            f"the tokens of {model.name} can't be read as pieces of text: its tokenizer is neither byte-level nor "
            "SentencePiece; give token ids instead of text"
        )
    added = dict(model.tokenizer.added_tokens_decoder)
    control = {*model.tokenizer.all_special_ids, *model.eos_ids, *(i for i, token in added.items() if token.special)}
    pieces = model.tokenizer.convert_ids_to_tokens(list(range(model.vocab_size)))
    return tuple(
        b"" if i in control or piece is None else added[i].content.encode() if i in added else kind(piece)
        for i, piece in enumerate(pieces)
    )


def _kind(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """How this decoder turns a piece into bytes; None if it is of another kind."""
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level()
    return _sentence_piece if kinds & {"ByteFallback", "Metaspace"} else None


@cache
def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return lambda piece: bytes(map(byte_of.__getitem__, piece))


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
