"""On a machine with a CUDA GPU: run the tests of kernels and engine natively, time each kernel against what it could
reach, then time whole runs (`gpu_engine.py`).

    make gpu-check [ARGS="--minutes 6 --out FOLDER --no-tests"]

Needs the repository and installed packages only. Times are medians over bursts of calls that are enqueued while the GPU
is still busy with something else, so that they hold no launch overhead of the host; every call of a burst has input of
its own, so that none is in the cache. The bound of a kernel is the bytes it must move over the measured bandwidth of a
copy. Exit status: 1 if a test fails, a kernel raises or a run fails, 2 without a GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from kernel_cases import Case, Sizes, all_cases
from rich.console import Console
from rich.table import Table

SIZES = Sizes()
ROOT = Path(__file__).resolve().parent.parent
NO_GPU_NEEDED = ("test_compile.py", "test_gpu_check.py")
DEVICE = "cuda"
CALLS = 20  # in one burst
BURSTS = 5
COLD = 256 << 20  # bytes of input that the calls of a burst go through; the cache of an H200 holds 50 MiB
COPY = 1 << 30  # bytes copied to measure the bandwidth
DELAY_WIDTH = 8192  # of the matrices whose product is the delay
DELAY = 0.01  # seconds
LONGEST_DELAY = 0.2  # if the host needs more than this to enqueue a burst, its time counts
TESTS, RUNS = 0.5, 0.35  # parts of the time, at most for the tests and at least for whole runs
GRACE = 20  # seconds that whole runs may take to stop by themselves


# --- Tests ------------------------------------------------------------------------------------------------------------


@dataclass
class FileRun:
    """One file of tests. `status` is pytest's, or "timeout"."""

    file: str
    status: int | str
    seconds: float
    output: str


def run_tests(files: Sequence[Path], limit: float) -> list[FileRun]:
    """Each file in a process of its own, all at once: most of the time goes into compiling kernels for this GPU."""

    def one(file: Path) -> FileRun:
        return run_file(file, ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(file)], limit)

    with ThreadPoolExecutor(max(1, len(files))) as pool:
        return list(pool.map(one, files))


def run_file(file: Path, arguments: Sequence[str], limit: float) -> FileRun:
    """Python with these arguments, in a process of its own that is killed after `limit` seconds."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = "timeout"
        output.seek(0)
        return FileRun(file.name, status, round(time.monotonic() - start, 1), output.read()[-6000:])


# --- Whole runs -------------------------------------------------------------------------------------------------------


def run_engine(seconds: float, arguments: Sequence[str] = ()) -> tuple[FileRun, dict[str, Any]]:
    """`gpu_engine.py` within that time, and what it measured: also if it had to be killed."""
    script = ROOT / "benchmarks" / "gpu_engine.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "engine.json"
        options = ["--seconds", str(seconds - GRACE), "--out", str(out), *arguments]
        run = run_file(script, [str(script), *options], seconds)
        return run, json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


# --- Times ------------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """One kernel at one shape; times in microseconds per call.

    Attributes:
        host_us: what the host needs to enqueue a call.
        chain_us: the plain PyTorch chain.
        waits: which of "kernel" and "chain" were slower to enqueue than to run, or waited: their time is the host's.
    """

    name: str
    shape: str
    megabytes: float
    bound_us: float
    kernel_us: float = math.nan
    host_us: float = math.nan
    chain_us: float = math.nan
    waits: tuple[str, ...] = ()
    error: str = ""


class Stopwatch:
    """Times calls by CUDA events, behind a delay that lets the host enqueue them all."""

    def __init__(self) -> None:
        self.matrix = torch.randn(DELAY_WIDTH, DELAY_WIDTH, device=DEVICE).bfloat16()
        self.product = torch.empty_like(self.matrix)
        self.delays = 4
        self._delay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._delay()
        torch.cuda.synchronize()
        self.seconds_per_delay = (time.perf_counter() - start) / self.delays
        self._set_delay(DELAY)

    def _set_delay(self, seconds: float) -> None:
        self.delay_seconds = seconds
        self.delays = max(1, math.ceil(seconds / self.seconds_per_delay))

    def _delay(self) -> None:
        for _ in range(self.delays):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def time(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[float, float, bool]:
        """Microseconds per call on the GPU and on the host, and whether the host was the slower one all the same."""
        call(*inputs[0])
        torch.cuda.synchronize()
        while True:
            bursts = [self._burst(call, inputs) for _ in range(BURSTS)]
            on_gpu, on_host, behind = (median(column) for column in zip(*bursts, strict=True))
            if not behind or 2 * self.delay_seconds > LONGEST_DELAY:
                self._set_delay(DELAY)
                return on_gpu, on_host, bool(behind)
            self._set_delay(2 * self.delay_seconds)

    def _burst(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[float, float, bool]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        self._delay()
        start.record()
        begun = time.perf_counter()
        for i in range(CALLS):
            call(*inputs[i % len(inputs)])
        on_host = time.perf_counter() - begun
        behind = start.query()  # the delay is over before everything was enqueued
        stop.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(stop) / CALLS, 1e6 * on_host / CALLS, behind


def copy_bandwidth(stopwatch: Stopwatch) -> float:
    """Bytes per second of a large copy, counted as read and written."""
    source = torch.zeros(COPY, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    on_gpu, _, _ = stopwatch.time(target.copy_, [(source,)])
    return 2 * source.numel() / (1e-6 * on_gpu)


def time_case(case: Case, stopwatch: Stopwatch, bandwidth: float) -> Timing:
    timing = Timing(case.name, case.shape, case.moved / 1e6, 1e6 * case.moved / bandwidth)
    try:
        with torch.device(DEVICE):
            inputs = [case.make() for _ in range(min(CALLS, math.ceil(COLD / case.moved)))]
        case.kernel(*inputs[0])  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # a kernel's launcher must not wait for the GPU
        case.kernel(*inputs[0])
        torch.cuda.set_sync_debug_mode("default")
        timing.kernel_us, timing.host_us, kernel_waits = stopwatch.time(case.kernel, inputs)
        timing.chain_us, _, chain_waits = stopwatch.time(case.chain, inputs)
        timing.waits = tuple(n for n, w in (("kernel", kernel_waits), ("chain", chain_waits)) if w)
    except Exception as error:  # reported in the table and by the exit status; the other cases are timed all the same
        timing.error = f"{type(error).__name__}: {str(error).strip()[:300]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return timing


# --- Report -----------------------------------------------------------------------------------------------------------

COLUMNS = ("kernel", "shape", "MB", "bound µs", "kernel µs", "of bound", "PyTorch µs", "speed-up", "host µs")


def cells(timing: Timing) -> list[str]:
    """One row of the table, under COLUMNS."""
    start = [timing.name, timing.shape, f"{timing.megabytes:.2f}", f"{timing.bound_us:.1f}"]
    if timing.error:
        return [*start, "failed", "", "", "", ""]
    mark = {name: "*" if name in timing.waits else "" for name in ("kernel", "chain")}
    return [
        *start,
        f"{timing.kernel_us:.1f}{mark['kernel']}",
        f"{timing.bound_us / timing.kernel_us:.0%}",
        f"{timing.chain_us:.1f}{mark['chain']}",
        f"{timing.chain_us / timing.kernel_us:.2f}×",
        f"{timing.host_us:.0f}",
    ]


def rich_table(timings: Sequence[Timing]) -> Table:
    table = Table(*(c for c in COLUMNS[:2]), title="kernels against bytes over bandwidth and against PyTorch")
    for column in COLUMNS[2:]:
        table.add_column(column, justify="right", no_wrap=True)
    for timing in timings:
        table.add_row(*cells(timing), style="red" if timing.error else None)
    return table


def markdown(
    facts: dict[str, Any],
    tests: Sequence[FileRun],
    timings: Sequence[Timing],
    engine: tuple[FileRun, dict[str, Any]] | None,
) -> str:
    lines = [f"# gpu-check on {facts['card']}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    if tests:
        lines += ["| tests | pytest status | s | |", "|---|---|---|---|"]
        lines += [f"| {t.file} | {t.status} | {t.seconds} | {last_line(t.output)} |" for t in tests]
    else:
        lines += ["The tests were not run."]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(cells(t))} |" for t in timings]
    lines += [
        "",
        "MB: bytes that must move, each once. bound: these over the bandwidth of a copy. kernel, PyTorch: median time "
        "on the GPU, inputs not in its cache; with *, the host was slower than the GPU or waited for it. host: time to "
        f"enqueue the kernel. A fill of one element takes {facts['smallest kernel, µs']} µs, which no bound includes.",
    ]
    if engine is not None:
        lines += ["", "Whole runs (benchmarks/gpu_engine.py says what the numbers mean):", "", "```"]
        lines += [engine[0].output.strip(), "```"]
    failures = [f"- {t.name} {t.shape}: {t.error}" for t in timings if t.error]
    lines += ["", "Failures:", "", *failures] if failures else []
    for t in (t for t in tests if t.status != 0):
        lines += ["", f"{t.file} ended with {t.status}:", "", "```", t.output.strip(), "```"]
    return "\n".join(lines) + "\n"


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip("= ").replace("|", "/") if lines else ""


def write_report(
    out: Path,
    facts: dict[str, Any],
    tests: Sequence[FileRun],
    timings: Sequence[Timing],
    engine: tuple[FileRun, dict[str, Any]] | None,
) -> Path:
    """Markdown and JSON, named after the card; returns the path of the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu_check_{re.sub('[^a-z0-9]+', '_', facts['card'].lower()).strip('_')}.md"
    path.write_text(markdown(facts, tests, timings, engine), encoding="utf-8")
    rows = [asdict(t) for t in timings]
    for row in rows:
        row |= {key: None for key, value in row.items() if isinstance(value, float) and math.isnan(value)}
    report = {**facts, "tests": [asdict(t) for t in tests], "timings": rows, "engine": engine[1] if engine else {}}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def facts_of_this_machine() -> dict[str, Any]:
    import triton

    from smcsample.kernels.compile import fingerprint, kernel_modules

    return {
        "card": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": sys.version.split()[0],
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "triton": triton.__version__,
        "kernel sources": fingerprint(kernel_modules()),
    }


def main(
    minutes: Annotated[float, typer.Option(help="Time for everything; what it does not reach is left out.")] = 6.0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = ROOT / "benchmarks" / "results",
    tests: Annotated[bool, typer.Option(help="Run the tests before the timing.")] = True,
    engine: Annotated[bool, typer.Option(help="Time whole runs after the kernels.")] = True,
) -> None:
    """Run the tests on this machine's GPU, time the kernels and whole runs, and write it all down."""
    if not torch.cuda.is_available():
        print("gpu-check needs a CUDA GPU, and PyTorch sees none here", file=sys.stderr)
        raise typer.Exit(2)
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: natively is what this is about
    deadline = time.monotonic() + 60 * minutes
    console = Console(width=None if sys.stdout.isatty() else 150)
    facts = facts_of_this_machine()

    files = [f for f in sorted((ROOT / "tests" / "kernels").glob("test_*.py")) if f.name not in NO_GPU_NEEDED]
    runs = run_tests(files, TESTS * 60 * minutes) if tests else []
    for run in runs:
        console.print(f"{run.file}: status {run.status}, {run.seconds} s, {last_line(run.output)}", markup=False)

    stopwatch = Stopwatch()
    bandwidth = copy_bandwidth(stopwatch)
    facts["copy bandwidth, GB/s"] = round(bandwidth / 1e9)
    facts["smallest kernel, µs"] = round(stopwatch.time(torch.empty(1, device=DEVICE).zero_, [()])[0], 2)
    cases, timings = all_cases(SIZES), []
    reserved = 15 + (RUNS * 60 * minutes if engine else 0)  # one more case, and the report
    for case in cases:
        if time.monotonic() > deadline - reserved:
            break
        timings.append(time_case(case, stopwatch, bandwidth))
        torch.cuda.empty_cache() if timings[-1].error else None
    facts["cases timed"] = f"{len(timings)} of {len(cases)}"

    del stopwatch
    torch.cuda.empty_cache()
    left = deadline - time.monotonic() - 5
    whole = run_engine(left) if engine and left > 2 * GRACE else None
    if whole is not None:
        console.print(whole[0].output.strip(), markup=False, soft_wrap=True)

    path = write_report(out, facts, runs, timings, whole)
    console.print(rich_table(timings))
    failed = [f"{r.file}: {r.status}" for r in runs if r.status != 0]
    failed += [f"{t.name} {t.shape}: {t.error}" for t in timings if t.error]
    failed += [f"{whole[0].file}: {whole[0].status}"] if whole is not None and whole[0].status != 0 else []
    for line in failed:
        console.print(f"FAILED {line}", style="red", markup=False)
    console.print(f"{facts['cases timed']} cases timed; written to {path}", markup=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
