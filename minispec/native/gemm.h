// Products of a few rows with a packed weight: y[r, n] = sum_k x[r, k] w[n, k]; weights bfloat16, the rest float32.
//
// At up to a dozen rows a product is bound by reading the weight, so the layout is made for one sequential read:
// blocks of 32 outputs; in a block, for every pair of inputs, the 32 pairs of weights side by side.
//
//     packed[block][pair][output % 32][2]            (zeros where outputs or inputs run out)
//
// Every product sums its inputs in ascending order, one chain per output, whatever the number of rows: a row's result
// is the same bits alone and in any company.
#pragma once

#include <algorithm>

#include "vec.h"

namespace minispec {

constexpr int kBlock = 32;     // outputs per block
constexpr int kRowTile = 12;   // rows that share one pass over a block: 24 accumulators of 32 registers
constexpr int kPadInputs = 32; // rows of x are zero up to a multiple of this

inline int padded_inputs(int in) { return (in + kPadInputs - 1) / kPadInputs * kPadInputs; }

struct Linear {
  const void* weight;  // packed
  const bf16* bias;    // [out], or null
  int32_t in, out;
  int32_t paired;      // 1: gate_up; blocks hold 16 outputs of the first half and the matching 16 of the second
  int32_t bits;        // of a weight. 16: bfloat16, as here; 8: see gemm8.h
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

// Pack the rows of a plain [out, in] weight that belong to one block.
inline void pack_block(const Linear& l, const bf16* plain, bf16* packed, int block) {
  const int pairs = padded_inputs(l.in) / 2;
  bf16* to = packed + static_cast<size_t>(block) * pairs * 2 * kBlock;
  for (int p = 0; p < pairs; ++p)
    for (int lane = 0; lane < kBlock; ++lane, to += 2) {
      const bf16* from = plain + static_cast<size_t>(output_of(l, block, lane)) * l.in + 2 * p;
      const bool inside = is_output(l, block, lane);
      to[0] = inside && 2 * p < l.in ? from[0] : 0;
      to[1] = inside && 2 * p + 1 < l.in ? from[1] : 0;
    }
}

// The way back.
inline void unpack_block(const Linear& l, bf16* plain, int block) {
  const bf16* from = static_cast<const bf16*>(l.weight) + static_cast<size_t>(block) * padded_inputs(l.in) * kBlock;
  for (int lane = 0; lane < kBlock; ++lane) {
    if (!is_output(l, block, lane)) continue;
    bf16* to = plain + static_cast<size_t>(output_of(l, block, lane)) * l.in;
    for (int k = 0; k < l.in; ++k) to[k] = from[(k / 2 * kBlock + lane) * 2 + k % 2];
  }
}

// Fetching of weights, beside the computation: the processor's own prefetching ends at a page. A pass over a block fetches
// the block that the thread turns to next, or where several passes share the work, half of it.
struct Ahead {
  const char* at;
  int step;  // bytes for every 128 that the pass reads: 128, 64 or 0
};

inline void fetch(Ahead& ahead) {
  _mm_prefetch(ahead.at, _MM_HINT_T1);
  if (ahead.step > 64) _mm_prefetch(ahead.at + 64, _MM_HINT_T1);
  ahead.at += ahead.step;
}

// The inner loop. Weights are widened to float32 on the way: two of the processor's plain multiply-add units do twice
// what its one bfloat16 unit does (vdpbf16ps: one in two cycles).
template <int M>
inline void tile(const float* x, size_t stride, const bf16* w, int pairs, Ahead ahead, __m512 (&acc)[M][2]) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  // A base per three rows: (base), (base + stride), (base + 2 stride) are addresses the processor computes for free. The
  // compiler would rather keep an offset per row, run out of registers, and read them back from memory each time.
  const float* base[(M + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (M + 2) / 3; ++i) base[i] = x + 3 * i * stride;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int p = 0; p < pairs; ++p, w += 2 * kBlock) {
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) asm("" : "+r"(base[i]));
    fetch(ahead);
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + kBlock);
    const __m512 even0 = _mm512_castsi512_ps(_mm512_slli_epi32(w0, 16));
    const __m512 even1 = _mm512_castsi512_ps(_mm512_slli_epi32(w1, 16));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 a = _mm512_set1_ps(base[m / 3][m % 3 * stride]);
      acc[m][0] = _mm512_fmadd_ps(a, even0, acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(a, even1, acc[m][1]);
    }
    const __m512 odd0 = _mm512_castsi512_ps(_mm512_and_si512(w0, high));
    const __m512 odd1 = _mm512_castsi512_ps(_mm512_and_si512(w1, high));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 a = _mm512_set1_ps(base[m / 3][m % 3 * stride + 1]);
      acc[m][0] = _mm512_fmadd_ps(a, odd0, acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(a, odd1, acc[m][1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) base[i] += 2;
  }
}

// One block of outputs for M rows. Out: bfloat16, float32, or silu(gate) * up as float32 rounded to bfloat16.
enum class To { kBf16, kFloat, kSilu };

// The end of a product: a block's sums of M rows, with the bias.
template <int M, To to>
inline void put(const Linear& l, int block, __m512 (&acc)[M][2], void* y, size_t y_stride) {
  const int first = output_of(l, block, 0), second = output_of(l, block, 16);
  const __mmask16 m0 = lanes(l.paired ? l.out / 2 - first : l.out - first);
  const __mmask16 m1 = l.paired ? m0 : l.out > second ? lanes(l.out - second) : 0;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    if (l.bias) {
      acc[m][0] = _mm512_add_ps(acc[m][0], load_bf16(l.bias + first, m0));
      acc[m][1] = _mm512_add_ps(acc[m][1], load_bf16(l.bias + second, m1));
    }
    if constexpr (to == To::kBf16) {
      bf16* row = static_cast<bf16*>(y) + m * y_stride;
      store_bf16(row + first, acc[m][0], m0);
      store_bf16(row + second, acc[m][1], m1);
    } else if constexpr (to == To::kFloat) {
      float* row = static_cast<float*>(y) + m * y_stride;
      _mm512_mask_storeu_ps(row + first, m0, acc[m][0]);
      _mm512_mask_storeu_ps(row + second, m1, acc[m][1]);
    } else {
      store_rounded(static_cast<float*>(y) + m * y_stride + first, silu_mul(acc[m][0], acc[m][1]), m0);
    }
  }
}

template <int M, To to>
void block_rows(const Linear& l, int block, const float* x, size_t stride, Ahead ahead, void* y, size_t y_stride) {
  const int pairs = padded_inputs(l.in) / 2;
  const bf16* w = static_cast<const bf16*>(l.weight) + static_cast<size_t>(block) * pairs * 2 * kBlock;
  __m512 acc[M][2];
  tile<M>(x, stride, w, pairs, ahead, acc);
  put<M, to>(l, block, acc, y, y_stride);
}

template <To to, int M = kRowTile>
inline void block_rows_of(int rows, const Linear& l, int block, const float* x, size_t stride, Ahead ahead, void* y,
                          size_t y_stride) {
  if constexpr (M > 0) {
    if (rows == M)
      block_rows<M, to>(l, block, x, stride, ahead, y, y_stride);
    else
      block_rows_of<to, M - 1>(rows, l, block, x, stride, ahead, y, y_stride);
  }
}

// All rows of a block of outputs in tiles as equal as can be: f(first row, rows, where y's rows begin, what to fetch of
// the `bytes` at `next`).
template <To to, class F>
inline void in_tiles(int rows, int largest, void* y, size_t y_stride, const char* next, size_t bytes, F&& f) {
  constexpr size_t width = to == To::kBf16 ? sizeof(bf16) : sizeof(float);
  const int tiles = (rows + largest - 1) / largest;
  for (int t = 0, at = 0; t < tiles; ++t) {
    const int n = (rows - at) / (tiles - t);
    const Ahead ahead{t < 2 ? next + t * bytes / 2 : next, tiles == 1 ? 128 : t < 2 ? 64 : 0};
    f(at, n, static_cast<char*>(y) + at * y_stride * width, ahead);
    at += n;
  }
}

}  // namespace minispec
