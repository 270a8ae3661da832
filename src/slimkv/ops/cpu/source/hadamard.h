// The rotation: signs, then a Hadamard matrix per block, as butterflies over a small core matrix (codec.rotation).
#pragma once

#include <type_traits>

#include "simd.h"

template <typename T>
struct Four {
  typedef T type __attribute__((vector_size(4 * sizeof(T))));
};

#if defined(__clang__) || __GNUC__ >= 12
#define SWAP_ONE(v) __builtin_shufflevector(v, v, 1, 0, 3, 2)
#define SWAP_TWO(v) __builtin_shufflevector(v, v, 2, 3, 0, 1)
#else  // older compilers want integers of the same size
#define SWAP_ONE(v) __builtin_shuffle(v, (typename Four<Integer<T>>::type){1, 0, 3, 2})
#define SWAP_TWO(v) __builtin_shuffle(v, (typename Four<Integer<T>>::type){2, 3, 0, 1})
template <typename T>
using Integer = typename std::conditional<sizeof(T) == 8, i64, i32>::type;
#endif

// Butterflies between x[i] and x[i + half], both `half` long.
template <typename T>
static inline void butterflies(T* x, int half) {
  for (int i = 0; i < half; i++) {
    const T a = x[i], b = x[i + half];
    x[i] = a + b;
    x[i + half] = a - b;
  }
}

template <typename T>
static void hadamard_block(T* x, int block, int core, const i8* matrix, bool transposed) {
  int half = core;
  if (core == 1 && block >= 4) {  // strides 1 and 2 inside vectors of four
    typedef typename Four<T>::type V;
    for (int i = 0; i < block; i += 4) {
      V v = read<V>(x + i);
      v = (V)SWAP_ONE(v) + v * (V){1, -1, 1, -1};
      v = (V)SWAP_TWO(v) + v * (V){1, 1, -1, -1};
      memcpy(x + i, &v, sizeof v);
    }
    half = 4;
  } else if (core > 1) {
    T row[MAX_DIM];
    for (int first = 0; first < block; first += core) {
      for (int j = 0; j < core; j++) row[j] = 0;
      for (int i = 0; i < core; i++) {
        const T value = x[first + i];
        if (transposed)
          for (int j = 0; j < core; j++) row[j] += value * (T)matrix[j * core + i];
        else
          for (int j = 0; j < core; j++) row[j] += value * (T)matrix[i * core + j];
      }
      memcpy(x + first, row, sizeof(T) * core);
    }
  }
  for (; half < block; half *= 2)
    for (int first = 0; first < block; first += 2 * half) butterflies(x + first, half);
}

// x @ signed_hadamard, without its normalisation.
template <typename T>
static void rotate(T* x, const Side& side) {
  for (int d = 0; d < side.dim; d++) x[d] *= (T)side.signs[d];
  for (int first = 0; first < side.dim; first += side.hadamard_block)
    hadamard_block(x + first, side.hadamard_block, side.core, side.core_matrix, false);
}

static inline void rotate_normalised(float* x, const Side& side) {
  rotate(x, side);
  for (int d = 0; d < side.dim; d++) x[d] *= side.orthonormal;
}

static inline void unrotate_normalised(float* x, const Side& side) {
  for (int first = 0; first < side.dim; first += side.hadamard_block)
    hadamard_block(x + first, side.hadamard_block, side.core, side.core_matrix, true);
  for (int d = 0; d < side.dim; d++) x[d] *= side.orthonormal * side.signs[d];
}
