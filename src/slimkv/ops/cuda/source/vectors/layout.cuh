// One vector per warp: its distribution over lanes, and the layout of values and codes in shared memory.
//
// Order "in eights": lane v % 32 holds dimensions 8 v .. 8 v + 7 as its turn v / 32. Order "apart": lane 8 h + b holds
// the D / 32 dimensions b + 8 k + D / 4 h.
#pragma once
#include "store/format.cuh"

template <int D> constexpr int TURNS_OF = (D / 8 + 31) / 32;
template <int D> DEVICE bool has_eight(int turn, int lane) { return D % 256 == 0 || 32 * turn + lane < D / 8; }
template <int D> DEVICE int dim_of_own(int lane, int k) { return (lane & 7) + 8 * k + D / 4 * (lane >> 3); }

// The indices of numbers and codes in shared memory, padded against bank conflicts.
DEVICE int number_index(int dim) { return dim + (dim >> 5) * 2; }
DEVICE int code_index(int dim) { return dim + (dim >> 7) * 8; }
template <class F> constexpr int VECTOR_CODE_BYTES = (F::D + (F::D >> 7) * 8 + 15) / 16 * 16;

// The bytes of a warp's shared memory: numbers and codes.
template <class F> constexpr int VECTOR_NUMBER_BYTES = F::KIND == LLOYD ? 4 * (F::D + (F::D + 31) / 32 * 2) : 0;
template <class F> constexpr int VECTOR_BYTES =
    F::KIND == RAW ? 0 : (VECTOR_NUMBER_BYTES<F> + VECTOR_CODE_BYTES<F> + 15) / 16 * 16;

// A token among 16, and the lanes whose words have its values: of keys lanes 4 row + t, of values 4 g + row / 2.
struct Place {
  int row, high;
  DEVICE_MEMBER Place(int position) : row(position & 7), high(position >> 3 & 1) {}
  template <bool VALUES> DEVICE_MEMBER int lane_of(int part) const {
    return VALUES ? 4 * part + row / 2 : 4 * row + part;
  }
};

// Numbers of 8, 16 or 32 bits: a lane's words have eight of a slice, of which a token owns NUMBERS adjacent ones.
template <class F> struct WideLayout {
  static constexpr int SLICES = F::D / 16, PARTS = F::VALUES ? 8 : 4, UNITS = SLICES * PARTS, COUNT = (UNITS + 31) / 32;
  static constexpr int NUMBERS = F::VALUES ? 2 : 4, BYTES = NUMBERS * F::BITS / 8;
  static constexpr int WORDS = BYTES < 4 ? 1 : BYTES / 4, PER_WORD = NUMBERS / WORDS;
  static constexpr int WORDS_OF_SLICE = F::BITS / 4;

  DEVICE_MEMBER static bool has(int unit) { return UNITS % 32 == 0 || unit < UNITS; }
  // The offset of word w of a unit in a tile.
  DEVICE_MEMBER static int offset(const Place& place, int unit, int w) {
    const int first = (4 * place.high + (F::VALUES ? 2 * (place.row & 1) : 0)) * F::BITS / 8;
    const int lane = place.template lane_of<F::VALUES>(unit % PARTS);
    return 4 * fragment_word(unit / PARTS * WORDS_OF_SLICE + first / 4 + w, lane, SLICES * WORDS_OF_SLICE) + first % 4;
  }
  DEVICE_MEMBER static int dim(int unit, int n) {
    const int part = unit % PARTS;
    return unit / PARTS * 16 + (F::VALUES ? part + 8 * n : 2 * part + (n & 1) + 8 * (n >> 1));
  }
};
