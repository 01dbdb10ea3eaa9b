"""The axioms of a potential."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smcsample.lm.prompt import Prompt, split
from smcsample.lm.stream import Model
from smcsample.potentials import LM, Potential
from smcsample.proposals import Draft
from smcsample.sampling import sample
from smcsample.testing.replay import Run, Trial, blocks, differ


@dataclass(frozen=True)
class PotentialReport:
    """What `check_potential` looked at: `texts`, how many of them got weight `zero`, how many tokens a table of
    `next_logits` was compared at (`told`), and whether the potential `defers` terms to the end of the run. A check
    without a text of weight > 0, or without one of weight zero for a constraint, has seen little."""

    texts: int
    zero: int
    told: int
    defers: bool


def check_potential(
    potential: Potential,
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    texts: Sequence[str | Sequence[int]] = (),
    *,
    n_texts: int = 12,
    max_new_tokens: int = 8,
    expected: Callable[[list[int], list[int]], float] | None = None,
    table: str = "exact",
    tolerance: float = 1e-4,
    seed: int = 0,
) -> PotentialReport:
    """Check a potential against its axioms, on given texts and on texts drawn from a model.

    - Nothing but the text counts: its increments, with what `finish` adds, have one sum however it is cut into blocks,
      whatever `batch.more` says, in whatever batch it stands, whatever junk lies behind its end, however often `finish`
      is asked on the way; and a second scorer gives it again.
    - −inf is absorbing: a text with a prefix of weight zero has weight zero.
    - `next_logits` is what `score` will say of each token: the same number, but for tokens that end their text (there a
      term may be missing); and never −inf for a token that gets weight, which no bonus would ever draw.
    - `select` commutes: a copy of another row, and a row that stays when others leave, goes on as if it had always had
      its tokens.

    Args:
        potential: what to check; a product is checked as one.
        model: gives the vocabulary, the text of tokens, and texts to try.
        prompts: one or several; more than one shows more.
        texts: continuations to try besides, for a potential that gives most texts weight zero.
        n_texts: how many texts to draw for each prompt, half from the model, half from ids at random.
        max_new_tokens: the length cap.
        expected: (prompt ids, token ids) → the log-weight that a finished text should get in all. Without it nothing
            can tell whether a term is paid twice, only whether it is paid alike.
        table: "exact"; or "support" for a potential whose table leaves terms out: then only the −inf are checked.
        tolerance: largest difference of log-weights that is no difference.
        seed: of the texts.

    Raises:
        AssertionError: naming the axiom, the text, the position, and the two values that should be one.
        ValueError: an unknown `table`.
    """
    if table not in ("exact", "support"):
        raise ValueError(f"table = {table!r} is neither 'exact' nor 'support'")
    asked, _ = split(prompts)
    trial = _trial(model, [model.encode(prompt) for prompt in asked], texts, n_texts, max_new_tokens, seed)
    rng = torch.Generator().manual_seed(seed)
    single = list(range(1, trial.length + 1))
    reference = Run(potential, trial).follow(single)
    totals = reference.totals()

    _same(potential, trial, totals, Run(potential, trial).follow(single).totals(), tolerance, "asked a second time")
    for cuts in _splits(trial.length, rng):
        found = Run(potential, trial).follow(cuts)
        _check_absorbing(potential, trial, reference, found, cuts)
        _same(potential, trial, totals, found.totals(), tolerance, f"in {blocks(cuts)} instead of single tokens")
    _check_more(potential, trial, totals, tolerance)
    _check_junk(potential, trial, totals, tolerance, rng)
    _check_finish(potential, trial, totals, tolerance)
    _check_batches(potential, trial, reference, tolerance)
    told = _check_tables(potential, trial, table, tolerance)
    _check_select(potential, trial, tolerance, rng)
    if expected is not None:
        n, ended = trial.n_particles, trial.ended().tolist()
        wanted = [expected(trial.prompts[r // n], ids[: ended[r]]) for r, ids in enumerate(trial.ids.tolist())]
        _same(potential, trial, torch.tensor(wanted, dtype=torch.float64), totals, tolerance, "instead of `expected`")
    defers = Run(potential, trial).follow(single).scorer.finish() is not None
    return PotentialReport(len(trial.ids), int((totals == -math.inf).sum()), told, defers)


def _trial(
    model: Model,
    prompts: list[list[int]],
    texts: Sequence[str | Sequence[int]],
    n_texts: int,
    max_new_tokens: int,
    seed: int,
) -> Trial:
    """Given texts, texts from the model and random ids, for every prompt; with random junk behind their ends."""
    rng = torch.Generator().manual_seed(seed)
    given = [model.encode(text) if isinstance(text, str) else list(text) for text in texts]
    length = max([max_new_tokens, *map(len, given)])
    drawn = sample(
        [list(prompt) for prompt in prompts],
        LM(model),
        Draft(model),
        n_particles=max(1, n_texts // 2),
        max_new_tokens=length,
        seed=seed,
        progress=False,
    )
    rows = []
    for posterior in drawn:
        own = [*given, *posterior.token_ids]
        for _ in range(n_texts - n_texts // 2):
            ids = torch.randint(model.vocab_size, (length,), generator=rng).tolist()
            at = int(torch.randint(length + 2, (1,), generator=rng))
            if model.eos_ids and at < length:
                ids[at] = model.eos_ids[at % len(model.eos_ids)]
            own.append(ids)
        for ids in own:
            junk = torch.randint(model.vocab_size, (length,), generator=rng).tolist()
            ended = len(ids) == length or (len(ids) > 0 and ids[-1] in model.eos_ids)
            end = [] if ended else model.eos_ids[:1]
            rows.append([*ids, *end, *junk][:length])
    return Trial(model, prompts, torch.tensor(rows, device=model.device))


def _splits(length: int, rng: torch.Generator) -> list[list[int]]:
    """One block, blocks of two and one, and two at random."""
    uneven = [stop for stop in range(1, length) if stop % 3 != 1] + [length]
    random = [sorted({*torch.randint(1, length + 1, (length // 2,), generator=rng).tolist(), length}) for _ in range(2)]
    return [[length], uneven, *random]


def _same(
    potential: Potential, trial: Trial, wanted: Tensor, found: Tensor, tolerance: float, how: str, say: str = ""
) -> None:
    wrong = differ(wanted, found.to(wanted.device), tolerance)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise AssertionError(
            f"potential {potential!r}: the log-weight of {trial.named(row)} is {found[row].item():g} {how}, and "
            f"{wanted[row].item():g} expected{say}"
        )


def _check_absorbing(potential: Potential, trial: Trial, reference: Run, found: Run, cuts: list[int]) -> None:
    revived = reference.lost & ~found.lost
    if bool(revived.any()):
        row = int(revived.nonzero()[0])
        position = int((reference.scores[row] == -math.inf).nonzero()[0])
        raise AssertionError(
            f"potential {potential!r}: -inf is not absorbing. In single tokens, {position + 1} tokens of "
            f"{trial.named(row)} got weight zero, but in {blocks(cuts)} all of it got {found.scores[row].sum():g}. "
            "Give -inf only where no continuation has weight, and then for every continuation"
        )


def _check_more(potential: Potential, trial: Trial, totals: Tensor, tolerance: float) -> None:
    run = Run(potential, trial)
    for stop in range(1, trial.length + 1):
        run.read(stop, more=stop % 2 == 1)
    _same(potential, trial, totals, run.totals(), tolerance, "where batch.more said that the round goes on")


def _check_junk(potential: Potential, trial: Trial, totals: Tensor, tolerance: float, rng: torch.Generator) -> None:
    """Other tokens behind the ends."""
    place = torch.arange(trial.length, device=trial.ids.device)
    behind = place >= trial.ended()[:, None]
    junk = torch.randint(trial.model.vocab_size, trial.ids.shape, generator=rng).to(trial.ids.device)
    other = trial.rows(torch.where(behind, junk, trial.ids))
    for cuts in ([trial.length], [*range(2, trial.length, 2), trial.length]):
        found = Run(potential, other).follow(cuts).totals()
        say = ". Tokens behind a text's end, where block.valid is False, must not count"
        _same(potential, trial, totals, found, tolerance, "with other junk behind its end", say)


def _check_finish(potential: Potential, trial: Trial, totals: Tensor, tolerance: float) -> None:
    """Groups end at different times, so `finish` is asked while others still run."""
    run = Run(potential, trial)
    for stop in range(1, trial.length + 1):
        run.read(stop)
        run.finish()
    say = ". finish() is asked whenever a group ends: it must not change what the others get"
    _same(potential, trial, totals, run.totals(), tolerance, "if finish() was asked on the way", say)


def _check_batches(potential: Potential, trial: Trial, reference: Run, tolerance: float) -> None:
    """Every prompt alone, in its place in the batch and not, and single rows alone."""
    n, cuts = trial.n_particles, list(range(1, trial.length + 1))
    for g in range(len(trial.prompts)):
        for particles in {n, 1}:
            alone = trial.groups([g], particles)
            found = Run(potential, alone).follow(cuts)
            rows = slice(g * n, g * n + particles)
            wrong = differ(reference.scores[rows], found.scores, tolerance)
            if bool(wrong.any()):
                row, t = wrong.nonzero()[0].tolist()
                raise AssertionError(
                    f"potential {potential!r}: the batch matters. Token {t} of {alone.named(row)} gets "
                    f"{reference.scores[g * n + row, t].item():g} in a batch of {len(trial.ids)} rows and "
                    f"{found.scores[row, t].item():g} in one of {particles}"
                )


def _check_tables(potential: Potential, trial: Trial, kind: str, tolerance: float) -> int:
    """Compare the table before each token with the token's score."""
    run, told = Run(potential, trial), 0
    for t in range(trial.length):
        table, going = run.table(), ~run.batch.ended
        if table is not None and run.scorer.normalised:
            sums = torch.where(going, table.logsumexp(dim=1), 0.0)
            if bool((sums.abs() > tolerance).any()):
                row = int(sums.abs().argmax())
                raise AssertionError(
                    f"potential {potential!r} says that it is normalised, but after {t} tokens of {trial.named(row)} "
                    f"its next_logits sum to exp({sums[row].item():g})"
                )
        ended = run.batch.ended.clone()
        block = run.read(t + 1)
        if table is None:
            continue
        said, scored = table.gather(1, block.ids)[:, 0], run.scores[:, t]
        unsaid = going & (said == -math.inf) & (scored > -math.inf)
        compared = ~ended & ~block.ends if kind == "exact" else torch.zeros_like(ended)
        wrong = unsaid | (compared & differ(said, scored, tolerance))
        told += int(compared.sum())
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            why = "no bonus token could ever be it" if unsaid[row] else "pass table='support' if that is meant"
            raise AssertionError(
                f"potential {potential!r}: next_logits and score disagree on token {t} of {trial.named(row)}: "
                f"next_logits said {said[row].item():g} and score {scored[row].item():g}; {why}"
            )
    return told


def _check_select(potential: Potential, trial: Trial, tolerance: float, rng: torch.Generator) -> None:
    """Rows become copies of others half-way and go on as themselves; then a prompt leaves."""
    n, groups = trial.n_particles, len(trial.prompts)
    for at in sorted({1, trial.length // 2, trial.length - 1} - {0, trial.length}):
        within = torch.randint(n, (groups, n), generator=rng)
        within[:, 0] = n - 1  # at least one row moves, and one line dies
        ancestors = (within + torch.arange(groups)[:, None] * n).flatten().to(trial.ids.device)
        crossed = trial.rows(torch.cat([trial.ids[ancestors, :at], trial.ids[:, at:]], dim=1))
        run, fresh = Run(potential, trial).follow([at]), Run(potential, crossed).follow([at])
        run.select(ancestors, crossed)
        _go_on(potential, run, fresh, tolerance, f"select at {at} tokens, ancestors {ancestors.tolist()}")
        if groups > 1:
            kept = [g for g in range(groups) if g != 0]
            run, fresh = Run(potential, trial).follow([at]), Run(potential, trial.groups(kept)).follow([at])
            run.keep(torch.tensor(kept, device=trial.ids.device), trial.groups(kept))
            _go_on(potential, run, fresh, tolerance, f"select at {at} tokens that kept the prompts {kept} only")


def _go_on(potential: Potential, run: Run, fresh: Run, tolerance: float, how: str) -> None:
    """Follow both to the end and compare token by token."""
    tables = [one.table() for one in (run, fresh)]
    if tables[0] is not None and tables[1] is not None:
        wrong = differ(tables[0], tables[1], tolerance).any(dim=1) & ~fresh.batch.ended
        if bool(wrong.any()):
            raise AssertionError(
                f"potential {potential!r}: next_logits of {run.trial.named(int(wrong.nonzero()[0]))} after a {how} is "
                "not that of a scorer that read the same tokens; gather every per-row tensor in select"
            )
    start = run.at
    for stop in range(start + 1, run.trial.length + 1):
        run.read(stop)
        fresh.read(stop)
    parts = (run.scores[:, start:], run.finish()[:, None]), (fresh.scores[:, start:], fresh.finish()[:, None])
    got, wanted = (torch.cat(part, dim=1) for part in parts)
    wrong = differ(got, wanted, tolerance)
    if bool(wrong.any()):
        row, t = wrong.nonzero()[0].tolist()
        where = f"token {start + t}" if start + t < run.trial.length else "finish()"
        raise AssertionError(
            f"potential {potential!r}: after a {how}, {where} of {run.trial.named(row)} gets {got[row, t].item():g}; a "
            f"scorer that read the same tokens gives {wanted[row, t].item():g}. Gather every per-row tensor by the "
            "ancestors in select, also when there are fewer of them than rows"
        )
