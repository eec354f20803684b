// Weights and inputs as whole numbers, of 16 or of 8 bits: products then run on the processor's integer units, which
// multiply and add twice (four times) as much in a cycle as its float32 units, and their sums over a group are exact.
//
// Layout of weights: blocks of 32 outputs, one sequential read. In a block, for every four bytes of inputs (2 or 4 of them), the 32
// outputs' weights side by side; 32 inputs are a group, and a stripe is 32 outputs and a group:
//
//     16 bits: packed[block]{ float scale[32]; stripe[group]{ int16 weight[16][32][2]; } }
//      8 bits: packed[block]{ stripe[group]{ bfloat16 scale[32]; uint8 weight[8][32][4]; } }
//
// Zeros where outputs or inputs run out.
#pragma once

#include "linear.h"

namespace minispec {

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even; not for NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// For exponents of normal numbers.
inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The greatest magnitude of 32 floats, as its bits: NaN and infinity come out on top.
inline uint32_t top_of(__m512 a, __m512 b) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                                  _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
}

// Bfloat16 weights as whole numbers of 16 bits, with a power of two for every output: what is at least 1/128 of an output's
// greatest weight is kept exactly, the rest to 2^-15 of the greatest. Inputs have 12 bits and a power of two for every group:
// a bfloat16 of at least 1/8 of the group's greatest is kept exactly. So the sums of a group fit into 32 bits,
// 32 * 32767 * 2048 < 2^31, and what is lost is less than what rounding to bfloat16 loses anyway.
struct Fixed16 {
  struct Factor {
    float scale;
  };
  static constexpr int kWords = kGroup * 2 / 4;  // of four bytes, in a group's inputs
  static constexpr int kStripe = kBlock * kGroup * 2, kHead = 4 * kBlock;

  static Factor round(const float* x, void* to) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const uint32_t top = top_of(a, b);
    const int exponent = std::max(static_cast<int>(top >> 23) - 127 - 10, -126);  // of the unit
    const __m512 up = _mm512_set1_ps(power_of_two(-exponent));
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, up)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, up));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(qa)), _mm512_cvtsepi32_epi16(qb), 1);
    _mm512_store_si512(to, both);
    return {top < 0x7f800000 ? power_of_two(exponent) : NAN};  // what is not finite makes the scale so
  }

  static __m512i start(const Factor&) { return _mm512_setzero_si512(); }
  static __m512i dot(__m512i sum, __m512i weights, __m512i inputs) { return _mm512_dpwssd_epi32(sum, weights, inputs); }
  static const uint8_t* weights(const uint8_t* stripe) { return stripe; }
  // Of sixteen outputs in a group, and behind all groups.
  static __m512 scale(const uint8_t*, int) { return _mm512_set1_ps(1.0f); }
  static __m512 last_scale(const uint8_t* block, int lane) { return _mm512_loadu_ps(reinterpret_cast<const float*>(block) + lane); }

  // `plain` [out, in] bfloat16.
  static void pack(const Linear& l, const void* plain, const bf16*, uint8_t* block_at, int block) {
    float scales[kBlock];
    int16_t* to = reinterpret_cast<int16_t*>(block_at + kHead);
    for (int lane = 0; lane < kBlock; ++lane) {
      const bf16* from = static_cast<const bf16*>(plain) + static_cast<size_t>(output_of(l, block, lane)) * l.in;
      const int inputs = is_output(l, block, lane) ? l.in : 0;
      int top = 0;
      for (int k = 0; k < inputs; ++k) top = std::max(top, from[k] & 0x7fff);
      const bool finite = top < 0x7f80;
      const int exponent = std::max((top >> 7) - 127 - 14, -126);
      const float up = power_of_two(-exponent);
      for (int k = 0; k < padded_inputs(l.in); ++k)
        to[(k / 2 * kBlock + lane) * 2 + k % 2] =
            k < inputs && finite ? static_cast<int16_t>(std::nearbyintf(to_float(from[k]) * up)) : 0;
      scales[lane] = finite ? power_of_two(exponent) : NAN;
    }
    std::memcpy(block_at, scales, sizeof scales);
  }

  // The way back.
  static void unpack(const Linear& l, void* plain, bf16*, int block, const uint8_t* block_at) {
    const int16_t* from = reinterpret_cast<const int16_t*>(block_at + kHead);
    for (int lane = 0; lane < kBlock; ++lane) {
      if (!is_output(l, block, lane)) continue;
      bf16* to = static_cast<bf16*>(plain) + static_cast<size_t>(output_of(l, block, lane)) * l.in;
      const float scale = reinterpret_cast<const float*>(block_at)[lane];
      for (int k = 0; k < l.in; ++k)
        to[k] = std::isnan(scale) ? 0x7fc0 : to_bf16(from[(k / 2 * kBlock + lane) * 2 + k % 2] * scale);
    }
  }
};

// As Q8_0 of llama.cpp has it: a scale for every output and group, bfloat16, made while loading (minispec/model/int8.py),
// and for every row and group, made here. The instruction multiplies unsigned bytes by signed ones, so a weight is kept
// as value + 128, and the sum starts at -128 times the sum of the inputs.
struct Blocks8 {
  struct Factor {
    float scale;
    int32_t start;
  };
  static constexpr int kWords = kGroup / 4;
  static constexpr int kStripe = kBlock * kGroup + 2 * kBlock, kHead = 0;

  // Scale = greatest magnitude / 127. What is not finite makes the scale so.
  static Factor round(const float* x, void* to) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const uint32_t bits = top_of(a, b);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    const __m512 factor = _mm512_set1_ps(top > 1e-30f ? 127.0f / top : 0.0f);
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
    _mm256_store_si256(static_cast<__m256i*>(to), _mm256_set_m128i(_mm512_cvtsepi32_epi8(qb), _mm512_cvtsepi32_epi8(qa)));
    // unsigned: with what is not finite it may overflow
    return {top / 127.0f,
            static_cast<int32_t>(-128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb))))};
  }

  static __m512i start(const Factor& factor) { return _mm512_set1_epi32(factor.start); }
  static __m512i dot(__m512i sum, __m512i weights, __m512i inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
  static const uint8_t* weights(const uint8_t* stripe) { return stripe + 2 * kBlock; }
  static __m512 scale(const uint8_t* stripe, int lane) { return load_bf16(reinterpret_cast<const bf16*>(stripe) + lane); }
  static __m512 last_scale(const uint8_t*, int) { return _mm512_set1_ps(1.0f); }

  // `plain` [out, in] int8, and its `scales` [out, groups].
  static void pack(const Linear& l, const void* plain, const bf16* scales, uint8_t* to, int block) {
    const int8_t* values = static_cast<const int8_t*>(plain);
    const int groups = groups_of(l.in);
    for (int g = 0; g < groups; ++g, to += kStripe)
      for (int lane = 0; lane < kBlock; ++lane) {
        const bool inside = is_output(l, block, lane);
        const size_t output = output_of(l, block, lane);
        const bf16 scale = inside ? scales[output * groups + g] : 0;
        std::memcpy(to + 2 * lane, &scale, sizeof scale);
        for (int k = 0; k < kGroup; ++k) {
          const int8_t value = inside && g * kGroup + k < l.in ? values[output * l.in + g * kGroup + k] : 0;
          to[2 * kBlock + (k / 4 * kBlock + lane) * 4 + k % 4] = static_cast<uint8_t>(value + 128);
        }
      }
  }

  // The way back.
  static void unpack(const Linear& l, void* plain, bf16* scales, int block, const uint8_t* from) {
    int8_t* values = static_cast<int8_t*>(plain);
    const int groups = groups_of(l.in);
    for (int g = 0; g < groups; ++g, from += kStripe)
      for (int lane = 0; lane < kBlock; ++lane) {
        if (!is_output(l, block, lane)) continue;
        const size_t output = output_of(l, block, lane);
        std::memcpy(scales + output * groups + g, from + 2 * lane, sizeof(bf16));
        for (int k = 0; k < kGroup && g * kGroup + k < l.in; ++k)
          values[output * l.in + g * kGroup + k] = from[2 * kBlock + (k / 4 * kBlock + lane) * 4 + k % 4] - 128;
      }
  }
};

// f(kind of weights).
template <class F>
inline auto with_kind(int bits, F&& f) {
  return bits == 8 ? f(Blocks8()) : f(Fixed16());
}

}  // namespace minispec
