"""An exact order-1 Markov language model: it goes wherever a `CausalLM` goes, and all of it can be enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch
from smcsample.lm.prompt import Prompt, is_chat
from smcsample.lm.stream import LMStream


@dataclass(frozen=True, eq=False, init=False)
class TabularLM:
    """p(x_1) = initial[x_1], p(x_t | x_{t−1}) = transition[x_{t−1}, x_t], in float64.

    The law of the first generated token is the row of the prompt's last token, or `initial` after an empty prompt.

    Args:
        initial: `[vocab]` probabilities.
        transition: `[vocab, vocab]` probabilities, each row summing to one.
        eos_id: the id that ends a sequence, several ids, or None.
        tokens: one string per id; default "a", "b", … with "<eos>" for the end of sequence.

    Raises:
        ValueError: shapes that do not match, negative numbers, rows that do not sum to one, an eos_id out of range,
            tokens that are too few or not all different.
    """

    initial: Float[Tensor, " vocab"]
    transition: Float[Tensor, "vocab vocab"]
    eos_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    name: str
    context_length: int | None = None

    def __init__(
        self,
        initial: Tensor | Sequence[float],
        transition: Tensor | Sequence[Sequence[float]],
        eos_id: int | Sequence[int] | None = None,
        *,
        tokens: Sequence[str] | None = None,
        name: str = "tabular",
    ) -> None:
        start = torch.as_tensor(initial, dtype=torch.float64)
        table = torch.as_tensor(transition, dtype=torch.float64)
        v = start.numel()
        if start.shape != (v,) or table.shape != (v, v):
            raise ValueError(f"initial {tuple(start.shape)} and transition {tuple(table.shape)} must be [V] and [V, V]")
        for label, rows in (("initial", start[None]), ("transition", table)):
            if bool((rows < 0).any()) or not torch.allclose(rows.sum(1), torch.ones(len(rows), dtype=rows.dtype)):
                raise ValueError(f"{label} is not a table of probabilities: give non-negative rows that sum to one")
        eos = () if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        names = tuple(tokens) if tokens is not None else _names(v, eos)
        if len(names) != v or len(set(names)) != v:
            raise ValueError(f"tokens has {len(set(names))} different strings for {v} ids; give one for each id")
        if any(not 0 <= e < v for e in eos):
            raise ValueError(f"eos_id = {eos_id} is outside the vocabulary 0 … {v - 1}")
        for field, value in {
            "initial": start,
            "transition": table,
            "eos_ids": eos,
            "tokens": names,
            "name": name,
        }.items():
            object.__setattr__(self, field, value)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        return self.initial.device

    def vocabulary(self) -> object:
        return self.tokens

    @property
    def bytes_per_token(self) -> int:
        return 0

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids as given, or text spelt in the model's tokens (longest match first)."""
        if is_chat(prompt):
            raise ValueError(f"it is chat messages, but {self.name} has no chat template; give text or token ids")
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]  # pyright: ignore[reportArgumentType]
        ids, rest = [], prompt
        while rest:
            match = max((t for t in self.tokens if t and rest.startswith(t)), key=len, default=None)
            if match is None:
                raise ValueError(f"{prompt!r}: no token of {self.name} matches {rest!r}")
            ids.append(self.tokens.index(match))
            rest = rest[len(match) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.tokens[i] for i in ids if i not in self.eos_ids)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Any prompt will do, the empty one too: it has `initial`."""

    def stream(self, batch: Batch) -> TabularStream:
        return TabularStream(self, batch)

    def __repr__(self) -> str:
        return f"TabularLM({self.name!r})"


def _names(vocab_size: int, eos: tuple[int, ...]) -> tuple[str, ...]:
    """ "a", "b", … or "<0>", "<1>", …, and "<eos>" (numbered if there are several)."""
    ends = {e: "<eos>" if len(eos) == 1 else f"<eos {i}>" for i, e in enumerate(eos)}
    return tuple(ends.get(i, chr(ord("a") + i) if vocab_size <= 26 else f"<{i}>") for i in range(vocab_size))


class TabularStream(LMStream):
    """Looks rows up; the extra row V of the table stands for an empty prompt."""

    def __init__(self, lm: TabularLM, batch: Batch) -> None:
        last = torch.tensor([prompt[-1] if prompt else lm.vocab_size for prompt in batch.prompts], device=lm.device)
        super().__init__(lm.name, batch, last.repeat_interleave(batch.n_particles))
        self._logits_table = torch.cat([lm.transition, lm.initial[None]]).log()

    def _forward(self, tokens: Int[Tensor, "row step"], keep: int) -> Float[Tensor, "row kept vocab"]:
        return self._logits_table[tokens[:, -keep:]]

    def _select(self, ancestors: Int[Tensor, " kept"]) -> None:
        """Nothing to move: the model has no state beyond the tokens."""
