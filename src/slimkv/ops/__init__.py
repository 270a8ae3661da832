"""The three operations on pages: store, attend, gather. Each has a reference and kernels behind one public function."""

from slimkv.ops.attention.api import AttendOptions, attend
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.store.api import store_kv

__all__ = ["AttendOptions", "attend", "gather_kv", "store_kv"]
