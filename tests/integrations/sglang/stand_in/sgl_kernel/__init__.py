"""A stand-in for SGLang's compiled kernels, which have no build for this machine.

Every name can be imported; calling one raises with its name, so that a lane never runs on something made up.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in for SGLang's kernels")

    missing.__name__ = name
    return missing


def _declare_thread_operators() -> None:
    """Threads are pinned and shared memory is set up by operators; here one process leaves both to torch."""
    import torch

    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("init_cpu_threads_env(str cpus) -> ()")
    library.define("initialize(int size, int rank) -> ()")
    library.impl("init_cpu_threads_env", lambda cpus: None, "CompositeExplicitAutograd")
    library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")
    globals()["_library"] = library


_declare_thread_operators()
