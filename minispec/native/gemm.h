// Products of a few rows with a packed weight: y[r, n] = sum_k x[r, k] w[n, k].
//
//     y[r, n] = last[n] * sum over groups g of  ws[n, g] xs[r, g] * sum over k in g of  wq[n, k] xq[r, k]
//
// The inner sums are exact, the outer ones run in ascending order, one chain per output, whatever the number of rows: a
// row's result is the same bits alone and in any company.
#pragma once

#include <vector>

#include "pool.h"
#include "weights.h"

namespace minispec {

constexpr int kRowTile = 12;  // rows that share one pass over a block: 24 sums of 32 registers

// f(kind of weights).
template <class F>
inline auto with_kind(const Linear& l, F&& f) {
  return l.bits == 8 ? f(Blocks8()) : f(Fixed16());
}

template <class Kind>
inline size_t block_bytes(const Linear& l, Kind) {
  return Kind::kHead + static_cast<size_t>(groups_of(l.in)) * Kind::kStripe;
}

// Bytes.
inline int64_t packed_size(const Linear& l) {
  return with_kind(l, [&](auto kind) { return static_cast<int64_t>(blocks_of(l) * block_bytes(l, kind)); });
}

// Where a team rounds the rows of a product's inputs to whole numbers. Few rows are rounded by every thread for itself: that
// is sooner done than waiting for one another.
class Rounded {
 public:
  explicit Rounded(int threads) : data_(threads) {}

  void fit(int rows, int inputs) {
    const size_t row = groups_of(inputs) * std::max(sizeof(Fixed16::Group), sizeof(Blocks8::Group));
    for (size_t thread = 0; thread < data_.size(); ++thread) {
      const size_t needed = row * (thread == 0 ? rows : std::min(rows, kRowTile));
      if (data_[thread].size() < needed) data_[thread].resize(needed);
    }
  }

  // All rows of x, rounded; called by all threads of the team.
  template <class Kind>
  const typename Kind::Group* rows(Pool& pool, int thread, const float* x, size_t stride, int rows, int groups) {
    const bool shared = rows > kRowTile;
    auto* to = reinterpret_cast<typename Kind::Group*>(data_[shared ? 0 : thread].data());
    const auto round = [&](int r) { Kind::round_row(x + r * stride, groups, to + static_cast<size_t>(r) * groups); };
    if (shared)
      pool.phase(rows, round);
    else
      for (int r = 0; r < rows; ++r) round(r);
    return to;
  }

 private:
  std::vector<std::vector<char>> data_;
};

// The inner loop: sums[m] of M rows and the outputs of one block.
template <class Kind, int M>
__attribute__((noinline)) void tile(const typename Kind::Group* x, size_t stride, const uint8_t* block, int groups, Ahead ahead,
                                    float (*sums)[kBlock]) {
  // A base per three rows: (base), (base + stride), (base + 2 stride) are addresses the processor computes for free. The
  // compiler would rather keep an offset per row, run out of registers, and read them back from memory each time.
  const typename Kind::Group* base[(M + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (M + 2) / 3; ++i) base[i] = x + 3 * i * stride;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    _mm512_store_ps(sums[m], _mm512_setzero_ps());
    _mm512_store_ps(sums[m] + 16, _mm512_setzero_ps());
  }
  const uint8_t* stripe = block + Kind::kHead;
  for (int g = 0; g < groups; ++g, stripe += Kind::kStripe) {
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) asm("" : "+r"(base[i]));
    asm("" : "+r"(sums) : : "memory");  // they stay in memory: registers are for the sums of the group
    __m512i sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = Kind::start(base[m / 3][m % 3 * stride]);
#pragma GCC unroll 16
    for (int j = 0; j < Kind::kWords; ++j) {
      const uint8_t* at = Kind::weights(stripe) + j * 4 * kBlock;
      fetch(ahead, at);
      const __m512i w0 = _mm512_loadu_si512(at), w1 = _mm512_loadu_si512(at + 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        int32_t word;
        std::memcpy(&word, reinterpret_cast<const char*>(base[m / 3][m % 3 * stride].value) + 4 * j, sizeof word);
        const __m512i a = _mm512_set1_epi32(word);
        sum[m][0] = Kind::dot(sum[m][0], w0, a);
        sum[m][1] = Kind::dot(sum[m][1], w1, a);
      }
    }
    const __m512 s0 = Kind::scale(stripe, 0), s1 = Kind::scale(stripe, 16);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 s = _mm512_set1_ps(base[m / 3][m % 3 * stride].scale);
      const auto add = [&](int half, __m512 weights) {
        float* at = sums[m] + 16 * half;
        _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][half]), _mm512_mul_ps(weights, s), _mm512_load_ps(at)));
      };
      add(0, s0);
      add(1, s1);
    }
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) ++base[i];
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int lane = 0; lane < kBlock; lane += 16)
      _mm512_store_ps(sums[m] + lane, _mm512_mul_ps(_mm512_load_ps(sums[m] + lane), Kind::last_scale(block, lane)));
}

template <class Kind, int M = kRowTile>
inline void tile_of(int rows, const typename Kind::Group* x, size_t stride, const uint8_t* block, int groups, Ahead ahead,
                    float (*sums)[kBlock]) {
  if constexpr (M > 0) {
    if (rows == M)
      tile<Kind, M>(x, stride, block, groups, ahead, sums);
    else
      tile_of<Kind, M - 1>(rows, x, stride, block, groups, ahead, sums);
  }
}

// All rows of a block of outputs, in tiles as equal as can be. Next: the block that the thread turns to then.
template <class Kind, To to>
inline void block_rows(const Linear& l, int block, int next, const typename Kind::Group* x, int rows, void* y, size_t y_stride) {
  constexpr size_t width = to == To::kBf16 ? sizeof(bf16) : sizeof(float);
  const int groups = groups_of(l.in), tiles = (rows + kRowTile - 1) / kRowTile;
  const size_t bytes = block_bytes(l, Kind());
  const uint8_t *weight = static_cast<const uint8_t*>(l.weight), *now = weight + block * bytes, *then = weight + next * bytes;
  for (int t = 0, at = 0; t < tiles; ++t) {
    const int n = (rows - at) / (tiles - t);
    alignas(64) float sums[kRowTile][kBlock];
    // the third pass fetches nothing: what is in the first cache anyway
    const void* from = t < 2 ? static_cast<const void*>(then + t * bytes / 2) : sums;
    const Ahead ahead{static_cast<const char*>(from), tiles == 1 ? 128 : t < 2 ? 64 : 0};
    char* results = static_cast<char*>(y) + at * y_stride * width;
    // results go to as many lines of memory as there are rows, last held by whoever read them: ask for them in time
    for (int m = 0; m < n; ++m) __builtin_prefetch(results + (m * y_stride + output_of(l, block, 0)) * width, 1);
    tile_of<Kind>(n, x + static_cast<size_t>(at) * groups, groups, now, groups, ahead, sums);
    put<to>(l, block, n, sums, results, y_stride);
    at += n;
  }
}

// A whole product, shared by the team; called by all its threads. x is zero up to a multiple of kGroup.
template <To to>
inline void gemm(Pool& pool, int thread, const Linear& l, const float* x, size_t stride, int rows, Rounded& rounded, void* y,
                 size_t y_stride) {
  with_kind(l, [&](auto kind) {
    using Kind = decltype(kind);
    const auto* whole = rounded.rows<Kind>(pool, thread, x, stride, rows, groups_of(l.in));
    // several blocks in a row, so that what is fetched ahead is mostly what the same thread reads next
    const int blocks = blocks_of(l), run = std::clamp(blocks / (4 * pool.size()), 1, 16);
    pool.phase((blocks + run - 1) / run, [&](int task) {
      const int end = std::min((task + 1) * run, blocks);
      for (int block = task * run; block < end; ++block) {
        // behind the run: where it goes on if all threads are equally fast
        const int next = block + 1 < end ? block + 1 : std::min((task + pool.size()) * run, blocks - 1);
        block_rows<Kind, to>(l, block, next, whole, rows, y, y_stride);
      }
    });
  });
}

// One block of outputs from what weights.h says of its kind, and the way back.
inline void pack_block(const Linear& l, const void* plain, const bf16* scales, void* packed, int block) {
  with_kind(l, [&](auto kind) {
    decltype(kind)::pack(l, plain, scales, static_cast<uint8_t*>(packed) + block * block_bytes(l, kind), block);
  });
}

inline void unpack_block(const Linear& l, void* plain, bf16* scales, int block) {
  with_kind(l, [&](auto kind) {
    decltype(kind)::unpack(l, plain, scales, block, static_cast<const uint8_t*>(l.weight) + block * block_bytes(l, kind));
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
