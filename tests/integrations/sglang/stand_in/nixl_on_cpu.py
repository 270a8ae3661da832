"""A plugin for SGLang with which NIXL moves pages between engines on a CPU: SGLang says they are in a GPU's memory.

The bytes that SGLang counts are added to the file that ``TRANSFERRED`` in the environment names.
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
