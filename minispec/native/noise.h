// Keyed Gumbel noise, eight tokens at a time: the words of minispec/sampling.py's philox exactly, and their noise in double
// precision, rounded once at the end.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace minispec {

// Philox4x32-7 (Salmon et al. 2011) of eight counters (block, position, 0, 0): word i of each in w[i], as 64-bit lanes.
inline void philox512(uint64_t seed, uint64_t position, __m512i blocks, __m512i w[4]) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  __m512i c0 = blocks, c1 = _mm512_set1_epi64(position), c2 = _mm512_setzero_si512(), c3 = c2;
  for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
    // a product reads the lower half of a lane; what the upper half has gathered goes at the end
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), c1), _mm512_set1_epi64(k0));
    c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), c3), _mm512_set1_epi64(k1));
    c1 = p1, c3 = p0;
  }
  const __m512i low = _mm512_set1_epi64(0xffffffff);
  w[0] = _mm512_and_si512(c0, low), w[1] = _mm512_and_si512(c1, low);
  w[2] = _mm512_and_si512(c2, low), w[3] = _mm512_and_si512(c3, low);
}

// 1 / c and log c for sixteen c in [0.75, 1.5): steps of 1/32 below 1, where the first eight are, and of 1/16 from there on.
struct LogTable {
  alignas(64) double inverse[16];
  alignas(64) double log[16];
  LogTable() {
    for (int j = 0; j < 16; ++j) {
      inverse[j] = 1.0 / (j < 8 ? 0.75 + j / 32.0 : 1.0 + (j - 8) / 16.0);
      log[j] = static_cast<double>(-std::log(static_cast<long double>(inverse[j])));
    }
  }
};
inline const LogTable kLogTable;

// log x within about 1 ulp for normal x > 0, near 1 too. x = 2^k z and z = c (1 + r) with c from the table, so that
// |r| <= 1/32: the series of log(1 + r) ends at r^11. c = 1 and k = 0 around 1, where only r is left and nothing cancels.
inline __m512d log512(__m512d x) {
  const __m512i bits = _mm512_castpd_si512(x);
  // the least z, half a step below 0.75: each z is next to its c
  const __m512i from_least = _mm512_sub_epi64(bits, _mm512_set1_epi64(0x3fe8000000000000 - (int64_t{1} << 47)));
  const __m512i j = _mm512_srli_epi64(from_least, 48), k = _mm512_srai_epi64(from_least, 52);
  const __m512d z = _mm512_castsi512_pd(_mm512_sub_epi64(bits, _mm512_slli_epi64(k, 52)));
  const __m512d inverse = _mm512_permutex2var_pd(_mm512_load_pd(kLogTable.inverse), j, _mm512_load_pd(kLogTable.inverse + 8));
  const __m512d log_c = _mm512_permutex2var_pd(_mm512_load_pd(kLogTable.log), j, _mm512_load_pd(kLogTable.log + 8));
  const __m512d r = _mm512_fmsub_pd(z, inverse, _mm512_set1_pd(1.0));
  const __m512d r2 = _mm512_mul_pd(r, r), r4 = _mm512_mul_pd(r2, r2);
  const auto pair = [&](int n) {  // of the series' terms n and n + 1, without r^n; n is even
    return _mm512_fmadd_pd(r, _mm512_set1_pd(1.0 / (n + 1)), _mm512_set1_pd(-1.0 / n));
  };
  const __m512d low = _mm512_fmadd_pd(r2, pair(4), pair(2)), high = _mm512_fmadd_pd(r2, pair(8), pair(6));
  const __m512d series = _mm512_fmadd_pd(r4, _mm512_fmadd_pd(r4, pair(10), high), low);
  const __m512d whole = _mm512_fmadd_pd(_mm512_cvtepi64_pd(k), _mm512_set1_pd(0.693147180559945309417), log_c);
  return _mm512_add_pd(whole, _mm512_fmadd_pd(r2, series, r));
}

// -log(-log(1 - u)) with u = (word + 0.5) / 2^32; 1 - u is exact in double.
inline __m256 gumbel_of(__m512i words) {
  const __m512d halves = _mm512_add_pd(_mm512_cvtepu64_pd(words), _mm512_set1_pd(0.5));
  const __m512d rest = _mm512_fnmadd_pd(halves, _mm512_set1_pd(0x1p-32), _mm512_set1_pd(1.0));
  const __m512d zero = _mm512_setzero_pd();
  return _mm512_cvtpd_ps(_mm512_sub_pd(zero, log512(_mm512_sub_pd(zero, log512(rest)))));
}

// Noise of the tokens first .. first + count; first is a multiple of 4.
inline void gumbel_row(uint64_t seed, uint64_t position, int first, int count, float* out) {
  const __m512i next = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int i = 0; i < count; i += 32) {
    __m512i w[4];
    philox512(seed, position, _mm512_add_epi64(next, _mm512_set1_epi64((first + i) / 4)), w);
    // four words of each of eight counters: from [word][counter] to [counter][word]
    const __m256 a = gumbel_of(w[0]), b = gumbel_of(w[1]), c = gumbel_of(w[2]), d = gumbel_of(w[3]);
    const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d ab2 = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), cd2 = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    const __m256d at04 = _mm256_unpacklo_pd(ab, cd), at15 = _mm256_unpackhi_pd(ab, cd);
    const __m256d at26 = _mm256_unpacklo_pd(ab2, cd2), at37 = _mm256_unpackhi_pd(ab2, cd2);
    alignas(32) double rest[16];
    const bool whole = count - i >= 32;
    double* to = whole ? reinterpret_cast<double*>(out + i) : rest;
    _mm256_storeu_pd(to, _mm256_permute2f128_pd(at04, at15, 0x20));
    _mm256_storeu_pd(to + 4, _mm256_permute2f128_pd(at26, at37, 0x20));
    _mm256_storeu_pd(to + 8, _mm256_permute2f128_pd(at04, at15, 0x31));
    _mm256_storeu_pd(to + 12, _mm256_permute2f128_pd(at26, at37, 0x31));
    if (!whole) std::memcpy(out + i, rest, sizeof(float) * (count - i));
  }
}

// Noise of some tokens; token t has word t % 4 of counter t / 4.
inline void gumbel_at(uint64_t seed, uint64_t position, const int64_t* tokens, int count, float* out) {
  for (int i = 0; i < count; i += 8) {
    const __mmask8 m = static_cast<__mmask8>(lanes(count - i));
    const __m512i token = _mm512_maskz_loadu_epi64(m, tokens + i), which = _mm512_and_si512(token, _mm512_set1_epi64(3));
    __m512i w[4];
    philox512(seed, position, _mm512_srli_epi64(token, 2), w);
    for (int word = 1; word < 4; ++word)
      w[0] = _mm512_mask_mov_epi64(w[0], _mm512_cmpeq_epi64_mask(which, _mm512_set1_epi64(word)), w[word]);
    _mm256_mask_storeu_ps(out + i, m, gumbel_of(w[0]));
  }
}

}  // namespace minispec
