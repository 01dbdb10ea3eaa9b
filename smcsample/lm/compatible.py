"""Whether models can weigh each other's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from smcsample.lm.stream import Model


def check_compatible(models: Sequence[Model]) -> None:
    """Refuse models whose token ids do not mean the same, or that lie on different devices.

    Raises:
        ValueError: naming two that do not agree.
    """
    first, *others = models
    for other in others:
        if other.vocab_size != first.vocab_size or other.vocabulary() != first.vocabulary():
            raise ValueError(
                f"{first.name} ({first.vocab_size} tokens) and {other.name} ({other.vocab_size} tokens) have different "
                "vocabularies, so one can't weigh the other's tokens; use models of one tokenizer family"
            )
        if other.device != first.device:
            raise ValueError(
                f"{first.name} is on {first.device} and {other.name} on {other.device}; load both on one device"
            )


def check_ids(ids: Sequence[int], models: Sequence[Model], max_new_tokens: int) -> None:
    """Refuse a prompt that one of the models can't continue by `max_new_tokens` tokens.

    Raises:
        ValueError: an empty prompt (for most models), ids outside the vocabulary, a prompt too long for the context.
    """
    for model in models:
        model.check_prompt(ids)
        outside = [i for i in ids if not 0 <= i < model.vocab_size]
        if outside:
            raise ValueError(
                f"token id {outside[0]} is outside the vocabulary 0 … {model.vocab_size - 1} of {model.name}; "
                "encode with that model's tokenizer"
            )
        if model.context_length is not None and len(ids) + max_new_tokens > model.context_length:
            raise ValueError(
                f"{len(ids)} tokens and max_new_tokens = {max_new_tokens} exceed the {model.context_length} positions "
                f"of {model.name}; shorten the prompt or ask for fewer new tokens"
            )
