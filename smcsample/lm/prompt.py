"""What users may pass as a prompt: text, chat messages, token ids, or a list of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from torch import Tensor

Chat: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Chat | Sequence[int] | Tensor | np.ndarray


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """True for a sequence that is not text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """True for a non-empty sequence of integers."""
    return (
        is_list(prompt) and len(prompt) > 0 and all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt)
    )


def is_chat(prompt: object) -> TypeGuard[Chat]:
    """True for a non-empty sequence of messages."""
    return is_list(prompt) and len(prompt) > 0 and all(isinstance(m, Mapping) for m in prompt)


def is_prompt(prompt: object) -> TypeGuard[Prompt]:
    """True for one prompt; an empty list counts as one only inside a list of prompts."""
    return isinstance(prompt, str) or is_ids(prompt) or is_chat(prompt)


def split(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether the caller gave one prompt rather than a list of them. Tensors and arrays of ids count
    as lists.

    Raises:
        ValueError: an empty list.
        TypeError: anything that is neither a prompt nor a list of prompts.
    """
    if isinstance(prompt, (Tensor, np.ndarray)):
        prompt = prompt.tolist()
    if is_prompt(prompt):
        return [prompt], True
    if not is_list(prompt):
        remedy = "give text, chat messages, token ids, or a list of these"
        if isinstance(prompt, Mapping):
            remedy = "give its input_ids" if "input_ids" in prompt else "wrap a single chat message in a list"
        raise TypeError(f"prompt is a {type(prompt).__name__}; {remedy}")
    if len(prompt) == 0:
        raise ValueError("prompt is an empty list; give token ids, or a list with at least one prompt")
    for i, one in enumerate(prompt):
        if not is_prompt(one) and not (is_list(one) and len(one) == 0):
            raise TypeError(f"prompt[{i}] = {one!r} is neither text, nor chat messages, nor token ids")
    return list(prompt), False
