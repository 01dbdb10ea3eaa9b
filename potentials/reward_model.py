"""A Hugging Face sequence classifier as the function of a `Reward`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

SHARED = ("revision", "token", "cache_dir", "trust_remote_code")
"""Arguments for the tokenizer too."""


@dataclass(frozen=True, eq=False)
class RewardModel:
    """Scores texts, for `Reward(RewardModel.load(…), beta=…, with_prompt=True)`. Build it with `load`.

    A model with one output gives that output; one with several classes gives the log-probability of `label`. Texts are
    scored `batch_size` at a time, the shortest first; the score of a text does not depend on its neighbours.
    """

    model: Any
    tokenizer: Any
    name: str
    template: Callable[[str, str], str]
    label: int | None
    batch_size: int
    max_length: int | None

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | tuple[Any, Any] | list[Any],
        *,
        template: Callable[[str, str], str] | None = None,
        label: int | str | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> RewardModel:
        """Load a classifier.

        Args:
            source: a Hugging Face name, a folder, or a pair (model, tokenizer) already loaded (it is put in evaluation
                mode; `device` and `dtype` then are its own).
            template: (prompt, completion) → the text to score, for a reward with `with_prompt=True`. Default: the two
                one after the other. For a chat reward model, apply its tokenizer's chat template here.
            label: which class, by index or name; required if there are several.
            batch_size: texts per forward.
            device, dtype: default: CUDA if there is one, else the CPU; the checkpoint's dtype on CUDA, else float32.
            name: what messages call it.
            kwargs: passed to `AutoModelForSequenceClassification.from_pretrained`.

        Raises:
            ValueError: no label for a model of several classes, or one that it does not have.
            OSError: a source that can't be found.
        """
        if isinstance(source, (tuple, list)):
            model, tokenizer = source
            called = name or model.config.name_or_path or type(model).__name__
        else:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            kwargs["dtype"] = dtype or ("auto" if device.type == "cuda" else torch.float32)
            shared = {
                key: kwargs[key] for key in ("revision", "token", "cache_dir", "trust_remote_code") if key in kwargs
            }
            tokenizer = AutoTokenizer.from_pretrained(source, **shared)
            model = AutoModelForSequenceClassification.from_pretrained(source, **kwargs).to(device)
            called = name or os.fspath(source)
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size} is less than 1; score at least one text at a time")
        classes: dict[int, str] = dict(model.config.id2label)
        indices = {label: i for i, label in classes.items()}
        index = indices.get(label) if isinstance(label, str) else label
        if len(classes) > 1 and index not in classes:
            raise ValueError(f"label = {label!r} is no class of {called}; choose one of {', '.join(indices)}")
        return cls(
            model.eval(),
            tokenizer,
            called,
            template or _one_after_the_other,
            index if len(classes) > 1 else None,
            batch_size,
            getattr(model.config, "max_position_embeddings", None),
        )

    def __call__(self, items: list[str] | list[tuple[str, str]]) -> list[float]:
        """One score per text, or per pair (prompt, completion), in float32 or wider.

        Raises:
            ValueError: a text longer than the model's context: cutting it would leave out its end.
        """
        texts = [item if isinstance(item, str) else self.template(*item) for item in items]
        ids = [self.tokenizer(text)["input_ids"] for text in texts]
        for text, tokens in zip(texts, ids, strict=True):
            if self.max_length is not None and len(tokens) > self.max_length:
                raise ValueError(
                    f"{text[:40]!r}… has {len(tokens)} tokens; {self.name} takes {self.max_length}. Use a lower "
                    "max_new_tokens, or a template that shortens the prompt"
                )
        # A decoder reads its score at the last token that is no padding, which it can't find without a padding id.
        size = 1 if self.model.config.pad_token_id is None else self.batch_size
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        scores = [0.0] * len(ids)
        for start in range(0, len(order), size):
            these = order[start : start + size]
            for i, score in zip(these, self._scores([ids[i] for i in these]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _scores(self, ids: list[list[int]]) -> Float[Tensor, " text"]:
        longest, device = max(map(len, ids)), self.model.device
        padding = self.model.config.pad_token_id
        padded = torch.full((len(ids), longest), 0 if padding is None else padding, device=device)
        mask = torch.zeros_like(padded)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = torch.tensor(tokens, device=device)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            logits = self.model(input_ids=padded, attention_mask=mask).logits
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits[:, 0] if self.label is None else logits.log_softmax(dim=1)[:, self.label]

    def __repr__(self) -> str:
        return f"RewardModel({self.name})"


def _one_after_the_other(prompt: str, completion: str) -> str:
    return prompt + completion
