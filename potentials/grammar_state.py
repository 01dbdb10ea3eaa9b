"""Grammars as languages of tokens, by llguidance (https://github.com/guidance-ai/llguidance), with its traps closed.

What its documentation does not say, found by comparing its masks with brute force (version 1.9.1):

- By default, where bytes are forced, the mask shrinks to one canonical token although the matcher would accept others.
  Samples then miss every other spelling of the same text, and weights are wrong. `no_forcing` restores all of them.
- A matcher that has failed (a limit, an illegal token, an empty language) answers with a mask of EOS alone, and never
  recovers. So errors are looked for after every call, and the EOS bit is never used: `is_accepting` decides.
- An end of sequence that is fed is counted in one place and not in another. It is never fed here.
- `consume_token` with an illegal token breaks the matcher; `try_consume_tokens` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from smcsample.lm.tabular import TabularLM
from smcsample.potentials.language import DEAD, Language, State

if TYPE_CHECKING:
    from smcsample.lm.stream import Model

HEADER = '%llguidance {"no_forcing": true}\n'
DEAD_END = "NoExtensionBias"
"""How a matcher's error begins when no token of the vocabulary leads on."""

_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def llguidance() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import llguidance
        import llguidance.hf
        import llguidance.numpy
    except ImportError as error:
        raise ImportError(
            "Regex, JsonSchema and Grammar need llguidance: pip install smcsample[constraints]"
        ) from error
    return llguidance


def check_grammar(grammar: str, name: str) -> None:
    """Refuse a grammar that does not compile.

    Raises:
        ValueError: what llguidance says of it.
    """
    failed, messages = llguidance().LLMatcher.validate_grammar_with_warnings(HEADER + grammar)
    if failed:
        raise ValueError(f"{name}: {_plain(messages[0])}")


class GrammarLanguage(Language):
    """The texts of a grammar.

    Args:
        grammar: in llguidance's Lark syntax, without options.
        name: what messages call it.
        model: whose tokens the texts are spelt in.
        limits: keyword arguments of `llguidance.LLParserLimits`.
    """

    def __init__(self, grammar: str, name: str, model: Model, limits: dict[str, int]) -> None:
        super().__init__(model.vocab_size)
        package = llguidance()
        self.name = name
        self._tokenizer = tokenizer_of(model, name)
        self._words = (self._tokenizer.vocab_size + 31) // 32
        self._fill = package.numpy.fill_next_token_bitmask_par
        self._executor = package.LLExecutor(torch.get_num_threads())
        self._not_text = _bits([*model.eos_ids, *_special_ids(model)], self._words)
        options = package.LLParserLimits(**limits)
        self._matcher = package.LLMatcher(self._tokenizer, HEADER + grammar, log_level=0, limits=options)
        self._check(self._matcher)

    def root(self) -> State:
        state = self._state(self._matcher.deep_copy())
        self.fill([state])
        if not state.accepting and state.bits is not None and not state.bits.any():
            raise ValueError(
                f"{self.name} allows no text, or none that the model's tokens can spell; every weight would be zero"
            )
        return state

    def step(self, state: State, token: int) -> State:
        if self._not_text[token // 8] >> (token % 8) & 1 or state.inner.validate_tokens([token]) != 1:
            self._check(state.inner)
            return DEAD
        matcher = state.inner.deep_copy()
        if matcher.try_consume_tokens([token]) != 1:
            self._check(matcher)
            raise RuntimeError(f"{self.name}: llguidance validated token {token} and then refused it")
        return self._state(matcher)

    def fill(self, states: list[State]) -> None:
        bits = np.zeros((len(states), self._words), dtype=np.int32)
        self._fill(self._executor, [(state.inner, row) for row, state in enumerate(states)], bits)
        for state, row in zip(states, bits.view(np.uint8), strict=True):
            if self._check(state.inner):
                row &= ~self._not_text
            else:
                row[:] = 0
            state.bits = row[: (self.vocab_size + 7) // 8].copy()

    def _state(self, matcher: Any) -> State:
        self._check(matcher)
        return State(matcher.is_accepting(), matcher)

    def _check(self, matcher: Any) -> bool:
        """True if the matcher is well, False if no token of the vocabulary leads on from here.

        Raises:
            RuntimeError: it met a limit or failed otherwise: what it says from here on means nothing.
        """
        if not matcher.is_error():
            return True
        message = matcher.get_error()
        if message.startswith(DEAD_END):
            return False
        raise RuntimeError(
            f"{self.name} failed in llguidance: {_plain(message)}; a simpler grammar or higher limits=… may help "
            "(see llguidance.LLParserLimits)"
        )


def tokenizer_of(model: Model, name: str) -> Any:
    """llguidance's view of a model's tokens, made once per model (it takes about a second for 49,152 of them).

    Raises:
        ValueError: a tokenizer it cannot read.
    """
    if model not in _tokenizers:
        _tokenizers[model] = _tabular(model) if isinstance(model, TabularLM) else _hugging_face(model, name)
    return _tokenizers[model]


def _hugging_face(model: Any, name: str) -> Any:
    try:
        return llguidance().hf.from_tokenizer(
            model.tokenizer, n_vocab=model.vocab_size, eos_token=list(model.eos_ids) or None
        )
    except Exception as error:  # llguidance raises bare exceptions of several kinds
        raise ValueError(
            f"{name} can't read the tokens of {model.name} as text ({_plain(str(error))}); constraints by llguidance "
            "need a fast tokenizer with byte-level or byte-fallback tokens"
        ) from error


def _tabular(model: TabularLM) -> Any:
    package = llguidance()
    return package.LLTokenizer(package.TokenizerWrapper(_Strings(model)), eos_token=list(model.eos_ids) or None)


class _Strings:
    """A vocabulary of strings as llguidance wants it; for a model without an end of sequence with one more token, which
    nothing can draw."""

    def __init__(self, model: TabularLM) -> None:
        ends = model.eos_ids or (model.vocab_size,)
        self.tokens = [*(token.encode() for token in model.tokens), *([] if model.eos_ids else [b"<eos>"])]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = ends[0], None, list(ends)
        self.encode = model.encode

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode())


def _special_ids(model: Any) -> list[int]:
    """Control tokens: not text, whatever they are called."""
    return [] if isinstance(model, TabularLM) else list(model.tokenizer.all_special_ids)


def _bits(ids: list[int], words: int) -> NDArray[np.uint8]:
    mask = np.zeros(words * 32, dtype=bool)
    mask[[i for i in ids if i < len(mask)]] = True
    return np.packbits(mask, bitorder="little")


def _plain(message: str) -> str:
    """llguidance's message without its dump of internals."""
    return message.split("<state>")[0].replace(HEADER, "").strip()
