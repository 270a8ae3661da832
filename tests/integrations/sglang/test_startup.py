"""Errors that must stop the real SGLang engine during startup."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import engine, plugin_path, run_engine, slimkv
from prompts import EngineError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# A third-party plugin that makes one of slimkv's hooks fail, in every process.
BREAKER = """
from sglang.srt.plugins.hook_registry import HookRegistry

def register():
    apply = HookRegistry._apply_target.__func__

    def broken(cls, target, hooks):
        if target.endswith("{name}"):
            raise RuntimeError("broken on purpose")
        return apply(cls, target, hooks)

    HookRegistry._apply_target = classmethod(broken)
"""


def breaking_plugin(folder, name: str) -> str:
    """A PYTHONPATH with a plugin that breaks the hook on ``name``."""
    (folder / "breaker.py").write_text(BREAKER.format(name=name))
    return plugin_path(folder, "breaker", "breaker:register")


def test_a_broken_hook(tmp_path):
    """SGLang only logs the failure. slimkv must not continue with a cache of the wrong size."""
    with pytest.raises(EngineError, match=r"did not install slimkv's hooks on .*PoolConfigurator\._compute_cell_size"):
        run_engine(engine(**slimkv()), [], spawned=True, PYTHONPATH=breaking_plugin(tmp_path, "._compute_cell_size"))


def test_a_wrong_setting_stops_the_engine_before_it_starts_a_process():
    with pytest.raises(EngineError, match="slimkv has no setting 'formt'; did you mean 'format'") as failure:
        run_engine(engine(**slimkv(formt="k4v4")), [])
    assert "scheduler" not in str(failure.value).lower()
