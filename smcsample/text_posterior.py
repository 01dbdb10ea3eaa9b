"""A posterior over continuations of one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from smcsample.history import History
from smcsample.lm.stream import Model
from smcsample.posterior import Posterior
from smcsample.resampling import Status
from smcsample.sequence import Texts
from smcsample.source import Source

if TYPE_CHECKING:
    from smcsample.rlhf import Samples


class TextPosterior(Posterior):
    """N weighted continuations; the values are their texts.

    `token_ids`: the generated ids of each particle, its EOS included. `log_q`: the log-probability each of them was
    drawn with (its proposal's law for a drafted token, the bonus law for a bonus). `finish_reasons`: "eos", or "stop"
    for a text completed by a constraint or a `StopAt`, or "length" for one cut at the cap, or "lost" for one that
    reached weight zero before its end and was not followed there.

    `log_p`: the log-probability of each token under the target's first language model, at temperature 1 and uncut;
    `log_p_law`: under the law that the target states for it, `LM(m, temperature, top_k, top_p)`, powers apart (None if
    the target has no such factor). `factors`: the target's factors, as text; `log_factors`: what each has given each
    particle, so that their sum is log γ(x) of a finished text. `rewards`: r(x) of each `Reward`, NaN if it was lost
    before. `prompt`: the prompt's ids as text.
    """

    def __init__(self, prompt_ids: list[int], texts: Texts, model: Model, history: History, source: Source) -> None:
        lengths = texts.lengths.tolist()
        self.prompt_ids = prompt_ids
        self.token_ids = [ids[:n] for ids, n in zip(texts.ids.tolist(), lengths, strict=True)]
        self.log_q = [log_q[:n] for log_q, n in zip(texts.log_q.tolist(), lengths, strict=True)]
        account = texts.account
        self.log_p, self.log_p_law = _cut(account.log_p, lengths), _cut(account.log_p_law, lengths)
        self.factors, self.log_factors = account.names, account.paid
        self.rewards = {name: values.tolist() for name, values in account.rewards.items()}
        self.prompt = model.decode(prompt_ids)
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

    def samples(self) -> Samples:
        """The different completions that have weight, for training: see `smcsample.rlhf.Samples`."""
        from smcsample.rlhf import merge

        return merge(self)

    def to_dataset(self, **options: Any) -> Any:
        """One row per different completion, with weights, rewards and log-probabilities per token: see
        `smcsample.rlhf.dataset` for the columns and the options (`min_ess`, `max_pareto_k`, `format`)."""
        from smcsample.rlhf import dataset

        return dataset(self, **options)

    def loss(self, model: Any, kind: str = "weighted_sft", temperature: float = 1.0) -> Tensor:
        """A scalar to minimise in `model`'s parameters: see `smcsample.losses.loss`."""
        return self.samples().loss(model, kind, temperature)

    def kl(self) -> float:
        """KL(target‖language model) in nats, E_w[r/β] − log Ẑ for `LM(m) * Reward(r, β)`: see `Samples.kl`."""
        return self.samples().kl

    def preference_pairs(
        self, score: Callable[[str], float] | None = None, margin: float = 0.0
    ) -> list[dict[str, Any]]:
        """Pairs of a better and a worse text that part at a fork of the genealogy: see `smcsample.forks`."""
        from smcsample.forks import preference_pairs

        return preference_pairs(self, score, margin)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "texts": self.texts,
            "token_ids": self.token_ids,
            "log_q": self.log_q,
            "log_p": self.log_p,
            "log_p_law": self.log_p_law,
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


def _cut(values: Float[Tensor, "particle token"] | None, lengths: list[int]) -> list[list[float]] | None:
    """One list per particle, without what lies beyond its end."""
    return None if values is None else [row[:n] for row, n in zip(values.tolist(), lengths, strict=True)]
