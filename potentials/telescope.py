"""Values of prefixes that cancel: whatever is paid ahead is taken back when the next value is paid.

With v the log-value of a text so far, a row pays v(prefix) − v(last paid prefix) on the way and v_T(x) − v(last paid
prefix) at its end, so that a finished text has paid v_T(x), wherever its prefixes were valued and however often.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.batch import Batch, Block
from smcsample.potentials.base import Scorer
from smcsample.potentials.text import Item, RowTexts, at_last_token
from smcsample.potentials.user_function import Values

KEYWORDS = ("end", "round")


class TelescopeScorer(Scorer):
    """Pays by `values`, a function of prefixes and of finished texts.

    Args:
        texts: the rows' texts.
        values: items → their log-values.
        when: "end", "round", or a delimiter.
        exact: True: a finished text has paid its own value. False: it has paid nothing, all is taken back.
    """

    def __init__(
        self,
        batch: Batch,
        texts: RowTexts,
        values: Callable[[list[Item]], list[float]],
        when: str,
        exact: bool,
    ) -> None:
        self._batch, self._texts, self._values = batch, texts, Values(values)
        self._when, self._exact = when, exact
        self._paid = torch.zeros(batch.n_rows, dtype=torch.float64, device=batch.device)

    def score(self, block: Block) -> Float[Tensor, "row step"]:
        ending, going = self._texts.append(block)
        items: dict[int, Item] = {}
        if self._exact:
            items |= zip(ending, self._texts.finals(ending), strict=True)
        if self._when != "end" and not self._batch.more:
            delimiter = None if self._when == "round" else self._when
            prefixes = zip(going, self._texts.prefixes(going, delimiter), strict=True)
            items |= {row: item for row, item in prefixes if item is not None}
        values = dict(zip(items, self._values(list(items.values())), strict=True))
        if not self._exact:
            values |= dict.fromkeys(ending, 0.0)
        # A prefix of weight zero may still have a continuation of another weight, so it counts as one without a value.
        final = set(ending)
        values = {row: value if value > -math.inf or row in final else 0.0 for row, value in values.items()}
        rows, paid = list(values), self._paid.tolist()
        score = at_last_token(block, rows, [values[row] - paid[row] for row in rows])
        self._paid[rows] = torch.tensor(list(values.values()), dtype=torch.float64, device=self._paid.device)
        return score

    def select(self, ancestors: Int[Tensor, " kept"]) -> None:
        self._texts.select(ancestors)
        self._paid = self._paid[ancestors]


def check_when(when: str, on: str) -> None:
    """Refuse what is neither a keyword nor a delimiter.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(when, str):
        raise TypeError(
            f"when = {when!r} is a {type(when).__name__}; give 'end', 'round', or a delimiter such as '\\n'"
        )
    if on not in ("text", "tokens"):
        raise ValueError(f"on = {on!r} is neither 'text' nor 'tokens'")
    if when not in KEYWORDS:
        if when == "" or when.isalpha():
            raise ValueError(
                f"when = {when!r} is neither 'end' nor 'round', and no delimiter: a delimiter has a character that is "
                "no letter, such as '\\n' or '. '"
            )
        if on == "tokens":
            raise ValueError(f"when = {when!r} is a delimiter of text; use 'end' or 'round' with on='tokens'")
