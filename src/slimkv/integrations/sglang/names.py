"""Names shared by SGLang's processes; every process imports this module, so it has no dependencies."""

from __future__ import annotations

BACKEND = "slimkv"  # of the attention backend
LISTENING = "SLIMKV_SGLANG_LISTENS"  # in the environment while ``slimkv calibrate`` runs an engine
# The function that builds the host pool of the hierarchical cache
HOST_POOL = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.build_kv_host_pool"
