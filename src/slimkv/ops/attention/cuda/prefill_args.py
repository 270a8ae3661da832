"""The arguments of the prefill kernels, as they lie in memory."""

from __future__ import annotations

import ctypes

SignBits = ctypes.c_uint32 * 8
Table = ctypes.c_uint32 * 3


class UnpackArgs(ctypes.Structure):
    """The argument of ``unpack``; prefill/unpack.cu says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "pages", "block_table", "seq_lens", "cu_seqlens_q", "key_levels", "value_levels", "keys", "values",
            "tile_scales",
        )),
        *((name, ctypes.c_int64) for name in ("page_stride", "page_head_stride", "table_stride")),
        *((name, ctypes.c_int32) for name in (
            "num_seqs", "num_kv_heads", "max_decode_queries", "first_tile", "tiles", "first_rank", "sliding_window",
        )),
        ("key_table", Table),
        ("value_table", Table),
        ("value_factor", ctypes.c_float),
    )  # fmt: skip


class AttendArgs(ctypes.Structure):
    """The argument of ``attend``; prefill/work.cuh says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "keys", "values", "tile_scales", "seq_lens", "cu_seqlens_q", "sinks", "score_shift", "out",
            "lse", "state",
        )),
        *((name, ctypes.c_int64) for name in (
            "query_stride", "query_head_stride", "out_stride", "out_head_stride", "sink_stride",
        )),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "key_norm", "value_norm")),
        ("key_sign_bits", SignBits),
        ("value_sign_bits", SignBits),
        *((name, ctypes.c_int32) for name in (
            "num_seqs", "num_kv_heads", "group_size", "max_decode_queries", "causal", "sliding_window",
            "query_blocks", "section",
            "first_tile", "tiles", "first_rank", "ranks", "first_pass", "last_pass", "first_query", "end_query",
            "aligned",
        )),
        *((name, ctypes.c_void_p) for name in ("pages", "block_table", "key_levels", "value_levels")),
        *((name, ctypes.c_int64) for name in ("page_stride", "page_head_stride", "table_stride")),
        ("key_table", Table),
        ("value_table", Table),
        *((name, ctypes.c_void_p) for name in ("key_signs", "value_signs", "unpacked", "attended")),
        ("lead", ctypes.c_int32),
        ("slots", ctypes.c_int32),
    )  # fmt: skip
