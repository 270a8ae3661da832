// The operands of values.
#pragma once
#include "decode/warp_state.cuh"

// The fp16 operand of a slice of values, in pairs of tokens.
template <class C> DEVICE void value_halves(const C& codes, int slice, const LevelTables& tables, u32 (&a)[4]) {
  if constexpr (V_PERMUTED) denormal_halves<true>(codes.low(slice), tables.value, a);
  else if constexpr (V_IN_PAIRS) {
    pair_halves<true>(codes, slice, tables.value_levels, a);
    if (WARPGROUPS && V_BITS == 5) wgmma_fence_operand(a);  // as in key_halves
  } else code_halves<V_KIND, V_BITS, true>(codes.low(slice), codes.high(slice), tables.value, tables.value_levels, a);
}
