"""The length bias of power sampling in closed form: when do short wrong answers beat long right ones?

Half the answers are direct, one token spread evenly over ten values (the model can't do the sum at once); half are
worked in n steps, each right with probability 0.97, otherwise one of the nine wrong digits.

    python examples/length_bias.py
"""

from rich.console import Console
from rich.table import Table

DIRECT, SLIP, VALUES = 0.5, 0.03, 10


def masses(exponent_direct: float, exponent_worked: float, steps: int) -> tuple[float, float]:
    """The mass of right answers and of all answers, every text to the power of its kind."""
    direct = VALUES * (DIRECT / VALUES) ** exponent_direct
    right, wrong = (1 - SLIP) ** exponent_worked, (SLIP / (VALUES - 1)) ** exponent_worked
    # Errors add up modulo ten: the n-fold convolution of (right, wrong, …, wrong), by its Fourier transform.
    everything = (right + (VALUES - 1) * wrong) ** steps
    no_error = (everything + (VALUES - 1) * (right - wrong) ** steps) / VALUES
    worked = (1 - DIRECT) ** exponent_worked
    return direct / VALUES + worked * no_error, direct + worked * everything


def accuracy_of_power(alpha: float, steps: int, normalised: int | None = None) -> float:
    """Share of right answers under p^alpha; with `normalised`, under LM ** normalised(alpha, tokens=normalised), where
    a direct answer has 3 tokens and a worked one steps + 2."""

    def exponent(tokens: int) -> float:
        return alpha if normalised is None else 1 + (alpha - 1) * min(1, normalised / tokens)

    right, everything = masses(exponent(3), exponent(steps + 2), steps)
    return right / everything


def accuracy_of_temperature(temperature: float, steps: int) -> float:
    """Share of right answers when every token is drawn at a temperature: the first token's coin stays a coin."""
    right, wrong = (1 - SLIP) ** (1 / temperature), (SLIP / (VALUES - 1)) ** (1 / temperature)
    second = ((right - wrong) / (right + (VALUES - 1) * wrong)) ** steps
    return DIRECT / VALUES + (1 - DIRECT) * (1 + (VALUES - 1) * second) / VALUES


if __name__ == "__main__":
    table = Table("steps", "p", "p^2", "p^4", "p^4, 'min_tokens' 3", "p^4, 'normalised' 20", "T = 1/4")
    for n in (5, 20, 40, 60, 80):
        right, everything = masses(4, 4, n)
        direct = VALUES * (DIRECT / VALUES) ** 4
        longer = (right - direct / VALUES) / (everything - direct)
        powers = [accuracy_of_power(alpha, n) for alpha in (1, 2, 4)]
        row = [*powers, longer, accuracy_of_power(4, n, normalised=20), accuracy_of_temperature(0.25, n)]
        table.add_row(str(n), *(f"{value:.3f}" for value in row))
    Console().print(table)
