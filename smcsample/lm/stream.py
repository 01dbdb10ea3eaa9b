"""One model following R rows: it is told tokens, and answers with the law of any position, feeding the model lazily.

Positions count generated tokens: position t is the law of token t given the prompt and tokens 0 … t−1. Tokens wait
until a law that depends on them is asked for; then all that wait go through the model in one forward. This is what
makes a round cheap: verifying K drafted tokens and the bonus is one forward over K+1 positions, and the draft reads
its last token and the bonus together at the start of the next round (the deferred bonus of SMC-SD).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.lm.law import NextToken, TokenLaw

if TYPE_CHECKING:
    from smcsample.lm.prompt import Prompt


@runtime_checkable
class Model(Protocol):
    """What a stream, a potential and a proposal need of a language model: CausalLM and TabularLM are two."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def context_length(self) -> int | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_per_token(self) -> int:
        """Memory that following one row takes, per token."""
        ...

    def encode(self, prompt: Prompt) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def vocabulary(self) -> object:
        """Something that compares equal for models whose token ids mean the same."""
        ...

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise ValueError if the model cannot continue these ids."""
        ...

    def stream(self, batch: Batch) -> LMStream: ...


class LMStream(ABC):
    """The lazily fed window over a model's positions; a subclass gives `_forward` and `_select`.

    Args:
        name: the model's name, for messages.
        batch: the rows it follows.
        last_prompt_tokens: `[row]`, the only token of the prompt not yet in the model's state.
    """

    def __init__(self, name: str, batch: Batch, last_prompt_tokens: Int[Tensor, " row"]) -> None:
        self.name = name
        self._batch = batch
        self._waiting = [last_prompt_tokens]
        self._known = 0
        self._logits: dict[int, Tensor] = {}
        self._tops: dict[int, Tensor] = {}
        self._laws: dict[tuple[int, TokenLaw], NextToken] = {}
        self.forwards = 0
        """Model forwards so far (a prefill of the prompts not counted)."""
        self.positions = 0
        """Positions per row that went through those forwards."""

    @abstractmethod
    def _forward(self, tokens: Int[Tensor, "row step"], keep: int) -> Float[Tensor, "row kept vocab"]:
        """Append tokens to every row; logits after each of the last `keep` of them."""

    @abstractmethod
    def _select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Rows of the model's state become copies of their ancestors."""

    def observe(self, block: Block) -> None:
        """Learn the tokens of a block; tokens already known are passed over, so every user of a stream may tell it."""
        new = block.stop - self._known
        if new > block.ids.shape[1]:
            raise ValueError(
                f"the stream of {self.name} knows {self._known} tokens; a block from {block.start} on leaves a gap"
            )
        if new > 0:
            self._waiting.extend(block.ids[:, -new:].unbind(dim=1))
            self._known = block.stop

    def law(self, position: int, law: TokenLaw) -> NextToken:
        """The law of token `position` of every row."""
        if (position, law) not in self._laws:
            self.ensure(position, position)
            self._laws[position, law] = NextToken(law.weights(self._logits[position]))
        return self._laws[position, law]

    def ensure(self, first: int, last: int) -> None:
        """Have the logits of positions `first` … `last`, by at most one forward."""
        fed = self._known - len(self._waiting)  # position of the newest law the model's state can give
        if last > fed:
            feed = last - fed
            tokens, self._waiting = torch.stack(self._waiting[:feed], dim=1), self._waiting[feed:]
            keep = min(feed, last - first + 1)
            logits = self._forward(tokens, keep)
            self.forwards += 1
            self.positions += feed
            for offset in range(keep):
                position = last - keep + 1 + offset
                self._logits[position] = logits[:, offset]
                self._tops[position] = logits[:, offset].amax(dim=-1)

    def has(self, first: int, last: int) -> bool:
        """True if no forward is needed for positions `first` … `last`."""
        return all(position in self._logits for position in range(first, last + 1))

    def check(self) -> None:
        """Raise FloatingPointError if logits since the last check are not finite. Call it before using what was drawn
        from them or computed of them: once for many positions, as on a GPU it waits for them all."""
        tops, self._tops = self._tops, {}
        if tops and not bool(torch.isfinite(torch.stack(list(tops.values()))).all()):
            position, top = next((p, top) for p, top in tops.items() if not bool(torch.isfinite(top).all()))
            row = int((~torch.isfinite(top)).nonzero()[0])
            where = f"{self._batch.name_row(row)} at position {position}"
            raise FloatingPointError(
                f"model {self.name} gave logits of maximum {top[row].item()} for {where}; they must be finite "
                "(NaN often means an overflow in float16: try dtype=torch.bfloat16)"
            )

    def forget(self, before: int) -> None:
        """Drop the laws of positions `< before`: the tokens there are committed and weighted."""
        self.check()
        self._logits = {t: logits for t, logits in self._logits.items() if t >= before}
        self._laws = {key: law for key, law in self._laws.items() if key[0] >= before}

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Rows become copies of their ancestors. Called by the batch, once for all users of the stream."""
        self.check()
        self._waiting = [tokens[ancestors] for tokens in self._waiting]
        self._logits = {t: logits[ancestors] for t, logits in self._logits.items()}
        self._laws = {}
        self._select(ancestors)

    def release(self) -> None:
        """Give back what the stream holds; it is not used again."""
        self._waiting, self._logits, self._tops, self._laws = [], {}, {}, {}
