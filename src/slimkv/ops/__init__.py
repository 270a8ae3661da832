"""Operations on pages: store, attend, gather. Each has a reference and backends behind one public function."""

from slimkv.ops.attention.api import AttendOptions, attend
from slimkv.ops.attention.workspace import workspace_bytes
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.merge import merge_attention_states
from slimkv.ops.plan import AttendPlan, StorePlan, plan_attend, plan_store
from slimkv.ops.store.api import store_kv

__all__ = [
    "AttendOptions",
    "AttendPlan",
    "StorePlan",
    "attend",
    "gather_kv",
    "merge_attention_states",
    "plan_attend",
    "plan_store",
    "store_kv",
    "workspace_bytes",
]
