// What the decode kernels are compiled for, where things are in shared memory, and their argument.
// Compile-time: BLOCK_SIZE, KD, VD, K_KIND, K_BITS, K_FIELDS, K_ROTATED, K_CORE, V_KIND, V_BITS, V_CODES, V_FIELDS, V_ROTATED,
// V_CORE (the pages),
// NG, WIDE (the columns), NT, WARPS, TEAM, WGMMA, ROLES, STAGES, BULK, APART, CLUSTER, WHOLE, POLLED, MIN_BLOCKS, SHARED (the shape), Q_TYPE, OUT_TYPE
// (types.cuh),
// WINDOW, SOFTCAP (the options).
//
// A column is a query head of one query. Columns come in groups, the 8 columns of a tensor-core product. In a narrow
// group each of 4 columns takes two of them, a high and a low byte (or half): lane 4 g + t finds both of column t side by
// side. In a wide group there are 8 columns of halves, of which that lane has 2 t and 2 t + 1.
//
// The output of many columns fills the registers of a warp. Then TEAM warps go together: each has scores of tokens of its
// own, as ever, and leaves their probabilities in shared memory; of the values each multiplies a part of the dimensions, for
// the tokens of the whole team. Nothing is unpacked twice.
//
// On sm_90a a team of four is a warpgroup (WGMMA): a warp's tile is its part of the operand of both products, queries and
// probabilities are the other one, in shared memory.
//
// With ROLES (roles.cuh) a warpgroup for keys and one for values are a pair: scores of the next step are made while values of the last
// one are multiplied, and each of the two has registers for its own part only. A pair has a ring, and a step is NT tiles for all of it.
// Of more than 40 columns a warp has the scores of one tile at a time (TILE_BY_TILE).
#pragma once
#include "common/numbers.cuh"
#include "common/codes.cuh"
#include "common/rotation.cuh"

constexpr int KS = KD / 16, VS = VD / 16, STEP = 16 * NT;
constexpr bool ONE_UNIT = ROLES;  // queries of all columns have the same unit
constexpr int RINGS = ROLES ? WARPS / 8 : WARPS;                // steps of a block at a time
constexpr int WORKERS = ROLES ? WARPS / 2 : WARPS;              // warps that have scores
constexpr int OWN_TILES = ROLES ? NT / 4 : NT, TILES_APART = ROLES ? 4 : 1;  // tiles of a step that a warp has scores of
constexpr bool TILE_BY_TILE = ROLES && NG > 5;  // registers hold the scores of one tile
constexpr int SCORED_TILES = TILE_BY_TILE ? 1 : OWN_TILES;  // at a time
constexpr int OWN = WIDE ? 2 : 1;          // columns of a group that a lane has
constexpr int GROUP = 4 * OWN, COLUMNS = NG * GROUP;
constexpr bool K_BYTES = !WIDE && in_bytes<K_KIND, K_BITS>(), V_BYTES = !WIDE && in_bytes<V_KIND, V_BITS>();
constexpr int K_TILE = 2 * KD * K_BITS, V_TILE = 2 * VD * V_BITS;
constexpr int K_NUMBER_OF_FIELDS = K_KIND == UNIFORM ? 2 : 1, V_NUMBER_OF_FIELDS = V_KIND == UNIFORM ? 2 : 1;
// Narrow values: are their bytes regrouped, which halves the products, or used as they lie, which saves permutations?
constexpr bool V_REGROUPED = WARPS > 4;
constexpr int PAGES = NT > BLOCK_SIZE / 16 ? NT / (BLOCK_SIZE / 16) : 1;  // of a step
// A step in the ring: key codes, value codes, then the fields one after the other, of all tiles, or of the tiles of one page after
// those of another (BULK). What a warp leaves for its team takes the place of a tile's key codes, or is behind the fields.
constexpr int PIECES = BULK ? PAGES : 1, PIECE_TILES = NT / PIECES;
constexpr int FIELDS = K_NUMBER_OF_FIELDS + V_NUMBER_OF_FIELDS, FIELD_STRIDE = 32 * PIECE_TILES;
constexpr int VALUES_AT = PIECE_TILES * K_TILE, FIELDS_AT = VALUES_AT + PIECE_TILES * V_TILE;
constexpr int PIECE = FIELDS_AT + FIELDS * FIELD_STRIDE, FIELDS_END = PIECES * PIECE;
// Of tile x. As plain as can be before loops are unrolled: it decides how many registers the compiler takes.
constexpr int keys_of(int x) { return PIECES == 1 ? x * K_TILE : x / PIECE_TILES * PIECE + x % PIECE_TILES * K_TILE; }
constexpr int values_of(int x) { return PIECES == 1 ? VALUES_AT + x * V_TILE : x / PIECE_TILES * PIECE + VALUES_AT + x % PIECE_TILES * V_TILE; }
constexpr int fields_of(int x) { return PIECES == 1 ? FIELDS_AT + 32 * x : x / PIECE_TILES * PIECE + FIELDS_AT + 32 * (x % PIECE_TILES); }
constexpr int WEIGHT_BYTES = TEAM > 1 && !WGMMA ? 256 * NG : 0;  // of a tile
constexpr bool WEIGHTS_BEHIND = WEIGHT_BYTES > K_TILE;
constexpr int weights_of(int x) { return WEIGHTS_BEHIND ? FIELDS_END + x * WEIGHT_BYTES : keys_of(x); }
constexpr int STEP_BYTES = FIELDS_END + (WEIGHTS_BEHIND ? NT * WEIGHT_BYTES : 0);
constexpr int OUT_SLICES = (VS + TEAM - 1) / TEAM;  // of the output that a warp has; in a warpgroup the last may have more than there are
constexpr int OUT_ROW = 16 * OUT_SLICES + 8 / OWN;  // floats; keeps the columns of a warp's result in different banks
constexpr int RESULT_BYTES = 4 * GROUP * (16 * OUT_SLICES + 8), SLOT = STEP_BYTES > RESULT_BYTES ? STEP_BYTES : RESULT_BYTES;
// Levels as halves from tables in shared memory, by pairs of codes up to 5 bits. PERMUTED: 4 bits by permutations instead, so that logic
// and shared memory share the work; values, which have to be put across anyway (pair_halves), and of the largest heads keys as well.
constexpr bool PERMUTES = WIDE && (!WGMMA || WARPS > 8);
constexpr bool K_PERMUTED = PERMUTES && K_KIND == LLOYD && K_BITS == 4 && KD == 256;
constexpr bool V_PERMUTED = PERMUTES && V_KIND == LLOYD && V_BITS == 4;
constexpr bool K_IN_PAIRS = K_KIND == LLOYD && K_BITS <= 5 && !K_BYTES && !K_PERMUTED;
constexpr bool V_IN_PAIRS = V_KIND == LLOYD && V_BITS <= 5 && !V_BYTES && !V_PERMUTED;
static_assert(!APART || !WIDE, "halves apart are twice the products");
constexpr bool K_APART = APART && K_KIND == LLOYD && K_BITS == 6, V_APART = APART && V_KIND == LLOYD && V_BITS == 6;
constexpr int LEVEL_ENTRIES_K =
    K_KIND != LLOYD || K_BYTES || K_PERMUTED ? 0 : K_IN_PAIRS ? PAIR_ENTRIES : K_APART ? 2 * APART_ENTRIES : 1 << K_BITS;
constexpr int LEVEL_ENTRIES_V =
    V_KIND != LLOYD || V_BYTES || V_PERMUTED ? 0 : V_IN_PAIRS ? PAIR_ENTRIES : V_APART ? 2 * APART_ENTRIES : 1 << V_BITS;
constexpr bool ONE_TABLE = K_KIND == V_KIND && K_BITS == V_BITS && KD == VD && K_PERMUTED == V_PERMUTED;
constexpr int LEVEL_BYTES = 128 * (LEVEL_ENTRIES_K + (ONE_TABLE ? 0 : LEVEL_ENTRIES_V));
static_assert(!BULK || (PIECE_TILES == BLOCK_SIZE / 16 && V_CODES == VALUES_AT && K_FIELDS == FIELDS_AT &&
                        V_FIELDS == FIELDS_AT + FIELD_STRIDE * K_NUMBER_OF_FIELDS), "a step is whole pages, in the ring as they are there");
static_assert(STAGES > 1 || TEAM == 1, "keys and values of a step are two copies");
static_assert(TEAM == 1 || (WIDE && (WGMMA || VS % TEAM == 0) && WARPS % TEAM == 0), "teams share wide values");
// Single bits as they lie are bytes for the products: 1 bit, Lloyd-Max.
constexpr bool K_SINGLE_BITS = K_BYTES && K_KIND == LLOYD && K_BITS == 1, V_SINGLE_BITS = V_BYTES && V_KIND == LLOYD && V_BITS == 1;
constexpr int KP = K_SINGLE_BITS ? bit_products<KS>() : (KS + 1) / 2, QI = K_BYTES ? KP : KS;  // products of a tile
constexpr bool Q_IN_SHARED = NG * QI > 16;                // registers are better spent on the output
// A warpgroup's operands lie as smem_descriptor says: a row of 64 numbers for every column, another operand for the next 64.
constexpr int OPERAND_BYTES = 128 * COLUMNS;
constexpr int QUERY_BYTES = WGMMA ? OPERAND_BYTES * ((KD + 63) / 64) : 256 * NG * QI;
static_assert(!WGMMA || (TEAM == 4 && WARPS % 4 == 0), "a warpgroup is a team");
// Blocks that share a multiprocessor, with one slot: queries take the place of the last levels until lanes have them in registers.
constexpr bool QUERIES_IN_LEVELS = STAGES == 1 && MIN_BLOCKS > 1 && LEVEL_BYTES >= QUERY_BYTES;
static_assert(!QUERIES_IN_LEVELS || !Q_IN_SHARED, "queries do not stay there");
constexpr float KEY_UNIT = FIELD_UNIT * (K_BYTES ? 1.0f : K_PERMUTED ? DENORMAL_UNIT : half_unit<K_KIND, K_BITS>());  // keys' fields stay small
constexpr float VALUE_UNIT = V_BYTES ? 1.0f : V_PERMUTED ? DENORMAL_UNIT : half_unit<V_KIND, V_BITS>();

static_assert(CLUSTER == 1 || !POLLED, "clusters merge themselves");
static_assert(CLUSTER == 1 || TEAM == 1, "a block of a cluster has one range and whole rows");

// WHOLE: a block for every sequence and KV head, and nothing to merge.
static_assert(!WHOLE || (CLUSTER == 1 && !POLLED && !ROLES), "there are no parts");
constexpr bool ONE_RANGE = CLUSTER > 1 || WHOLE;  // of every block, which may be empty

constexpr int STATE_WORDS = TEAM > 1 ? 3 : 2;

// Shared memory: levels of keys | levels of values | a warpgroup's queries, its teams' probabilities twice | rings | other queries |
// column constants | maxima, sums and, in teams, shifts of the warps | barriers of the rings' slots
constexpr int OPERANDS_AT = LEVEL_BYTES;
static_assert(!WGMMA || OPERANDS_AT % 1024 == 0, "rows are exchanged within 1024 bytes");
constexpr int TEAM_WEIGHTS_AT = OPERANDS_AT + (WGMMA ? QUERY_BYTES : 0);
constexpr int OPERANDS_END = TEAM_WEIGHTS_AT + (WGMMA ? WORKERS / 2 * OWN_TILES * OPERAND_BYTES : 0);
// ROLES: parts of the output take the place of queries and probabilities, of all pairs at once or added up by one after the other; a row
// of 4 words more than a multiple of 16 keeps lanes in different banks.
constexpr int RESULT_ROW = 16 * OUT_SLICES + 4, PAIR_RESULT_BYTES = 4 * RESULT_ROW * COLUMNS * TEAM;
constexpr int RESULT_SUMS = RINGS * PAIR_RESULT_BYTES <= OPERANDS_END - OPERANDS_AT ? RINGS : 1;
constexpr int RINGS_AT = ROLES && OPERANDS_AT + PAIR_RESULT_BYTES > OPERANDS_END ? OPERANDS_AT + PAIR_RESULT_BYTES : OPERANDS_END;
constexpr int RINGS_END = RINGS_AT + RINGS * STAGES * SLOT;
constexpr int QUERY_AT = WGMMA ? OPERANDS_AT : QUERIES_IN_LEVELS ? LEVEL_BYTES - QUERY_BYTES : RINGS_END;
constexpr int COLUMN_AT = RINGS_END + (WGMMA || QUERIES_IN_LEVELS ? 0 : QUERY_BYTES);
constexpr int STATE_AT = COLUMN_AT + 16 * COLUMNS;
constexpr int REFERENCES_AT = STATE_AT + 4 * STATE_WORDS * COLUMNS * WORKERS;  // of the softmax, of every column and warp
constexpr int FACTORS_AT = REFERENCES_AT + (TILE_BY_TILE ? 4 * COLUMNS * WORKERS : 0);  // of pairs, for two steps: of every column, and whether there are any
constexpr int BARRIERS_AT = FACTORS_AT + (ROLES ? RINGS * 2 * (4 * COLUMNS + 8) : 0);
constexpr int BARRIERS = STAGES > 1 ? STAGES : 2;  // of a ring: one a slot, or one for keys and one for values
constexpr int PAIR_BARRIERS_AT = BARRIERS_AT + (BULK ? 8 * RINGS * BARRIERS : 0);  // probabilities of two steps: there, used
// What the blocks of a cluster send each other: columns of a block, each from every block (combine.cuh).
constexpr int INBOX_COLUMNS = (COLUMNS + CLUSTER - 1) / CLUSTER, CLUSTER_LANES = CLUSTER > 8 ? 16 : CLUSTER > 4 ? 8 : CLUSTER > 2 ? 4 : 2;
constexpr int INBOX_BARRIERS_AT = PAIR_BARRIERS_AT + (ROLES ? RINGS * 4 * 8 : 0);
constexpr int INBOX_AT = (INBOX_BARRIERS_AT + (CLUSTER > 1 ? 8 * INBOX_COLUMNS : 0) + 15) / 16 * 16;
constexpr int INBOX_END = CLUSTER > 1 ? INBOX_AT + INBOX_COLUMNS * CLUSTER * 4 * (VD + 4) : INBOX_BARRIERS_AT;
// Rotations that take shared memory have the ring's free slot for that, or, where there is none, memory of their own.
constexpr bool OWN_SCRATCH = STAGES == 1 && !(POWER_OF_TWO(KD) && KD >= 32);
constexpr int SCRATCH_AT = (INBOX_END + 15) / 16 * 16, SCRATCH_ROWS = COLUMNS < WARPS ? COLUMNS : WARPS;
// Rotating the output back takes that of the queries, or, where results are in its place (ROLES), memory of its own.
constexpr bool TAKES_SCRATCH = V_ROTATED && !(POWER_OF_TWO(VD) && VD >= 32);
constexpr int SHARED_BYTES = OWN_SCRATCH ? SCRATCH_AT + SCRATCH_ROWS * 4 * KD : ROLES && TAKES_SCRATCH ? SCRATCH_AT + WARPS * 4 * VD : INBOX_END;
static_assert(!OWN_SCRATCH || !ROLES, "rings of pairs have several slots");
static_assert(SHARED_BYTES == SHARED, "the launcher counts shared memory as this file does");
static_assert(!ROLES || (WGMMA && BULK && WARPS % 8 == 0 && NT % 4 == 0), "a step is as many tiles of every warp");

struct DecodeArgs {
  const void* query;
  const u8* pages;
  const i32* block_table;
  const i32* seq_lens;
  const i32* cu_seqlens_q;
  const void* key_signs;    // bf16 [KD, KD], the rotation's entries +-1
  const void* value_signs;  // bf16 [VD, VD]
  const float* key_levels;  // by code
  const float* value_levels;
  const float* sinks;  // or null
  void* out;
  float* lse;          // or null
  float* parts;        // [slots, COLUMNS, VD]
  float* part_states;  // [slots, COLUMNS, 2]: maximum (base 2), sum
  i64 query_stride, query_head_stride, page_stride, page_head_stride, table_stride, out_stride, out_head_stride;
  float scale;    // of scores, times log2(e)
  float softcap;  // times log2(e)
  float key_norm, value_norm;    // what makes the rotations orthonormal
  Table key_table, value_table;  // their signs are unused
  u32 key_sign_bits[8], value_sign_bits[8];  // the rotations' random signs, a set bit for -1
  u32 key_core[32], value_core[32];  // columns of the keys' core, rows of the values', likewise
  i32 num_seqs, num_kv_heads, group_size, max_decode_queries, causal, sliding_window, blocks, merge_split;
  i32 merge_places;  // of a sequence, one for each query, that `merge` looks at; 0: it looks at every row
  i32 queries_of_chunk;  // that are attended together: COLUMNS / group_size
  i32 group_inverse;     // 2^16 / group_size, rounded up
};
