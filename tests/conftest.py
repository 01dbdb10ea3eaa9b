"""Set-up shared by all tests. Must run before anything imports `smcsample`."""

import importlib.util
import os
import sys

import torch
from hypothesis import settings

# Check every annotated shape and type while the tests run. A function that must stay as written (a Triton kernel) opts
# out with `@typing.no_type_check`.
if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    if "smcsample" in sys.modules:
        raise RuntimeError("smcsample was imported before tests/conftest.py: its annotations would go unchecked")
    install_import_hook("smcsample", "typechecking.checked")

# Without a GPU, Triton kernels run in the interpreter, which has to be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # the test processes share the cores, and sums come out in one order

# Times vary too much for deadlines. In CI the examples are the same on every run.
settings.register_profile("smcsample", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("smcsample")
