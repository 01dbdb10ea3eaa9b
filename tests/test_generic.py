"""The generic sampler on models with exact answers: Kalman filter, HMM forward algorithm, toy chains."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import smcsample as smc
from tracing import walk

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scheme", ["systematic", "multinomial", "ssp", "stratified", "residual", "killing"])
def test_linear_gaussian_against_kalman(scheme: str) -> None:
    """400 replicates of N = 100: E[Ẑ] = Z on the linear scale and filter means right, within 5 standard errors.

    The standard errors are below 3 % of Z and 0.02: a missing 1/N, a wrong sign or a stale weight is many of them.
    """
    module = example("linear_gaussian")
    model = module.LinearGaussian(module.observations(12))
    log_z, means = module.kalman(model)
    final = None
    for step in smc.run(model, 100, n_groups=400, seed=2, resampling=scheme):
        weights = step.log_weights.softmax(1)
        estimates = (weights * step.state).sum(1)
        error = estimates.std() / 20
        assert error < 0.02
        assert abs(estimates.mean() - means[step.t]) < 5 * error + 0.01  # self-normalisation leaves a bias of O(1/N)
        final = step
    assert final is not None
    ratio = (final.log_evidence - log_z).exp()
    error = ratio.std() / 20
    assert error < 0.03
    assert abs(ratio.mean() - 1) < 5 * error


def test_hidden_markov_against_the_forward_algorithm() -> None:
    module = example("hidden_markov")
    model = module.example()
    log_z, filters = module.forward(model)
    runs = smc.smc(model, 50, n_groups=1000, seed=3)
    ratio = torch.tensor([run.log_evidence - log_z for run in runs], dtype=torch.float64).exp()
    error = ratio.std() / math.sqrt(1000)
    assert error < 0.01
    assert abs(ratio.mean() - 1) < 5 * error
    share = torch.stack([run.expect(lambda x: (x == 0).double()) for run in runs])
    assert abs(share.mean() - filters[-1][0]) < 5 * share.std() / math.sqrt(1000) + 0.003


class Chain:
    """Two-state chain whose every draw a test can walk: x_t from a guided proposal by a uniform, weights exact."""

    initial_law = torch.tensor([0.6, 0.4], dtype=torch.float64)
    table = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=torch.float64)
    proposal = torch.tensor([[0.5, 0.5], [0.35, 0.65]], dtype=torch.float64)
    likelihood = torch.tensor([[0.9, 0.1], [0.2, 0.7], [0.5, 0.3]], dtype=torch.float64)

    def initial(self, source: smc.Source) -> Tensor:
        return torch.zeros(source.n_groups, source.n_particles, dtype=torch.long)

    def step(self, state: Tensor, t: int, source: smc.Source) -> tuple[Tensor, Tensor]:
        law = self.table[state] if t else self.initial_law.expand(*state.shape, 2)
        q = self.proposal[state]
        wanted = torch.ones(state.numel(), dtype=torch.bool)
        x = source.tokens(q.log().flatten(0, 1), t, None, wanted).view(state.shape)
        pick = x[..., None]
        return x, (law.gather(2, pick) / q.gather(2, pick))[..., 0].log() + self.likelihood[t][x].log()

    def select(self, state: Tensor, ancestors: Tensor) -> Tensor:
        return state.gather(1, ancestors)

    def finished(self, state: Tensor, t: int) -> Tensor:
        return torch.full(state.shape[:1], t == 3)

    def evidence(self) -> float:
        alpha = self.initial_law * self.likelihood[0]
        for t in (1, 2):
            alpha = (alpha @ self.table) * self.likelihood[t]
        return alpha.sum().item()


@pytest.mark.parametrize("tau", [0.0, 0.9, 1.0])
def test_evidence_of_a_guided_chain_is_exactly_unbiased(tau: float) -> None:
    def run(source: smc.Source, groups: int) -> list[smc.Posterior]:
        return smc.smc(Chain(), 3, n_groups=groups, ess_threshold=tau, source=source)

    paths = walk(run, 3)
    mean = math.fsum(p.probability * math.exp(p.posterior.log_evidence) for p in paths)
    assert mean == pytest.approx(Chain().evidence(), rel=1e-12)


class Fixed:
    """Particles 0 … N−1 with given log-weights at each step."""

    def __init__(self, *log_weights: list[float]) -> None:
        self.log_weights = torch.tensor(log_weights, dtype=torch.float64)

    def initial(self, source: smc.Source) -> dict[str, Tensor]:
        return {"x": torch.arange(source.n_particles).repeat(source.n_groups, 1)}

    def step(self, state: dict[str, Tensor], t: int, source: smc.Source) -> tuple[dict[str, Tensor], Tensor]:
        return state, self.log_weights[t][state["x"]]

    def select(self, state: dict[str, Tensor], ancestors: Tensor) -> dict[str, Tensor]:
        return {"x": state["x"].gather(1, ancestors)}

    def finished(self, state: dict[str, Tensor], t: int) -> Tensor:
        return torch.full(state["x"].shape[:1], t == len(self.log_weights))


def test_weights_travel_with_particles() -> None:
    """Estimates before a resampling use the weights before it; then states are the ancestors', weights reset."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    steps = list(smc.run(Fixed(weights.log().tolist(), [0.0] * 4), 4, ess_threshold=1.0))
    before, after = steps
    assert (before.log_weights[0].softmax(0) * before.state["x"][0]).sum().item() == pytest.approx(2.0)
    assert not before.resampled.any()
    assert after.resampled.all()
    assert torch.equal(after.state["x"], after.ancestors)
    assert torch.all(after.log_weights == 0)
    assert after.log_evidence.item() == pytest.approx(math.log(0.25), abs=1e-15)
    assert after.unique_ancestors.tolist() == [after.ancestors.unique().numel()]


def test_all_weights_zero() -> None:
    dead = smc.smc(Fixed([-math.inf] * 4, [0.0] * 4), 4)
    assert dead.status is smc.Status.DEAD
    assert dead.log_evidence == -math.inf
    assert dead.ess == 0
    assert torch.all(dead.weights == 0)
    assert len(dead.steps) == 1
    with pytest.raises(smc.DeadPopulationError):
        dead.draw()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_weights_are_refused_by_place(value: float) -> None:
    with pytest.raises(FloatingPointError, match=r"Fixed gave .* at step 1, group 0, particle 2"):
        smc.smc(Fixed([0.0] * 4, [0.0, 0.0, value, 0.0]), 4)


def test_groups_that_finish_early_keep_their_weights() -> None:
    class Ragged(Fixed):
        def finished(self, state: dict[str, Tensor], t: int) -> Tensor:
            return torch.tensor([t >= 1, t >= 3])

    log_w = [math.log(v) for v in (0.01, 0.01, 0.01, 0.97)]
    first, second = smc.smc(Ragged(log_w, log_w, log_w), 4, n_groups=2, ess_threshold=1.0)
    assert len(first.steps) == 1
    assert len(second.steps) == 3
    assert first.log_weights.tolist() == pytest.approx(log_w)
    assert not torch.equal(second.genealogy[1], torch.arange(4))


class Walk:
    """x_0 normal, x_t = x_{t−1} − a fresh normal; group g takes g + 1 steps. The state is a tuple of two tensors."""

    def initial(self, source: smc.Source) -> tuple[Tensor, Tensor]:
        x = source.normal()
        return x, torch.zeros_like(x)

    def step(self, state: tuple[Tensor, Tensor], t: int, source: smc.Source) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = state[0] - source.normal()
        return (x, state[1] + 1), -(x**2) / 2

    def select(self, state: tuple[Tensor, Tensor], ancestors: Tensor) -> tuple[Tensor, Tensor]:
        return state[0].gather(1, ancestors), state[1].gather(1, ancestors)

    def finished(self, state: tuple[Tensor, Tensor], t: int) -> Tensor:
        return t >= torch.arange(1, state[0].shape[0] + 1)


def test_initial_and_first_step_draw_different_numbers() -> None:
    """x_0 − e ~ N(0, 2), so Z = E exp(−x²/2) = 1/√3; 20,000 particles are within 0.02 of it, shared numbers give 1."""
    posterior = smc.smc(Walk(), 20_000, seed=1)
    assert math.exp(posterior.log_evidence) == pytest.approx(3**-0.5, abs=0.02)


def test_a_source_can_be_used_again() -> None:
    source = smc.Source(4, 1, 50)
    first, second = smc.smc(Walk(), 50, source=source), smc.smc(Walk(), 50, source=source)
    assert first.log_evidence == second.log_evidence
    assert torch.equal(first.values[0], second.values[0])


def test_groups_keep_the_particles_of_their_own_last_step_in_any_tree_of_tensors() -> None:
    runs = smc.smc(Walk(), 5, n_groups=3, seed=2)
    for g, run in enumerate(runs):
        assert len(run.steps) == g + 1
        assert torch.all(run.values[1] == g + 1)
        x, steps = run.draw()
        assert x.shape == steps.shape == ()
        assert run.expect(lambda particle: particle[1]).item() == pytest.approx(g + 1)
        assert run.best()[0] in run.values[0]
    assert runs[0].vote(lambda particle: particle[1]) == pytest.approx({1.0: 1.0})


def test_a_state_of_another_kind_is_refused_after_one_step() -> None:
    class Strange(Walk):
        def step(self, state: tuple, t: int, source: smc.Source) -> tuple:
            state, increments = super().step(state, t, source)
            return (state[0], "not a tensor"), increments

        def finished(self, state: tuple, t: int) -> Tensor:
            return torch.tensor([t >= 1])

    with pytest.raises(TypeError, match=r"state holds str, not a tensor \[1, 4, …\]"):
        smc.smc(Strange(), 4)


def test_a_model_finished_from_the_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="finished before its first step"):
        smc.smc(Fixed(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_particles": 0}, "n_particles = 0"),
        ({"n_groups": 0}, "n_groups = 0"),
        ({"ess_threshold": 1.5}, "ess_threshold = 1.5"),
        ({"ess_threshold": -0.1}, "ess_threshold = -0.1"),
        ({"resampling": "sistematic"}, "systematic"),
        ({"resampling": "fearnhead_clifford"}, "fearnhead_clifford"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    class Untouched(Fixed):
        def initial(self, source: smc.Source) -> dict[str, Tensor]:
            raise AssertionError("the model ran")

    with pytest.raises(ValueError, match=message):
        smc.smc(Untouched([0.0] * 4), **({"n_particles": 4} | options))
