// The rotation: signs, then a Hadamard matrix per block, as butterflies over a small core matrix (codec.rotation).
#pragma once

#include "simd.h"

// Butterflies between the two halves of x, each `half` long.
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
  if (core == 1 && block >= 4) {  // the first two strides at once, in registers
    for (int i = 0; i < block; i += 4) {
      const T a = x[i] + x[i + 1], b = x[i] - x[i + 1], c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
      x[i] = a + c, x[i + 1] = b + d, x[i + 2] = a - c, x[i + 3] = b - d;
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
