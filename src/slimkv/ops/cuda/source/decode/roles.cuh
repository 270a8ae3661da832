// Many columns by pairs of warpgroups on sm_90a: one makes scores and probabilities, the other multiplies values with them. What one
// waits for is hidden behind what the other does, and neither holds the other's registers.
//
// Slots of a pair's ring are whole steps. The warpgroup of values is the last to need one, so its first warp fills it again. Probabilities
// go through two buffers with a barrier each for being there and for having been used.
#pragma once
#include "decode/combine.cuh"
#include "decode/loader.cuh"
#include "decode/scores.cuh"
#include "decode/values.cuh"

constexpr int KEY_REGISTERS = NG == 5 ? 144 : 136;  // of the 256 that a thread of each role have together

// What a pair of warpgroups shares.
struct PairMemory {
  u8 *ring, *weights;
  float* factors;  // of two steps: COLUMNS, and whether they are to be used
  u64 *full, *published, *used;

  // `kept`: in registers of each lane. What the compiler can compute anew are instructions of every step.
  DEVICE_MEMBER PairMemory(u8* shared, int pair, int lane, bool kept) {
    auto at = [&](int offset) { return shared + (kept ? (int)in_register((u32)offset, lane) : offset); };
    ring = at(RINGS_AT + pair * STAGES * SLOT);
    weights = at(TEAM_WEIGHTS_AT + pair * 2 * OWN_TILES * OPERAND_BYTES);
    factors = (float*)at(FACTORS_AT + pair * 2 * (COLUMNS + 2) * 4);
    full = (u64*)at(BARRIERS_AT + pair * BARRIERS * 8);
    published = (u64*)at(PAIR_BARRIERS_AT + pair * 4 * 8);
    used = published + 2;
  }
  // Of the step with this number, counted over all ranges.
  DEVICE_MEMBER u8* slot(u32 number) const { return ring + number % STAGES * SLOT; }
  DEVICE_MEMBER u8* weights_of_step(u32 number) const { return weights + (number & 1) * OWN_TILES * OPERAND_BYTES; }
  DEVICE_MEMBER float* factors_of(u32 number) const { return factors + (number & 1) * (COLUMNS + 2); }
  DEVICE_MEMBER void wait_for_copy(u32 number) const { mbarrier_wait(full + number % STAGES, number / STAGES & 1); }
  DEVICE_MEMBER void wait_until_published(u32 number) const { mbarrier_wait(published + (number & 1), number >> 1 & 1); }
  DEVICE_MEMBER void wait_until_used(u32 number) const { mbarrier_wait(used + (number & 1), number >> 1 & 1); }  // -1, -2: at once
};

// All probabilities of a step are there, and whether the output is to be rescaled for them.
DEVICE void end_publishing(const PairMemory& memory, const Team& pair, int lane, u32 taken, bool rescales, const Weighing& weighing, Accumulator& acc) {
  if (pair.member == 0 && lane == 0) {
    memory.factors_of(taken)[COLUMNS] = rescales ? 1.0f : 0.0f;
    mbarrier_arrive(memory.published + (taken & 1));
  }
#pragma unroll
  for (int c = 0; c < C; c++) acc.row_sum[c] += weighing.sum[c], acc.shift[c] += weighing.shift[c];
}

// Scores and probabilities of the pair's steps of a range.
DEVICE void attend_keys(const DecodeArgs& args, const WorkRange& range, u8* shared, const PairMemory& memory, const Team& pair,
                        const ColumnState& columns, const LevelTables& tables, int lane, u32& taken, Accumulator& acc) {
  const int g = lane >> 2, t = lane & 3, key_offset = keys_of(pair.member), field_offset = fields_of(pair.member) - FIELDS_AT;
  // Fields of all own tiles, a word of each lane; what is kept for the loop must not be computed again in it.
  constexpr int WORDS = 8 * OWN_TILES * FIELDS;
  const auto word_offset = [&](int word) { return field_offset + fields_of(TILES_APART * (word / (8 * FIELDS))) + FIELD_STRIDE * (word / 8 % FIELDS) + 4 * (word % 8); };
  const int own_fields = (int)in_register(field_offset + 2 * g, lane), own_word = (int)in_register(word_offset(WORDS < 32 ? lane % WORDS : lane), lane);
  for (int step = range.first + pair.number; step < range.last; step += RINGS, taken++) {
    u8 *slot = memory.slot(taken), *fields = slot + field_offset, *operands = memory.weights_of_step(taken);
    memory.wait_for_copy(taken);
    KeyOperands keys;
    keys.load(slot + key_offset, tables, lane);
    const int step_token = range.s.begin + step * STEP, token0 = step_token + 16 * pair.member;
    const bool clear = step_token + STEP <= columns.clear_end && step_token >= columns.clear_begin;
    StepScores s;
    TokenFields tokens;
    load_token_fields(slot + own_fields, columns, tokens);
    tokens.largest = *(const u32*)(slot + own_word);
#pragma unroll
    for (int i = 32; i < WORDS; i += 32)
      if (i + 32 <= WORDS || i + lane < WORDS) tokens.largest = max_u16x2(tokens.largest, *(const u32*)(slot + word_offset(i + lane)));
    auto score = [&] {
      keys.multiply(shared, tables, s);
      if (!TOKEN_UNITS) scale_scores(args, fields, columns, g, s);
      if (clear) acc.largest_fields = max_u16x2(acc.largest_fields, tokens.largest);
      else hide_tokens(fields, shared, token0, lane, s);
    };
    score();
    memory.wait_until_used(taken - 2);
    Weighing weighing;
    const bool moves = publish_to_warpgroup<false>(s, fields, columns, tokens, operands, pair, lane, acc, weighing);
    fence_proxy_async();  // before products read it
    const bool again = pair.any(moves);
    bool rescales = false;
    if (again) {
      keys.load(slot + key_offset, tables, lane);
      score();
      rescales = update_max(fields, columns, g, t, s, true, pair, (float*)(shared + STATE_AT), memory.factors_of(taken), tokens, acc);
      publish_to_warpgroup<true>(s, fields, columns, tokens, operands, pair, lane, acc, weighing);
      fence_proxy_async();
      pair.sync();
    }
    end_publishing(memory, pair, lane, taken, rescales, weighing, acc);
  }
}

// The same of so many columns that scores of one tile at a time are all that registers hold, and the reference is in shared memory.
DEVICE void attend_keys_by_tiles(const DecodeArgs& args, const WorkRange& range, u8* shared, const PairMemory& memory, const Team& pair,
                                 const ColumnState& columns, const LevelTables& tables, int lane, u32& taken, Accumulator& acc) {
  const int g = lane >> 2, t = lane & 3, key_offset = keys_of(pair.member), field_offset = fields_of(pair.member) - FIELDS_AT;
  constexpr int WORDS = 8 * OWN_TILES * FIELDS;
  const auto word_offset = [&](int word) { return field_offset + fields_of(TILES_APART * (word / (8 * FIELDS))) + FIELD_STRIDE * (word / 8 % FIELDS) + 4 * (word % 8); };
  const int own_fields = (int)in_register(field_offset + 2 * g, lane), own_word = (int)in_register(word_offset(WORDS < 32 ? lane % WORDS : lane), lane);
  float* const references = references_of(shared, pair.number * TEAM + pair.member, t);
#pragma unroll
  for (int c = 0; c < C; c++) references[own_column(c, 0)] = MINUS_INFINITY;
  for (int step = range.first + pair.number; step < range.last; step += RINGS, taken++) {
    u8 *slot = memory.slot(taken), *operands = memory.weights_of_step(taken);
    memory.wait_for_copy(taken);
    KeyOperands keys;
    keys.load(slot + key_offset, tables, lane);
    const int step_token = range.s.begin + step * STEP;
    const bool clear = step_token + STEP <= columns.clear_end && step_token >= columns.clear_begin;
    TokenFields tokens;
    StepScores s;
    Weighing weighing;
    const u32 place = begin_publishing<false>(operands, pair, lane, acc, weighing);
    if (clear)
#pragma unroll
      for (int i = 0; i < WORDS; i += 32)
        if (i + 32 <= WORDS || i + lane < WORDS) acc.largest_fields = max_u16x2(acc.largest_fields, *(const u32*)(slot + (i ? word_offset(i + lane) : own_word)));
    auto fields = [&](int x) { return slot + field_offset + fields_behind(x); };
    auto score = [&](int x) {
      load_token_fields(slot + own_fields + fields_behind(x), columns, tokens);
      keys.multiply(shared, tables, s);
      if (!TOKEN_UNITS) scale_scores(args, fields(x), columns, g, s);
      if (!clear) hide_tokens(fields(x), shared, step_token + 16 * (pair.member + TILES_APART * x), lane, s);
    };
#pragma unroll
    for (int x = 0; x < OWN_TILES; x++) {
      score(x);
      if (x + 1 < OWN_TILES) keys.load(slot + key_offset + keys_of(TILES_APART * (x + 1)), tables, lane);
      if (x == 0) memory.wait_until_used(taken - 2);
      publish_pieces<0, false>(place + x * OPERAND_BYTES, s, fields(x), columns, tokens, references, g, weighing);
    }
    fence_proxy_async();  // before products read it
    const bool again = pair.any(reference_is_behind(weighing));
    bool rescales = false;
    if (again) {
      float highest[C];
#pragma unroll
      for (int c = 0; c < C; c++) highest[c] = MINUS_INFINITY;
#pragma unroll 1
      for (int x = 0; x < OWN_TILES; x++) {
        keys.load(slot + key_offset + keys_of(TILES_APART * x), tables, lane);
        score(x);
        find_highest(fields(x), columns, g, s, tokens, highest);
      }
      rescales = move_reference(columns, g, t, highest, true, pair, (float*)(shared + STATE_AT), memory.factors_of(taken), references, acc);
      begin_publishing<true>(operands, pair, lane, acc, weighing);
#pragma unroll 1
      for (int x = 0; x < OWN_TILES; x++) {
        keys.load(slot + key_offset + keys_of(TILES_APART * x), tables, lane);
        score(x);
        publish_pieces<0, true>(place + x * OPERAND_BYTES, s, fields(x), columns, tokens, references, g, weighing);
      }
      fence_proxy_async();
      pair.sync();
    }
    end_publishing(memory, pair, lane, taken, rescales, weighing, acc);
  }
#pragma unroll
  for (int c = 0; c < C; c++) acc.row_max[c] = references[own_column(c, 0)];
}

// Copies the steps of a range, one after the other.
struct PairLoader {
  Loader loader;
  int next, last;
  u32 filled;

  DEVICE_MEMBER void init(u8* shared, const PairMemory& memory, int pair, int lane) {
    if (lane == 0)
      for (int i = 0; i < 2; i++) mbarrier_init(memory.published + i, 1), mbarrier_init(memory.used + i, 4);
    loader.init(shared, pair, lane);
    filled = 0;
  }
  DEVICE_MEMBER void copy_next() {
    if (next >= last) return;
    loader.copy(next, filled % STAGES, true);
    filled++, next += RINGS;
    loader.look_up(min_i32(next, last - 1));
  }
  DEVICE_MEMBER void open(const DecodeArgs& args, const WorkRange& range, int pair) {
    next = range.first + pair, last = range.last;
    if (next >= last) return;
    loader.open(args, range);
    // All that a ring takes, by a lane for each page.
    constexpr int STEPS = STAGES - 1;
    static_assert(STEPS * PIECES <= 32, "a lane for each");
    const int of_step = loader.lane / PIECES, piece = loader.lane % PIECES, step = next + of_step * RINGS;
    const bool real = of_step < STEPS && step < last;
    const i32 id = real ? ldg_i32(loader.table + min_i32((loader.begin_tile + NT * step) / (BLOCK_SIZE / 16) + piece, loader.last_page)) : 0;
    if (real) {
      const int slot = (filled + of_step) % STAGES;
      if (piece == 0) mbarrier_arrive_expect_tx(loader.barriers + slot, FIELDS_END);
      cp_async_bulk(loader.ring + slot * SLOT + piece * PIECE, loader.pages + id * loader.page_stride, PIECE, loader.barriers + slot);
    }
    const int count = min_i32(STEPS, (last - next + RINGS - 1) / RINGS);
    filled += count, next += count * RINGS;
    loader.look_up(min_i32(next, last - 1));
  }
};

// This warp's part of the values of the pair's steps.
DEVICE void attend_values(const WorkRange& range, const PairMemory& memory, const Team& pair, const LevelTables& tables, int lane,
                          PairLoader& loader, u32& taken, Accumulator& acc) {
  const int t = lane & 3;
  constexpr int WANTED = (NG > 4 ? 2 : 4) / OUT_SLICES, AT_ONCE = WANTED < 1 ? 1 : WANTED > NT ? NT : WANTED;  // tiles; so many products, for registers
  // Tiles ahead; all where single bits are in token rows, which some warps take long to read.
  constexpr int LOADED = 2 * AT_ONCE < NT && !(V_BITS % 2 && VS % 4) ? 2 * AT_ONCE : NT;
  for (int step = range.first + pair.number; step < range.last; step += RINGS, taken++) {
    const u8* slot = memory.slot(taken);
    memory.wait_for_copy(taken);
    PartCodes codes[NT];
    PartCodes::load_parts<LOADED>(codes, [&](int i) { return slot + values_of(i); }, lane, pair.member);
    // By a lane for all: what is known to be alike is made into descriptors once, not for every product.
    const u64 weights = smem_descriptor(shfl(shared_address(memory.weights_of_step(taken)), 0), 16);
#pragma unroll
    for (int first = 0; first < NT; first += AT_ONCE) {
      u32 a[AT_ONCE][OUT_SLICES][4];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++) value_halves(codes[first + k], i, tables, a[k][i]);
      const int ahead = first + LOADED;
      if (ahead < NT) PartCodes::load_parts<AT_ONCE>(codes + ahead, [&](int i) { return slot + values_of(ahead + i); }, lane, pair.member);
      if (first == 0) {
        memory.wait_until_published(taken);
        const float* factors = memory.factors_of(taken);
        if (factors[COLUMNS] != 0.0f)
#pragma unroll
          for (int c = 0; c < C; c++) {
            const float factor = factors[own_column(c, t)];
#pragma unroll
            for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
              for (int j = c % OWN; j < OUT_NUMBERS; j += OWN) acc.numbers(c / OWN, i)[j] *= factor;
          }
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int tile = first + k;
        const u64 operand = descriptor_behind(weights, tile / 4 * OPERAND_BYTES + 32 * (tile % 4));
#pragma unroll
        for (int i = 0; i < OUT_SLICES; i++)
          WarpgroupProduct::register_a(acc.products(i), a[k][i][0], a[k][i][1], a[k][i][2], a[k][i][3], operand);
      }
      wgmma_commit();
      if (first) wgmma_wait<1>();
    }
    if (pair.member == 0) {
      memory.wait_until_used(taken - 1);
      loader.copy_next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < OUT_SLICES; i++) wgmma_fence_operand(acc.products(i));
    sync_warp();
    if (lane == 0) mbarrier_arrive(memory.used + (taken & 1));
  }
  if (pair.member == 0) memory.wait_until_used(taken - 1);  // before rings are filled again
}

// The warp's part of the output, of all columns at once, when all states are there.
DEVICE void leave_results(const Accumulator& acc, const Team& pair, u8* shared, int lane, bool adds) {
  const int g = lane >> 2, t = lane & 3, worker = pair.number * TEAM + pair.member, place = worker % (TEAM * RESULT_SUMS);
  const float* states = (const float*)(shared + STATE_AT);
#pragma unroll
  for (int c = 0; c < C; c++) {
    const int column = own_column(c, t);
    float shift = 0, highest = MINUS_INFINITY;
    if (V_KIND == UNIFORM)  // of the tokens of the whole team
      for (int w = 0; w < TEAM; w++) shift += states[STATE_WORDS * ((pair.number * TEAM + w) * COLUMNS + column) + 2];
#pragma unroll
    for (int w = 0; w < WORKERS; w += TEAM) highest = max_f32(highest, states[STATE_WORDS * (w * COLUMNS + column)]);  // a team has one
    const float row_max = states[STATE_WORDS * (worker * COLUMNS + column)];
    const float factor = row_max == MINUS_INFINITY ? 0.0f : exp2_approx(row_max - highest);
    float* mine = (float*)(shared + OPERANDS_AT) + (place * COLUMNS + column) * RESULT_ROW;
#pragma unroll
    for (int i = 0; i < OUT_SLICES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = V_KIND == UNIFORM ? (acc.number(c / OWN, i, r, c % OWN) * VALUE_UNIT + shift) * factor
                                          : acc.number(c / OWN, i, r, c % OWN) * (VALUE_UNIT * factor);
        mine[16 * i + g + 8 * r] = adds ? mine[16 * i + g + 8 * r] + x : x;
      }
  }
}

// Rows of the range, a warp for each: the output of an item of which the block has had all keys, else a part of the workspace.
DEVICE void write_rows(const DecodeArgs& args, const WorkRange& range, u8* shared, int warp, int lane) {
  const float *states = (const float*)(shared + STATE_AT), *results = (const float*)(shared + OPERANDS_AT);
  const i64 part = (i64)range.item + block_index();
  for (int column = warp; column < COLUMNS; column += WARPS) {
    const int per_chunk = args.queries_of_chunk, query = range.chunk * per_chunk + by_group(args, column);
    if (column >= per_chunk * args.group_size || query >= range.s.queries) continue;
    float all_max, all_sum, x[VN];
    sum_of_warps(states, column, all_max, all_sum);
#pragma unroll
    for (int j = 0; j < VN; j++) {
      const int d = lane + 32 * j;
      x[j] = 0;
#pragma unroll
      for (int w = 0; w < TEAM * RESULT_SUMS; w += TEAM)
        if (d < VD) x[j] += results[((w + d / (16 * OUT_SLICES)) * COLUMNS + column) * RESULT_ROW + d % (16 * OUT_SLICES)];
    }
    if (is_whole(args, range)) {
      write_row(args, range.s.start + query, range.head * args.group_size + in_group(args, column), all_max, all_sum, x,
                scratch_of_writer(shared, warp), lane);
      continue;
    }
    float* to = args.parts + (part * COLUMNS + column) * VD;
#pragma unroll
    for (int j = 0; j < VN; j++)
      if (lane + 32 * j < VD) write_part(to + lane + 32 * j, x[j]);
    if (lane < 2) write_part(args.part_states + (part * COLUMNS + column) * 2 + lane, lane ? all_sum : all_max);
  }
}

// Queries of a range that are in the lanes' registers, to operands with one unit. In between they are in shared memory, so that one piece of
// code does for all: it is met for the first time, and comes from far away.
template <int QUERIES>
DEVICE void prepare_queries(const DecodeArgs& args, const WorkRange& range, const float (&query)[QUERIES][QN], u8* shared, int warp, int lane) {
  const float infinity = as_float(0x7F800000u);
  float* scratch = (float*)(shared + TEAM_WEIGHTS_AT) + warp * KD;
  constexpr bool STAGED = COLUMNS > 32 && 4 * KD * (WARPS + COLUMNS) <= RINGS_AT - TEAM_WEIGHTS_AT;
  float* const rotated = (float*)(shared + TEAM_WEIGHTS_AT) + WARPS * KD + warp * KD + lane;
  if (STAGED) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
#pragma unroll
        for (int j = 0; j < QN; j++)
          if (lane + 32 * j < KD) rotated[i * WARPS * KD + 32 * j] = query[i][j];
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      float* const place = rotated + (column - warp) * KD;
      float y[QN];
#pragma unroll
      for (int j = 0; j < QN; j++) y[j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      const float largest = rotate_query(args, y, scratch, lane);
#pragma unroll
      for (int j = 0; j < QN; j++)
        if (lane + 32 * j < KD) place[32 * j] = y[j];
      if (lane == 0) *column_at(shared, column) = {largest < infinity ? largest : 0.0f, largest, 0, 0};
    }
  }
  float y[QUERIES][QN], largest[QUERIES], all = 0;
  if (!STAGED)
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
#pragma unroll
      for (int j = 0; j < QN; j++) y[i][j] = query[i][j];
      largest[i] = rotate_query(args, y[i], scratch, lane);
      if (lane == 0 && warp + i * WARPS < COLUMNS) column_at(shared, warp + i * WARPS)->unit = largest[i] < infinity ? largest[i] : 0.0f;
    }
  sync_threads();
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 32)
    if (c + 32 <= COLUMNS || c + lane < COLUMNS) all = max_f32(all, column_at(shared, c + lane)->unit);
#pragma unroll
  for (int d = 16; d; d >>= 1) all = max_f32(all, shfl_xor(all, d));
  sync_threads();  // columns are written again
  if (STAGED) {
#pragma unroll 1
    for (int column = warp; column < COLUMNS; column += WARPS) {
      const float* const place = rotated + (column - warp) * KD;
      const bool finite = column_at(shared, column)->sum < infinity;
      sync_warp();
#pragma unroll
      for (int j = 0; j < QN; j++) y[0][j] = lane + 32 * j < KD ? place[32 * j] : 0.0f;
      write_query(args, range, column, y[0], all, finite, shared, shared + QUERY_AT, lane);
    }
  } else
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
      if (i * WARPS + WARPS <= COLUMNS || i * WARPS + warp < COLUMNS)
        write_query(args, range, warp + i * WARPS, y[i], all, largest[i] < infinity, shared, shared + QUERY_AT, lane);
}

// What both roles do is one piece of code: instructions that are met for the first time come from far away.
DEVICE void attend_in_roles(const DecodeArgs& args, u8* shared) {
  const int warp = shfl(thread_index() / 32, 0), lane = thread_index() & 31, worker = warp % WORKERS;
  const bool has_values = warp >= WORKERS, loads = has_values && worker % TEAM == 0;
  if (POLLED) griddepcontrol_wait();  // `merge` starts later
  else pdl_wait();
  int left;
  WorkPartition partition;
  WorkRange range = first_range(args, ThisBlock(), lane, partition, left);
  if (left <= 0) return;
  const Team pair = {worker / TEAM, worker % TEAM};
  const PairMemory memory(shared, pair.number, lane, false);
  PairLoader loader;
  if (loads) loader.init(shared, memory, pair.number, lane);
  constexpr int QUERIES = (COLUMNS + WARPS - 1) / WARPS;
  float query[QUERIES][QN];
  auto begin_loading = [&](const WorkRange& p) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++) load_query(args, p, warp + i * WARPS, query[i], lane);
    if (loads) loader.open(args, p, pair.number);
  };
  begin_loading(range);
  const LevelTables tables = load_tables(args, shared, lane);  // while pages travel
  bool starts_merge = POLLED;
  u32 taken = 0;
  while (true) {
    prepare_queries(args, range, query, shared, warp, lane);
    fence_proxy_async();  // queries were written
    sync_threads();
    if (POLLED && starts_merge && warp == WARPS - 1)
      start_merge(args, partition.padded && !is_whole(args, range), (i64)range.item + block_index(), lane);
    starts_merge = false;
    if (has_values) {
      setmaxnreg_dec<256 - KEY_REGISTERS>();
      Accumulator acc;
      acc.clear();
      attend_values(range, PairMemory(shared, pair.number, lane, true), pair, tables, lane, loader, taken, acc);
      sync_threads();
#pragma unroll
      for (int first = 0; first < RINGS; first += RESULT_SUMS) {
        if (first) sync_team(1 + RINGS, 32 * WORKERS);
        if (RESULT_SUMS == RINGS || pair.number == first) leave_results(acc, pair, shared, lane, first > 0);
      }
      setmaxnreg_inc<128>();
    } else {
      setmaxnreg_inc<KEY_REGISTERS>();
      Accumulator acc;
      acc.clear();
      ColumnState columns;
      columns.load(args, range, shared, lane & 3);
      const PairMemory kept(shared, pair.number, lane, true);
      if constexpr (TILE_BY_TILE) attend_keys_by_tiles(args, range, shared, kept, pair, columns, tables, lane, taken, acc);
      else attend_keys(args, range, shared, kept, pair, columns, tables, lane, taken, acc);
      leave_states(columns, acc, (float*)(shared + STATE_AT), worker, lane);
      sync_threads();
      setmaxnreg_dec<128>();
    }
    left -= range.last - range.first + ITEM_COST;  // with what the next item takes
    WorkRange next = range;
    if (left > 0) {
      next = next_range(args, range, left);
      begin_loading(next);
    }
    sync_threads();
    write_rows(args, range, shared, warp, lane);
    if (left <= 0) return;
    sync_threads();  // before results and states are written again
    range = next;
  }
}
