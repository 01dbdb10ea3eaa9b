"""The Metropolis–Hastings move on texts: keep a beginning, draw the rest again.

A move keeps the first m tokens of a text x, m uniform over 0 … |x| − 1, and draws the rest again from the proposal, up
to the end of sequence or the horizon. With y the new text it is accepted with probability min(1, r),

    r = γ(y) / γ(x) · ∏_{s ≥ m} q(x_s | x_<s) / ∏_{s ≥ m} q(y_s | y_<s) · |x| / |y|

(Karan & Du 2025, arXiv 2510.14901, for γ = p^α). Both products run over the whole of their own suffix, however long
the other one is, and |x|/|y| is there because m is drawn among the tokens of the text it starts from. A public
implementation lacks both: it cuts x's suffix to the length of y's, and it leaves |x|/|y| out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.kernels.ops import Purpose
from smcsample.proposals import Constrained, Draft, Proposal
from smcsample.sequence import Rows, SequenceModel
from smcsample.source import Source

POSITION_BITS = 16
"""Bits of the counter's position word that hold a token's position; the other 16 number the moves."""
CUT, ACCEPT = (1 << POSITION_BITS) - 1, (1 << POSITION_BITS) - 2
"""The positions whose numbers choose m and decide on acceptance."""
READ, DRAW = 64, 16
"""Tokens scored at a time: kept by every row, and drawn. After a block in which all rows ended none is drawn."""


class Redraw(Source):
    """The numbers of move `move`: tokens before `keep` are given, not drawn, so any drafter walks along them.

    Args:
        source: where the numbers come from.
        ids: `[row, token]`, of which row r keeps the first `keep[r]`.
        move: which move of the run this is.

    Raises:
        ValueError: more moves than the counter has room for.
    """

    def __init__(self, source: Source, ids: Int[Tensor, "row token"], keep: Int[Tensor, " row"], move: int) -> None:
        self.__dict__.update(source.__dict__)
        if move >= 1 << (32 - POSITION_BITS):
            raise ValueError(f"move {move} of a run is beyond its {1 << (32 - POSITION_BITS)} moves; make fewer")
        self.source, self.ids, self.keep, self.move = source, ids, keep, move

    def tokens(
        self, log_weights: Float[Tensor, "row vocab"], position: int, purpose: Purpose, wanted: Bool[Tensor, " row"]
    ) -> Int[Tensor, " row"]:
        given = position < self.keep
        if bool((wanted & ~given).any()):
            place = (self.move << POSITION_BITS) | position
            drawn = self.source.tokens(log_weights, place, Purpose.MOVE, wanted & ~given)
        else:
            drawn = torch.zeros_like(self.keep)
        return torch.where(given, self.ids[:, position], drawn) if position < self.ids.shape[1] else drawn

    def choose(self, log_weights: Float[Tensor, "row choice"], position: int) -> Int[Tensor, " row"]:
        """One choice per row, drawn ∝ exp(log_weights)."""
        every = torch.ones_like(self.keep, dtype=torch.bool)
        return self.source.tokens(log_weights, (self.move << POSITION_BITS) | position, Purpose.MOVE, every)


@dataclass
class Chain:
    """Where every row's chain stands.

    `ids`, `log_q` `[row, token]`: its text and the proposal's log-probability of each token, of which `lengths` count;
    `ended`: texts that are complete; `log_target`: log γ of the text, or of the prefix it is.
    """

    ids: Int[Tensor, "row token"]
    log_q: Float[Tensor, "row token"]
    lengths: Int[Tensor, " row"]
    ended: Bool[Tensor, " row"]
    log_target: Float[Tensor, " row"]

    def where(self, chosen: Bool[Tensor, " row"], other: Chain) -> Chain:
        """`other` in the chosen rows, `self` elsewhere; both reach equally far."""
        return Chain(
            torch.where(chosen[:, None], other.ids, self.ids),
            torch.where(chosen[:, None], other.log_q, self.log_q),
            torch.where(chosen, other.lengths, self.lengths),
            torch.where(chosen, other.ended, self.ended),
            torch.where(chosen, other.log_target, self.log_target),
        )

    def padded(self, horizon: int) -> Chain:
        """The same with room for `horizon` tokens."""
        room = horizon - self.ids.shape[1]
        pad = torch.nn.functional.pad
        return Chain(pad(self.ids, (0, room)), pad(self.log_q, (0, room)), self.lengths, self.ended, self.log_target)

    def suffix(self, m: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """Σ_{s ≥ m} log q(x_s | x_<s) over the row's own tokens."""
        s = torch.arange(self.ids.shape[1], device=m.device)
        return torch.where((s >= m[:, None]) & (s < self.lengths[:, None]), self.log_q, 0.0).sum(dim=1)


@dataclass
class Moved:
    """A move: the chains after it, which rows accepted, and how many tokens every row drew for it."""

    chain: Chain
    accepted: Bool[Tensor, " row"]
    drawn: Int[Tensor, " row"]


def walk(
    model: SequenceModel, source: Source, chain: Chain, keep: Int[Tensor, " row"], read: int, horizon: int
) -> tuple[Rows, Chain]:
    """Start afresh, follow the first `keep` tokens of every row and draw on to `horizon`; the state there, and the
    chain it ends in, with its log γ. The first `read` ≤ min(keep) tokens are scored as given, many at a time, and keep
    their log q; those after it cost a step each.
    """
    rows = model.initial(source)
    log_target = torch.zeros_like(chain.log_target)
    while rows.ids.shape[1] < read:
        start = rows.ids.shape[1]
        stop = min(start + READ, read)
        log_target = log_target + model.read(rows, chain.ids[:, start:stop], chain.log_q[:, start:stop])
        rows.batch.forget(stop)
    while rows.ids.shape[1] < horizon and not bool(rows.batch.ended.all()):
        start = rows.ids.shape[1]
        increments = model.extend(rows, min(DRAW, horizon - start))
        log_target = log_target + increments + rows.log_q[:, start:].sum(dim=1)
        rows.batch.forget(rows.ids.shape[1])
    if horizon >= model.max_new_tokens:
        deferred = torch.zeros(source.n_groups, source.n_particles, dtype=torch.float64, device=source.device)
        model.close(rows, deferred)
        log_target = log_target + deferred.flatten()
    else:  # what waits for the end of a run belongs to the text all the same
        log_target = log_target + rows.held.masked_fill(rows.lost, 0.0)
    reached = Chain(rows.ids, rows.log_q, rows.lengths, rows.batch.ended, log_target)
    return rows, reached.padded(horizon)


def walked(
    model: SequenceModel, source: Source, chain: Chain, keep: Int[Tensor, " row"], read: int, horizon: int
) -> Chain:
    """The chain that a `walk` ends in; what its models needed on the way is given back."""
    rows, reached = walk(model, source, chain, keep, read, horizon)
    model.discard(rows.batch)
    return reached


def move(
    model: SequenceModel,
    source: Source,
    chain: Chain,
    number: int,
    *,
    among: Bool[Tensor, "row token"] | None = None,
    stay_unfinished: bool = False,
) -> Moved:
    """One Metropolis–Hastings move of every row that has a choice of m; leaves γ over texts up to the chain's horizon
    invariant.

    Args:
        model: its prompts are the rows' groups; block size and move do not matter.
        source: where random numbers come from.
        chain: see `Chain`; its `log_q` must be the proposal's wherever m may fall.
        number: which move of the run this is: each number has random numbers of its own.
        among: which m may be chosen; default: all tokens of the text. A choice that depends on the text beyond its
            length would need another ratio.
        stay_unfinished: accept unfinished texts only.
    """
    horizon = chain.ids.shape[1]
    if among is None:
        among = torch.arange(horizon, device=chain.ids.device) < chain.lengths[:, None]
    moving = among.any(dim=1)
    no_choice = torch.zeros_like(among)
    no_choice[:, 0] = ~moving
    table = torch.where(among | no_choice, 0.0, -math.inf)
    everything = torch.full_like(chain.lengths, horizon)
    chosen = Redraw(source, chain.ids, everything, number).choose(table, CUT)
    m = torch.where(moving, chosen, horizon)
    other = walked(model, Redraw(source, chain.ids, m, number), chain, m, int(m.min()), horizon)
    ratio = other.log_target + chain.suffix(m) - other.suffix(m)
    ratio = ratio + chain.lengths.double().log() - other.lengths.double().log()
    # Where γ(x) = 0 the chain has not begun: it takes whatever comes.
    log_p = torch.where(chain.log_target == -math.inf, 0.0, (ratio - chain.log_target).clamp(max=0.0))
    refused = other.ended if stay_unfinished else torch.zeros_like(other.ended)
    log_p = torch.where(refused, -math.inf, log_p)
    decide = torch.stack([log_p, torch.log1p(-log_p.exp())], dim=1)
    accepted = (Redraw(source, chain.ids, everything, number).choose(decide, ACCEPT) == 0) & moving
    return Moved(chain.where(accepted, other), accepted, torch.where(moving, other.lengths - m, 0))


def check_proposal(proposal: Proposal) -> None:
    """Refuse what no ratio can be made with.

    Raises:
        TypeError: a proposal whose tokens have no stated law.
        ValueError: a proposal that can't give every token the target allows.
    """
    draft = proposal.draft if isinstance(proposal, Constrained) else proposal
    if not isinstance(draft, Draft):
        raise TypeError(
            f"proposal {proposal!r} can't make Metropolis–Hastings moves, which need the law of every token; use "
            "Draft(model)"
        )
    if draft.allow_truncation:
        raise ValueError(
            f"proposal {proposal!r} may cut what the target allows, and then no move ever leads back; leave "
            "allow_truncation out"
        )


def empty(source: Source) -> Chain:
    """Chains that have not begun."""
    rows = source.n_groups * source.n_particles
    none = torch.zeros(rows, 0, dtype=torch.float64, device=source.device)
    lengths = torch.zeros(rows, dtype=torch.long, device=source.device)
    return Chain(none.long(), none, lengths, lengths > 0, lengths.double())


def grown(model: SequenceModel, source: Source, chain: Chain, number: int, horizon: int) -> Chain:
    """The unfinished texts drawn on to `horizon`, and log γ of every text there; uses move `number`'s numbers."""
    now = chain.ids.shape[1]
    keep = torch.full_like(chain.lengths, now)
    return walked(model, Redraw(source, chain.ids, keep, number), chain, keep, now, horizon)
