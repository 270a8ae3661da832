// Query-aware rounding of keys (see slimkv.codec.query_aware): coordinates are rounded from the last to the first, each
// corrected for the errors made so far. A warp rounds 32 tokens. Corrections for errors of later slices are 8-bit MMAs;
// within a slice, every lane rounds the 16 coordinates of its own token one after the other. This is one long
// dependency chain, so a second warp works in parallel: it rotates and packs 16 of the 32 tokens, and stores values
// while the first warp rounds.
#pragma once
#include "store/lloyd.cuh"

// The words of a token's packed codes per slice: two of nibbles, or four of bytes.
template <class F> constexpr int CODE_WORDS = F::BITS <= 4 ? 2 : 4;

// The correction of coordinate n for errors of its own slice, plus ``older``, the correction for later slices. w: the
// weights of its row in the slice; ``errors``: of coordinates from n + 2 on; ``newest``: of n + 1, then added to
// ``errors``. Only the newest error is on the critical path; its product is added to the float of an integer < 2^24.
DEVICE float add_errors_of_slice(int n, i32 older, const Words4& w, float newest, u32 newest_byte, u32 (&errors)[4]) {
  if (n < 14) older = dp4a_s8(errors[3], w.w, older);
  if (n < 10) older = dp4a_s8(errors[2], w.z, older);
  if (n < 6) older = dp4a_s8(errors[1], w.y, older);
  if (n < 2) older = dp4a_s8(errors[0], w.x, older);
  float total = i32_to_f32_rn(older);
  if (n < 15) {
    const u32 word = n < 3 ? w.x : n < 7 ? w.y : n < 11 ? w.z : w.w;
    total = fma_rn(newest, i32_to_f32_rn((i32)(word << (24 - 8 * ((n + 1) % 4))) >> 24), total);
    errors[(n + 1) / 4 % 4] = prmt(errors[(n + 1) / 4 % 4], newest_byte,
        n % 4 == 3       ? 0x3214
            : n % 4 == 0 ? 0x3240
            : n % 4 == 1 ? 0x3410
                         : 0x4210);
  }
  return total;
}

#include "store/round.cuh"

// Rounds with every matrix that the lanes' tokens use (round_query_aware). index: the matrix of the lane's token; only:
// this block's matrix, if matrices are distributed over blocks (spread).
template <class F> DEVICE void round_with_matrices(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables,
    const ScaledLevels<F>& levels, const StoreArgs& args, int head, int index, int only, int lane) {
  const u8* weights = args.query_aware + (i64)head * F::D * F::D;
  if constexpr (SHARED_WEIGHTS || QUERY_AWARE == 1)
    round_query_aware<F>(memory, tables, levels, weights, args.error_steps, true, lane);
  else {
    int end = args.spread ? only + 1 : args.matrices;
#pragma unroll 1
    for (int matrix = args.spread ? only : 0; matrix < end; matrix++) {  // 32 adjacent tokens nearly always share one
      if (!warp_any(index == matrix)) continue;
      sync_warp();  // the previous sums have been read
      bool mine = args.spread || index == matrix;
      round_query_aware<F>(memory, tables, levels, weights + matrix * args.matrix_stride, args.error_steps, mine, lane);
    }
  }
}

template <class F> DEVICE void coordinates_of_tile(const Digits<F>& digits, const TokenScalars& scalars,
    const SideArgs& side, const QueryAwareMemory<F>& memory, int tile, int lane) {
  float factor[2] = {shfl(scalars.factor, lane >> 2), shfl(scalars.factor, (lane >> 2) + 8)};
  UNROLL_FOR (int i = 0; i < F::PER; i++) {
    typename Digits<F>::Sum exact[F::GROUPS][8];
    rotate_slices<F>(digits, side, i, lane, exact);
    UNROLL_FOR (int q = 0; q < F::GROUPS; q++)
      UNROLL_FOR (int n = 0; n < 8; n += 2) {
        const int token = token_number<F>(n);
        memory.put_neighbours(16 * tile + token_of<F>(lane, token), 16 * (q * F::PER + i) + dim_of<F>(lane, n),
            mul_rn(integer_of<F>(exact[q][n]), factor[token]), mul_rn(integer_of<F>(exact[q][n + 1]), factor[token]));
      }
  }
}

template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_codes_of_tile(const SideArgs& side,
    const StoreArgs& args, int head, int first, TokenScalars scalars, bool keep, const LloydTables<F>& tables,
    const QueryAwareMemory<F>& memory, int tile, int lane) {
  Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
  if (!keep) slots.slot = -1;
  slots.aligned = slots.aligned && !warp_any(!keep);
  CodePlanes<F> codes;
  LevelSums<F> sums;
  UNROLL_FOR (int i = 0; i < F::PER; i++) {
    UNROLL_FOR (int q = 0; q < F::GROUPS; q++) {
      constexpr int BYTES = CODE_WORDS<F> / 2;  // for the codes of two neighbours
      const int slice = q * F::PER + i, order = i * F::GROUPS + q;
      u32 code[8], nibbles = 0;
      UNROLL_FOR (int j = 0; j < 4; j++) {  // two adjacent dimensions of a token per j
        const u8* two = memory.codes(16 * tile + (lane >> 2) + 8 * (j >> 1), slice, (lane & 3) + 4 * (j & 1));
        if constexpr (BYTES == 1) nibbles += (u32)*two << (8 * j);
        else code[2 * j] = two[0], code[2 * j + 1] = two[1];
      }
      if constexpr (BYTES == 1) put_nibbles<F>(codes, sums, slice, order, nibbles, side);
      else put_slice<F>(codes, sums, slice, order, code, tables, side);
    }
  }
  u32 field = field_of_token(scalars, total_of_squares(sum_of_squares<F>(sums, lane)));
  store_lloyd_codes<F, PAGE_TOKENS>(codes, field, scalars.zero, args, head, slots, lane, 0);
}

// Fills the tables of a thread block that stores keys.
template <class F> DEVICE void fill_query_aware_tables(const SideArgs& side, const StoreArgs& args, int head,
    int matrix, u8* shared, int threads) {
  Weights<F>::copy(shared + ScaledLevels<F>::TABLE_BYTES,
      args.query_aware + (i64)head * F::D * F::D + matrix * args.matrix_stride, thread_index(), threads);
  LloydTables<F>(shared).fill(shared, side, thread_index(), threads);
  ScaledLevels<F>(shared).fill(side, args.error_steps, thread_index(), threads);
}

// Encodes and writes 32 keys of one head with two warps and the ``number``-th part of the block's memory; if matrices
// are distributed over blocks, only keys that use matrix ``only``. Each warp has a tile of 16 keys with rows ``raw``.
// Warp 0 rounds all 32 while warp 1 runs ``meanwhile``.
template <class F, int PAGE_TOKENS, class SLOT, class Work> DEVICE void store_query_aware(const SideArgs& side,
    const StoreArgs& args, int head, int only, int first, const u32 raw[F::CHUNKS][2][F::RAW], u8* shared, int number,
    int warp, Work meanwhile) {
  int lane = thread_index() & 31, index = 0;
  constexpr bool SEVERAL = QUERY_AWARE > 1;
  const bool spread = SEVERAL && args.spread;
  bool none = first >= args.tokens;
  if (!none && SEVERAL && args.query_aware_index != nullptr)
    index = min_i32(max_i32(args.query_aware_index[min_i32(first + lane, args.tokens - 1)], 0), args.matrices - 1);
  none = none || (spread && !warp_any(index == only));  // the same for both warps
  LloydTables<F> tables(shared);
  ScaledLevels<F> levels(shared);
  QueryAwareMemory<F> memory(shared + ScaledLevels<F>::TABLE_BYTES, number);
  TokenScalars scalars;
  if (!none) {
    Digits<F> digits;
    const u32 exponent = fixed_point<F>(raw, lane, digits);
    scalars = scalars_of<F>(digits, exponent, side.unit, lane);
    coordinates_of_tile<F>(digits, scalars, side, memory, warp, lane);
  }
  cp_async_wait<0>();
  sync_threads();  // also for the tables
  if (warp) meanwhile();
  else if (!none) round_with_matrices<F>(memory, tables, levels, args, head, index, only, lane);
  if (none) return;
  sync_team(1 + number, 64);
  const bool keep = !spread || shfl(index, 16 * warp + (lane & 15)) == only;
  if (first + 16 * warp < args.tokens)
    store_codes_of_tile<F, PAGE_TOKENS, SLOT>(side, args, head, first + 16 * warp, scalars, keep, tables, memory, warp,
        lane);
}
