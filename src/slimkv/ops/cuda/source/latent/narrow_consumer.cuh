// A consumer warp of narrow.cu: scores and values for its part of the latent's dimensions.
#pragma once
#include "latent/narrow_team.cuh"

constexpr float SHIFT = BY_PAIRS ? 0.0f : OFFSET;  // the offset of levels in operands
constexpr bool HELD = BY_PAIRS;  // queries stay in registers; other formats have too few
// Slices whose transposition hides the latency of reading whether a maximum was raised (by measurement).
constexpr int TRANSPOSED_EARLY = L_LEVELS ? 0 : OWN < 3 ? OWN : 3;
constexpr float MOST_PROBABILITY = 256.0f;  // relative to the current running maximum
constexpr float LEAST_SCALE = 9.094947e-13f;  // 2^-40
constexpr float LOWEST = -1e30f;  // the initial maximum, far below any score

typedef u32 Levels[TOKEN_TILES][OWN][4];  // of 16 tokens each: tokens x dimensions, later transposed

// The two tokens for which a lane computes probabilities of rows g and g + 8, and the scales of their latents.
struct TokenPair {
  int token;
  float scale[2];
};

struct Consumer : TeamMember {
  const LatentArgs& args;
  const int warp;
  // The lane's group of 8 tokens: its warp's or, in half of the rows, the next warp's, to avoid bank conflicts.
  const int octet;
  const LevelTable levels;

  // Per work tile, for rows g and g + 8.
  Words4 queries[OWN];  // in the warp's dimensions
  float unit[2], start[2];
  int visible_end[2], clear_end, length;
  float row_max[2], row_sum[2];
  Fragment o[2 * OWN], probability_sum;

  DEVICE_MEMBER Consumer(const LatentArgs& args_, u8* shared_, int team_, int warp_, int lane_)
      : TeamMember(shared_, team_, lane_), args(args_), warp(warp_), octet(warp_ ^ (lane_ >> 3 & 1)),
        levels{shared_address(shared_ + LEVELS_AT) + 4 * lane_} {}

  DEVICE_MEMBER void sync() const { bar_sync(1 + team, 32 * WARPS); }
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
    UNROLL_FOR (int n = 0; n < 2; n++) {
      const Row& row = row_of(n);
      unit[n] = row.unit, visible_end[n] = row.visible_end, row_sum[n] = 0.0f;
      start[n] = SHIFT == 0.0f ? 0.0f : row.start;
    }
    clear_end = work.visible_end(args, 0), length = work.length;
    UNROLL_FOR (int i = 0; i < 4; i++) {
      row_max[i / 2] = LOWEST, probability_sum[i] = 0.0f;
      UNROLL_FOR (int j = 0; j < 2 * OWN; j++) o[j][i] = 0.0f;
    }
  }

  // ---- scores -------------------------------------------------------------------------------------------------------

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
  DEVICE_MEMBER int place() const { return 8 * octet + 2 * t; }  // first of the lane's two tokens
  DEVICE_MEMBER TokenPair token_pair(u32 fields, int kv_block) const {
    TokenPair pair;
    pair.token = kv_block * KV_BLOCK + place();
    UNROLL_FOR (int b = 0; b < 2; b++)
      pair.scale[b] = marked_scale(pair.token + b < length ? fields >> (16 * b) & 0xFFFF : 0);
    return pair;
  }

  // Sums the warps' partial scores for the lane's two rows and two tokens into x, and masks them. Transposing levels of
  // the last 16 tokens hides the latency of the additions.
  DEVICE_MEMBER void sum_scores(const TokenPair& pair, bool clear, Levels& kept, float (&x)[4]) const {
    UNROLL_FOR (int n = 0; n < 2; n++) {
      const Words2 rope = *rope_scores(octet, n);
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
        x[2 * n + i] += as_float(i ? rope.y : rope.x);
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
  DEVICE_MEMBER void raise_max(const float (&x)[4], u32 fields, int kv_block, float (&sum)[2]) {
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
    const u8* const stage = wait_for_stage();
    OwnCodes codes[TOKEN_TILES];
    UNROLL_FOR (int i = 0; i < TOKEN_TILES; i++) codes[i].load(stage + i * L_TILE, lane, warp);
    Levels kept;
    score_latents(codes, kept);
    const u32 fields = *(const u32*)(stage + LATENT_FIELDS_AT + 2 * place());
    finish_scores();
    if (warp == 0 && lane == 0) mbarrier_arrive(empty());
    const TokenPair pair = token_pair(fields, kv_block);
    float x[4], sum[2];
    sum_scores(pair, (kv_block + 1) * KV_BLOCK <= clear_end, kept, x);
    const bool raises = !exponentiate(x, pair, sum);
    i32* const last_raised = (i32*)(mine + RAISED_AT);  // the last KV block in which a maximum is raised
    if (raises) *last_raised = kv_block;
    sync();
    const int raised_at = *last_raised;
    UNROLL_FOR (int i = 0; i < TRANSPOSED_EARLY; i++) transpose(kept[0][i]);
    if (shfl(raised_at, 0) == kv_block) raise_max(x, fields, kv_block, sum);
    UNROLL_FOR (int n = 0; n < 2; n++) row_sum[n] += sum[n];
    add_values(kept);
    advance();
  }
  // Adds probabilities times values in the warp's dimensions.
  DEVICE_MEMBER void add_values(const Levels& kept) {
    UNROLL_FOR (int half = 0; half < TOKEN_TILES; half++) {
      const Words4 p = *(const Words4*)probabilities(half);
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
