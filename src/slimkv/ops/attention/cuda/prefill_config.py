"""The table of configurations of the CUDA prefill kernels, and the choice for a request."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from slimkv.codec.byte_levels import MOST_BITS
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES, AttendOptions, AttendRequest
from slimkv.ops.attention.cuda.prefill_defines import PrefillConfig, Unpack, packed_stages, shared_bytes
from slimkv.ops.attention.cuda.prefill_workspace import WORKSPACE_BYTES, plan_ahead, seen_tokens
from slimkv.ops.cuda.constants import KIND_NUMBERS
from slimkv.ops.cuda.device import Device, device_of
from slimkv.spec import CodecSpec, Kind

FIRST, AHEAD, FUSED = Unpack
# Codes by the cost of unpacking: Lloyd-Max of at most 4 bits; uniform of at most 4 bits, whose zero points take
# registers; more than 4 bits, through a LUT in shared memory.
SHORT, UNIFORM, LONG = ANY = ("short", "uniform", "long")
_80_TO_128, _TO_128, _TO_256 = (80, 96, 112, 128), (64, 80, 96, 112, 128), (192, 256)
_WARPS = PrefillConfig(FIRST, 64, 1, 1, 2, producers=0, single_warps=True, blocks_per_sm=2)

# Head sizes, codes, and a configuration for them. If several apply, the one with the least estimated time is chosen;
# without wgmma, the first whose blocks fit shared memory.
CONFIGS: tuple[tuple[tuple[int, ...], tuple[str, ...], PrefillConfig], ...] = (
    (_TO_128, ANY, PrefillConfig(FIRST, 128, 2)),
    (_TO_256, ANY, PrefillConfig(FIRST, 64, 2)),
    # At head size 64 there are few products to hide unpacking behind, so unpacking first is faster.
    (_80_TO_128, ANY, PrefillConfig(AHEAD, 128, 2, producer_registers=56)),
    (_TO_128, (SHORT,), PrefillConfig(FUSED, 128, 2, producers=2, producer_registers=40)),
    (_TO_128, (UNIFORM,), PrefillConfig(FUSED, 128, 2, producer_registers=72)),  # two producers would spill
    (_TO_256, (SHORT, UNIFORM), PrefillConfig(FUSED, 64, 2, producer_registers=72)),
    # Each unpacked tile serves twice as many rows.
    ((64,), ANY, PrefillConfig(FUSED, 128, 3, row_blocks=2, producer_registers=56)),
    (_80_TO_128, (SHORT,), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=40)),
    (_80_TO_128, (UNIFORM, LONG), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=56)),
    ((64, 128), (SHORT,), PrefillConfig(FIRST, 128, 4, eight_bit=True)),
    ((64,), (SHORT,), PrefillConfig(FIRST, 128, 4, consumers=3, eight_bit=True, tile_time=1.26)),
    ((128,), (SHORT,), PrefillConfig(FIRST, 128, 3, consumers=3, eight_bit=True, tile_time=1.41)),
    # Two blocks of four warps, or one of eight if a multiprocessor has only 100 KB.
    ((64,), ANY, replace(_WARPS, held_queries=True)),
    (_80_TO_128, ANY, _WARPS),
    (_80_TO_128, ANY, replace(_WARPS, consumers=2, blocks_per_sm=1)),
    (_TO_256, ANY, replace(_WARPS, tile_tokens=32, consumers=2, row_blocks=1, blocks_per_sm=1, held_queries=True)),
    ((64,), (SHORT,), replace(_WARPS, tile_tokens=256, eight_bit=True, held_queries=True)),
    ((128,), (SHORT,), replace(_WARPS, tile_tokens=128, eight_bit=True)),
    ((256,), (SHORT,), replace(_WARPS, tile_tokens=128, consumers=2, row_blocks=1, blocks_per_sm=1, eight_bit=True)),
)
HEAD_DIMS = tuple(sorted({dim for dims, _, _ in CONFIGS for dim in dims}))
MOST_GROUP = 64
# Query rows per sequence up to which FUSED measured faster, by kind of codes and head size (up to 64, 128, 256).
_FUSED_UP_TO = {SHORT: (512, 768, 512), UNIFORM: (512, 512, 256), LONG: (512, 512, 0)}
FUSED_FROM_ROWS, FUSED_FROM_QUERIES = 65, 17  # minimum per sequence for FUSED to replace decode
LEAST_SPLIT = 512  # minimum tokens per split of FUSED, as in split.cuh
# Measured times in units of a wave of FUSED blocks of 128 rows. First line: a wave of 256-row blocks, of half-filled
# ones, and of FIRST blocks; unpacking one KV head of a sequence on one multiprocessor; starting FUSED blocks. Second
# line: a row of the decode kernel; for an AHEAD block that unpacks a whole KV head, the added and the minimum time.
WIDE_ROUND, PART_ROUND, UNPACKED_ROUND, UNPACKING, FUSED_START = 1.69, 1.35, 0.68, 1.79, 0.1
DECODED_ROW, BESIDE_ATTENDING, UNPACKING_AHEAD = 0.012, 0.5, 3.6
LARGE_MERGE = 500  # above head size 128, starting and merging splits takes as long as attending to this many tokens


@lru_cache(maxsize=64)
def codes_of(spec: CodecSpec) -> str:
    """The kind of the keys' or the values' codes, whichever take longer to unpack."""
    if max(spec.key.bits, spec.value.bits) > MOST_BITS:
        return LONG
    return UNIFORM if Kind.UNIFORM in (spec.key.kind, spec.value.kind) else SHORT


@lru_cache(maxsize=256)
def configs(
    spec: CodecSpec, unpack: Unpack, eight_bit: bool = False, single_warps: bool = False
) -> tuple[PrefillConfig, ...]:
    """The table's entries that fit Hopper's shared memory, in order."""
    kind, codes = (unpack, eight_bit, single_warps), codes_of(spec)
    found = (config for dims, of, config in CONFIGS if spec.key_dim in dims and codes in of and config.kind == kind)
    return tuple(config for config in found if unpack != FUSED or packed_stages(spec, config) > 0)


def refusal(request: AttendRequest) -> str | None:
    """Why these kernels do not support the request, or None."""
    spec = request.layout.spec
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind not in KIND_NUMBERS:
            return f"{name} format {side.name} is not unpacked by the CUDA prefill (Lloyd-Max, uniform and fp8 are)"
    if spec.key_dim != spec.value_dim or spec.key_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"head sizes {spec.key_dim}/{spec.value_dim} are not equal, or not one of {sizes}"
    if request.layout.block_size < 16:
        return "it needs blocks of at least 16 tokens"
    if request.group > MOST_GROUP:
        return f"{request.group} query heads per KV head are more than {MOST_GROUP}"
    if request.fresh is not None:
        return "it attends to codes only, not to fresh K and V"
    return None


def eight_bit_refusal(request: AttendRequest) -> str | None:
    """Why 8-bit tensor cores do not support the request, or None."""
    reason = eight_bit.refusal(request) or refusal(request)
    device, dim = device_of(request.query.device), request.layout.spec.key_dim
    if reason is None and not device.multiplies_bytes:
        reason = "8-bit prefill needs products of integers at least as fast as fp16, which this GPU does not have"
    sizes = eight_bit_head_dims(single_warps=not device.warpgroups)
    if reason is None and dim not in sizes:
        reason = f"head size {dim} is not prefilled in 8 bits; {', '.join(map(str, sizes))} are"
    return reason


def eight_bit_head_dims(single_warps: bool) -> tuple[int, ...]:
    """Head sizes that are prefilled in 8 bits."""
    kind = (FIRST, True, single_warps)
    return tuple(sorted({dim for dims, _, config in CONFIGS if config.kind == kind for dim in dims}))


@lru_cache(maxsize=256)
def warp_config(spec: CodecSpec, device: Device, eight_bit: bool = False) -> PrefillConfig:
    """The mma.sync configuration for a device without wgmma."""

    def fits(config: PrefillConfig) -> bool:
        shared = shared_bytes(spec, config)
        within = (shared + 1024) * config.blocks_per_sm <= device.shared_of_multiprocessor
        return within and shared <= device.shared_of_block

    return next(filter(fits, configs(spec, FIRST, eight_bit, single_warps=True)))


def config_for(request: AttendRequest) -> PrefillConfig:
    """The configuration of a supported request."""
    spec, options, device = request.layout.spec, request.options, device_of(request.query.device)
    found = reachable(device, spec, options)
    if len(found) > 1 and options.prefill != EIGHT_BIT:
        found = configs(spec, FUSED) if _can_fuse(request) else ()
        if not found or spec.key_dim <= 128 or splits(request, found[-1]) > 1:
            found += configs(spec, FIRST) + (configs(spec, AHEAD) if _can_unpack_ahead(request) else ())
    return min(found, key=lambda config: _time(request, config))


def reachable(device: Device, spec: CodecSpec, options: AttendOptions) -> tuple[PrefillConfig, ...]:
    """All configurations that a layer's requests can use."""
    if spec.key_dim != spec.value_dim or spec.key_dim not in HEAD_DIMS:
        return ()
    by_row, in_bytes = options.deterministic, options.prefill == EIGHT_BIT and not options.deterministic
    if in_bytes and not (configs(spec, FIRST, True, not device.warpgroups) and device.multiplies_bytes):
        return ()
    if not device.warpgroups:
        return (replace(warp_config(spec, device, in_bytes), by_row=by_row),)
    if by_row or in_bytes:
        return tuple(replace(c, by_row=by_row) for c in configs(spec, FIRST, in_bytes)[: 1 if by_row else None])
    return tuple(config for unpack in Unpack for config in configs(spec, unpack))


def _can_fuse(request: AttendRequest) -> bool:
    """Whether there are few query rows, or so few work tiles that they need split-KV, which only FUSED has."""
    spec, fused = request.layout.spec, configs(request.layout.spec, FUSED, request.options.prefill == EIGHT_BIT)
    most = _FUSED_UP_TO[codes_of(spec)][(spec.key_dim > 64) + (spec.key_dim > 128)]
    return bool(fused) and (request.max_query_len * request.group <= most or splits(request, fused[-1]) > 1)


def _can_unpack_ahead(request: AttendRequest) -> bool:
    """Whether query lengths are equal, or all sequences but one decode, and unpacking seldom waits for workspace.

    If a block unpacked for a much longer sequence, unpacking would take longer than its own attention.
    """
    total, longest, sequences = request.query.shape[0], request.max_query_len, request.seq_lens.shape[0]
    config, alike = configs(request.layout.spec, AHEAD), total == sequences * longest or total - longest < sequences
    available = device_of(request.query.device).multiprocessors
    return bool(config) and alike and plan_ahead(request, config[0], sequences, available, WORKSPACE_BYTES).flows


def _time(request: AttendRequest, config: PrefillConfig) -> float:
    """The estimated time in waves of FUSED blocks of 128 rows, as if all sequences had the same length."""
    sequences, available = request.seq_lens.shape[0], device_of(request.query.device).multiprocessors
    items, rows = sequences * request.pages.shape[1], request.max_query_len * request.group
    if config.eight_bit:  # larger blocks take less time per row but may leave multiprocessors idle
        blocks = -(-request.query.shape[0] // (config.rows // request.group)) * request.pages.shape[1]
        return -(-blocks // available) * config.tile_time
    if config.fused:
        blocks, rest = divmod(rows, config.rows)
        part = 0 < rest <= config.rows - config.rows // config.row_blocks
        whole = -(-items * (blocks + (rest > 0 and not part)) // available)
        rounds = whole * (WIDE_ROUND if config.row_blocks > 1 else 1) + part * -(-items // available) * PART_ROUND
        parts = splits(request, config)
        merge = LARGE_MERGE if parts > 1 and request.layout.spec.key_dim > 128 else 0
        return max(FUSED_START, merge / seen_tokens(request, config.rows // request.group)) + rounds / parts
    # Tokens seen by all queries of a sequence, divided by those that one block's queries see: above 1 with a window.
    spread = seen_tokens(request, request.max_query_len) / seen_tokens(request, config.rows // request.group)
    blocks = -(-rows // config.rows)
    rounds, round_time, first = -(-items * blocks // available), UNPACKED_ROUND, items
    if config.ahead:
        beside = UNPACKED_ROUND + BESIDE_ATTENDING * spread / blocks
        round_time = max(beside, UNPACKING_AHEAD * spread / blocks)
        first = plan_ahead(request, config, sequences, available, WORKSPACE_BYTES).lead
    return rounds * round_time + first / available * UNPACKING * spread


def _work_tiles(request: AttendRequest, config: PrefillConfig, most_queries: int) -> int:
    """The maximum number of work tiles of a request; each is a block of queries and a KV head."""
    total, per_block = request.query.shape[0], config.rows // request.group
    sequences = min(request.seq_lens.shape[0], total // (most_queries + 1))
    blocks = min(total // per_block + sequences, sequences * -(-request.max_query_len // per_block))
    return max(1, blocks * request.pages.shape[1])


def splits(request: AttendRequest, config: PrefillConfig, most_queries: int = FUSED_FROM_QUERIES - 1) -> int:
    """How many FUSED blocks split a work tile's keys, for sequences of equal length (source/prefill/split.cuh)."""
    blocks = device_of(request.query.device).multiprocessors // _work_tiles(request, config, most_queries)
    return max(1, min(blocks, -(-seen_tokens(request, request.max_query_len) // LEAST_SPLIT)))


def most_packed_queries(request: AttendRequest) -> int:
    """The maximum number of queries per sequence for the decode kernel.

    That kernel rereads pages for every few rows but splits KV, so it also takes requests that are too small for prefill
    to fill the device.
    """
    if request.options.deterministic:
        prompt = request.options.prompt
        return MAX_DECODE_QUERIES if prompt is None else 0 if prompt else request.max_query_len
    device, few = device_of(request.query.device), max(FUSED_FROM_QUERIES, -(-FUSED_FROM_ROWS // request.group)) - 1
    if few >= MAX_DECODE_QUERIES or request.max_query_len <= few or not device.warpgroups:
        return MAX_DECODE_QUERIES
    if refusal(request) is not None or not _can_fuse(request) or not (config := config_for(request)).fused:
        return MAX_DECODE_QUERIES
    (sequences,), total, heads = request.seq_lens.shape, request.query.shape[0], request.pages.shape[1]
    if total < sequences * request.max_query_len:  # shorter sequences decode either way
        faster = min(sequences, total // (few + 1)) * heads >= 0.9 * device.multiprocessors
    else:
        faster = _time(request, config) < DECODED_ROW * total * request.group * heads / device.multiprocessors
    return few if faster else MAX_DECODE_QUERIES
