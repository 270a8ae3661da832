"""A stand-in for SGLang's compiled kernels, which have no build for this machine.

Every name can be imported. What speculation calls is written out in ``speculation``; calling anything else raises with
its name, so that a lane never runs on something made up.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]


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
