"""Tables and numbers about a run, for the command line."""

from __future__ import annotations

import math

from rich.table import Table
from rich.text import Text

from smcsample.diagnostics import pareto_k, roots, step_chi2
from smcsample.text_posterior import TextPosterior


def summary(posterior: TextPosterior, seconds: float) -> dict[str, float | int | str | None]:
    """What a reader wants to know of one run; `seconds` is its wall time."""
    tokens = sum(map(len, posterior.token_ids))
    longest = max(map(len, posterior.token_ids))
    return {
        "status": posterior.status.name,
        "particles": len(posterior),
        "rounds": len(posterior.steps),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "longest_tokens_per_second": longest / seconds,
        "ess": posterior.ess,
        "resamples": sum(record.resampled for record in posterior.steps),
        "log_evidence": posterior.log_evidence,
        "chi2_per_round": step_chi2(posterior).mean().item(),
        "pareto_k": pareto_k(posterior.log_weights),
        "unique_ancestors": len(roots(posterior.genealogy).unique()),
        "unique_texts": len(set(posterior.texts)),
    }


LABELS = {
    "status": "status",
    "particles": "particles N",
    "rounds": "rounds",
    "tokens": "tokens, all particles",
    "tokens_per_second": "tokens/s, all particles",
    "longest_tokens_per_second": "tokens/s, longest particle",
    "ess": "ESS of the final weights",
    "resamples": "resamplings",
    "log_evidence": "log Ẑ",
    "chi2_per_round": "χ² of a round's weights, mean",
    "pareto_k": "k̂ of the final weights",
    "unique_ancestors": "first-round particles with descendants",
    "unique_texts": "distinct texts",
}


def summary_table(title: str, numbers: dict[str, float | int | str | None]) -> Table:
    """`summary` as a table."""
    table = Table(title=Text(title), show_header=False)
    for key, value in numbers.items():
        table.add_row(
            LABELS[key], f"{value:,.4g}" if isinstance(value, float) else "–" if value is None else str(value)
        )
    return table


def finite(value: object) -> object:
    """A tree of plain values fit for JSON, which has no infinities: they become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
