// Tables of levels, in registers and in shared memory.
#pragma once
#include "decode/shape.cuh"

struct LevelTables {
  Table key, value;  // in registers
  LevelTable key_levels, value_levels;
};

template <int BITS, bool IN_PAIRS> DEVICE u32 level_entry(const float* levels, int i) {
  constexpr int FIRST = BITS == 5 ? 16 : 0, CODES = BITS < 4 ? 1 << BITS : 16;  // levels that a nibble selects
  u32 entry = f32_to_f16(levels[IN_PAIRS ? FIRST + i % CODES : i % (1 << BITS)]);
  if (IN_PAIRS) entry |= f32_to_f16(levels[FIRST + i / 16 % CODES]) << 16;
  return entry;
}

// Writes every entry 32 times, once per lane. Threads start at different lanes to avoid bank conflicts.
template <int BITS, int ENTRIES, bool IN_PAIRS> DEVICE void fill_levels(u8* table, const float* levels) {
  for (int i = thread_index(); i < ENTRIES; i += 32 * WARPS) {
    const u32 entry = level_entry<BITS, IN_PAIRS>(levels, i);
    UNROLL_FOR (int k = 0; k < 8; k++) *(Words4*)(table + 128 * i + 16 * ((k + i) & 7)) = {entry, entry, entry, entry};
  }
}

// Fills the LUTs. Tables go to per-lane registers, because a permutation takes only one uniform operand.
DEVICE LevelTables load_tables(const DecodeArgs& args, u8* shared, int lane) {
  u8* key_levels = shared;
  u8* value_levels = ONE_TABLE ? shared : shared + 128 * LEVEL_ENTRIES_K;
  fill_levels<K_BITS, LEVEL_ENTRIES_K, K_IN_PAIRS>(key_levels, args.key_levels);
  if (!ONE_TABLE) fill_levels<V_BITS, LEVEL_ENTRIES_V, V_IN_PAIRS>(value_levels, args.value_levels);
  const u32 signs = in_register(0x80808080u, lane);
  auto in_registers = [&](const Table& table, bool doubled) {
    return Table{in_register(doubled ? doubled_magnitudes(table.low) : table.low, lane),
        in_register(doubled ? doubled_magnitudes(table.high) : table.high, lane), signs};
  };
  const Table key_table = in_registers(args.key_table, K_PERMUTED);
  const Table value_table = ONE_TABLE ? key_table : in_registers(args.value_table, V_PERMUTED);
  return {key_table, value_table, {shared_address(key_levels) + 4 * lane}, {shared_address(value_levels) + 4 * lane}};
}
