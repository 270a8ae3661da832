"""attend on a CPU in one call of the compiled library: decode, verification and prefill, any number of sequences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slimkv.ops.attention.api import AttendRequest, refuses_eight_bit, refuses_split_arguments
from slimkv.ops.cpu.module import Call, layout_tables, library
from slimkv.ops.cpu.structures import CAttendCall, CVectors, pages_of, vectors_of


def supports(request: AttendRequest) -> str | None:
    """Supports every format, size and option. The library chooses splits, regardless of the number of threads."""
    return refuses_split_arguments(request) or refuses_eight_bit(request)


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    _call(request)()


def plan(request: AttendRequest) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A prepared ``run`` for other queries and lengths of the same shapes, on the same pages and block table."""
    call = _call(request)
    args, query_of, out_of = call.args, call.args.query, call.args.out

    def launch(query: Tensor, out: Tensor, seq_lens: Tensor) -> None:
        query_of.data, out_of.data, args.seq_lens = query.data_ptr(), out.data_ptr(), seq_lens.data_ptr()
        call()

    return launch


def _call(request: AttendRequest) -> Call:
    options, table = request.options, request.block_table
    tables = layout_tables(request.layout)
    sinks, shift = request.sinks, request.score_shift
    fresh = (CVectors(), CVectors()) if request.fresh is None else tuple(map(vectors_of, request.fresh))
    args = CAttendCall(
        layout=tables.address, pages=pages_of(request.pages), query=vectors_of(request.query),
        out=vectors_of(request.out), fresh_key=fresh[0], fresh_value=fresh[1], block_table=table.data_ptr(),
        table_stride=table.stride(0), table_width=table.shape[1], seq_lens=request.seq_lens.data_ptr(),
        cu_seqlens_q=request.cu_seqlens_q.data_ptr(), sequences=request.seq_lens.shape[0],
        total_queries=request.query.shape[0], heads=request.query.shape[1], causal=options.causal,
        window=options.sliding_window or 0, softmax_scale=request.softmax_scale, softcap=options.softcap,
        sinks=None if sinks is None else sinks.data_ptr(),
        sink_stride=request.sink_stride,
        score_shift=None if shift is None else shift.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(),
    )  # fmt: skip
    return Call(library().attend, args, tables, sinks, shift, table, request.cu_seqlens_q)
