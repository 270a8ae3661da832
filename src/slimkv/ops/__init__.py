"""The three operations on pages: store, attend, gather. Each has a reference and kernels behind one public function."""

from slimkv.ops.attend import AttendOptions, attend
from slimkv.ops.gather import gather
from slimkv.ops.store import store

__all__ = ["AttendOptions", "attend", "gather", "store"]
