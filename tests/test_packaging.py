"""What holds the house together: what a wheel contains, what imports without the extras, and who imports whom."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [".ci", "smcsample", "kernels", "potentials", "proofs", "tests", "examples", "benchmarks", "docs"]
READERS = ["proofs", "tests", "examples", "benchmarks"]  # they may use public names only
CORE = ["feynman_kac", "algorithm", "posterior", "weights", "resampling", "source"]  # know nothing of language models
LAYERS = {  # who may import what of ours
    "smcsample.kernels": ("smcsample.kernels",),
    "smcsample.potentials": ("smcsample.potentials", "smcsample.kernels", "smcsample.lm", "smcsample.checks"),
}
OPTIONAL = ["accelerate", "beartype", "gguf", "llguidance", "matplotlib", "pandas", "ray", "triton"]


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Runs `code` as `python -c` does, with `cwd` first on sys.path; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- The folder kernels/ and Hugging Face's distribution of the same name ---------------------------------------------

LLAMA = """
import transformers.models.llama.modeling_llama as llama
import torch

config = llama.LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=1)
assert llama.LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 11)
"""

STAND_IN = """
class Anything:
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self

def __getattr__(name):  # the use_… functions are decorators with arguments
    return (lambda *args: lambda decorated: decorated) if name.startswith("use_") else Anything()
"""


def test_kernels_folder_does_not_break_transformers():
    run_python(LLAMA, cwd=ROOT)


def test_kernels_folder_does_not_hide_the_distribution(tmp_path):
    """With `kernels` installed, transformers must get that one, though our folder comes first on sys.path."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text(STAND_IN)
    info = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (info / "top_level.txt").write_text("kernels\n")
    seen = "import kernels, transformers.utils as u; print(u.is_kernels_available(), kernels.__file__)"
    assert run_python(LLAMA + seen, cwd=ROOT, path=tmp_path).split() == ["True", str(tmp_path / "kernels/__init__.py")]


def test_layout():
    assert not (ROOT / "kernels/__init__.py").exists(), "makes transformers import our kernels/ instead of theirs"
    assert not (ROOT / "conftest.py").exists(), "puts the root, and with it kernels/, on sys.path under plain pytest"
    for name in ("kernels", "potentials"):
        assert os.readlink(ROOT / "smcsample" / name) == f"../{name}"


# --- The sdist and the wheel ------------------------------------------------------------------------------------------


def source_files(root: Path) -> dict[str, Path]:
    """Every .py file of the package by its path in a wheel, the linked folders included."""
    found = [Path(folder, f) for folder, _, files in os.walk(root / "smcsample", followlinks=True) for f in files]
    return {p.relative_to(root).as_posix(): p for p in found if p.suffix == ".py"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist of this tree and the wheel made from that sdist."""
    out, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("build") / "source"
    copy.mkdir()
    for item in ROOT.iterdir():
        if item.is_file():
            shutil.copy(item, copy)
        elif item.name in FOLDERS:
            shutil.copytree(item, copy / item.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run_python(f"import setuptools.build_meta as b; b.build_sdist({str(out)!r})", cwd=copy)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(copy.parent, filter="data")
    unpacked = copy.parent / sdist.name.removesuffix(".tar.gz")
    run_python(f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})", cwd=unpacked)
    return out


def test_sdist_holds_real_files(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        members = {m.name.partition("/")[2]: m for m in tar.getmembers()}
    assert all(m.isfile() or m.isdir() for m in members.values()), "links in the sdist"
    assert set(source_files(ROOT)) | {"smcsample/py.typed", "LICENSE"} <= set(members)
    assert "kernels" not in members
    assert "potentials" not in members


def test_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    sources = source_files(ROOT)
    assert any(name.startswith("smcsample/kernels/") for name in sources)
    assert any(name.startswith("smcsample/potentials/") for name in sources)
    with zipfile.ZipFile(wheel) as archive:
        files = {n for n in archive.namelist() if ".dist-info/" not in n}
        (entry_points,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        assert files == set(sources) | {"smcsample/py.typed"}
        assert all(archive.read(name) == path.read_bytes() for name, path in sources.items())
        assert "smcsample = smcsample.cli:main" in archive.read(entry_points).decode()


def test_wheel_imports_from_elsewhere(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    names = ["smcsample", "smcsample.kernels.ops", "smcsample.potentials"]
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    (tmp_path / "elsewhere").mkdir()
    places = run_python(code, cwd=tmp_path / "elsewhere", path=tmp_path / "site").split()
    assert [Path(p).relative_to(tmp_path / "site/smcsample").as_posix() for p in places] == [
        "__init__.py",
        "kernels/ops.py",
        "potentials/__init__.py",
    ]


def test_imports_without_the_extras(tmp_path):
    code = f"""
import importlib, sys

class Hide:  # as if not installed: find_spec gives None, import raises ModuleNotFoundError
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {OPTIONAL} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
for name in {OPTIONAL}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " is not hidden")

import smcsample, smcsample.potentials, smcsample.proposals
for module in (smcsample, smcsample.potentials, smcsample.proposals):
    for name in module.__all__:
        getattr(module, name)
"""
    run_python(code, cwd=ROOT)


# --- Who imports whom -------------------------------------------------------------------------------------------------


def module_name(wheel_path: str) -> str:
    return wheel_path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: Path, package: str = "") -> set[str]:
    """The dotted names a file imports, `from a.b import c` as "a.b.c"; `package` resolves relative imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def import_graph(root: Path) -> dict[str, set[str]]:
    """For each module of ours, the modules of ours that its text imports (the deepest module each name lies in)."""
    paths = {module_name(name): path for name, path in source_files(root).items()}
    known = {".".join(m.split(".")[:i]) for m in paths for i in range(1, m.count(".") + 2)}  # with namespace packages

    def deepest(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = {deepest(name) for name in imported_names(path, package)} - {""}
    return graph


def layer_faults(root: Path) -> list[str]:
    graph, faults = import_graph(root), []
    for module, imports in graph.items():
        for layer, allowed in LAYERS.items():
            if module.startswith(layer):
                faults += [f"{module} imports {name}" for name in imports if not name.startswith(allowed)]
    for start in (f"smcsample.{name}" for name in CORE if f"smcsample.{name}" in graph):
        reached, todo = {start}, [start]
        while todo:
            new = graph.get(todo.pop(), set()) - reached
            reached |= new
            todo += new
        forbidden = r"smcsample$|smcsample\.(lm|potentials|proposals|sequence|sampling)(\.|$)"
        faults += [f"{start} reaches {name}" for name in reached if re.match(forbidden, name)]
    return faults


def private_faults(root: Path) -> list[str]:
    """Where proofs, tests, examples and benchmarks use a private name of ours: imported, or through an imported one."""
    faults = []
    for path in (p for folder in READERS for p in sorted((root / folder).rglob("*.py"))):
        used = {name for name in imported_names(path) if name.partition(".")[0] == "smcsample"}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        ours = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                ours |= {(a.asname or "smcsample") for a in node.names if a.name.partition(".")[0] == "smcsample"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "smcsample":
                ours |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] in ours:
                used.add(ast.unparse(node))
        private = re.compile(r"(^|\.)_(?!_)")
        faults += [f"{path.relative_to(root)} uses {name}" for name in sorted(used) if private.search(name)]
    return faults


def second_copy_faults(root: Path) -> list[str]:
    """`import kernels` from the root is a second module object beside smcsample.kernels: nobody may."""
    paths = (p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py")))
    return [
        f"{path.relative_to(root)} imports {name}"
        for path in paths
        for name in imported_names(path, "relative")
        if name.partition(".")[0] in ("kernels", "potentials", "proposals")
    ]


def outside_path_faults(root: Path) -> list[str]:
    """Mentions of a place on somebody's machine."""
    outside = re.compile(r"(?<![\w.~-])/(?:" + "|".join(["work", "home", "root", "tmp", "Users"]) + r")/")
    files = [p for p in root.iterdir() if p.is_file()]
    files += [p for folder in FOLDERS for p in sorted((root / folder).rglob("*")) if p.is_file()]
    faults = []
    for path in (p for p in files if p.suffix != ".pyc"):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), start=1):
            faults += [f"{path.relative_to(root)}:{number}: {line.strip()}"] if outside.search(line) else []
    return faults


CHECKS = [layer_faults, private_faults, second_copy_faults, outside_path_faults]


@pytest.mark.parametrize("check", CHECKS)
def test_house_rules(check):
    assert {f"smcsample.{name}" for name in CORE} <= set(import_graph(ROOT)), "CORE names a module that is not there"
    assert check(ROOT) == []


@pytest.mark.parametrize(
    ("check", "file", "text"),
    [
        (layer_faults, "smcsample/kernels/ops.py", "from smcsample.weights import ess"),
        (layer_faults, "smcsample/kernels/ops.py", "from .. import weights"),
        (layer_faults, "smcsample/potentials/base.py", "import smcsample.weights"),
        (layer_faults, "smcsample/algorithm.py", "from smcsample import sequence"),
        (layer_faults, "smcsample/algorithm.py", "from . import Posterior"),
        (layer_faults, "smcsample/weights.py", "def f():\n    import smcsample.sequence"),
        (private_faults, "tests/test_x.py", "from smcsample.weights import _top"),
        (private_faults, "tests/test_x.py", "import smcsample as smc\nsmc.weights._top()"),
        (second_copy_faults, "examples/x.py", "from kernels.ops import f"),
        (outside_path_faults, "benchmarks/x.md", "see /" + "work/notes"),
        (outside_path_faults, "Makefile", "include=/" + "home/me/x"),
    ],
)
def test_house_rules_can_fail(check, file, text, tmp_path):
    healthy = {
        "smcsample/__init__.py": "from smcsample.algorithm import smc",
        "smcsample/algorithm.py": "import smcsample.weights",
        "smcsample/weights.py": "import torch",
        "smcsample/sequence.py": "from smcsample.lm.stream import LMStream",
        "smcsample/lm/stream.py": "from smcsample.kernels import ops\nfrom ..weights import ess",
        "smcsample/kernels/ops.py": "from smcsample.kernels.reference import f\nfrom . import reference",
        "smcsample/kernels/reference.py": "import torch",
        "tests/test_x.py": "import smcsample.weights\nprint(smcsample.weights.__doc__, __file__)",
    }
    for name, content in healthy.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert check(tmp_path) == []
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert check(tmp_path) != []
