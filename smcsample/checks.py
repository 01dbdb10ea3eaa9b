"""Checks of arguments, with messages that say what to do."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex


def integer(name: str, value: Any, least: int, remedy: str) -> int:
    """`value` as an int of at least `least`.

    Raises:
        TypeError: not an integer (numpy's count as integers).
        ValueError: too small; the message ends with the remedy.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} = {value!r} is a {type(value).__name__}; give an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} = {number} is less than {least}; {remedy}")
    return number
