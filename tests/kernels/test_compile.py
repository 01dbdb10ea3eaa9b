"""Ahead-of-time compilation: of all our kernels, and of toys that must be refused."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from smcsample.kernels import compile as aot

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

TOY = """
import triton
import triton.language as tl
from smcsample.kernels.compile_target import CompileTarget

@triton.jit
def log_sum(x, out, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], -1e30, tl.float32)
    for start in range(0, n, BLOCK):
        v = tl.load(x + start + lane, mask=start + lane < n, other=0).to(tl.float32)
        new = tl.maximum(top, v)
        total = total * tl.exp(top - new) + tl.exp(v - new)
        top = new
    peak = tl.max(top, 0)
    tl.store(out, tl.log(tl.sum(total * tl.exp(top - peak), 0)) + peak)

@triton.jit
def product(x, out, D: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * D + tl.arange(0, D)[None, :]
    tile = tl.load(x + at)
    tl.store(out + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :], tl.dot(tile, tl.trans(tile)))

@triton.jit
def wrong(x, out):
    tl.store(out, tl.load(x) + tl.no_such_function(x))

POINTERS = {"x": "*bf16", "out": "*fp32"}

def sums(name, block, warps, signature={**POINTERS, "n": "i32"}, divisible=("x",)):
    return CompileTarget(name, log_sum, signature, {"BLOCK": block}, warps, 2, divisible)

def compile_targets():
    return [TARGETS]
"""


@pytest.fixture
def compile_toys(monkeypatch, tmp_path, capsys):
    """Compiles the given `compile_targets()` of TOY; returns the exit status, the results by name, and the messages."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(aot, "HERE", tmp_path)  # whose sources count: an edit of ours meanwhile disturbs nothing

    def run(configurations: str, name: str = "toys", before: str = "", **options: str):
        (tmp_path / f"{name}.py").write_text(before + TOY.replace("TARGETS", configurations))
        options = {"targets": "sm_80", "kernels": "", **options}
        status = 0
        try:
            aot.main(**options, cache=tmp_path / "cache", modules=name, as_json=True)
        except typer.Exit as exit_:
            status = exit_.exit_code
        printed = capsys.readouterr()
        results = json.loads(printed.out) if printed.out else []
        return status, {(r["name"], r["gpu"]): r for r in results}, printed.err

    return run


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "smcsample.kernels.compile", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target_without_spills():
    done = command("--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [r for r in results if r["fault"] or r["spilled"]] == []
    names = {r["name"] for r in results}
    assert sorted((r["name"], r["gpu"]) for r in results) == sorted((n, gpu) for n in names for gpu in TARGETS)
    assert all(0 < r["registers"] <= 512 for r in results)
    assert {kernel for kernel, _ in launches()} == {r["function"] for r in results}, "launched but not compiled"


def launches() -> list[tuple[str, dict[str, object]]]:
    """Every `kernel[grid](…)` in kernels/: the kernel, and the keywords that stand there or in a named dictionary."""
    found = []
    for name in aot.kernel_modules():
        module = importlib.import_module(name)
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        jitted = {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and "triton.jit" in decorators(f)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value) in jitted:
                keywords = {}
                for keyword in call.keywords:
                    text = ast.unparse(keyword.value)
                    keywords |= {keyword.arg: text} if keyword.arg else getattr(module, text, {})
                found.append((ast.unparse(call.func.value), keywords))
    return found


def decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list]


def test_launches_have_the_floating_point_rules_that_are_compiled():
    """Contraction is off by name, as in what is compiled here: Triton's default differs between its versions."""
    assert not aot.FP_FUSION
    assert launches() != []
    assert {kernel for kernel, keywords in launches() if str(keywords.get("enable_fp_fusion")) != "False"} == set()


def test_toys(compile_toys, tmp_path):
    """Two targets, names or beginnings of names; what is not asked for is not compiled, and options arrive."""
    toys = 'sums("sums a", 1024, 4), sums("sums b", 4096, 8), sums("other", 4096, 8, divisible=())'
    status, results, _ = compile_toys(toys, targets="sm_90,gfx942", kernels="sums b,oth")
    assert status == 0
    assert set(results) == {(name, gpu) for name in ("sums b", "other") for gpu in ("sm_90", "gfx942")}
    row = results["sums b", "gfx942"]
    assert row["function"] == "log_sum"
    assert 0 < row["registers"] < 128
    assert row["shared"] > 0
    assert row["spilled"] == 0
    assert results["other", "sm_90"]["registers"] != results["sums b", "sm_90"]["registers"]  # loads one by one
    compiled = [json.loads(path.read_text()) for path in (tmp_path / "cache/triton").glob("*/log_sum.json")]
    assert [(c["num_warps"], c["num_stages"], c["enable_fp_fusion"]) for c in compiled] == [(8, 2, False)] * 4


def test_faults_are_refused_by_name(compile_toys):
    """Spills, too much shared memory, and what does not compile; the healthy one beside them is compiled."""
    faulty = [
        'sums("spilling", 8192, 2)',
        'sums("healthy", 1024, 4)',
        'CompileTarget("large", product, POINTERS, {"D": 4096}, 8, 2, ("x", "out"))',
        'CompileTarget("wrong", wrong, POINTERS, {}, 4, 2, ())',
        'sums("unfit", 1024, 4, {**POINTERS, "m": "i32"})',
    ]
    status, results, messages = compile_toys(", ".join(faulty))
    faults = {name: results[name, "sm_80"]["fault"] for name in ("spilling", "healthy", "large", "wrong", "unfit")}
    assert status == 1
    assert results["spilling", "sm_80"]["spilled"] > 100
    assert faults["spilling"].startswith("spills ")
    assert faults["healthy"] == ""
    assert "of shared memory of 166912" in faults["large"]
    assert "no_such_function" in faults["wrong"]
    assert "do not fit the kernel's arguments" in faults["unfit"]
    assert all(f"{name} on sm_80 {fault.splitlines()[0]}" in messages for name, fault in faults.items() if fault)
    assert "healthy" not in messages


def test_results_are_cached_until_a_source_changes(compile_toys, tmp_path):
    """A source of the toys' own module, then one that stands beside it, as kernels import each other."""

    def registers(block: int) -> int:
        return compile_toys(f'sums("sums", {block}, 4)')[1]["sums", "sm_80"]["registers"]

    honest = registers(1024)
    (stored,) = (tmp_path / "cache").glob("*.json")
    stored.write_text(stored.read_text().replace(f", {honest},", ", 77,"))
    assert registers(1024) == 77
    assert registers(2048) not in (77, honest)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/beside.py").touch()
    assert registers(1024) == honest != 77


def test_an_error_is_not_cached(compile_toys, tmp_path):
    """It may have been the machine's."""
    before = f"import os\nextra = {{}} if os.path.exists({str(tmp_path / 'repaired')!r}) else {{'m': 'i32'}}\n"
    toys = 'sums("sums", 1024, 4), sums("repaired", 1024, 4, {**POINTERS, "n": "i32", **extra})'
    assert compile_toys(toys, before=before)[0] == 1
    (tmp_path / "repaired").touch()
    assert compile_toys(toys, before=before)[0] == 0


def test_results_belong_to_a_version_of_triton(monkeypatch):
    here = aot.fingerprint([])
    assert aot.fingerprint([]) == here
    monkeypatch.setattr("triton.__version__", "0")
    assert aot.fingerprint([]) != here


def test_a_source_that_changes_meanwhile(compile_toys, tmp_path):
    """Triton reads sources late, so that a result could belong to neither version."""
    status, results, messages = compile_toys(
        'sums("sums", 1024, 4)', before="import pathlib\npathlib.Path(__file__).open('a').write('# more')\n"
    )
    assert (status, results) == (1, {})
    assert "changed while it was compiled" in messages
    assert list((tmp_path / "cache").glob("*.json")) == []


def test_the_compiler_dies(compile_toys):
    status, results, messages = compile_toys('__import__("os")._exit(3)')
    assert (status, results) == (1, {})
    assert "compiles for sm_80 ended with status 3" in messages


def test_unknown_target():
    done = command("--targets", "sm_80,sm_11")
    assert done.returncode == 2
    assert "sm_11: not among sm_80, sm_86" in " ".join(done.stderr.replace("│", "").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ","}, "names no target"),
        ({"modules": "no_such_module"}, "there is no module 'no_such_module'"),
    ],
)
def test_bad_arguments(options, message, tmp_path):
    with pytest.raises(typer.BadParameter, match=message):
        aot.main(**{"targets": "sm_80", "kernels": "", "modules": "", **options}, cache=tmp_path)


def test_unknown_kernel(compile_toys):
    with pytest.raises(typer.BadParameter, match="no kernel's name begins with 'sum z'; there are: sums"):
        compile_toys('sums("sums", 1024, 4)', kernels="sum z")
