// A consumer warpgroup of wide.cu: scores and probabilities of every other KV block, and half of the output dimensions.
#pragma once
#include "latent/wide_producer.cuh"

constexpr int HALF = LD / 2;  // output dimensions of a warpgroup
constexpr int PROBABILITIES_OF_FIRST = 1, CONSUMERS = 3;  // named barriers; the second warpgroup's probabilities have 2

typedef float Output[HALF / 2];
typedef u32 Probabilities[4][4];  // an operand for every 16 tokens

// A row's factor that turns products of latents into scores, the rope parts' unit relative to it, the visible tokens.
struct __attribute__((aligned(16))) Row {
  float unit, rope;
  i32 visible_end;
  i32 unused;
};

// A lane has rows g and g + 8 of its warp's 16.
struct Consumer {
  u8* shared;
  u64 *full, *empty;
  int group, warp, lane;
  int before;  // KV blocks of earlier ranges
  int first, count;  // KV blocks of this range
  int clear_end;  // all rows see tokens before it
  float unit[2], rope[2];
  int visible_end[2];
  float row_max[2], row_sum[2];

  DEVICE_MEMBER int row_of(int r) const { return 16 * warp + lane / 4 + 8 * r; }
  DEVICE_MEMBER void take_rows() {
    UNROLL_FOR (int r = 0; r < 2; r++) {
      const Row row = ((const Row*)(shared + PROBABILITIES_AT))[row_of(r)];
      unit[r] = row.unit, rope[r] = row.rope, visible_end[r] = row.visible_end;
      row_max[r] = MINUS_INFINITY, row_sum[r] = 0.0f;
    }
  }
  DEVICE_MEMBER const TokenScales& scales_of(int stage) const {
    return ((const TokenScales*)(shared + SCALES_AT))[stage];
  }
  // The scales of the lane's tokens 8 j + 2 t and 8 j + 2 t + 1.
  DEVICE_MEMBER Words2 pair_of(const float* scales, int j) const {
    return *(const Words2*)(scales + 8 * j + 2 * (lane & 3));
  }

  // -- descriptors of operands, advanced by `bytes`; values: in the warpgroup's dimensions
  DEVICE_MEMBER u64 queries_at(int bytes) const {
    return advance_descriptor(smem_descriptor(shared_address(shared + QUERIES_AT), 16), bytes);
  }
  DEVICE_MEMBER u64 keys_at(int stage, int bytes) const {
    return advance_descriptor(smem_descriptor(shared_address(shared + RING_AT) + stage * STAGE, 16), bytes);
  }
  DEVICE_MEMBER u64 values_at(int stage, int bytes) const {
    const u32 own = shared_address(shared + RING_AT) + stage * STAGE + group * (CHUNKS / 2) * CHUNK;
    return advance_descriptor(smem_descriptor(own, CHUNK), bytes);
  }

  // -- scores
  // Issues products of queries and rope parts.
  DEVICE_MEMBER void start_rope_scores(float (&s)[32], int stage) const {
    UNROLL_FOR (int i = 0; i < 32; i++) s[i] = 0.0f;
    wgmma_fence_operand(s);
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < ROPE_SLICES; k++) {
      const int at = (CHUNKS + k / 4) * CHUNK + k % 4 * 32;
      WgmmaNarrow<64, BF16_ROPE>::shared_a(s, queries_at(at), keys_at(stage, at));
    }
    wgmma_commit();
  }
  // Converts rope scores to units of the latents' scales.
  DEVICE_MEMBER void scale_rope_scores(float (&s)[32], int stage) const {
    const TokenScales& scales = scales_of(stage);
    wgmma_fence_operand(s);
    UNROLL_FOR (int j = 0; j < 8; j++) {
      const Words2 by = pair_of(R_KIND == RAW ? scales.inverse : scales.rope, j);
      UNROLL_FOR (int i = 0; i < 4; i++)
        s[4 * j + i] *= as_float(i % 2 ? by.y : by.x) * (BF16_ROPE ? 1.0f : rope[i / 2]);
    }
    wgmma_fence_operand(s);
    wgmma_fence();
  }
  // Issues products with quarter Q of the latents' dimensions, which are added to s.
  template <int Q> DEVICE_MEMBER void start_scores(float (&s)[32], int stage) const {
    UNROLL_FOR (int k = Q * QUARTER; k < (Q + 1) * QUARTER; k++) {
      const int at = k / 4 * CHUNK + k % 4 * 32;
      Wgmma<64>::shared_a<true>(s, queries_at(at), keys_at(stage, at));
    }
    wgmma_commit();
  }

  // -- softmax
  // Turns products into base-2 scores plus the logarithm of the token's scale, masked.
  DEVICE_MEMBER void scale_scores(float (&s)[32], const TokenScales& scales, int token) const {
    const int t = lane & 3;
    UNROLL_FOR (int j = 0; j < 8; j++) {
      const Words2 scale = pair_of(scales.scale, j), log = pair_of(scales.log, j);
      UNROLL_FOR (int i = 0; i < 4; i++)
        s[4 * j + i] =
            s[4 * j + i] * as_float(i % 2 ? scale.y : scale.x) * unit[i / 2] + as_float(i % 2 ? log.y : log.x);
    }
    if (token + KV_BLOCK <= clear_end) return;
    UNROLL_FOR (int i = 0; i < 32; i++)
      if (token + 8 * (i / 4) + 2 * t + i % 2 >= visible_end[i / 2 % 2]) s[i] = MINUS_INFINITY;
  }
  // Raises running maxima that lag; `by`: the rescaling factors of the output. Returns whether any was raised.
  DEVICE_MEMBER bool raise_max(const float (&s)[32], float (&by)[2]) {
    float wanted[2] = {MINUS_INFINITY, MINUS_INFINITY};
    UNROLL_FOR (int i = 0; i < 32; i++) wanted[i / 2 % 2] = max_f32(wanted[i / 2 % 2], s[i]);
    auto behind = [&](int r) { return wanted[r] > row_max[r] + RESCALE_THRESHOLD; };
    if (!warp_any(behind(0) || behind(1))) return false;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      wanted[r] = max_f32(wanted[r], shfl_xor(wanted[r], 1));
      wanted[r] = max_f32(wanted[r], shfl_xor(wanted[r], 2));
      const float to = behind(r) ? wanted[r] : row_max[r];
      by[r] = behind(r) ? exp2_approx(row_max[r] - to) : 1.0f;
      row_max[r] = to, row_sum[r] *= by[r];
    }
    return true;
  }
  // Turns scores into fp16 probabilities times the tokens' scales. Returns whether a maximum was raised.
  DEVICE_MEMBER bool softmax(float (&s)[32], int stage, int token, float (&by)[2], Probabilities& p) {
    const TokenScales& scales = scales_of(stage);
    scale_scores(s, scales, token);
    const bool raised = raise_max(s, by);
    float shift[2];
    UNROLL_FOR (int r = 0; r < 2; r++) shift[r] = row_max[r] == MINUS_INFINITY ? 0.0f : row_max[r];
    UNROLL_FOR (int j = 0; j < 8; j++) {
      const Words2 inverse = pair_of(scales.inverse, j);
      UNROLL_FOR (int r = 0; r < 2; r++) {
        const float low = exp2_approx(s[4 * j + 2 * r] - shift[r]), high = exp2_approx(s[4 * j + 2 * r + 1] - shift[r]);
        row_sum[r] += low * as_float(inverse.x);
        row_sum[r] += high * as_float(inverse.y);
        p[j / 2][j % 2 * 2 + r] = pack_f16x2(low, high);
      }
    }
    return raised;
  }
  DEVICE_MEMBER void rescale(Output& o, bool raised, const float (&by)[2]) const {
    if (!raised) return;
    UNROLL_FOR (int i = 0; i < HALF / 2; i++) o[i] *= by[i / 2 % 2];
  }

  // -- exchange of probabilities with the other warpgroup
  DEVICE_MEMBER void send(const Probabilities& p) const {
    const u32 row = shared_address(shared + PROBABILITIES_AT) + (16 * warp + lane % 16) * 128;
    UNROLL_FOR (int k = 0; k < 4; k++)
      stmatrix_x4<0>(row + ((2 * k + lane / 16 ^ (lane & 7)) << 4), p[k][0], p[k][1], p[k][2], p[k][3]);
    float* maxima = (float*)(shared + ROW_MAX_AT);
    if ((lane & 3) == 0) maxima[row_of(0)] = row_max[0], maxima[row_of(1)] = row_max[1];
    fence_proxy_async();
    bar_arrive(PROBABILITIES_OF_FIRST + group, 256);
  }
  // Waits for the other warpgroup's probabilities and maxima. Returns whether any maximum differs.
  DEVICE_MEMBER bool receive(float (&by)[2]) {
    bar_sync(PROBABILITIES_OF_FIRST + 1 - group, 256);
    const float* maxima = (const float*)(shared + ROW_MAX_AT);
    const float others[2] = {maxima[row_of(0)], maxima[row_of(1)]};
    if (!warp_any(others[0] != row_max[0] || others[1] != row_max[1])) return false;
    UNROLL_FOR (int r = 0; r < 2; r++) {
      by[r] = others[r] != row_max[r] ? exp2_approx(row_max[r] - others[r]) : 1.0f;
      row_max[r] = others[r], row_sum[r] *= by[r];
    }
    return true;
  }

  // -- output
  // Issue products of this or the other warpgroup's probabilities with the values in this warpgroup's dimensions.
  DEVICE_MEMBER void start_values(Output& o, const Probabilities& p, int stage) const {
    wgmma_fence_operand(o);
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < 4; k++)
      Wgmma<HALF>::register_a(o, p[k][0], p[k][1], p[k][2], p[k][3], values_at(stage, k * 2048));
    wgmma_commit();
  }
  DEVICE_MEMBER void start_others_values(Output& o, int stage) const {
    const u64 probabilities = smem_descriptor(shared_address(shared + PROBABILITIES_AT), 16);
    wgmma_fence_operand(o);
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < 4; k++)
      Wgmma<HALF>::shared_a_across(o, advance_descriptor(probabilities, k * 32), values_at(stage, k * 2048));
    wgmma_commit();
  }

  // -- KV blocks, numbered from the first one of the range
  DEVICE_MEMBER int stage_of(int i) const { return (before + i) % STAGES; }
  DEVICE_MEMBER void await(int stage, u32 turn, int part) const {
    mbarrier_wait(full + 5 * stage + part, turn);
    fence_proxy_async();  // orders the producer's stores, after the barrier, before wgmma
  }
  // Releases this warpgroup's dimensions of a stage; scores no longer read them.
  DEVICE_MEMBER void release(Output& o, int i) const {
    wgmma_fence_operand(o);
    if (lane == 0) mbarrier_arrive(empty + 3 * stage_of(i) + group);
  }
  // Issues the value products of a KV block that the other warpgroup scored.
  DEVICE_MEMBER void attend_others(Output& o, int i) {
    float by[2];
    const bool raised = receive(by);
    rescale(o, raised, by);
    start_others_values(o, stage_of(i));
  }
  // Issues half of the scores of this warpgroup's KV block; then the values of the other's block, whose probabilities
  // have arrived; then the other half and this block's values. The output is rescaled only while no product adds to it.
  template <bool AFTER_OTHER> DEVICE_MEMBER void attend_own(Output& o, int i) {
    const int stage = stage_of(i), token = (first + i) * KV_BLOCK;
    const u32 turn = (u32)((before + i) / STAGES & 1);
    float s[32], by[2];
    Probabilities p;
    await(stage, turn, ROPE);
    start_rope_scores(s, stage);
    wgmma_wait<0>();
    scale_rope_scores(s, stage);
    await(stage, turn, 0);
    wgmma_fence_operand(s);
    wgmma_fence();
    start_scores<0>(s, stage);
    await(stage, turn, 1);
    start_scores<1>(s, stage);
    if (AFTER_OTHER) {
      wgmma_wait<0>();
      wgmma_fence_operand(s);
      attend_others(o, i - 1);
    }
    await(stage, turn, 2);
    wgmma_fence_operand(s);
    wgmma_fence();
    start_scores<2>(s, stage);
    await(stage, turn, 3);
    start_scores<3>(s, stage);
    if (AFTER_OTHER) {
      wgmma_wait<2>();
      release(o, i - 1);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    const bool raised = softmax(s, stage, token, by, p);
    send(p);
    if (lane == 0) mbarrier_arrive(empty + 3 * stage + ROPE_FREE);
    rescale(o, raised, by);
    start_values(o, p, stage);
    wgmma_wait<0>();
    release(o, i);
  }
  DEVICE_MEMBER void attend_range(Output& o) {
    int i = group;
    if (group == 0 && count > 0) attend_own<false>(o, 0), i = 2;
    for (; i < count; i += 2) attend_own<true>(o, i);
    if (i == count && count) {  // the other warpgroup scores the last one
      attend_others(o, count - 1);
      wgmma_wait<0>();
      release(o, count - 1);
    }
  }
};
