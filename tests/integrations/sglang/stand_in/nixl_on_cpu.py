"""A plugin that lets NIXL move pages between SGLang engines on a CPU, where SGLang would declare them as GPU memory.

It appends the bytes of each transfer, as counted by SGLang, to the file named by the environment variable
``TRANSFERRED``.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVSender
    from sglang.srt.disaggregation.nixl import conn

    conn._normalize_kv_mem_kinds = lambda kinds, count: ["DRAM"] * count
    plain = CommonKVSender.get_transfer_metric

    def counted(self: Any) -> Any:
        found = plain(self)
        with open(os.environ["TRANSFERRED"], "a") as file:
            print(found.transfer_total_bytes, file=file)
        return found

    CommonKVSender.get_transfer_metric = counted
