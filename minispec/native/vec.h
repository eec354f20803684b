// Sixteen floats at a time: conversions, exp, and the row operations between the matrix products.
//
// Each result depends on its own row and on nothing else, and sums run in a fixed order: a token's numbers are the same
// bits whoever shares its step. Values are rounded to bfloat16 where the eager forward in torch rounds them.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace minispec {

using bf16 = uint16_t;

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m512 load_bf16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load_bf16(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store_bf16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store_bf16(bf16* p, __m512 x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }
inline __m512 rounded(__m512 x) { return widen(narrow(x)); }
inline __mmask16 lanes(int n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

// e^x within 2 ulp for x in [-87, 88]; 0 below, inf above. Cody-Waite reduction and a polynomial of degree 6.
inline __m512 exp512(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.3f), high = _mm512_set1_ps(88.7f);
  const __mmask16 under = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), over = _mm512_cmp_ps_mask(x, high, _CMP_GT_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.3888889e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3333333e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1666667e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666667e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_scalef_ps(p, n);
  p = _mm512_mask_mov_ps(p, under, _mm512_setzero_ps());
  return _mm512_mask_mov_ps(p, over, _mm512_set1_ps(INFINITY));
}

// silu(gate) * up, both rounded to bfloat16 on the way as torch does.
inline __m512 silu_mul(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 g = rounded(gate);
  const __m512 s = _mm512_div_ps(g, _mm512_add_ps(one, exp512(_mm512_sub_ps(_mm512_setzero_ps(), g))));
  return _mm512_mul_ps(rounded(s), rounded(up));
}

inline void store_rounded(bf16* p, __m512 x, __mmask16 m) { store_bf16(p, x, m); }
inline void store_rounded(float* p, __m512 x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, rounded(x)); }

// RMSNorm of one row (Zhang & Sennrich 2019): y = bf16(x / sqrt(mean(x^2) + eps)) * weight, rounded to bfloat16.
template <class T>
inline void rms_norm(const bf16* x, const bf16* weight, int dim, float eps, T* y) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < dim; i += 16) {
    const __m512 v = load_bf16(x + i, lanes(dim - i));
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / static_cast<float>(dim) + eps));
  for (int i = 0; i < dim; i += 16) {
    const __mmask16 m = lanes(dim - i);
    const __m512 normed = rounded(_mm512_mul_ps(load_bf16(x + i, m), factor));
    store_rounded(y + i, _mm512_mul_ps(normed, load_bf16(weight + i, m)), m);
  }
}

// residual = bf16(residual + x), one row.
inline void add_to(bf16* residual, const bf16* x, int dim) {
  for (int i = 0; i < dim; i += 16) {
    const __mmask16 m = lanes(dim - i);
    store_bf16(residual + i, _mm512_add_ps(load_bf16(residual + i, m), load_bf16(x + i, m)), m);
  }
}

// RoPE (Su et al. 2021) of one head, halves paired; cos and sin [half] float32. y may be x.
inline void rotate(const bf16* x, const float* cos, const float* sin, int half, bf16* y) {
  for (int i = 0; i < half; i += 16) {
    const __mmask16 m = lanes(half - i);
    const __m512 a = load_bf16(x + i, m), b = load_bf16(x + half + i, m);
    const __m512 c = _mm512_maskz_loadu_ps(m, cos + i), s = _mm512_maskz_loadu_ps(m, sin + i);
    store_bf16(y + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)), m);
    store_bf16(y + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)), m);
  }
}

}  // namespace minispec
