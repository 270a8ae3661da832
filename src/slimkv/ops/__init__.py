"""Operations on pages: store, attend, gather, copy. Each has a reference and kernels behind its public functions."""

from slimkv.ops.attention.api import AttendOptions, attend
from slimkv.ops.copy.api import copy_tokens, read_tokens, write_tokens
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.store.api import store_kv

__all__ = ["AttendOptions", "attend", "copy_tokens", "gather_kv", "read_tokens", "store_kv", "write_tokens"]
