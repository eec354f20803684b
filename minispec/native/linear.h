// What products know of a weight: which output lies where, what is fetched ahead, and where results go.
#pragma once

#include <algorithm>

#include "vec.h"

namespace minispec {

constexpr int kBlock = 32;  // outputs per block
constexpr int kGroup = 32;  // inputs per group; rows of x are zero up to a multiple of this

inline int groups_of(int in) { return (in + kGroup - 1) / kGroup; }
inline int padded_inputs(int in) { return groups_of(in) * kGroup; }

struct Linear {
  const void* weight;  // packed; see weights.h
  const bf16* bias;    // [out], or null
  int32_t in, out;
  int32_t paired;      // 1: gate_up; blocks hold 16 outputs of the first half and the matching 16 of the second
  int32_t bits;        // of a weight, 16 or 8
};

inline int blocks_of(const Linear& l) { return l.paired ? (l.out / 2 + 15) / 16 : (l.out + kBlock - 1) / kBlock; }

// Where output `lane` of a block lies in [0, out).
inline int output_of(const Linear& l, int block, int lane) {
  if (!l.paired) return block * kBlock + lane;
  return lane < 16 ? block * 16 + lane : l.out / 2 + block * 16 + lane - 16;
}

// Whether a lane of a block is an output at all.
inline bool is_output(const Linear& l, int block, int lane) {
  return l.paired ? block * 16 + lane % 16 < l.out / 2 : block * kBlock + lane < l.out;
}

// Fetching of weights, beside the computation: the processor's own prefetching ends at a page. A pass over a block fetches
// the block that the thread turns to next, or where several passes share the work, half of it.
struct Ahead {
  const char* at;
  int step;  // bytes for every 128 that the pass reads: 128, 64 or 0
};

// `weights` is what is read next: naming it keeps the compiler from fetching everything at once.
inline void fetch(Ahead& ahead, const uint8_t*& weights) {
  asm volatile("prefetcht1 (%1)\n\tprefetcht1 (%1,%2)" : "+r"(weights) : "r"(ahead.at), "r"(static_cast<int64_t>(ahead.step / 2)));
  ahead.at += ahead.step;
}

// Results: bfloat16, float32, or silu(gate) * up as float32 rounded to bfloat16.
enum class To { kBf16, kFloat, kSilu };

// The end of a product: a block's sums of `rows` rows, with the bias.
template <To to>
inline void put(const Linear& l, int block, int rows, const float (*sums)[kBlock], void* y, size_t y_stride) {
  const int first = output_of(l, block, 0), second = output_of(l, block, 16);
  const __mmask16 m0 = lanes(l.paired ? l.out / 2 - first : l.out - first);
  const __mmask16 m1 = l.paired ? m0 : l.out > second ? lanes(l.out - second) : 0;
  for (int m = 0; m < rows; ++m) {
    __m512 a = _mm512_load_ps(sums[m]), b = _mm512_load_ps(sums[m] + 16);
    if (l.bias) {
      a = _mm512_add_ps(a, load_bf16(l.bias + first, m0));
      b = _mm512_add_ps(b, load_bf16(l.bias + second, m1));
    }
    if constexpr (to == To::kBf16) {
      bf16* row = static_cast<bf16*>(y) + m * y_stride;
      store_bf16(row + first, a, m0);
      store_bf16(row + second, b, m1);
    } else if constexpr (to == To::kFloat) {
      float* row = static_cast<float*>(y) + m * y_stride;
      _mm512_mask_storeu_ps(row + first, m0, a);
      _mm512_mask_storeu_ps(row + second, m1, b);
    } else {
      store_rounded(static_cast<float*>(y) + m * y_stride + first, silu_mul(a, b), m0);
    }
  }
}

}  // namespace minispec
