"""The progress bar of a run."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from smcsample.cohorts import Cohort


class RoundProgress:
    """Tokens per particle (summed over prompts), prompts done, and the mean ESS, on stderr."""

    def __init__(self, max_new_tokens: int, n_prompts: int, *, disabled: bool) -> None:
        self._cap, self._prompts = max_new_tokens, n_prompts
        self._tokens = [0] * n_prompts
        self._progress = Progress(
            TextColumn("sampling"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tokens · {task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=disabled,
            transient=True,
        )
        self._task = self._progress.add_task("sampling", total=max_new_tokens * n_prompts, note="")

    def __enter__(self) -> RoundProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, cohort: Cohort) -> None:
        """After a round of a cohort."""
        step = cohort.step
        assert step.state is not None
        for g, place in enumerate(cohort.groups):
            self._tokens[place] = step.state.ids.shape[1] if g in cohort.going else self._cap
        done = sum(tokens == self._cap for tokens in self._tokens)
        note = f"{done}/{self._prompts} prompts done, ESS {step.ess[step.running].mean():.1f}"
        self._progress.update(self._task, completed=sum(self._tokens), note=note)


class MoveProgress:
    """Moves of Markov chains done, and the share that was accepted, on stderr."""

    def __init__(self, moves: int, *, disabled: bool) -> None:
        self._accepted: list[float] = []
        self._progress = Progress(
            TextColumn("moving"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} moves · {task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=disabled,
            transient=True,
        )
        self._task = self._progress.add_task("moving", total=moves, note="")

    def __enter__(self) -> MoveProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, accepted: float | None) -> None:
        """After a move, the share of the rows that accepted it; None: after the texts grew."""
        if accepted is not None:
            self._accepted.append(accepted)
        mean = sum(self._accepted) / max(1, len(self._accepted))
        self._progress.update(self._task, advance=1, note=f"{mean:.0%} accepted")
