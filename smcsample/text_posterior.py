"""A posterior over continuations of one prompt."""

from __future__ import annotations

from typing import Any

from smcsample.history import History
from smcsample.lm.stream import Model
from smcsample.posterior import Posterior
from smcsample.resampling import Status
from smcsample.sequence import Texts
from smcsample.source import Source


class TextPosterior(Posterior):
    """N weighted continuations; the values are their texts.

    `token_ids`: the generated ids of each particle, its EOS included. `log_q`: the log-probability each of them was
    drawn with (its proposal's law for a drafted token, the bonus law for a bonus). `finish_reasons`: "eos", or "stop"
    for a text completed by a constraint or a `StopAt`, or "length" for one cut at the cap, or "lost" for one that
    reached weight zero before its end and was not followed there.
    """

    def __init__(self, prompt_ids: list[int], texts: Texts, model: Model, history: History, source: Source) -> None:
        lengths = texts.lengths.tolist()
        self.prompt_ids = prompt_ids
        self.token_ids = [ids[:n] for ids, n in zip(texts.ids.tolist(), lengths, strict=True)]
        self.log_q = [log_q[:n] for log_q, n in zip(texts.log_q.tolist(), lengths, strict=True)]
        self.texts = [model.decode(ids) for ids in self.token_ids]
        super().__init__(self.texts, history, source)
        ended = [bool(ids) and ids[-1] in model.eos_ids for ids in self.token_ids]
        lost = (self.log_weights == float("-inf")).tolist()
        self.finish_reasons = [
            "eos" if e else "lost" if gone else "stop" if stopped else "length"
            for e, gone, stopped in zip(ended, lost, texts.stopped.tolist(), strict=True)
        ]

    @property
    def text(self) -> str:
        """The answer: one continuation drawn ∝ weight, the same every time for a seed.

        Raises:
            DeadPopulationError: no particle has any weight.
        """
        return self.answer

    def __repr__(self) -> str:
        text = self.text if self.status is Status.OK else ""
        return f"{super().__repr__()[:-1]}, text={text[:60] + '…' if len(text) > 60 else text!r})"

    def best(self) -> str:
        """The text with the largest total weight: equal texts count together.

        Raises:
            DeadPopulationError: no particle has any weight.
        """
        return next(iter(self.vote()))

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "texts": self.texts,
            "token_ids": self.token_ids,
            "log_q": self.log_q,
            "finish_reasons": self.finish_reasons,
            "prompt_ids": self.prompt_ids,
        }

    def __getitem__(self, n: int) -> str:
        return self.texts[n]

    def _columns(self) -> dict[str, Any]:
        columns = super()._columns()
        return {
            "text": columns.pop("value"),
            **columns,
            "finish_reason": self.finish_reasons,
            "token_ids": self.token_ids,
            "log_q": self.log_q,
        }
