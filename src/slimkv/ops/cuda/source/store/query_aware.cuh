// Query-aware rounding of keys (see slimkv.codec.query_aware): coordinates from the last to the first, each corrected for the
// errors made so far. A warp takes 32 tokens. Errors of later slices correct a slice by products of bytes on the tensor
// cores; within a slice every lane has a token of its own, and its 16 coordinates one after the other. That is one long chain
// of dependent steps, so a second warp does what it can beside it: it rotates and packs 16 of the 32 tokens, and stores values
// while the first one rounds.
//
// A search under SEARCH scales has as many lanes for each token, next to each other, and takes the warp's tokens in SEARCH
// rounds of 32 / SEARCH. Each lane is a row of its own, with errors of its own; codes are bytes of the token's word.
#pragma once
#include "store/lloyd.cuh"

constexpr int ROUNDS = SEARCH > 0 ? SEARCH : 1;

template <class F> constexpr int WEIGHT_STRIDE = F::D + (SHARED_WEIGHTS ? 16 : 0);  // bytes of a matrix's row, where it is read
constexpr bool OWN_WEIGHTS = SHARED_WEIGHTS || SEARCH == 0;  // is what slices have of themselves? A search has no room for it.
// Is a slice corrected by the next one lane by lane? Its errors are in registers still, and nothing waits for it; it takes weights of which
// many are near. Else all that later slices add is summed by the tensor cores.
constexpr bool AHEAD = SHARED_WEIGHTS;
DEVICE u32 load_weight_word(const u8* p) { return SHARED_WEIGHTS ? *(const u32*)p : ldg_word(p); }

// Without a search, codes are left in memory packed: those of a token's slice are two words of nibbles, or four of bytes.
constexpr bool PACKED_CODES = SEARCH == 0;
template <class F> constexpr int CODE_WORDS = F::BITS <= 4 ? 2 : 4;

template <class F> struct QueryAwareMemory {
  // Words from token to token, of each kind: lanes that load 16 bytes of a token each do not meet in a bank.
  static constexpr int STRIDE = F::D + 4, SUM_STRIDE = 20, ERROR_STRIDE = PACKED_CODES ? STRIDE : F::D / 4 + 4;
  static constexpr int NUMBERS = 32 * STRIDE * 4, SUMS = (AHEAD ? 2 : 1) * 32 * SUM_STRIDE * 4, ERRORS = PACKED_CODES ? 0 : 32 * ERROR_STRIDE * 4;
  static constexpr int OWN = OWN_WEIGHTS && !SHARED_WEIGHTS ? 16 * F::D : 0, BYTES = NUMBERS + SUMS + ERRORS + OWN;
  static constexpr int MATRIX = SHARED_WEIGHTS ? F::D * WEIGHT_STRIDE<F> : 0;  // of the block
  float* numbers;  // [32][STRIDE]: coordinates in the codebook's units, then codes
  i32* sums;       // [32][SUM_STRIDE], AHEAD twice: corrections of a slice by later ones, in steps
  u8* weights;     // [D][16]: of the matrix, what slices have of themselves; [D][WEIGHT_STRIDE]: all of it
  // ``block``: the memory of all pairs, of which this is the ``number``-th.
  DEVICE_MEMBER QueryAwareMemory(u8* block, int number)
      : numbers((float*)(block + MATRIX + number * BYTES)), sums((i32*)((u8*)numbers + NUMBERS)),
        weights(SHARED_WEIGHTS ? block : (u8*)sums + SUMS + ERRORS) {}
  // The errors of a row's slice when it is done, 16 signed bytes: behind codes, where its coordinates were, or apart.
  DEVICE_MEMBER u32* errors(int row, int slice) const {
    if constexpr (PACKED_CODES) return (u32*)numbers + row * STRIDE + 16 * slice + 4;
    else return (u32*)sums + SUMS / 4 + row * ERROR_STRIDE + 4 * slice;
  }
  // For the threads of a pair.
  DEVICE_MEMBER void copy_weights(const u8* from, int thread, int threads) const {
    if constexpr (OWN > 0)
#pragma unroll 1
      for (int i = thread; i < F::D; i += threads) cp_async_16(weights + 16 * i, from + i * F::D + i / 16 * 16);
    cp_async_commit();
  }
  // For those of the block.
  DEVICE_MEMBER static void copy_matrix(u8* block, const u8* from, int thread, int threads) {
    if constexpr (MATRIX > 0)
#pragma unroll 1
      for (int i = thread; i < F::D * F::D / 16; i += threads)
        cp_async_16(block + 16 * i / F::D * WEIGHT_STRIDE<F> + 16 * i % F::D, from + 16 * i);
    cp_async_commit();
  }
  // Of row i, what slice s has: its own or, AHEAD, the next one. matrix: as load_weight_word takes it; at: of ``weights``.
  DEVICE_MEMBER static Words4 near_weights(const u8* matrix, u32 at, int i, int s) {
    if constexpr (SHARED_WEIGHTS) return ld_shared_constant_16(at + i * WEIGHT_STRIDE<F> + 16 * min_i32(s, F::D / 16 - 1));
    else if constexpr (OWN_WEIGHTS) return ld_shared_constant_16(at + 16 * i);
    else return ldg_cached(matrix + i * F::D + 16 * s);
  }
};

// Levels times error_steps, behind the other tables: up to 4 bits by cell, so that one look-up leads to the next coordinate, else by code.
template <class F> struct ScaledLevels {
  static constexpr bool BY_CELL = F::BITS <= 4;
  static constexpr int TABLE_BYTES = (LloydTables<F>::BYTES + 4 * (BY_CELL ? F::CELLS : 1 << F::BITS) + 15) / 16 * 16;
  u8* levels;

  DEVICE_MEMBER ScaledLevels(u8* memory) : levels(memory + LloydTables<F>::BYTES) {}
  DEVICE_MEMBER void fill(const SideArgs& side, float error_steps, int thread, int threads) const {
    if constexpr (BY_CELL) {
#pragma unroll 1
      for (int i = thread; i < F::CELLS / 4; i += threads) cp_async_16(levels + 16 * i, side.cells + LloydTables<F>::CELL_BYTES + 16 * i);
      cp_async_commit();
    } else
#pragma unroll 1
      for (int i = thread; i < 1 << F::BITS; i += threads)
        ((float*)levels)[i] = mul_rn(i32_to_f32_rn(side.levels[i]), mul_rn(error_steps, 1.0f / 128));
  }
  // The level less x, times error_steps, rounded once: error_steps is a power of two, and so are products with it exact.
  DEVICE_MEMBER float error(float x, float error_steps, u32 cell, u32 code) const {
    return fma_rn(x, -error_steps, ((const float*)levels)[BY_CELL ? cell : code]);
  }
};

// What errors of later slices add to slice s, 32 tokens by 16 coordinates, as the tensor cores have it. Two slices are summed at a
// time, in the middle of slice s + 1: AHEAD those from s + 2 on, so that the sums are there when slice s begins; else those that were
// done when slice s + 1 began, but for an odd one, and the rest at its end. Nothing of that is a branch, so that it goes on beside
// the rounding: of slices that do not count, weights are zeros.
template <class F> struct LaterErrors {
  static constexpr int SLICES = F::D / 16, STEPS = (SLICES + 1) / 2;
  static constexpr int FIRST_AT = AHEAD ? 10 : 6;  // the coordinate of slice s + 1 with which it begins: weights have come from far by then
  i32 c[2][2][4];      // tiles of 16 tokens, halves of the slice
  u32 b[STEPS][2][2];  // halves of the slice, slices 2 k and 2 k + 1
  u32 last[2][2];      // the same of s + 1 and s + 2

  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int i = 0; i < 16; i++) c[i >> 3][i >> 2 & 1][i & 3] = 0;
  }
  DEVICE_MEMBER void load(const u8* weights, int s, int lane) {
    const u8* rows = weights + (16 * max_i32(s, 0) + (lane >> 2)) * WEIGHT_STRIDE<F> + 4 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u8* half = rows + 8 * (i >> 1) * WEIGHT_STRIDE<F>;
      if (!AHEAD) last[i >> 1][i & 1] = load_weight_word(half + 16 * min_i32(s + 1 + (i & 1), SLICES - 1));
#pragma unroll
      for (int k = 1; k < STEPS; k++) b[k][i >> 1][i & 1] = 2 * k + (i & 1) < SLICES ? load_weight_word(half + 32 * k + 16 * (i & 1)) : 0;
    }
  }
  DEVICE_MEMBER void add(const QueryAwareMemory<F>& memory, int slice, const u32 weights[2][2], int lane) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const int row = 16 * tile + (lane >> 2), t = lane & 3, second = min_i32(slice + 1, SLICES - 1);
      const u32 a0 = memory.errors(row, slice)[t], a1 = memory.errors(row + 8, slice)[t];
      const u32 a2 = memory.errors(row, second)[t], a3 = memory.errors(row + 8, second)[t];
#pragma unroll
      for (int h = 0; h < 2; h++) mma_s8_s8(c[tile][h], a0, a1, a2, a3, weights[h][0], weights[h][1]);
    }
  }
  DEVICE_MEMBER void add_step(const QueryAwareMemory<F>& memory, int s, int k, int lane) {
    u32 weights[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i >> 1][i & 1] = (AHEAD ? 2 * k + (i & 1) : 2 * k) >= s + 2 ? b[k][i >> 1][i & 1] : 0;
    add(memory, 2 * k, weights, lane);
  }
  // A quarter of the sums.
  DEVICE_MEMBER void store(const QueryAwareMemory<F>& memory, int quarter, i32* to, int lane) const {
    const int g = lane >> 2, t = lane & 3, tile = quarter >> 1, half = quarter & 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
      *(Words2*)(to + (16 * tile + g + 8 * i) * memory.SUM_STRIDE + 8 * half + 2 * t) = {(u32)c[tile][half][2 * i], (u32)c[tile][half][2 * i + 1]};
  }
  // The part of it that goes with coordinate n of slice s + 1.
  DEVICE_MEMBER void go_on(const QueryAwareMemory<F>& memory, int s, int n, i32* to, int lane) {
    static_assert(STEPS <= 8, "sums are there when they are stored");
    if (n == FIRST_AT) clear();
    if constexpr (AHEAD) {
      const int k = FIRST_AT + 1 - n;
      if (k >= 1 && k < STEPS) add_step(memory, s, k, lane);
      if (n < 4) store(memory, 3 - n, to, lane);
    } else if (n == FIRST_AT)
#pragma unroll
      for (int k = 1; k < STEPS; k++) add_step(memory, s, k, lane);
  }
  // The rest, if not AHEAD.
  DEVICE_MEMBER void end(const QueryAwareMemory<F>& memory, int s, i32* to, int lane) {
    if (SEARCH > 0 || s + 1 < SLICES) {  // the branch saves the first slice's share, and a search is better without
#pragma unroll
      for (int h = 0; h < 2; h++) last[h][1] = s % 2 == 1 && s + 2 < SLICES ? last[h][1] : 0;
      add(memory, min_i32(s + 1, SLICES - 1), last, lane);
    }
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++) store(memory, quarter, to, lane);
  }
};

// Replaces the coordinates of a token for each lane, whose column is ``token``, by codes; of those that are not ``mine``,
// nothing changes. With a search the coordinates are taken times ``scale`` and the codes are byte number ``lane`` % SEARCH;
// returns the sum of squared distances from the targets.
template <class F> DEVICE float round_query_aware(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables, const ScaledLevels<F>& levels, const u8* weights,
                                            float error_steps, float scale, int token, bool mine, int lane) {
  constexpr float LIMIT = (float)(F::CELL_ZERO - 2) / (1 << F::CELL_SHIFT);  // beyond the last boundary, within the cells
  float back = div_rn(1.0f / 64, error_steps);  // a power of two
  float cost = 0.0f;
  LaterErrors<F> sums = {};
  const u32 near = settled(shared_address(memory.weights));
  u32 errors[4] = {};
  i32 *here = memory.sums, *ahead = AHEAD ? memory.sums + 32 * memory.SUM_STRIDE : here;
  if (AHEAD)
#pragma unroll
    for (int i = 0; i < 4; i++) *(Words4*)(here + lane * memory.SUM_STRIDE + 4 * i) = {0, 0, 0, 0};
#pragma unroll 1
  for (int s = F::D / 16 - 1; s >= 0; s--) {
    float* own = memory.numbers + token * memory.STRIDE + 16 * s;
    // Nothing is stored before the slice is done, but sums at its end: the compiler would not load what comes next before that.
    float numbers[16];
    i32 later[16];
    u32 codes[16], packed[CODE_WORDS<F>] = {};
    auto load_numbers = [&] {
#pragma unroll
      for (int i = 3; i >= 0; i--) {
        const Words4 x = *(const Words4*)(own + 4 * i);
        numbers[4 * i] = as_float(x.x), numbers[4 * i + 1] = as_float(x.y), numbers[4 * i + 2] = as_float(x.z), numbers[4 * i + 3] = as_float(x.w);
      }
    };
    if constexpr (SEARCH > 0) {  // before another lane of this token puts a code there
      load_numbers();
#pragma unroll
      for (int n = 0; n < 16; n++) numbers[n] = mul_rn(numbers[n], scale);
    }
    if constexpr (!AHEAD) sums.end(memory, s, here, lane);
    sync_warp();
    if constexpr (AHEAD) sums.load(weights, s - 1, lane);
#pragma unroll
    for (int i = 3; i >= 0; i--) {
      const Words4 four = *(const Words4*)(here + lane * memory.SUM_STRIDE + 4 * i);
      later[4 * i] = (i32)four.x, later[4 * i + 1] = (i32)four.y, later[4 * i + 2] = (i32)four.z, later[4 * i + 3] = (i32)four.w;
    }
    if constexpr (SEARCH == 0) load_numbers();
    if constexpr (!AHEAD) sums.load(weights, s - 1, lane);
    const u32 before[4] = {errors[0], errors[1], errors[2], errors[3]};  // of the next slice
    errors[0] = errors[1] = errors[2] = errors[3] = 0;  // without the newest, which is a float
    float newest = 0.0f;
    u32 newest_byte = 0;
    Words4 own_weights = memory.near_weights(weights, near, 16 * s + 15, s), next_weights = {};
    if (AHEAD) next_weights = memory.near_weights(weights, near, 16 * s + 15, s + 1);
#pragma unroll
    for (int n = 15; n >= 0; n--) {
      const Words4 v = next_weights, w = own_weights;
      if (n > 0) {  // before anything is stored
        own_weights = memory.near_weights(weights, near, 16 * s + n - 1, s);
        if (AHEAD) next_weights = memory.near_weights(weights, near, 16 * s + n - 1, s + 1);
      }
      i32 older = later[n];
      if (AHEAD) older = dp4a_s8(before[0], v.x, dp4a_s8(before[1], v.y, dp4a_s8(before[2], v.z, dp4a_s8(before[3], v.w, older))));
      if (n < 14) older = dp4a_s8(errors[3], w.w, older);
      if (n < 10) older = dp4a_s8(errors[2], w.z, older);
      if (n < 6) older = dp4a_s8(errors[1], w.y, older);
      if (n < 2) older = dp4a_s8(errors[0], w.x, older);
      // Only the newest error is waited for: its product joins a float that is an integer below 2^24.
      float total = i32_to_f32_rn(older);
      if (n < 15) {
        const u32 word = n < 3 ? w.x : n < 7 ? w.y : n < 11 ? w.z : w.w;
        total = fma_rn(newest, i32_to_f32_rn((i32)(word << (24 - 8 * ((n + 1) % 4))) >> 24), total);
        errors[(n + 1) / 4 % 4] = prmt(errors[(n + 1) / 4 % 4], newest_byte, n % 4 == 3 ? 0x3214 : n % 4 == 0 ? 0x3240 : n % 4 == 1 ? 0x3410 : 0x4210);
      }
      float x = numbers[n];
      float target = fma_rn(total, -back, x), within = min_f32(target, LIMIT);  // below, cells end by themselves
      const u32 cell = cell_from_below<F>(within);
      // The level first: the next coordinate waits for it. Of more than 4 bits it is looked up by code.
      if constexpr (!ScaledLevels<F>::BY_CELL) codes[n] = code_of_cell<F>(cell, within, tables);
      float unlimited = levels.error(x, error_steps, cell, codes[n]), error = min_f32(max_f32(unlimited, -127.0f), 127.0f);
      if constexpr (ScaledLevels<F>::BY_CELL) codes[n] = code_of_cell<F>(cell, within, tables);
      packed[n * CODE_WORDS<F> / 16] += codes[n] << (2 * CODE_WORDS<F> * n % 32);
      const float rounded = add_rn(error, 12582912.0f);
      newest = sub_rn(rounded, 12582912.0f);
      newest_byte = as_bits(rounded);
      if constexpr (SEARCH > 0) {
        float distance = levels.error(target, error_steps, cell, codes[n]);
        cost = add_rn(cost, mul_rn(distance, distance));
      }
      sums.go_on(memory, s - 1, n, ahead, lane);
    }
    errors[0] = prmt(errors[0], newest_byte, 0x3214);
    if (mine) {
      if constexpr (SEARCH > 0)
#pragma unroll
        for (int n = 0; n < 16; n++) ((u8*)(own + n))[lane % ROUNDS] = (u8)codes[n];
      else if constexpr (CODE_WORDS<F> == 2) *(Words2*)own = {packed[0], packed[1]};
      else *(Words4*)own = {packed[0], packed[1], packed[2], packed[3]};
      *(Words4*)memory.errors(lane, s) = {errors[0], errors[1], errors[2], errors[3]};
    }
    if constexpr (AHEAD) {
      i32* const swapped = here;
      here = ahead, ahead = swapped;
    } else sync_warp();
  }
  return cost;
}

// With every matrix that the lanes' tokens ask for; see round_query_aware. index: which one the lane's token takes; only:
// the one that it is for where matrices are spread over blocks. loaded: the one of which memory has weights.
template <class F> DEVICE float round_with_matrices(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables, const ScaledLevels<F>& levels,
                                                    const StoreArgs& args, int head, int index, int only, int& loaded, float scale, int token, int lane) {
  const u8* weights = args.query_aware + (i64)head * F::D * F::D;
  if constexpr (SHARED_WEIGHTS) return round_query_aware<F>(memory, tables, levels, memory.weights, args.error_steps, scale, token, true, lane);
  if constexpr (QUERY_AWARE == 1) return round_query_aware<F>(memory, tables, levels, weights, args.error_steps, scale, token, true, lane);
  float cost = 0.0f;
  int end = args.spread ? only + 1 : args.matrices;
#pragma unroll 1
  for (int matrix = args.spread ? only : 0; matrix < end; matrix++) {  // 32 neighbours nearly always share one
    if (!warp_any(index == matrix)) continue;
    if (OWN_WEIGHTS && !SHARED_WEIGHTS && matrix != loaded) {
      sync_warp();
      memory.copy_weights(weights + matrix * args.matrix_stride, lane, 32);
      cp_async_wait<0>();
      sync_warp();
      loaded = matrix;
    }
    bool mine = args.spread || index == matrix;
    float found = round_query_aware<F>(memory, tables, levels, weights + matrix * args.matrix_stride, args.error_steps, scale, token, mine, lane);
    if (mine) cost = found;
  }
  return cost;
}

// The rounds of a search, or the one numbered ``only_round``; returns the number of the best scale of token ``lane``, the
// first one of equals.
template <class F> DEVICE int search_scales(const QueryAwareMemory<F>& memory, const LloydTables<F>& tables, const ScaledLevels<F>& levels, const StoreArgs& args,
                                            int head, int index, int only, int& loaded, int only_round, int lane) {
  constexpr int TOKENS = 32 / ROUNDS;
  int best = 0, own = lane % ROUNDS;
  float scale = args.search_scales[own], weight = args.search_weights[own];
#pragma unroll 1
  for (int round = only_round < 0 ? 0 : only_round; round < (only_round < 0 ? ROUNDS : only_round + 1); round++) {
    int token = round * TOKENS + lane / ROUNDS;
    float cost = mul_rn(round_with_matrices<F>(memory, tables, levels, args, head, shfl(index, token), only, loaded, scale, token, lane), weight);
    int number = own;
#pragma unroll
    for (int step = 1; step < ROUNDS; step *= 2) {
      float other = shfl_xor(cost, step);
      int its = shfl_xor(number, step);
      if (other < cost || (other == cost && its < number)) cost = other, number = its;
    }
    number = shfl(number, lane % TOKENS * ROUNDS);
    if (lane / TOKENS == round) best = number;
  }
  return best;
}

// Digits and scalars of a tile of 16 tokens.
template <class F> DEVICE TokenScalars prepare_tile(const u32 raw[F::CHUNKS][2][F::RAW], const SideArgs& side, int lane, Digits<F>& digits) {
  u32 exponent = fixed_point<F>(raw, lane, digits);
  return scalars_of<F>(digits, exponent, side.unit, lane);
}

template <class F> DEVICE void coordinates_of_tile(const Digits<F>& digits, const TokenScalars& scalars, const SideArgs& side,
                                                   const QueryAwareMemory<F>& memory, int tile, int lane) {
  float factor[2] = {shfl(scalars.factor, lane >> 2), shfl(scalars.factor, (lane >> 2) + 8)};
#pragma unroll
  for (int i = 0; i < F::PER; i++) {
    typename Digits<F>::Sum exact[F::GROUPS][8];
    rotate_slices<F>(digits, side, i, lane, exact);
#pragma unroll
    for (int q = 0; q < F::GROUPS; q++)
#pragma unroll
      for (int n = 0; n < 8; n += 2) {  // neighbours
        const int token = token_number<F>(n);
        *(Words2*)(memory.numbers + (16 * tile + token_of<F>(lane, token)) * memory.STRIDE + 16 * (q * F::PER + i) + dim_of<F>(lane, n)) =
            {as_bits(mul_rn(integer_of<F>(exact[q][n]), factor[token])), as_bits(mul_rn(integer_of<F>(exact[q][n + 1]), factor[token]))};
      }
  }
}

template <class F, int PAGE_TOKENS, class SLOT> DEVICE void store_codes_of_tile(const SideArgs& side, const StoreArgs& args, int head, int first,
                                                                                 TokenScalars scalars, bool keep, int best, const LloydTables<F>& tables,
                                                                                 const QueryAwareMemory<F>& memory, int tile, int lane) {
  Slots slots = load_slots<SLOT>(args.slots, first, args.tokens, lane);
  if (!keep) slots.slot = -1;
  slots.aligned = slots.aligned && !warp_any(!keep);
  CodePlanes<F> codes;
  LevelSums<F> sums;
  Digits<F> digits;
  if constexpr (F::POLICY == UNBIASED) {
    u32 raw[F::CHUNKS][2][F::RAW];
    load_rows<F>(side, head, first, args.tokens, lane, raw);
    prepare_tile<F>(raw, side, lane, digits);
  }
  int shift[2] = {};  // of the best scale's code, in the words of the lane's tokens
  if constexpr (SEARCH > 0)
#pragma unroll
    for (int j = 0; j < 2; j++) shift[j] = 8 * shfl(best, token_of<F>(lane, j));
#pragma unroll
  for (int i = 0; i < F::PER; i++) {
    typename Digits<F>::Sum exact[F::GROUPS][8] = {};
    if constexpr (F::POLICY == UNBIASED) rotate_slices<F>(digits, side, i, lane, exact);
#pragma unroll
    for (int q = 0; q < F::GROUPS; q++) {
      u32 code[8];
      float rotated[8];
      int slice = q * F::PER + i;
      if constexpr (PACKED_CODES) {  // of each token two neighbours, and two more eight dimensions on
        constexpr int BYTES = CODE_WORDS<F> / 2;  // of two neighbours
        const u8* at = (const u8*)(memory.numbers + (16 * tile + (lane >> 2)) * memory.STRIDE + 16 * slice) + (lane & 3) * BYTES;
        u32 low = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u8* two = at + (j & 1) * 4 * BYTES + 4 * 8 * memory.STRIDE * (j >> 1);
          if constexpr (BYTES == 1) low += (u32)*two << (8 * j);
          else code[2 * j] = two[0], code[2 * j + 1] = two[1];
        }
        if constexpr (BYTES == 1 && (LevelSums<F>::PACKED || F::POLICY == PLAIN)) {
          put_nibbles<F>(codes, sums, slice, i * F::GROUPS + q, low, side);
          continue;
        }
        if constexpr (BYTES == 1)
#pragma unroll
          for (int n = 0; n < 8; n++) code[n] = low >> (4 * n) & 15;
      }
#pragma unroll
      for (int n = 0; n < 8; n++) {
        if constexpr (!PACKED_CODES)
          code[n] = as_bits(memory.numbers[(16 * tile + token_of<F>(lane, token_number<F>(n))) * memory.STRIDE + 16 * slice + dim_of<F>(lane, n)]);
        if constexpr (SEARCH > 0) code[n] = code[n] >> shift[token_number<F>(n)] & ((1 << F::BITS) - 1);  // those of other rounds are no codes
        rotated[n] = integer_of<F>(exact[q][n]);
      }
      put_slice<F>(codes, sums, slice, i * F::GROUPS + q, code, rotated, tables, side);
    }
  }
  u32 field = field_of_token<F>(scalars, policy_total(policy_sum<F>(sums, lane)), side);
  store_lloyd_codes<F, PAGE_TOKENS>(codes, field, scalars.zero, args, head, slots, lane, 0);
}

// The tables of a block whose warps store keys.
template <class F> DEVICE void fill_query_aware_tables(const SideArgs& side, const StoreArgs& args, int head, int matrix, u8* shared, int threads) {
  QueryAwareMemory<F>::copy_matrix(shared + ScaledLevels<F>::TABLE_BYTES, args.query_aware + (i64)head * F::D * F::D + matrix * args.matrix_stride,
                                   thread_index(), threads);
  LloydTables<F>(shared).fill(shared, side, thread_index(), threads);
  ScaledLevels<F>(shared).fill(side, args.error_steps, thread_index(), threads);
}

// Encodes and writes 32 keys of one head with two warps and the ``number``-th part of the block's memory: where matrices are
// spread over blocks those of them that take matrix ``only``, and where rounds are those of ``only_round``. Each warp has a tile
// of 16, of which ``raw`` are the rows; warp 0 rounds all of them, while warp 1 does ``meanwhile``.
template <class F, int PAGE_TOKENS, class SLOT, class Work> DEVICE void store_query_aware(const SideArgs& side, const StoreArgs& args, int head, int only, int only_round,
                                                                                          int first, const u32 raw[F::CHUNKS][2][F::RAW], u8* shared, int number, int warp, Work meanwhile) {
  constexpr int ROUND_TOKENS = 32 / ROUNDS;
  int lane = thread_index() & 31, index = 0;
  constexpr bool SEVERAL = QUERY_AWARE > 1;
  const bool spread = SEVERAL && args.spread;
  bool none = first + max_i32(only_round, 0) * ROUND_TOKENS >= args.tokens;
  if (!none && SEVERAL && args.query_aware_index != nullptr)
    index = min_i32(max_i32(args.query_aware_index[min_i32(first + lane, args.tokens - 1)], 0), args.matrices - 1);
  none = none || (spread && !warp_any(index == only));  // the same for both
  LloydTables<F> tables(shared);
  ScaledLevels<F> levels(shared);
  QueryAwareMemory<F> memory(shared + ScaledLevels<F>::TABLE_BYTES, number);
  int loaded = !SEVERAL ? 0 : spread ? only : shfl(index, 0);
  TokenScalars scalars;
  if (!none) {
    memory.copy_weights(args.query_aware + (i64)head * F::D * F::D + (SEVERAL ? loaded * args.matrix_stride : 0), 32 * warp + lane, 64);
    Digits<F> digits;
    scalars = prepare_tile<F>(raw, side, lane, digits);
    coordinates_of_tile<F>(digits, scalars, side, memory, warp, lane);
  }
  cp_async_wait<0>();
  sync_threads();  // for the block's tables, too
  if (warp) meanwhile();
  else if (!none) {
    if constexpr (SEARCH > 0) {
      const int best = search_scales<F>(memory, tables, levels, args, head, index, only, loaded, only_round, lane);
      sync_warp();
      memory.sums[lane] = best;
    } else round_with_matrices<F>(memory, tables, levels, args, head, index, only, loaded, 1.0f, lane, lane);
  }
  if (none) return;
  sync_team(1 + number, 64);
  const int from = 16 * warp + (lane & 15);
  const bool keep = (!spread || shfl(index, from) == only) && (only_round < 0 || from / ROUND_TOKENS == only_round);
  const int best = SEARCH > 0 ? memory.sums[from] : 0;
  if (first + 16 * warp < args.tokens)
    store_codes_of_tile<F, PAGE_TOKENS, SLOT>(side, args, head, first + 16 * warp, scalars, keep, best, tables, memory, warp, lane);
}
