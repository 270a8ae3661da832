// Lloyd-Max codes of rotated coordinates, and their scale.
#pragma once
#include "store/pages.cuh"
#include "store/slices.cuh"

// Tables in shared memory: for each cell its code, or the number of boundaries below it; the boundaries; the levels.
template <class F> struct LloydTables {
  static constexpr int COUNT = F::BITS > 4 ? 1 << F::BITS : 0;  // bounds and levels
  static constexpr int CELL_BYTES = (F::CELLS + 15) / 16 * 16;
  static constexpr int BYTES = CELL_BYTES + 8 * COUNT;
  const u8* cells;
  const float* bounds;
  const i32* levels;

  DEVICE_MEMBER LloydTables(u8* memory)
      : cells(memory), bounds((float*)(memory + CELL_BYTES)), levels((i32*)(memory + CELL_BYTES) + COUNT) {}
  // Starts copies, which are visible to all threads after ``cp_async_wait`` and ``sync_threads``.
  DEVICE_MEMBER void fill(u8* memory, const SideArgs& side, int thread, int threads) const {
#pragma unroll 1
    for (int i = thread; i < CELL_BYTES / 16; i += threads) cp_async_16(memory + 16 * i, side.cells + 16 * i);
    cp_async_commit();
#pragma unroll 1
    for (int i = thread; i < COUNT; i += threads) {
      ((u32*)(memory + CELL_BYTES))[i] = ((const u32*)side.bounds)[i];
      ((u32*)(memory + CELL_BYTES))[COUNT + i] = ((const u32*)side.levels)[i];
    }
  }
};

template <class F> constexpr int TILE_MEMORY =
    (LloydTables<F>::BYTES + 15) / 16 * 16;  // the offset of the memory after the tables

// The cell of a number. Cells include their upper edge.
template <class F> DEVICE u32 cell_of(float x) { return ceil_product(x, as_float(1u << F::CELL_SHIFT), F::CELL_ZERO); }

// As cell_of, but numbers below all cells get the first cell.
template <class F> DEVICE u32 cell_from_below(float x) {
  return ceil_product_or_zero(x, as_float(1u << F::CELL_SHIFT), F::CELL_ZERO);
}

// The code of a coordinate in the codebook's units. Up to 4 bits, boundaries are edges of cells, and a value on an edge
// belongs to the cell below it, as the tie rule requires. In wider codes, a cell has at most one boundary.
template <class F> DEVICE u32 code_of_cell(u32 cell, float x, const LloydTables<F>& tables) {
  u32 index = tables.cells[cell];
  if constexpr (F::BITS > 4) {
    index += x > tables.bounds[index] ? 1 : 0;
    constexpr u32 HALF = 1 << (F::BITS - 1);
    index = index >= HALF ? index : HALF - 1 - index;
  }
  return index;
}

template <class F> DEVICE u32 code_of(float x, const LloydTables<F>& tables) {
  return code_of_cell<F>(cell_of<F>(x), x, tables);
}

// Sums of squared levels of a lane's tokens, for the scale.
template <class F> struct LevelSums {
  static constexpr bool PACKED = F::BITS <= 4, WIDE = F::ONE_SLICE && !PACKED, SQUARES = PACKED || WIDE;
  // Squares of twice the centroids (PACKED), or of centroids times LEVEL_DENOMINATOR: below 2^32 per vector.
  u32 squares[F::TOKENS] = {};
  i64 sums[F::TOKENS] = {};  // the latter, if 32 bits are not enough
  u32 before = 0;

  // Adds the codes of a slice, given as nibbles: four centroids per lookup and per dot product. Values are processed
  // two slices at a time; order: the number of slices before this one.
  DEVICE_MEMBER void add_codes(int order, u32 nibbles, const SideArgs& side) {
    u32 a = side.doubled_levels[0], b = side.doubled_levels[1];
    nibbles &= 0x11111111u * ((1 << (F::BITS - 1)) - 1);
    if constexpr (!F::VALUES) {
      add(0, prmt(a, b, nibbles));
      add(1, prmt(a, b, nibbles >> 16));
    } else if (order % 2 == 0 && order + 1 < F::LOCAL) {
      before = nibbles;
    } else {  // a token has one byte of each slice's word
      u32 other = order % 2 ? before : 0;
      u32 first = prmt(other, nibbles, 0x5140), second = prmt(other, nibbles, 0x7362);
      u32 all[4] = {prmt(a, b, first), prmt(a, b, first >> 16), prmt(a, b, second), prmt(a, b, second >> 16)};
      UNROLL_FOR (int j = 0; j < 4; j++) add(j, order % 2 ? all[j] : all[j] & 0xFFFF0000u);
    }
  }
  DEVICE_MEMBER void add(int j, u32 levels) { squares[j] = dp4a_u8(levels, levels, squares[j]); }
  DEVICE_MEMBER void add_level(int j, i32 level) {
    if constexpr (SQUARES) squares[j] += (u32)(level * level);
    else sums[j] += (i64)level * level;
  }
};

// The scale field of the lane's token, which preserves its norm. total: the sum of squared centroids times
// LEVEL_DENOMINATOR^2.
DEVICE u32 field_of_token(const TokenScalars& s, float total) {
  const float scale = div_rn_normal(s.norm, sqrt_rn_normal(total));
  u32 field = encode_unsigned(mul_rn(mul_rn(scale, 128.0f), s.down));
  return s.bad ? INVALID_FIELD : s.zero ? 0 : field;
}

// Adds the eight codes of a slice, up to 4 bits, given as nibbles.
template <class F> DEVICE void put_nibbles(CodePlanes<F>& codes, LevelSums<F>& sums, int slice, int order, u32 nibbles,
    const SideArgs& side) {
  sums.add_codes(order, nibbles, side);
  codes.put(slice, nibbles, 0);
}

// Adds the eight codes of a slice.
template <class F> DEVICE void put_slice(CodePlanes<F>& codes, LevelSums<F>& sums, int slice, int order,
    const u32 code[8], const LloydTables<F>& tables, const SideArgs& side) {
  u32 low = 0, high = 0;
  UNROLL_FOR (int n = 0; n < 8; n++) {
    if constexpr (F::BITS <= 4) low += code[n] << (4 * n);
    else if constexpr (F::BITS < 8) low += (code[n] & 15) << (4 * n), high += code[n] >> 4 << (4 * n);
    if constexpr (!LevelSums<F>::PACKED) sums.add_level(token_number<F>(n), tables.levels[code[n]]);
  }
  if constexpr (LevelSums<F>::PACKED) sums.add_codes(order, low, side);
  if constexpr (F::BITS < 8) codes.put(slice, low, high);
  else codes.put_bytes(slice, four_bytes(code), four_bytes(code + 4));
}

// The sum of squares in the lane of each token. total_of_squares turns it into a float, rounded once.
template <class F> DEVICE auto sum_of_squares(const LevelSums<F>& sums, int lane) {
  if constexpr (LevelSums<F>::SQUARES) return sum_of_token<F>(sums.squares, lane);
  else return sum_of_token<F>(sums.sums, lane);
}
DEVICE float total_of_squares(u32 sum) { return mul_rn(i32_to_f32_rn((i32)sum), 4096.0f); }  // (128 / 2)^2; below 2^24
DEVICE float total_of_squares(i64 sum) { return i64_to_f32_rn(sum); }

template <class F, int PAGE_TOKENS> DEVICE void store_lloyd_codes(CodePlanes<F>& codes, u32 field, bool zero,
    const StoreArgs& args, int head, Slots slots, int lane, int part) {
  u8* pages = args.pages + head * args.page_head_stride;
  bool empty = zero || field == INVALID_FIELD;
  if (warp_any(empty))
    UNROLL_FOR (int j = 0; j < F::TOKENS; j++)
      if (shfl((u32)empty, token_of<F>(lane, j))) codes.each([&](auto& plane, int) { plane.erase_token(j); });
  store_planes<F, PAGE_TOKENS>(codes, field, pages, args.page_stride, slots, lane, part);
}

// The factor that turns sums of short integers into numbers of cells, in units of the smallest denormal float.
template <class F> DEVICE float cells_per_sum(const TokenScalars& s) {
  return mul_rn(s.factor, power_of_two(SHORT_SHIFT<F> + F::CELL_SHIFT - 149));
}

// Encodes the warp's slices i, i + PER, ... factor: one for each of the lane's tokens.
template <class F> DEVICE void encode_slices(const typename Digits<F>::Sum exact[F::GROUPS][8],
    const float factor[F::TOKENS], int i, CodePlanes<F>& codes, LevelSums<F>& sums, const LloydTables<F>& tables,
    const SideArgs& side) {
  UNROLL_FOR (int q = 0; q < F::GROUPS; q++) {
    u32 code[8];
    UNROLL_FOR (int n = 0; n < 8; n++) {
      if constexpr (F::SHORT)
        code[n] = tables.cells[ceil_product(exact[q][n], factor[token_number<F>(n)], F::CELL_ZERO)];
      else code[n] = code_of<F>(mul_rn(integer_of<F>(exact[q][n]), factor[token_number<F>(n)]), tables);
    }
    put_slice<F>(codes, sums, q * F::PER + i, i * F::GROUPS + q, code, tables, side);
  }
}

// The sum of squares over the SPLIT warps of a tile; this is warp ``part``. Also assembles words shared by warps.
template <class F> DEVICE auto sum_of_warps(CodePlanes<F>& codes, const LevelSums<F>& sums, u8* memory, int lane,
    int part) {
  auto sum = sum_of_squares<F>(sums, lane);
  if constexpr (F::SPLIT > 1) {
    auto* shared = (decltype(sum)*)memory;
    u32* words = (u32*)(shared + 16 * F::SPLIT);
    if (lane < 16) shared[part * 16 + lane] = sum;
    codes.leave(words, lane, part);
    sync_threads();
    codes.join(words, lane, part);
    sum = 0;
    UNROLL_FOR (int i = 0; i < F::SPLIT; i++) sum += shared[i * 16 + (lane & 15)];
  }
  return sum;
}

// Encodes and writes 16 tokens of one head, whose rows the warp has loaded. SPLIT warps share the tile; this is warp
// ``part``.
template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_lloyd_rows(const u32 raw[F::CHUNKS][2][F::RAW],
    const SideArgs& side, const StoreArgs& args, int head, int first, int part, Slots slots, u8* memory, int lane) {
  LloydTables<F> tables(memory);
  Digits<F> digits;
  typename Digits<F>::Sum exact[F::GROUPS][8];
  Fragments<F> matrix(side, 0, part * F::PER, lane);  // early, to hide the latency of the load
  u32 exponent = fixed_point<F>(raw, lane, digits);
  rotate_slices<F>(digits, side, part * F::PER, lane, exact,
      &matrix);  // first, to hide the latency of the norm
  TokenScalars scalars = scalars_of<F>(digits, exponent, side.unit, lane);
  float factor[F::TOKENS];
  UNROLL_FOR (int j = 0; j < F::TOKENS; j++)
    factor[j] = shfl(F::SHORT ? cells_per_sum<F>(scalars) : scalars.factor, token_of<F>(lane, j));
  CodePlanes<F> codes;
  LevelSums<F> sums;
  UNROLL_FOR (int i = 0; i < F::PER; i++) {
    if (i > 0) rotate_slices<F>(digits, side, F::SPLIT == 1 ? i : part * F::PER + i, lane, exact);
    encode_slices<F>(exact, factor, i, codes, sums, tables, side);
  }
  const auto sum = sum_of_warps<F>(codes, sums, memory + TILE_MEMORY<F>, lane, part);
  if constexpr (F::SPLIT == 1)
    slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);  // late, to save registers
  store_lloyd_codes<F, PAGE_TOKENS>(codes, field_of_token(scalars, total_of_squares(sum)), scalars.zero, args, head,
      slots, lane, part);
}

// As store_lloyd_rows, with one slice per warp and digits in shared memory.
template <class F, int PAGE_TOKENS> DEVICE void store_lloyd_slice(const SharedDigits<F>& digits,
    const SliceFragments<F>& matrix, const SideArgs& side, const StoreArgs& args, int head, int slice, Slots slots,
    u8* memory, int lane) {
  i32 exact[1][8];
  rotate_slice<F>(digits, matrix, lane, exact[0]);
  const TokenScalars scalars = scalars_of<F>(digits.squared[lane & 15], digits.exponents[lane & 15], side.unit);
  float factor[F::TOKENS];
  UNROLL_FOR (int j = 0; j < F::TOKENS; j++) factor[j] = shfl(scalars.factor, token_of<F>(lane, j));
  CodePlanes<F> codes;
  LevelSums<F> sums;
  encode_slices<F>(exact, factor, 0, codes, sums, LloydTables<F>(memory), side);
  const auto sum = sum_of_warps<F>(codes, sums, memory + TILE_MEMORY<F> + SharedDigits<F>::BYTES, lane, slice);
  const typename Choose<LevelSums<F>::WIDE, i64, decltype(sum)>::Type total = sum;
  store_lloyd_codes<F, PAGE_TOKENS>(codes, field_of_token(scalars, total_of_squares(total)), scalars.zero, args, head,
      slots, lane, slice);
}

// Few tokens: the warps of a thread block share a tile. Rows, slots and tables are loaded concurrently.
template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_lloyd_together(const SideArgs& side,
    const StoreArgs& args, int head, int first, u8* memory, int threads) {
  int lane = thread_index() & 31, part = thread_index() >> 5;
  LloydTables<F>(memory).fill(memory, side, thread_index(), threads);
  if constexpr (F::ONE_SLICE) {
    const SliceFragments<F> matrix(side, min_i32(part, F::SPLIT - 1), lane);
    const SharedDigits<F> digits(memory + TILE_MEMORY<F>);
    pdl_wait();
    const Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
    const bool mine = threads == 32 * F::SPLIT || part < F::SPLIT;
    if (mine) digits.fill(side, head, first, args.tokens, thread_index());
    cp_async_wait<0>();
    sync_threads();
    if (mine) store_lloyd_slice<F, PAGE_TOKENS>(digits, matrix, side, args, head, part, slots, memory, lane);
    else sync_threads();  // matches the barrier in the call above; a warp takes one branch as a whole
  } else {
    prefetch_rotation<F>(side, thread_index(), threads);
    pdl_wait();
    Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
    u32 raw[F::CHUNKS][2][F::RAW];
    load_rows<F>(side, head, first, args.tokens, lane, raw);
    cp_async_wait<0>();
    sync_threads();
    if (first < args.tokens && part < F::SPLIT)
      store_lloyd_rows<F, PAGE_TOKENS, SLOT>(raw, side, args, head, first, part, slots, memory, lane);
    else if constexpr (F::SPLIT > 1) sync_threads();  // likewise
  }
}

// Many tokens: every warp processes tiles ``tile``, ``tile`` + ``step``, ... and prefetches the rows of its next tile.
template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_lloyd_tiles(const SideArgs& side,
    const StoreArgs& args, int head, int tile, int step, u8* memory, int threads) {
  RowBuffer<F> rows(memory + TILE_MEMORY<F> + (thread_index() >> 5) * RowBuffer<F>::BYTES, side, head, 16 * tile,
      16 * step, thread_index() & 31);
  LloydTables<F>(memory).fill(memory, side, thread_index(), threads);
  prefetch_rotation<F>(side, thread_index(), threads);
  pdl_wait();
  rows.fetch(side, 16 * tile, args.tokens, thread_index() & 31);
  cp_async_wait<1>();  // waits for tables, not for rows
  sync_threads();
#pragma unroll 1
  for (; 16 * tile < args.tokens; tile += step) {
    u32 raw[F::CHUNKS][2][F::RAW];
    int lane = read_laneid();
    rows.take(side, head, 16 * tile, args.tokens, lane, raw);
    rows.fetch(side, 16 * (tile + step), args.tokens, lane);
    store_lloyd_rows<F, PAGE_TOKENS, SLOT>(raw, side, args, head, 16 * tile, 0, Slots(), memory, lane);
  }
  cp_async_wait<0>();
}
