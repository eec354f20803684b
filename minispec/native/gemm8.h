// Products with weights of 8 bits, and the choice between the two kinds.
//
// Weights and inputs are whole numbers in blocks of 32 inputs, each with a scale: per output and block, bfloat16, made
// while loading (minispec/model/int8.py); per row and block, float32, made here. With q = value / scale,
//
//     y[r, n] = sum over blocks b of  ws[n, b] xs[r, b] * sum over k in b of  wq[n, k] xq[r, k]
//
// as Q8_0 of llama.cpp has it. The inner sums are exact (vpdpbusd), the outer ones run in ascending order: a row's result
// is the same bits alone and in any company. The instruction multiplies unsigned bytes by signed ones, so a weight is kept
// as wq + 128, and the sum starts at -128 sum(xq).
//
//     packed[block of 32 outputs][block of 32 inputs]{ bfloat16 scale[32]; uint8 weight[8][32][4]; }
#pragma once

#include "gemm.h"
#include "pool.h"

namespace minispec {

constexpr int kGroup = 32;                                // inputs that share a scale
constexpr int kStripe = kBlock * kGroup + 2 * kBlock;     // bytes of 32 outputs and 32 inputs
constexpr int kRowTile8 = 6;                              // two sums of each kind per row: 24 of 32 registers

inline int groups_of(const Linear& l) { return padded_inputs(l.in) / kGroup; }

// Bytes.
inline int64_t packed_size(const Linear& l) {
  const int64_t outputs = static_cast<int64_t>(blocks_of(l)) * kBlock;
  return l.bits == 8 ? outputs / kBlock * groups_of(l) * kStripe : outputs * padded_inputs(l.in) * sizeof(bf16);
}

// One block of outputs from values [out, in] and scales [out, groups]. Zeros where outputs or inputs run out.
inline void pack_block8(const Linear& l, const int8_t* values, const bf16* scales, uint8_t* packed, int block) {
  const int groups = groups_of(l);
  uint8_t* to = packed + static_cast<size_t>(block) * groups * kStripe;
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
inline void unpack_block8(const Linear& l, int8_t* values, bf16* scales, int block) {
  const int groups = groups_of(l);
  const uint8_t* from = static_cast<const uint8_t*>(l.weight) + static_cast<size_t>(block) * groups * kStripe;
  for (int g = 0; g < groups; ++g, from += kStripe)
    for (int lane = 0; lane < kBlock; ++lane) {
      if (!is_output(l, block, lane)) continue;
      const size_t output = output_of(l, block, lane);
      std::memcpy(scales + output * groups + g, from + 2 * lane, sizeof(bf16));
      for (int k = 0; k < kGroup && g * kGroup + k < l.in; ++k)
        values[output * l.in + g * kGroup + k] = from[2 * kBlock + (k / 4 * kBlock + lane) * 4 + k % 4] - 128;
    }
}

// 32 inputs of a row. What an instruction broadcasts lies together, so that a row needs one address.
struct Group {
  int8_t value[kGroup];
  float scale;
  int32_t start;  // -128 times the sum of the values
};

// Round a row; x is zero behind its end. Scale = greatest magnitude / 127. What is not finite makes the scale so.
inline void round_row(const float* x, int groups, Group* to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int g = 0; g < groups; ++g, x += kGroup, ++to) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    // as integers, so that NaN and infinity come out on top
    const uint32_t bits = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                         _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
    float top;
    std::memcpy(&top, &bits, sizeof top);
    const __m512 factor = _mm512_set1_ps(top > 1e-30f ? 127.0f / top : 0.0f);
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->value), _mm512_cvtsepi32_epi8(qa));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->value + 16), _mm512_cvtsepi32_epi8(qb));
    to->scale = top / 127.0f;
    // unsigned: with what is not finite it may overflow
    to->start = static_cast<int32_t>(-128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb))));
  }
}

template <int M>
inline void tile8(const Group* x, size_t stride, const uint8_t* w, int groups, Ahead ahead, __m512 (&acc)[M][2]) {
  const Group* base[(M + 2) / 3];  // a base per three rows, as in gemm.h
#pragma GCC unroll 16
  for (int i = 0; i < (M + 2) / 3; ++i) base[i] = x + 3 * i * stride;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, w += kStripe) {
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) asm("" : "+r"(base[i]));
    __m512i sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_set1_epi32(base[m / 3][m % 3 * stride].start);
    _mm_prefetch(ahead.at, _MM_HINT_T1);
    ahead.at += ahead.step / 2;
#pragma GCC unroll 16
    for (int j = 0; j < kGroup / 4; ++j) {
      const uint8_t* at = w + 2 * kBlock + j * kBlock * 4;
      fetch(ahead);
      const __m512i w0 = _mm512_loadu_si512(at), w1 = _mm512_loadu_si512(at + 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        int32_t four;
        std::memcpy(&four, base[m / 3][m % 3 * stride].value + 4 * j, sizeof four);
        const __m512i a = _mm512_set1_epi32(four);
        sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], w0, a);
        sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], w1, a);
      }
    }
    const __m512 s0 = load_bf16(reinterpret_cast<const bf16*>(w)), s1 = load_bf16(reinterpret_cast<const bf16*>(w) + 16);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 s = _mm512_set1_ps(base[m / 3][m % 3 * stride].scale);
      acc[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][0]), _mm512_mul_ps(s0, s), acc[m][0]);
      acc[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][1]), _mm512_mul_ps(s1, s), acc[m][1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) ++base[i];
  }
}

template <To to, int M = kRowTile8>
inline void block_rows8(int rows, const Linear& l, int block, const Group* x, size_t stride, Ahead ahead, void* y,
                        size_t y_stride) {
  if constexpr (M > 0) {
    if (rows == M) {
      const int groups = groups_of(l);
      const uint8_t* w = static_cast<const uint8_t*>(l.weight) + static_cast<size_t>(block) * groups * kStripe;
      __m512 acc[M][2];
      tile8<M>(x, stride, w, groups, ahead, acc);
      put<M, to>(l, block, acc, y, y_stride);
    } else {
      block_rows8<to, M - 1>(rows, l, block, x, stride, ahead, y, y_stride);
    }
  }
}

// A whole product, shared by the team; called by all its threads. x is zero up to a multiple of kPadInputs; `rounded` has
// room for its rows (kGroup inputs an element).
template <To to>
inline void gemm(Pool& pool, const Linear& l, const float* x, size_t stride, int rows, Group* rounded, void* y,
                 size_t y_stride) {
  const int groups = groups_of(l);
  if (l.bits == 8) pool.phase(rows, [&](int r) { round_row(x + r * stride, groups, rounded + static_cast<size_t>(r) * groups); });
  // several blocks in a row, so that what is fetched ahead is mostly what the same thread reads next
  const int blocks = blocks_of(l), run = std::clamp(blocks / (4 * pool.size()), 1, 16);
  const size_t bytes = packed_size(l) / blocks;
  pool.phase((blocks + run - 1) / run, [&](int task) {
    const int end = std::min((task + 1) * run, blocks);
    for (int block = task * run; block < end; ++block) {
      // behind the run: where it goes on if all threads are equally fast
      const int next = block + 1 < end ? block + 1 : std::min((task + pool.size()) * run, blocks - 1);
      const char* ahead = static_cast<const char*>(l.weight) + next * bytes;
      if (l.bits == 8)
        in_tiles<to>(rows, kRowTile8, y, y_stride, ahead, bytes, [&](int at, int n, void* to_rows, Ahead part) {
          block_rows8<to>(n, l, block, rounded + static_cast<size_t>(at) * groups, groups, part, to_rows, y_stride);
        });
      else
        in_tiles<to>(rows, kRowTile, y, y_stride, ahead, bytes, [&](int at, int n, void* to_rows, Ahead part) {
          block_rows_of<to>(n, l, block, x + at * stride, stride, part, to_rows, y_stride);
        });
    }
  });
}

// The best few logits of a row made again with the head's own weights [vocab, in] bfloat16, which decide near-ties.
inline void rescore(float* logits, int vocab, const float* x, const bf16* weight, int in) {
  constexpr int kBest = 8;
  int best[kBest + 1], count = 0;  // best first, equal ones in the order of their ids
  float lowest = -INFINITY;        // what a logit must exceed
  for (int i = 0; i < vocab; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes(vocab - i), logits + i);
    for (uint32_t m = _mm512_cmp_ps_mask(v, _mm512_set1_ps(lowest), _CMP_GT_OQ); m; m &= m - 1) {
      const int id = i + __builtin_ctz(m);
      if (!(logits[id] > lowest)) continue;
      int at = count;
      for (; at > 0 && logits[best[at - 1]] < logits[id]; --at) best[at] = best[at - 1];
      best[at] = id;
      count = std::min(count + 1, kBest);
      if (count == kBest) lowest = logits[best[kBest - 1]];
    }
  }
  for (int i = 0; i < count; ++i) {
    const bf16* w = weight + static_cast<int64_t>(best[i]) * in;
    __m512 sum = _mm512_setzero_ps();
    for (int k = 0; k < in; k += 16)
      sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + k), load_bf16(w + k, lanes(in - k)), sum);
    logits[best[i]] = _mm512_reduce_add_ps(sum);
  }
}

}  // namespace minispec
