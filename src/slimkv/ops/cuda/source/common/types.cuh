// Numbers that launchers and kernels share (slimkv/ops/cuda/constants.py has the same), and the fields' mark.
#pragma once
#include "common/intrinsics.cuh"

enum Kind { LLOYD = 0, UNIFORM = 1, FP8 = 2 };
constexpr int RAW = 3;  // besides those kinds: unquantised numbers, in the rope parts of latents and in stores
enum DType { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2 };

template <bool A, class T, class E> struct Choose { typedef T Type; };
template <class T, class E> struct Choose<false, T, E> { typedef E Type; };

constexpr u32 INVALID_FIELD = 0xFFFF;  // of a token whose K or V was not a number
