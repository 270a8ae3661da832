// Attention of 17 and more query rows (queries x heads) on packed latents, for sm_90a: scores from latents and rope
// parts, values from the same latents.
//
// Query rows are the columns of wgmmas, so that a work tile can have any multiple of 8 rows. KV blocks have 64 tokens.
// Two score warpgroups alternate between KV blocks. They unpack codes to levels (exact in fp16) in registers, the A
// operand (tokens x dimensions) of products with the queries, and also store the levels as values. Scores and
// probabilities are multiplied by the tokens' scales. Two value warpgroups, each for half the dimensions, multiply the
// stored levels, which `wgmma` reads transposed (dimensions x tokens), by probabilities.
#include "common/hopper.cuh"

constexpr int THREADS = 512, TILE_COST = 4;
#include "latent/merge.cuh"
#include "latent/queries.cuh"
#include "latent/columns_scores.cuh"
#include "latent/columns_values.cuh"

// With fewer registers for the value warpgroups, the compiler serialises their wgmmas.
constexpr int HELD = (OWN_CHUNKS * ROWS / 2 + 32 + 7) / 8 * 8, VALUE_REGISTERS = HELD > 96 ? HELD : 96,
              SCORE_REGISTERS = 256 - VALUE_REGISTERS;

// One warp: stages row n of a work tile. Rows beyond the last are zeros and see no tokens.
DEVICE void stage_query(const LatentArgs& args, const WorkTile& tile, const Query& query, int n, const Place& place) {
  const Units units = stage_operand(args, query, n, place.shared + QUERIES_AT, LEVEL_UNIT);
  if (query.lane == 0) {
    Columns& columns = place.columns();
    columns.unit(n) = units.latent, columns.rope[n] = units.rope;
    columns.visible_end[n] = query.real ? tile.visible_end(args, n) : 0;
    columns.row_max(n) = columns.seen[0][n] = columns.seen[1][n] = LOWEST;
    if (n == 0) columns.generation = 0;
  }
}

// All warps: stages all queries. Each warp calls meanwhile() when its first queries have arrived.
template <class F>
DEVICE void stage_queries(const LatentArgs& args, const WorkTile& tile, const Place& place, int warp,
    const F& meanwhile) {
  each_query<THREADS / 32, (ROWS + 15) / 16>(args, tile, warp, place.lane, [&](const Query& query, int n) {
    if (n == warp) meanwhile();
    stage_query(args, tile, query, n, place);
  });
  fence_proxy_async();
  bar_sync(ALL, THREADS);
}

// The work tile and the number of KV blocks of a range; none after the last range.
struct Part {
  WorkRange range;
  WorkTile tile;
  int count;

  DEVICE_MEMBER Part(const LatentArgs& args, const WorkRange& range_)
      : range(range_), tile(args, max_i32(range_.b, 0), range_.tile),
        count(max_i32(shfl(min_i32(range_.last, tile.kv_blocks(args)) - range_.first, 0), 0)) {}
};

DEVICE void score_ranges(const LatentArgs& args, const Place& place) {
  Scorer own;
  (Place&)own = place;
  own.table = args.table, own.levels = {shared_address(place.shared + LEVELS_AT) + 4 * place.lane};
  own.rope_levels = {shared_address(place.shared + ROPE_LEVELS_AT)};
  AnnouncedRanges& ranges = place.ranges();
  if (thread_index() < 32) {
    const AnnouncedRanges first(args, place.lane, place.lane == 0);
    if (place.lane == 0) ranges = first;
  }
  int before = 0;  // KV blocks of earlier ranges
  while (true) {
    bar_sync(ALL, THREADS);
    const WorkRange range = broadcast(ranges.range);
    if (range.b < 0) return;
    const Part part(args, range);
    const i32 page = part.count > 0 ? own.first_page(args, part.tile, range.first, before) : 0;
    stage_queries(args, part.tile, place, 4 * place.group + place.warp, [&] {
      if (part.count > 0)
        prefetch_tokens(args.pages + page * args.page_stride, own.first_token(range.first, before) % BLOCK_SIZE,
            place.lane);
    });
    own.begin(part.tile.visible_end(args, 0));
    own.attend_range(args, part.tile, range.first, part.count, before);
    before += part.count;
    const Part again(args, broadcast(ranges.range));  // recomputed to save registers
    own.store_states(Results(args, again.range, again.tile));
    bar_sync(ALL, THREADS);
    if (thread_index() == 0) ranges.advance(args);
  }
}

DEVICE void multiply_ranges(const LatentArgs& args, const Place& place) {
  const Multiplier own = {place};
  int before = 0;
  while (true) {
    bar_sync(ALL, THREADS);
    const WorkRange range = broadcast(place.ranges().range);
    if (range.b < 0) return;
    const Part begun(args, range);
    stage_queries(args, begun.tile, place, 8 + 4 * place.group + place.warp, [] {});
    const int count = begun.count;
    Output o;
    UNROLL_FOR (int i = 0; i < OWN_CHUNKS * ROWS / 2; i++) o[i / (ROWS / 2)][i % (ROWS / 2)] = 0.0f;
    own.attend_range(o, count, before);
    before += count;
    const Part part(args, broadcast(place.ranges().range));  // recomputed to save registers
    const Results to(args, part.range, part.tile);
    if (to.whole) own.store_output_rows(to, o);
    else own.store_part(to, o);
    bar_sync(ALL, THREADS);
  }
}

KERNEL(THREADS, 1) attend(GRID_CONSTANT LatentArgs args) {
  SHARED_OPERANDS(shared);
  const int warp = shfl(thread_index() / 32, 0);
  const Place place = {shared, warp / 4 % 2, warp % 4, thread_index() & 31};
  fill_rope_levels<THREADS>(args.rope_levels, shared + ROPE_LEVELS_AT);
  for (int i = thread_index(); i < 32 * L_LEVELS; i += THREADS)  // one copy per lane
    ((u32*)(shared + LEVELS_AT))[i] = f32_to_f16(args.latent_levels[i / 32]);
  if (thread_index() == 0) {
    for (int i = 0; i < STAGES * (1 + OWN_CHUNKS); i++) mbarrier_init(place.full(0) + i, i < STAGES ? 4 : 8);
    fence_mbarrier_init();
  }
  pdl_wait();
  sync_threads();
  if (warp >= 8) {
    if (VALUE_REGISTERS > 128) setmaxnreg_inc<VALUE_REGISTERS>();
    else setmaxnreg_dec<VALUE_REGISTERS>();
    multiply_ranges(args, place);
  } else {
    if (SCORE_REGISTERS > 128) setmaxnreg_inc<SCORE_REGISTERS>();
    else setmaxnreg_dec<SCORE_REGISTERS>();
    score_ranges(args, place);
  }
}
HOST_TESTABLE(attend, LatentArgs)
