// Constants shared with the launchers (slimkv/ops/cuda/constants.py), and the mark of invalid fields.
#pragma once
#include "common/intrinsics.cuh"

enum Kind { LLOYD = 0, UNIFORM = 1, FP8 = 2 };
constexpr int RAW = 3;  // a further kind: unquantised numbers, in rope parts of latents and in stores
enum DType { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2 };

template <bool A, class T, class E> struct Choose { typedef T Type; };
template <class T, class E> struct Choose<false, T, E> { typedef E Type; };

constexpr u32 INVALID_FIELD = 0xFFFF;  // marks a token whose K or V is NaN
