"""Forwards of a model as CUDA graphs: a decoding step is many small launches, which take the host longer than the GPU.

A forward of one shape reads and writes the same addresses every time: tokens, positions, slots and tables are copied
into buffers, and the pools of keys and values stay where they are until they grow. So it is recorded once and replayed.
Tables are filled up with −1 to a power of two of columns, so that they change their shape rarely; rows that have ended
stay along, with slots and positions of −1 (see `smcsample.lm.paging.Pages.extend`).

Only the forwards are recorded. What lies between them in a round (drawing, weights, resampling, tables) is launched one
by one, and `torch.compile` is not used.

Recording is one function, `Capture`; `CudaCapture` is the real one. **It has never run on a GPU**: the tests put one in
its place that runs the recorded forward again, on the same buffers and the same pools.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.attention import Forward

if TYPE_CHECKING:
    from smcsample.lm.decoder import Decoder

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records what a function launches; what it returns launches it again and gives the same output tensor every time."""

FIRST_CAPTURE = 3
"""The use of a shape at which it is recorded: shapes of a run's first or last round come once or twice."""
LIMIT = 16
"""Graphs of one stream. A run has about six shapes: two or three lengths of steps, at two or three widths of tables."""
NARROWEST = 16
"""Columns of the smallest tables."""
WARM_UPS = 2
EVERYTHING = 2**31 - 1
"""A position beyond all: a recorded forward always looks at sliding windows, as its positions are not known yet."""


class CudaCapture:
    """`torch.cuda.graph`, after a warm-up on another stream, as its documentation asks (torch 2.11: "CUDA Graphs").

    The warm-up also compiles kernels, and it refuses what waits for the device before recording starts, as an error
    while recording may leave the allocator in a bad state. Graphs share their memory: each one's output is copied
    before another is replayed. That memory goes with the last graph, so it is asked of a living one and never kept.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(side)
        other = next(iter(self._graphs), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if other is None else other.pool()):
            out = run()
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class Shape(NamedTuple):
    """What a recorded forward can't change. `columns`: of its tables, filled up."""

    rows: int
    steps: int
    keep: int
    columns: int


class Recorded:
    """One forward of one shape, and the buffers it reads."""

    def __init__(self, decoder: Decoder, capture: Capture, shape: Shape, tokens: Tensor, step: Forward) -> None:
        self._tokens, self._slots, self._positions = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (tokens, step.slots, step.positions)
        )
        self._tables = step.tables.new_empty(shape.rows, shape.columns)
        forward = Forward(step.pool, self._slots, self._positions, self._tables, EVERYTHING, plan=None)
        # A warm-up is a real forward: it writes what this step is about to write, where it will write it.
        self._fill(tokens, step)
        self._replay = capture(lambda: decoder.forward(self._tokens, forward, shape.keep))

    def __call__(self, tokens: Tensor, step: Forward) -> Tensor:
        """The logits, in memory of their own: the next replay overwrites the recorded forward's."""
        self._fill(tokens, step)
        return self._replay().clone()

    def _fill(self, tokens: Tensor, step: Forward) -> None:
        self._tokens.copy_(tokens)
        self._slots.copy_(step.slots)
        self._positions.copy_(step.positions)
        columns = step.tables.shape[1]
        self._tables[:, :columns].copy_(step.tables)
        self._tables[:, columns:].fill_(-1)


class Graphs:
    """The forwards of one stream: the first ones of a shape as they are, the later ones replayed.

    Forwards must come with all rows, ended or not, or their shapes would change all the time. `captured`, `replayed`:
    how many so far. If recording fails, the model says so once and everything is run as it is.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._uses: Counter[Shape] = Counter()
        self._recorded: OrderedDict[Shape, Recorded] = OrderedDict()
        self._addresses: list[int] = []
        self.captured = 0
        self.replayed = 0

    def forward(self, tokens: Int[Tensor, "row step"], step: Forward, keep: int) -> Float[Tensor, "row kept vocab"]:
        """See `Decoder.forward`; there must be no plan in `step`."""
        addresses = [pool.data_ptr() for pool in (step.pool.slot_positions, *step.pool.tensors)]
        if addresses != self._addresses:
            self._recorded.clear()  # the pools have grown, and moved
            self._addresses = addresses
        rows, columns = step.tables.shape
        shape = Shape(rows, tokens.shape[1], keep, max(NARROWEST, 1 << (columns - 1).bit_length()))
        self._uses[shape] += 1
        if shape not in self._recorded and self._uses[shape] >= FIRST_CAPTURE:
            self._record(shape, tokens, step)
        if shape not in self._recorded:
            return self._decoder.forward(tokens, step, keep)
        self._recorded.move_to_end(shape)
        self.replayed += 1
        return self._recorded[shape](tokens, step)

    def _record(self, shape: Shape, tokens: Tensor, step: Forward) -> None:
        if self._decoder.capture is None:
            return
        if len(self._recorded) == LIMIT:
            oldest, _ = self._recorded.popitem(last=False)
            self._uses[oldest] = 0
        try:
            self._recorded[shape] = Recorded(self._decoder, self._decoder.capture, shape, tokens, step)
            self.captured += 1
        except Exception as error:  # the same forward has run before, so recording it is what failed
            self._decoder.give_up_capture(error)
