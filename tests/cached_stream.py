"""`LMStream` on a Hugging Face `DynamicCache`, reordered by `select`: simple, and the oracle for faster engines."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch
from smcsample.lm.stream import LMStream


class CachedStream(LMStream):
    """Prompts are padded on the left, prefilled once per group but for their last token, then repeated for its rows."""

    def __init__(self, model: Any, name: str, vocab_size: int, batch: Batch) -> None:
        from transformers import DynamicCache

        device = model.device
        last = torch.tensor([prompt[-1] for prompt in batch.prompts], device=device)
        super().__init__(name, batch, last.repeat_interleave(batch.n_particles))
        self._model, self._vocab_size = model, vocab_size
        self._cache = DynamicCache(config=model.config)
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.24 and warns of the old name.
        self._options = {"cache" if "cache" in parameters else "past_key_values": self._cache, "use_cache": True}
        self._can_keep_few = "logits_to_keep" in parameters
        lengths = torch.tensor([len(prompt) - 1 for prompt in batch.prompts], device=device)
        longest = int(lengths.max())
        is_token = torch.arange(longest, device=device) >= (longest - lengths)[:, None]
        self._length = lengths
        if longest > 0:
            self._mask = is_token | (lengths == 0)[:, None]  # a row of padding attends to itself rather than to nothing
            ids = torch.zeros(len(batch.prompts), longest, dtype=torch.long, device=device)
            for row, prompt in enumerate(batch.prompts):
                ids[row, longest - len(prompt) + 1 :] = torch.tensor(prompt[:-1], device=device)
            positions = torch.arange(longest, device=device) - (longest - lengths)[:, None]
            positions = torch.where(is_token, positions, 0)  # padding is masked; its position only has to exist
            self._run(ids, positions, keep=1)
            self._cache.batch_repeat_interleave(batch.n_particles)
        self._mask = is_token.repeat_interleave(batch.n_particles, dim=0)
        self._length = lengths.repeat_interleave(batch.n_particles)

    def _forward(self, tokens: Int[Tensor, "row step"], keep: int) -> Float[Tensor, "row kept vocab"]:
        steps = tokens.shape[1]
        positions = self._length[:, None] + torch.arange(steps, device=tokens.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), steps)], dim=1)
        self._length = self._length + steps
        return self._run(tokens, positions, keep)

    def _run(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        with torch.inference_mode():
            out = self._model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=None if bool(self._mask.all()) else self._mask.long(),
                **self._options,
                **({"logits_to_keep": keep} if self._can_keep_few else {}),
            )
        return out.logits[:, -keep:, : self._vocab_size]

    def _select(self, ancestors: Int[Tensor, " kept"]) -> None:
        if self._cache.get_seq_length() > 0:
            with torch.inference_mode():
                self._cache.batch_select_indices(ancestors)
        self._mask, self._length = self._mask[ancestors], self._length[ancestors]
