"""Operations on pages: store, attend, gather, copy. Each has a reference and faster backends."""

from slimkv.ops.attention.api import AttendOptions, attend
from slimkv.ops.attention.workspace import workspace_bytes
from slimkv.ops.batch import AttentionBatch, PackedKV, Rounding
from slimkv.ops.copy.api import copy_tokens, read_tokens, write_tokens
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.latent.api import attend_latent, latent_rotation
from slimkv.ops.latent.tokens import gather_latent, store_latent
from slimkv.ops.latent.workspace import latent_workspace_bytes
from slimkv.ops.merge import merge_attention_states
from slimkv.ops.plan import AttendPlan, StorePlan, plan_attend, plan_store
from slimkv.ops.store.api import store_kv

__all__ = [
    "AttendOptions", "AttendPlan", "AttentionBatch", "PackedKV", "Rounding", "StorePlan", "attend", "attend_latent",
    "copy_tokens", "gather_kv", "gather_latent", "latent_rotation", "latent_workspace_bytes", "merge_attention_states",
    "plan_attend", "plan_store", "read_tokens", "store_kv", "store_latent", "workspace_bytes", "write_tokens",
]  # fmt: skip
