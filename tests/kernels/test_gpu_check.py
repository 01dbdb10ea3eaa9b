"""`make gpu-check` without a GPU: its cases on the CPU, and the whole of it with a GPU that is made up."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_check")


def small(gpu_check):
    return gpu_check.Sizes((2, 9), 70, 2, (3, 5), (20,), (1, 4), 4, 4, 2, 64)


def tensors_of(values) -> list[torch.Tensor]:
    flat = []
    for value in values:
        flat += [value] if isinstance(value, torch.Tensor) else tensors_of(value)
    return flat


def test_kernels_and_chains_do_the_same(gpu_check):
    """On equal input they give equal results: what is random, and what else only a kernel returns, apart."""
    names = set()
    for case in gpu_check.all_cases(small(gpu_check)):
        names.add(case.name)
        torch.manual_seed(3)
        mine = case.make()
        torch.manual_seed(3)
        theirs = case.make()
        result, expected = case.kernel(*mine), case.chain(*theirs)
        if case.name == "draw_tokens":
            for tokens, log_q, log_p in (result, expected):
                scores = torch.log_softmax(mine[0].float(), -1).gather(-1, tokens[:, None])[:, 0]
                torch.testing.assert_close(log_p, scores)
                assert (log_q <= 1e-6).all()
        elif case.name == "reweight_and_resample":
            torch.testing.assert_close(result.ess, expected[1])
            torch.testing.assert_close(result.banked, expected[2])
            assert torch.equal(result.resampled, expected[4])
        elif case.name == "paged_attention":
            torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)
        elif result is None:  # in place
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b)
        else:
            torch.testing.assert_close(tuple(tensors_of([result])), tuple(tensors_of([expected])))
    assert names == {
        "draw_tokens",
        "score_tokens",
        "reweight_and_resample",
        "write_kv",
        "gather_tables",
        "copy_pages",
        "paged_attention",
    }


def test_bytes_moved(gpu_check):
    """Against the sizes of the tensors, where these are all read or written once."""
    for case in gpu_check.all_cases(small(gpu_check)):
        given = [x.numel() * x.element_size() for x in tensors_of(case.make())]
        if case.name == "paged_attention":
            assert case.moved == sum(given) + given[0]
        elif case.name == "copy_pages":
            assert case.moved == sum(given)
        elif case.name == "gather_tables":
            assert case.moved == sum(given) + given[0]
        elif case.name == "score_tokens":
            assert case.moved == given[0]
        elif case.name == "write_kv":
            keys, values, _, _, _, slots, positions = given
            assert case.moved == 2 * (keys + values + positions) + slots


class Event:
    """An event of a GPU on which the first event of each burst is still to come, and 20 calls take 1 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@pytest.fixture
def made_up_gpu(gpu_check, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Toy 1/2")
    for name in ("synchronize", "set_sync_debug_mode", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, value in {"DEVICE": "cpu", "DELAY_WIDTH": 8, "COPY": 1000, "CALLS": 2, "BURSTS": 1}.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check, "SIZES", small(gpu_check))
    engine = gpu_check.FileRun("gpu_engine.py", 0, 2.5, "runs: 7 tokens/s\n")
    monkeypatch.setattr(gpu_check, "run_engine", lambda seconds: (engine, {"results": [seconds]}))


def table_widths(text: str) -> set[int]:
    """How many columns the lines of the last Markdown table have."""
    table = text[text.index("| kernel | shape |") :].partition("\n\n")[0]
    return {line.count("|") - 1 for line in table.splitlines()}


@pytest.mark.usefixtures("made_up_gpu")
def test_report(gpu_check, monkeypatch, tmp_path, capsys):
    runs = [gpu_check.FileRun("test_x.py", 0, 1.5, "....\n=== 4 passed in 1.0s ===\n")]
    monkeypatch.setattr(gpu_check, "run_tests", lambda files, limit: runs)
    gpu_check.main(minutes=6, out=tmp_path)
    report = json.loads((tmp_path / "gpu_check_nvidia_toy_1_2.json").read_text(encoding="utf-8"))
    cases = gpu_check.all_cases(small(gpu_check))
    assert len(report["timings"]) == len(cases)
    assert report["copy bandwidth, GB/s"] == 0  # 2·1000 bytes in 1 ms/2
    assert 60 < report["engine"]["results"][0] < 360  # the time that is left
    row = report["timings"][0]
    assert row["bound_us"] == pytest.approx(cases[0].moved / 4)
    assert row["kernel_us"] == row["chain_us"] == 500
    assert row["error"] == ""
    text = (tmp_path / "gpu_check_nvidia_toy_1_2.md").read_text(encoding="utf-8")
    assert table_widths(text) == {len(gpu_check.COLUMNS)}
    assert "| test_x.py | 0 | 1.5 | 4 passed in 1.0s |" in text
    assert "Failures" not in text
    assert "```\nruns: 7 tokens/s\n```" in text
    assert f"{len(cases)} of {len(cases)} cases timed" in capsys.readouterr().out


@pytest.mark.usefixtures("made_up_gpu")
def test_failures_are_loud_and_the_table_is_written(gpu_check, monkeypatch, tmp_path, capsys):
    def broken(*_):
        raise RuntimeError("out of resource | shared memory")

    first, second, *_ = gpu_check.all_cases(small(gpu_check))
    monkeypatch.setattr(gpu_check, "all_cases", lambda sizes: [first._replace(kernel=broken), second])
    runs = [gpu_check.FileRun("test_x.py", 1, 1.5, "E  assert 1 == 2\n=== 1 failed in 1.0s ===\n")]
    monkeypatch.setattr(gpu_check, "run_tests", lambda files, limit: runs)
    engine = gpu_check.FileRun("gpu_engine.py", "timeout", 2.5, "")
    monkeypatch.setattr(gpu_check, "run_engine", lambda seconds: (engine, {}))
    with pytest.raises(typer.Exit) as exit_:
        gpu_check.main(minutes=6, out=tmp_path)
    assert exit_.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "FAILED test_x.py: 1" in printed
    assert "FAILED gpu_engine.py: timeout" in printed
    assert "FAILED draw_tokens R=2 V=70 plain: RuntimeError" in printed
    text = (tmp_path / "gpu_check_nvidia_toy_1_2.md").read_text(encoding="utf-8")
    assert "assert 1 == 2" in text
    assert table_widths(text) == {len(gpu_check.COLUMNS)}
    assert "- draw_tokens R=2 V=70 plain: RuntimeError: out of resource" in text
    rows = json.loads((tmp_path / "gpu_check_nvidia_toy_1_2.json").read_text(encoding="utf-8"))["timings"]
    assert [row["kernel_us"] for row in rows] == [None, 500]


@pytest.mark.usefixtures("made_up_gpu")
def test_no_time_left(gpu_check, monkeypatch, tmp_path):
    gpu_check.main(minutes=0, out=tmp_path, tests=False)
    text = (tmp_path / "gpu_check_nvidia_toy_1_2.md").read_text(encoding="utf-8")
    assert "- cases timed: 0 of " in text
    assert "The tests were not run." in text
    assert "Whole runs" not in text


def test_tests_run_and_time_out(gpu_check, tmp_path):
    files = {
        "test_good.py": "def test_good(): pass",
        "test_bad.py": "def test_bad(): assert 1 == 2",
        "test_slow.py": "import time\ndef test_slow(): time.sleep(100)",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    runs = gpu_check.run_tests([tmp_path / name for name in files], limit=10)
    assert [run.status for run in runs] == [0, 1, "timeout"]
    assert gpu_check.last_line(runs[0].output).startswith("1 passed")


def test_whole_runs_at_a_toy_size(gpu_check):
    """The benchmark itself, in a process of its own: every method gives a number, and the roofline follows from it."""
    toy = ["--toy", "--tokens", "6", "--prompt", "5", "--particles", "2", "--device", "cpu"]
    run, report = gpu_check.run_engine(300, toy)
    assert run.status == 0, run.output
    assert report["methods measured"] == "5 of 5"
    results = {result["method"]: result for result in report["results"]}
    bandwidth = 1e9 * report["copy bandwidth GB/s"]
    target, draft = 1e6 * report["target MB"], 1e6 * report["draft MB"]
    for k in (7, 8):
        bound = 2 * (k + 1) * bandwidth / (target + k * draft)
        assert results[f"target with draft, K = {k}, no graphs"]["bound"] == pytest.approx(bound, rel=0.05)
        assert results[f"target ** 4 with itself, K = {k}, no graphs"]["bound"] == pytest.approx(
            2 * bandwidth / target, rel=0.05
        )
    for result in results.values():
        seconds = sorted(result["runs"])[1]
        assert result["tokens_per_second"] == pytest.approx(2 * 6 / seconds, rel=0.02)
        assert result["of_roofline"] == pytest.approx(result["tokens_per_second"] / result["bound"], abs=1e-3)
    assert "target ** 4 with itself" in run.output


def test_whole_runs_that_fail_or_take_too_long(gpu_check):
    run, report = gpu_check.run_engine(300, ["--toy", "--device", "cpu", "--tokens", "-5"])
    assert run.status == 1
    assert "FAILED target with draft, K = 8, no graphs: ValueError: max_new_tokens = -5" in run.output
    assert [result["tokens_per_second"] for result in report["results"]] == [None] * 5
    run, report = gpu_check.run_engine(1, ["--toy", "--device", "cpu"])
    assert (run.status, report) == ("timeout", {})


def test_kernel_tests_import_what_the_gpu_machine_has(gpu_check):
    """Nothing can be installed there; a test that wants more says `pytest.importorskip`. transformers needs
    tokenizers."""
    tests = BENCHMARKS.parent / "tests"
    helpers = {path.stem for path in tests.glob("*.py")}
    known = {"torch", "triton", "transformers", "tokenizers", "jaxtyping", "pytest", "hypothesis", "rich", "typer"}
    known.add("smcsample")
    seen, todo = {}, [p for p in (tests / "kernels").glob("test_*.py") if p.name not in gpu_check.NO_GPU_NEEDED]
    while todo:
        path = todo.pop()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        seen[path.name] = {name.partition(".")[0] for name in imports}
        todo += [tests / f"{name}.py" for name in seen[path.name] & helpers if f"{name}.py" not in seen]
    wanted = {name: sorted(tops - known - helpers - sys.stdlib_module_names) for name, tops in seen.items()}
    assert {name: extra for name, extra in wanted.items() if extra} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py")]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "gpu-check needs a CUDA GPU, and PyTorch sees none here\n"
