// A consumer warp of narrow.cu: scores and values for its part of the latent's dimensions.
#pragma once
#include "latent/narrow_codes.cuh"

constexpr float SHIFT = BY_PAIRS ? 0.0f : OFFSET;  // the offset of levels in operands
constexpr bool HELD = BY_PAIRS;  // queries stay in registers; other formats have too few
// Work that hides the latency of reading whether a maximum was raised (by measurement): transposing slices, reading p.
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int TRANSPOSED_EARLY = L_LEVELS ? 0 : min_of(R_KIND == RAW ? 3 : 4, OWN);
constexpr bool READ_EARLY = !L_LEVELS && R_KIND != RAW;
constexpr float MOST_PROBABILITY = 256.0f;  // relative to the current running maximum
constexpr float LEAST_SCALE = 9.094947e-13f;  // 2^-40
constexpr float LOWEST = -1e30f;  // the initial maximum, far below any score

struct __attribute__((aligned(16))) Row {
  float start, unit, rope_unit;
  i32 visible_end;
};

typedef float Fragment[4];
typedef u32 Levels[TOKEN_TILES][OWN][4];  // of 16 tokens each: tokens x dimensions, later transposed

// The two tokens for which a lane computes probabilities of rows g and g + 8: their fields, and their decoded scales.
struct Fields { u32 latent, rope; };
struct TokenPair {
  int token;
  float scale[2], rope_scale[2];  // of the latent and of the rope part
};

struct Consumer {
  const LatentArgs& args;
  u8* const shared;  // of the block
  u8* const mine;    // of the team
  const int team, warp, lane, g, t;
  // The lane's group of 8 tokens: its warp's for even lanes, the next warp's for odd ones, to avoid bank conflicts.
  const int octet;
  const LevelTable levels;
  const RopeLevels rope_levels;
  int slot;
  u32 phase;

  // Per work tile, for rows g and g + 8.
  Words4 queries[OWN];  // in the warp's dimensions
  float unit[2], rope_unit[2], start[2];
  int visible_end[2], clear_end, length;
  float row_max[2], row_sum[2];
  Fragment o[2 * OWN], probability_sum;

  DEVICE_MEMBER Consumer(const LatentArgs& args_, u8* shared_, int team_, int warp_, int lane_)
      : args(args_), shared(shared_), mine(shared_ + TEAMS_AT + team_ * TEAM_BYTES), team(team_), warp(warp_),
        lane(lane_), g(lane_ >> 2), t(lane_ & 3), octet(warp_ ^ (lane_ & 1)),
        levels{shared_address(shared_ + LEVELS_AT) + 4 * lane_},
        rope_levels{shared_address(shared_ + ROPE_LEVELS_AT) + 4 * (lane_ % COPIES)}, slot(0), phase(0) {}

  DEVICE_MEMBER void sync() const { bar_sync(1 + team, 32 * WARPS); }
  DEVICE_MEMBER u64* full() const { return (u64*)(mine + BARRIERS_AT) + slot; }
  DEVICE_MEMBER u64* empty() const { return full() + STAGES; }
  // Warp w's partial scores of 8 tokens and rows 8 n to 8 n + 7.
  DEVICE_MEMBER Words2* scores(int eight, int w, int n) const {
    return (Words2*)(mine + SCORES_AT) + ((eight * WARPS + w) * 2 + n) * 32 + lane;
  }
  DEVICE_MEMBER float* warp_max() const { return (float*)(mine + WARP_MAX_AT); }  // [warp, row]
  DEVICE_MEMBER Words4 query_of(int i) const {
    return *(const Words4*)(shared + QUERIES_AT + (warp * OWN + i) * 512 + 16 * lane);
  }
  DEVICE_MEMBER u8* probabilities(int token_tile) const {
    return mine + PROBABILITIES_AT + token_tile * 512 + 16 * lane;
  }

  // Starts a work tile whose queries are in shared memory.
  DEVICE_MEMBER void take_rows(const WorkTile& work) {
    if constexpr (HELD)
      UNROLL_FOR (int i = 0; i < OWN; i++) queries[i] = query_of(i);
    const Row* const rows = (const Row*)(shared + ROWS_AT) + g;
    UNROLL_FOR (int n = 0; n < 2; n++) {
      unit[n] = rows[8 * n].unit;
      rope_unit[n] = BF16_ROPE ? R_UNIT * args.scale : rows[8 * n].rope_unit;
      start[n] = SHIFT == 0.0f ? 0.0f : rows[8 * n].start;
      visible_end[n] = rows[8 * n].visible_end;
      row_sum[n] = 0.0f;
    }
    clear_end = work.visible_end(args, 0), length = work.length;
    UNROLL_FOR (int i = 0; i < 4; i++) {
      row_max[i / 2] = LOWEST, probability_sum[i] = 0.0f;
      UNROLL_FOR (int j = 0; j < 2 * OWN; j++) o[j][i] = 0.0f;
    }
  }

  // ---- scores -------------------------------------------------------------------------------------------------------

  // Scores of the rope parts of the warp's 8 tokens.
  DEVICE_MEMBER void score_rope(const u8* stage, Fragment& r) const {
    const RopeOperand rope(stage + ROPE_CODES_AT + warp / 2 * R_TILE, lane, octet % 2);
    UNROLL_FOR (int i = 0; i < ROPE_SLICES; i++) {
      const Words4 q = *(const Words4*)(shared + ROPE_QUERIES_AT + 512 * i + 16 * lane);
      u32 b[2];
      rope.slice(i, args.table, rope_levels, b);
      if (BF16_ROPE) mma_bf16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
      else mma_f16(r, q.x, q.y, q.z, q.w, b[0], b[1]);
    }
  }
  // Writes partial scores, over the warp's dimensions, to shared memory; `kept` receives the levels.
  DEVICE_MEMBER void score_latents(const OwnCodes (&codes)[TOKEN_TILES], Levels& kept) const {
    Fragment s[OCTETS];
    UNROLL_FOR (int j = 0; j < OCTETS; j++) s[j][0] = 0.0f, s[j][1] = 0.0f, s[j][2] = 0.0f, s[j][3] = 0.0f;
    UNROLL_FOR (int i = 0; i < OWN; i++) {
      const Words4 q = HELD ? queries[i] : query_of(i);
      UNROLL_FOR (int half = 0; half < TOKEN_TILES; half++) {
        u32(&a)[4] = kept[half][i];
        codes[half].matrices(i, args.table, levels, a);
        mma_f16(s[2 * half], q.x, q.y, q.z, q.w, a[0], a[2]);
        mma_f16(s[2 * half + 1], q.x, q.y, q.z, q.w, a[1], a[3]);
      }
    }
    UNROLL_FOR (int j = 0; j < OCTETS; j++)
      UNROLL_FOR (int n = 0; n < 2; n++) *scores(j, warp, n) = {as_bits(s[j][2 * n]), as_bits(s[j][2 * n + 1])};
  }
  DEVICE_MEMBER int place() const { return 8 * octet + 2 * t; }  // of the lane's tokens in the KV block
  DEVICE_MEMBER Fields read_fields(const u8* stage) const {
    return {*(const u32*)(stage + LATENT_FIELDS_AT + 2 * place()),
        R_KIND == RAW ? 0 : *(const u32*)(stage + ROPE_FIELDS_AT + 2 * place())};
  }
  DEVICE_MEMBER TokenPair token_pair(const Fields& fields, int kv_block) const {
    TokenPair pair;
    pair.token = kv_block * KV_BLOCK + place();
    UNROLL_FOR (int b = 0; b < 2; b++) {
      pair.scale[b] = marked_scale(pair.token + b < length ? fields.latent >> (16 * b) & 0xFFFF : 0);
      pair.rope_scale[b] = R_KIND == RAW ? 1.0f : marked_scale(fields.rope >> (16 * b) & 0xFFFF);
    }
    return pair;
  }
  DEVICE_MEMBER static float marked_scale(u32 field) { return field == INVALID_FIELD ? NOT_A_NUMBER : scale_of(field); }

  // Releases the stage.
  DEVICE_MEMBER void release() {
    if (warp == 0 && lane == 0) mbarrier_arrive(empty());
    slot++;
    if (slot == STAGES) slot = 0, phase ^= 1;
  }

  // Sums the warps' partial scores for the lane's two rows and two tokens into x, and masks them. Transposing levels of
  // the last 16 tokens hides the latency of the additions.
  DEVICE_MEMBER void sum_scores(const Fragment& r, const TokenPair& pair, bool clear, Levels& kept,
      float (&x)[4]) const {
    UNROLL_FOR (int n = 0; n < 2; n++) {
      float low[WARPS], high[WARPS];
      UNROLL_FOR (int w = 0; w < WARPS; w++) {
        const Words2 sums = *scores(octet, w, n);
        low[w] = as_float(sums.x), high[w] = as_float(sums.y);
      }
      UNROLL_FOR (int i = n * OWN / 2; i < (n + 1) * OWN / 2; i++) transpose(kept[1][i]);
      UNROLL_FOR (int w = WARPS / 2; w; w /= 2)
        UNROLL_FOR (int i = 0; i < w; i++) low[i] += low[i + w], high[i] += high[i + w];
      UNROLL_FOR (int i = 0; i < 2; i++) {
        const float products = i ? high[0] : low[0];
        x[2 * n + i] = (SHIFT == 0.0f ? products : products + start[n]) * (pair.scale[i] * unit[n]);
        x[2 * n + i] += r[2 * n + i] * (pair.rope_scale[i] * rope_unit[n]);
        if (!clear && pair.token + i >= visible_end[n]) x[2 * n + i] = MINUS_INFINITY;
      }
    }
  }
  DEVICE_MEMBER static void transpose(u32 (&matrices)[4]) {
    UNROLL_FOR (int m = 0; m < 4; m++) matrices[m] = movmatrix_trans(matrices[m]);
  }

  // ---- softmax ------------------------------------------------------------------------------------------------------

  // Probabilities relative to the current running maximum, which seldom rises. Returns false if any is too large.
  DEVICE_MEMBER bool exponentiate(const float (&x)[4], const TokenPair& pair, float (&sum)[2]) const {
    bool fine = true;
    UNROLL_FOR (int n = 0; n < 2; n++) {
      const float p = exp2_approx(x[2 * n] - row_max[n]), q = exp2_approx(x[2 * n + 1] - row_max[n]);
      sum[n] = p + q;
      // Masked tokens have probability zero, even if their scale is NaN.
      const float first = p > 0.0f ? p * pair.scale[0] : p, second = q > 0.0f ? q * pair.scale[1] : q;
      fine = fine && first <= MOST_PROBABILITY && second <= MOST_PROBABILITY;
      *(u32*)(probabilities(warp / 2) + octet % 2 * 8 + 4 * n) = pack_f16x2(first, second);
    }
    return fine;
  }
  // Raises the team's running maximum and rescales.
  DEVICE_MEMBER void raise_max(const float (&x)[4], const Fields& fields, int kv_block, float (&sum)[2]) {
    const TokenPair pair = token_pair(fields, kv_block);
    UNROLL_FOR (int n = 0; n < 2; n++) {
      float top = max_f32(x[2 * n] + log2_approx(max_f32(pair.scale[0], LEAST_SCALE)),
          x[2 * n + 1] + log2_approx(max_f32(pair.scale[1], LEAST_SCALE)));
      top = max_f32(top, shfl_xor(top, 1));
      top = max_f32(top, shfl_xor(top, 2));
      if (t == 0) warp_max()[warp * ROWS + g + 8 * n] = top;
    }
    sync();
    float by[2];
    UNROLL_FOR (int n = 0; n < 2; n++) {
      const float* all = warp_max() + g + 8 * n;
      const float wanted = max_f32(max_f32(all[0], all[ROWS]), max_f32(all[2 * ROWS], all[3 * ROWS]));
      float& highest = row_max[n];
      const bool raise = wanted > highest + RESCALE_THRESHOLD;
      by[n] = raise ? exp2_approx(highest - wanted) : 1.0f;
      highest = raise ? wanted : highest;
    }
    exponentiate(x, pair, sum);
    UNROLL_FOR (int n = 0; n < 2; n++) row_sum[n] *= by[n];
    UNROLL_FOR (int i = 0; i < 4; i++) {
      probability_sum[i] *= by[i / 2];
      UNROLL_FOR (int j = 0; j < 2 * OWN; j++) o[j][i] *= by[i / 2];
    }
    sync();
  }

  // ---- a KV block ---------------------------------------------------------------------------------------------------

  DEVICE_MEMBER void attend(int kv_block) {
    const u8* const stage = mine + RING_AT + slot * STAGE_BYTES;
    mbarrier_wait(full(), phase);
    OwnCodes codes[TOKEN_TILES];
    UNROLL_FOR (int i = 0; i < TOKEN_TILES; i++) codes[i].load(stage + i * L_TILE, lane, warp);
    Fragment r = {0.0f, 0.0f, 0.0f, 0.0f};
    score_rope(stage, r);  // first, because these MMAs are dependent
    Levels kept;
    score_latents(codes, kept);
    const Fields fields = read_fields(stage);
    sync();  // the stage has been read, and all partial scores are written
    release();
    const TokenPair pair = token_pair(fields, kv_block);
    float x[4], sum[2];
    sum_scores(r, pair, (kv_block + 1) * KV_BLOCK <= clear_end, kept, x);
    const bool raises = !exponentiate(x, pair, sum);
    i32* const last_raised = (i32*)(mine + RAISED_AT);  // the last KV block in which a maximum is raised
    if (raises) *last_raised = kv_block;
    sync();
    const int raised_at = *last_raised;
    Words4 p;
    if (READ_EARLY) p = *(const Words4*)probabilities(0);
    UNROLL_FOR (int i = 0; i < TRANSPOSED_EARLY; i++) transpose(kept[0][i]);
    if (shfl(raised_at, 0) == kv_block) {
      raise_max(x, fields, kv_block, sum);
      if (READ_EARLY) p = *(const Words4*)probabilities(0);
    }
    UNROLL_FOR (int n = 0; n < 2; n++) row_sum[n] += sum[n];
    add_values(kept, p);
  }
  // Adds probabilities times values in the warp's dimensions; p: probabilities of the first 16 tokens, if READ_EARLY.
  DEVICE_MEMBER void add_values(const Levels& kept, Words4 p) {
    UNROLL_FOR (int half = 0; half < TOKEN_TILES; half++) {
      if (half || !READ_EARLY) p = *(const Words4*)probabilities(half);
      if (SHIFT != 0.0f) mma_f16(probability_sum, p.x, p.y, p.z, p.w, 0x3C003C00u, 0x3C003C00u);
      UNROLL_FOR (int i = 0; i < OWN; i++) {
        u32 b[4];
        UNROLL_FOR (int m = 0; m < 4; m++)
          b[m] = half || i < TRANSPOSED_EARLY ? kept[half][i][m] : movmatrix_trans(kept[half][i][m]);
        mma_f16(o[2 * i], p.x, p.y, p.z, p.w, b[0], b[1]);
        mma_f16(o[2 * i + 1], p.x, p.y, p.z, p.w, b[2], b[3]);
      }
    }
  }
};
