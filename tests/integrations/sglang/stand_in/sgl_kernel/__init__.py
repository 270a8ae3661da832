"""A stand-in for SGLang's compiled kernels, which are not built for CPU machines.

Every name can be imported. The functions needed for speculation and for several ranks are implemented. Calling any
other function raises an error with its name, so that tests never run on placeholder results.
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


def _declare_operators() -> None:
    """SGLang's operators pin threads and let ranks communicate through shared memory. Here torch does both."""
    import torch

    def all_reduce(data: torch.Tensor, op: int) -> None:
        from sglang.srt.distributed import get_tp_group

        torch.distributed.all_reduce(data, group=get_tp_group().cpu_group)

    def all_gather(data: torch.Tensor, dim: int) -> torch.Tensor:
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        parts = [torch.empty_like(data) for _ in range(group.world_size)]
        torch.distributed.all_gather(parts, data.contiguous(), group=group.cpu_group)
        return torch.cat(parts, dim)

    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("init_cpu_threads_env(str cpus) -> ()")
    library.define("initialize(int size, int rank) -> ()")
    library.define("shm_allreduce(Tensor(a!) data, int op) -> ()")
    library.define("shm_allgather(Tensor data, int dim) -> Tensor")
    library.impl("init_cpu_threads_env", lambda cpus: None, "CompositeExplicitAutograd")
    library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")
    library.impl("shm_allreduce", all_reduce, "CPU")
    library.impl("shm_allgather", all_gather, "CPU")
    globals()["_library"] = library


_declare_operators()
