"""Ahead-of-time compilation of every Triton kernel to machine code, for GPUs that are not here.

    python -m smcsample.kernels.compile [--targets sm_80,sm_90] [--kernels NAME,...] [--json]

Compiles what each module's `compile_targets()` lists and fails if a kernel spills registers to memory or needs more
shared memory than the GPU has. One process per GPU target: Triton caches the target in its functions, and the process
must not have the interpreter on. Triton's own cache makes a second compilation of an unchanged kernel cheap; results
for unchanged sources are read from a file without importing a kernel at all.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from smcsample.kernels.compile_target import CompileTarget

HERE = Path(__file__).resolve().parent
FP_FUSION = False  # as every launcher says; Triton's own default changes after 3.9


class Gpu(NamedTuple):
    """A kind of GPU, in Triton's terms; `shared` is the shared memory one program can have, in bytes."""

    backend: str
    arch: int | str
    warp_size: int
    shared: int


# Shared memory of a thread block: CUDA Programming Guide, "Compute Capabilities". LDS: ROCm, "AMD GPU specifications".
GPUS = {
    "sm_80": Gpu("cuda", 80, 32, 163 << 10),
    "sm_86": Gpu("cuda", 86, 32, 99 << 10),
    "sm_89": Gpu("cuda", 89, 32, 99 << 10),
    "sm_90": Gpu("cuda", 90, 32, 227 << 10),
    "sm_100": Gpu("cuda", 100, 32, 227 << 10),
    "gfx942": Gpu("hip", "gfx942", 64, 64 << 10),
    "gfx950": Gpu("hip", "gfx950", 64, 160 << 10),
}


class Compiled(NamedTuple):
    """What one kernel needs on one kind of GPU, or the error that its compilation ended with."""

    name: str
    function: str
    gpu: str
    registers: int = 0  # 32-bit vector registers per thread
    spilled: int = 0  # bytes of local memory per thread; ptxas rounds its stack frame up to 8
    shared: int = 0  # bytes of shared memory per program
    seconds: float = 0.0
    error: str = ""

    @property
    def fault(self) -> str:
        """Why this cannot be accepted; empty if it can."""
        limit = GPUS[self.gpu].shared
        if self.error:
            return f"does not compile: {self.error}"
        faults = [f"spills {self.spilled} bytes per thread"] if self.spilled else []
        faults += [f"needs {self.shared} bytes of shared memory of {limit}"] if self.shared > limit else []
        return ", ".join(faults)


# --- In the process of one target -------------------------------------------------------------------------------------


def _find(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in the compiler's report:\n{text[:2000]}")
    return int(found.group(1))


def _registers_and_spills(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers, and bytes of local memory: CUDA from the machine code, AMD from the metadata in the assembly."""
    if "amdgcn" in asm:
        text = asm["amdgcn"]
        # Scalar registers spill to lanes of vector registers; what reaches memory is in the private segment.
        private, spills = (
            _find(rf"\.{name}:\s*(\d+)", text) for name in ("private_segment_fixed_size", "vgpr_spill_count")
        )
        return _find(r"\.vgpr_count:\s*(\d+)", text), max(private, 4 * spills)
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _find(r"REG:(\d+)", text), _find(r"STACK:(\d+)", text) + _find(r"LOCAL:(\d+)", text)


def compile_one(target: CompileTarget, gpu: str) -> Compiled:
    """Compile one configuration. Needs a process without TRITON_INTERPRET."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = target.kernel.arg_names
    given = [*target.signature, *target.constexprs]
    if sorted(given) != sorted(names) or not set(target.divisible) <= set(target.signature):
        raise ValueError(
            f"signature, constexprs and divisible of {target.name} do not fit the kernel's arguments {names}: "
            f"{sorted(target.signature)}, {sorted(target.constexprs)}, {sorted(target.divisible)}"
        )
    source = ASTSource(
        target.kernel,
        {name: target.signature.get(name, "constexpr") for name in names},
        target.constexprs,
        {(names.index(name),): [["tt.divisibility", 16]] for name in target.divisible},
    )
    kind = GPUS[gpu]
    start = time.perf_counter()
    options = {"num_warps": target.num_warps, "num_stages": target.num_stages, "enable_fp_fusion": FP_FUSION}
    kernel = triton.compile(source, target=GPUTarget(kind.backend, kind.arch, kind.warp_size), options=options)
    registers, spilled = _registers_and_spills(kernel.asm)
    seconds = round(time.perf_counter() - start, 2)
    return Compiled(target.name, target.kernel.__name__, gpu, registers, spilled, kernel.metadata.shared, seconds)


def compile_for(gpu: str, modules: Sequence[str], wanted: Sequence[str]) -> Iterator[list[str] | Compiled]:
    """First the names of all configurations, then the result of each wanted one."""
    targets = [target for module in modules for target in importlib.import_module(module).compile_targets()]
    names = [target.name for target in targets]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"compile_targets() gives the same name twice: {', '.join(doubles)}")
    yield names
    seen = set()
    for target in (t for t in targets if selected(t.name, wanted)):
        try:
            result = compile_one(target, gpu)
        except Exception as error:  # becomes the result of this kernel, so that the others are compiled too
            result = Compiled(target.name, target.kernel.__name__, gpu, error=f"{type(error).__name__}: {error}")
            if result.error not in seen:
                print(f"{target.name}: {traceback.format_exc()}", file=sys.stderr)
            seen.add(result.error)
        yield result


def serve(request: str) -> None:
    """The child process: one JSON line per answer of `compile_for` on standard output, which nobody else may use."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for answer in compile_for(*json.loads(request)):
            print(json.dumps(answer), file=answers, flush=True)


# --- In the process of the command ------------------------------------------------------------------------------------


def selected(name: str, wanted: Sequence[str]) -> bool:
    """Whether `--kernels` names this configuration, by its whole name or by how it begins; no names mean all."""
    return not wanted or any(name.startswith(beginning) for beginning in wanted)


def kernel_modules() -> list[str]:
    """The modules of this folder that have kernels to compile."""
    defines = re.compile(r"^def compile_targets\(", re.MULTILINE)
    files = [path for path in sorted(HERE.glob("*.py")) if defines.search(path.read_text(encoding="utf-8"))]
    return [f"smcsample.kernels.{path.stem}" for path in files]


def fingerprint(modules: Sequence[str]) -> str:
    """A hash of everything a result depends on, the target apart: this folder and the version of Triton."""
    import triton

    files = set(HERE.rglob("*.py"))
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"there is no module {module!r} with a file")
        files.add(Path(spec.origin).resolve())
    digest = hashlib.sha256(f"triton {triton.__version__}".encode())
    for path in sorted(files):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


class Store:
    """The results for one target and one state of the sources, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self.results: dict[str, Compiled] = {}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.names = stored["names"]
            self.results = {row[0]: Compiled(*row) for row in stored["results"]}

    def save(self) -> None:
        """Write what compiled (an error may have been the machine's), in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self.results.values() if not row.error]
        part = self.path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"names": self.names, "results": rows}), encoding="utf-8")
        part.replace(self.path)


def results_for(
    gpu: str, modules: Sequence[str], wanted: Sequence[str], cache: Path, progress: Callable[[int, int], None]
) -> tuple[list[str], list[Compiled]]:
    """The names of all configurations and the results of the wanted ones, from the cache or a child process.

    `progress` hears how many of how many are there.
    """
    sources = fingerprint(modules)
    store = Store(cache / f"{gpu}-{sources}.json")
    if not store.names or any(name not in store.results for name in store.names if selected(name, wanted)):
        with tempfile.TemporaryFile("w+") as log:
            child = _start_child(gpu, modules, wanted, cache, log)
            with child.stdout as answers:
                store.names = json.loads(next(answers, "[]"))
                total = sum(selected(name, wanted) for name in store.names)
                for done, answer in enumerate(answers, start=1):
                    result = Compiled(*json.loads(answer))
                    store.results[result.name] = result
                    progress(done, total)
            status = child.wait()
            log.seek(0)
            if said := log.read().strip():
                print(f"--- {gpu} ---\n{said}", file=sys.stderr)
        died = f"the process that compiles for {gpu} ended with status {status}"
        if fingerprint(modules) != sources:
            raise RuntimeError(f"a kernel's source changed while it was compiled for {gpu}; run again")
        if not store.names:
            raise RuntimeError(f"{died}; its messages are above")
        for name in (n for n in store.names if selected(n, wanted) and n not in store.results):
            store.results[name] = Compiled(name, "", gpu, error=died)
        store.save()
    return store.names, [store.results[name] for name in store.names if selected(name, wanted)]


def _start_child(gpu: str, modules: Sequence[str], wanted: Sequence[str], cache: Path, log: IO[str]) -> Any:
    code = "import sys; from smcsample.kernels.compile import serve; serve(sys.argv[1])"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache / "triton"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, json.dumps([gpu, modules, wanted])]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def compile_all(gpus: Sequence[str], modules: Sequence[str], wanted: Sequence[str], cache: Path) -> list[Compiled]:
    """The results of the wanted configurations on every GPU target, as many targets at a time as there are cores.

    Raises:
        ValueError: `wanted` has a beginning with which no configuration begins.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {gpu: progress.add_task(gpu, total=None) for gpu in gpus}

        def one(gpu: str) -> tuple[list[str], list[Compiled]]:
            return results_for(
                gpu, modules, wanted, cache, lambda done, total: progress.update(bars[gpu], completed=done, total=total)
            )

        with ThreadPoolExecutor(min(len(gpus), os.cpu_count() or 1)) as pool:
            answers = list(pool.map(one, gpus))
    for beginning in wanted:
        if not any(name.startswith(beginning) for name in answers[0][0]):
            raise ValueError(f"no kernel's name begins with {beginning!r}; there are: {', '.join(answers[0][0])}")
    return [result for _, results in answers for result in results]


def results_table(results: Sequence[Compiled], gpus: Sequence[str]) -> Table:
    """Kernel × target: registers per thread and shared memory, faults in red."""
    table = Table(title="registers per thread · shared memory in KiB", title_justify="left")
    table.add_column("kernel")
    for gpu in gpus:
        table.add_column(gpu, justify="right", no_wrap=True)
    cells = {(r.name, r.gpu): _cell(r) for r in results}
    for name in dict.fromkeys(r.name for r in results):
        table.add_row(name, *(cells[name, gpu] for gpu in gpus))
    return table


def _cell(result: Compiled) -> str:
    if result.error:
        return "[red]failed[/]"
    text = f"{result.registers} · {result.shared / 1024:.1f}"
    text += f" · {result.spilled} B spilled" if result.spilled else ""
    return f"[red]{text}[/]" if result.fault else text


def main(
    targets: Annotated[str, typer.Option(help=f"GPU targets, of {', '.join(GPUS)}.")] = "sm_80,sm_90,sm_100,gfx942",
    kernels: Annotated[str, typer.Option(help="Names of configurations, or how they begin. Default: all.")] = "",
    cache: Annotated[Path | None, typer.Option(help="Where results are kept. Default: ~/.cache/smcsample.")] = None,
    modules: Annotated[str, typer.Option(help="Python modules with a compile_targets(). Default: our own.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Compile every Triton kernel for GPUs that need not be here; exit status 1 if one spills, is too big or fails."""
    gpus, wanted = _items(targets), _items(kernels)
    if unknown := [gpu for gpu in gpus if gpu not in GPUS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(GPUS)}", param_hint="--targets")
    if not gpus:
        raise typer.BadParameter("names no target", param_hint="--targets")
    if importlib.util.find_spec("triton") is None:
        raise typer.BadParameter("Triton is not installed; pip install 'smcsample[gpu]'", param_hint="triton")
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smcsample"
    try:
        results = compile_all(gpus, _items(modules) or kernel_modules(), wanted, cache)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RuntimeError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps([{**r._asdict(), "fault": r.fault} for r in results], indent=1))
    else:
        console = Console()
        Console(width=console.width if console.is_terminal else 140).print(results_table(results, gpus))
    faulty = [r for r in results if r.fault]
    for r in faulty:
        print(f"{r.name} on {r.gpu} {r.fault}", file=sys.stderr)
    if faulty:
        raise typer.Exit(1)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
