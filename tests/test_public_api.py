"""The public names are pinned, modules have no circular imports, and source files stay short."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import slimkv

SOURCE = Path(slimkv.__file__).parent
PUBLIC = [
    "AttentionBatch", "Calibration", "Codec", "CodecSpec", "CorruptDataError", "Encoded", "FidelityError", "InputError",
    "KVCacheConfig", "LatentSpec", "MissingDependencyError", "OutOfPagesError", "PageLayout", "PagedPool",
    "ScalePolicy", "SlimKVCache", "SlimKVError", "SpecError", "TensorFormat", "UnsupportedError", "__version__",
    "attention", "calibrate_model", "disable", "enable", "fake_quantize", "ops", "status",
]  # fmt: skip
OPS = [
    "AttendOptions", "AttendPlan", "AttentionBatch", "PackedKV", "Rounding", "StorePlan", "attend", "attend_latent",
    "copy_tokens", "gather_kv", "gather_latent", "latent_rotation", "latent_workspace_bytes", "merge_attention_states",
    "plan_attend", "plan_store", "read_tokens", "store_kv", "store_latent", "workspace_bytes", "write_tokens",
]  # fmt: skip


def test_public_names_are_pinned():
    assert slimkv.__all__ == PUBLIC
    assert slimkv.ops.__all__ == OPS
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name):
    assert getattr(slimkv, name) is not None


def fresh(code: str) -> str:
    """What ``code`` prints in a new process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_slimkv_loads_neither_torch_nor_an_engine():
    names = ("torch", "numpy", "transformers", "triton", "vllm", "rich")
    assert fresh(f"import sys, slimkv; print([m for m in {names} if m in sys.modules])") == "[]"


def test_submodules_are_found_after_import_slimkv_alone():
    names = ("codec", "errors", "formats", "ops", "spec")
    assert fresh(f"import slimkv; print([getattr(slimkv, m).__name__[7:] for m in {names}] == [*{names}])") == "True"


def test_names_for_people_and_type_checkers():
    assert set(PUBLIC) <= set(dir(slimkv))
    assert "class CodecSpec" in pydoc.plain(pydoc.render_doc(slimkv))
    names: dict[str, object] = {}
    exec("from slimkv import *", names)
    assert set(PUBLIC) <= set(names)
    with pytest.raises(AttributeError, match="module 'slimkv' has no attribute 'nothing'"):
        slimkv.nothing  # noqa: B018
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    declared = {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert set(PUBLIC) - declared == {"__version__"}


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_no_function_shadows_a_package():
    for info in pkgutil.walk_packages(slimkv.__path__, "slimkv."):
        parent, _, name = info.name.rpartition(".")
        if "vllm" in parent or "sglang" in parent or name == "__main__":  # the engine must be installed to import them
            continue
        held = getattr(importlib.import_module(parent), name, None)
        assert held is None or type(held).__name__ == "module", f"{parent}.{name} is not the module"


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a file imports, including imports inside functions."""
    found, tree = set(), ast.parse(path.read_text())
    for block in [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]:
        block.body = []  # only for annotations, not imported at run time
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("slimkv"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found


def test_no_import_circles():
    known = modules()
    below = {name: imported(path, known) - {"slimkv"} for name, path in known.items() if name != "slimkv"}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a circle: " + " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for other in sorted(below.get(name, ())):
            visit(other, (*path, name))
        done.add(name)

    for name in sorted(below):
        visit(name, ())


def test_files_have_one_subject():
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := p.read_text().count("\n")) > 450}
    assert long == {}
