"""The example that measures power sampling: its parts against what they claim, and the whole as a smoke test."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import smcsample as smc
from smcsample.potentials import LM
from test_generic import EXAMPLES


@pytest.fixture(scope="module")
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example as scripts import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module


def test_solutions_are_what_they_say(example: Callable[[str], ModuleType]) -> None:
    """Direct ones are right; worked ones slip in 3 % of the steps, from wherever they stand."""
    sums = example("digit_sums")
    generator = torch.Generator().manual_seed(1)
    digits = sums.questions(20_000, generator)
    texts = sums.solutions(digits, sums.Task(direct=0.25, slip=0.03), generator)
    direct = texts[:, 0] == sums.DIRECT
    assert direct.double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(texts[direct, 1], digits[direct].sum(1) % 10)
    assert (texts[direct, 2] == sums.EOS).all()
    worked, asked = texts[~direct], digits[~direct]
    assert (worked[:, 0] == sums.WORKED).all()
    assert (worked[:, -1] == sums.EOS).all()
    assert torch.equal(worked[:, 1], asked[:, 0])
    slips = (worked[:, 2:-1] - worked[:, 1:-2] - asked[:, 1:]) % 10 != 0
    assert slips.double().mean().item() == pytest.approx(0.03, abs=0.003)


def test_enumeration_is_that_of_the_model(example: Callable[[str], ModuleType]) -> None:
    """An untrained model, so that every text has a chance: the law of 1,500 draws, within five standard errors, and
    p^2 against the definition."""
    sums = example("digit_sums")
    model = sums.train(sums.Task(0.5, 0.1), 40, 0, lambda loss: None)
    digits = torch.tensor([1, 2, 3, 4, 5, 6])
    plain, squared = sums.enumerate_power(model, digits, [1.0, 2.0], least=1e-4)
    drawn = smc.sample(
        sums.prompt_of(digits), LM(model), n_particles=1500, block_size=0, max_new_tokens=sums.LONGEST
    ).vote(sums.answer)
    for key, share in plain.answers.items():
        if key is not None:
            error = math.sqrt(share * (1 - share) / 1500)
            assert abs(drawn.get(key, 0.0) - share) < 5 * error + plain.missing
    assert sum(squared.answers.values()) == pytest.approx(1)
    assert squared.missing < plain.missing


def test_wilson_intervals(example: Callable[[str], ModuleType]) -> None:
    """Against the textbook: 0 of 10, 10 of 10, and 81 of 263."""
    wilson = example("power_sampling").wilson
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-3)


def test_quick_run(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    module = example("power_sampling")
    app = module.typer.Typer()
    app.command()(module.main)
    out = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["--quick", "--variant", "pivot", "--markdown", "--json", str(out)])
    assert result.exit_code == 0, result.output
    methods = {score["method"] for score in json.loads(out.read_text())}
    assert methods >= {
        "greedy",
        "best of N by log p",
        "importance resampling",
        "SMC",
        "Metropolis–Hastings",
        "exact p^α",
    }
    assert "| SMC, bridge(4) | 4 |" in result.output
    assert CliRunner().invoke(app, ["--variant", "other"]).exit_code == 2
