"""The one place random numbers come from. Every draw of the library goes through a `Source`.

A number depends on the seed, the stream (which prompt or replicate), the particle, the position and the purpose, and
on nothing else: not on the batch, not on what was drawn before. A test can pass a source of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from smcsample.checks import integer
from smcsample.kernels import ops
from smcsample.kernels.ops import Purpose
from smcsample.resampling import SCHEMES, Resampled, resample

PARTICLE_BITS = 20
"""Bits of the counter's particle word; the other 12 number the calls within a step."""


class Source:
    """Random numbers for `n_groups` × `n_particles` particles.

    Args:
        seed: one integer in [0, 2^64): group i then is stream i of that seed. Or one integer per group: then a
            group's numbers do not depend on where in the batch it stands.
        n_groups, n_particles: the population's size.

    Raises:
        TypeError: a seed that is no integer.
        ValueError: a seed out of range, or a list of seeds whose length is not `n_groups`, n_particles out of range.
    """

    def __init__(
        self, seed: int | Sequence[int], n_groups: int, n_particles: int, device: torch.device | str = "cpu"
    ) -> None:
        if not 1 <= n_particles <= 1 << PARTICLE_BITS:
            raise ValueError(
                f"n_particles = {n_particles} is outside 1 … 2^{PARTICLE_BITS}; use several groups instead"
            )
        one = not isinstance(seed, Sequence)
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * n_groups
        if len(seeds) != n_groups:
            raise ValueError(f"seed has {len(seeds)} entries for {n_groups} groups; give one integer, or one per group")
        seeds = [integer("seed", s, 0, "seeds are integers in [0, 2^64)") for s in seeds]
        if max(seeds) >= 1 << 64:
            raise ValueError(f"seed = {max(seeds)} is too large; seeds are integers in [0, 2^64)")
        signed = [s - (1 << 64) if s >= 1 << 63 else s for s in seeds]
        self._seed = torch.tensor(signed, dtype=torch.int64, device=device)
        self._stream = torch.arange(n_groups, device=device) if one else torch.zeros_like(self._seed)
        self.n_particles = int(n_particles)
        self._step = self._calls = 0

    @property
    def n_groups(self) -> int:
        return len(self._seed)

    @property
    def device(self) -> torch.device:
        return self._seed.device

    def take(self, groups: Int[Tensor, " kept"]) -> Source:
        """The same numbers for some of the groups: finished ones leave a batch without changing the others."""
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__ | {"_seed": self._seed[groups], "_stream": self._stream[groups]}
        return other

    def begin(self, step: int) -> None:
        """Start step `step`: `uniform` and `normal` number their calls afresh within each step. Runs number the calls
        of `initial` as step 0 and step t as t + 1."""
        self._step, self._calls = step, 0

    def uniform(self, *shape: int) -> Float[Tensor, "group particle *shape"]:
        """Uniforms in (0, 1), float64, for a user's model: fresh ones at every call.

        Raises:
            ValueError: more than 4096 calls in one step.
        """
        flat = self._float64(Purpose.USER, self._step, self._calls, math.prod(shape))
        self._calls += 1
        return flat.reshape(self.n_groups, self.n_particles, *shape)

    def normal(self, *shape: int) -> Float[Tensor, "group particle *shape"]:
        """Standard normals, float64, for a user's model: fresh ones at every call."""
        return torch.special.ndtri(self.uniform(*shape))

    def tokens(
        self,
        log_weights: Float[Tensor, "row vocab"],
        position: int,
        purpose: Purpose,
        wanted: Bool[Tensor, " row"],
    ) -> Int[Tensor, " row"]:
        """One token per row (row g·N + n), drawn with probability ∝ exp(log_weights). Rows not `wanted` (ended ones)
        may get any token."""
        seed, stream, particle = self._rows()
        counters = ops.Counters(seed, stream, particle, torch.full_like(seed, position))
        return ops.draw_gumbel_max(log_weights, counters, purpose)

    def resample(
        self, log_w: Float[Tensor, "group particle"], scheme: str, step: int, wanted: Bool[Tensor, " group"]
    ) -> Resampled:
        """Ancestors by the named scheme. Groups not `wanted` may get any."""
        n = log_w.shape[1]
        return resample(log_w, self._group(Purpose.RESAMPLE, step, SCHEMES[scheme].uniforms(n, n)), n, scheme)

    def answers(self, draw: int) -> Float[Tensor, " group"]:
        """The uniform that picks the `draw`-th answer of each group from its weighted particles."""
        return self._group(Purpose.ANSWER, draw, 1)[:, 0]

    def _group(self, purpose: Purpose, position: int, n: int) -> Float[Tensor, "group n"]:
        return ops.group_uniforms(self._seed, self._stream, torch.full_like(self._seed, position), purpose, n)

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        n = self.n_particles
        particle = torch.arange(n, device=self.device).repeat(self.n_groups)
        return self._seed.repeat_interleave(n), self._stream.repeat_interleave(n), particle

    def _float64(self, purpose: Purpose, step: int, call: int, n: int) -> Tensor:
        seed, stream, particle = self._rows()
        position = torch.full_like(seed, step)
        if call >= 1 << (32 - PARTICLE_BITS):
            raise ValueError(f"{call} calls of the source in step {step}; ask for one array of all the numbers instead")
        particle = particle + (call << PARTICLE_BITS)
        words = ops.words(seed, stream, particle, position, purpose, 2 * n)
        return ops.uniform_float64(words[:, 0::2], words[:, 1::2])
