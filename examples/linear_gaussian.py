"""A linear-Gaussian state-space model in twenty lines, its evidence and filter means checked against the Kalman filter.

x_0 ~ N(0, 1),   x_t = ρ x_{t−1} + σ ε_t,   y_t = x_t + τ η_t          python examples/linear_gaussian.py
"""

import math

import torch
from torch import Tensor

import smcsample as smc


class LinearGaussian:
    """The bootstrap filter: particles move by the model, and are weighted by the density of the observation."""

    def __init__(self, y: Tensor, rho: float = 0.9, sigma: float = 1.0, tau: float = 0.5) -> None:
        self.y, self.rho, self.sigma, self.tau = y, rho, sigma, tau

    def initial(self, source: smc.Source) -> Tensor:
        return source.normal()

    def step(self, state: Tensor, t: int, source: smc.Source) -> tuple[Tensor, Tensor]:
        x = self.rho * state + self.sigma * source.normal() if t > 0 else state
        return x, -0.5 * ((self.y[t] - x) / self.tau) ** 2 - math.log(self.tau * math.sqrt(2 * math.pi))

    def select(self, state: Tensor, ancestors: Tensor) -> Tensor:
        return state.gather(1, ancestors)

    def finished(self, state: Tensor, t: int) -> Tensor:
        return torch.full(state.shape[:1], t == len(self.y))


def kalman(model: LinearGaussian) -> tuple[float, list[float]]:
    """Exact log-evidence, and the mean of x_t given y_0 … y_t."""
    mean, variance, log_z, means = 0.0, 1.0, 0.0, []
    for t, y in enumerate(model.y.tolist()):
        if t > 0:
            mean, variance = model.rho * mean, model.rho**2 * variance + model.sigma**2
        total = variance + model.tau**2
        log_z -= 0.5 * (math.log(2 * math.pi * total) + (y - mean) ** 2 / total)
        gain = variance / total
        mean, variance = mean + gain * (y - mean), (1 - gain) * variance
        means.append(mean)
    return log_z, means


def observations(steps: int = 20) -> Tensor:
    """A fixed series that looks like the model's."""
    t = torch.arange(steps, dtype=torch.float64)
    return 1.5 * torch.sin(0.7 * t) + 0.3 * torch.cos(2.1 * t)


if __name__ == "__main__":
    model = LinearGaussian(observations())
    log_z, means = kalman(model)
    for step in smc.run(model, n_particles=2000, seed=1):
        weights = torch.softmax(step.log_weights[0], dim=0)
        print(
            f"t={step.t:2d}  ESS {step.ess[0]:6.0f}  mean {weights @ step.state[0]:+.3f}  Kalman {means[step.t]:+.3f}"
        )
    print(f"log Ẑ = {step.log_evidence[0]:.3f}, exact {log_z:.3f}")
