"""A hidden Markov model with a proposal of our own, checked against the forward algorithm.

x_0 ~ initial,   x_t ~ transition[x_{t−1}],   y_t ~ emission[x_t]          python examples/hidden_markov.py
"""

import torch
from torch import Tensor

import smcsample as smc


class HiddenMarkov:
    """The guided filter: x_t is drawn given y_t, so a step's weight is p(y_t | x_{t−1})."""

    def __init__(self, initial: Tensor, transition: Tensor, emission: Tensor, y: list[int]) -> None:
        self.prior, self.table, self.emission, self.y = initial, transition, emission, y

    def initial(self, source: smc.Source) -> Tensor:
        return torch.full((source.n_groups, source.n_particles), -1)

    def step(self, state: Tensor, t: int, source: smc.Source) -> tuple[Tensor, Tensor]:
        prior = self.prior.expand(*state.shape, -1) if t == 0 else self.table[state]
        joint = prior * self.emission[:, self.y[t]]
        heights = joint.cumsum(-1)
        point = source.uniform() * heights[..., -1]
        return (heights <= point[..., None]).sum(-1), heights[..., -1].log()

    def select(self, state: Tensor, ancestors: Tensor) -> Tensor:
        return state.gather(1, ancestors)

    def finished(self, state: Tensor, t: int) -> Tensor:
        return torch.full(state.shape[:1], t == len(self.y))


def forward(model: HiddenMarkov) -> tuple[float, list[list[float]]]:
    """Exact log-evidence, and the law of x_t given y_0 … y_t."""
    alpha, log_z, filters = model.prior, 0.0, []
    for t, y in enumerate(model.y):
        joint = (alpha if t == 0 else alpha @ model.table) * model.emission[:, y]
        log_z += joint.sum().log().item()
        alpha = joint / joint.sum()
        filters.append(alpha.tolist())
    return log_z, filters


def example() -> HiddenMarkov:
    """Three states, three symbols, no symmetry."""
    table = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
    emission = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.25, 0.05, 0.7]], dtype=torch.float64)
    return HiddenMarkov(
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), table, emission, [0, 2, 2, 1, 0, 1, 2, 0, 0, 2]
    )


if __name__ == "__main__":
    model = example()
    log_z, filters = forward(model)
    posterior = smc.smc(model, n_particles=1000, seed=1)
    print(f"log Ẑ = {posterior.log_evidence:.3f}, exact {log_z:.3f}")
    print("P(x_T | y):", {state: round(share, 3) for state, share in posterior.vote(int).items()}, "exact", filters[-1])
