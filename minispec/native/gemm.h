// Products of a few rows with a packed weight: y[r, n] = sum_k x[r, k] w[n, k].
//
//     y[r, n] = last[n] * sum over groups g of  ws[n, g] xs[r, g] * sum over k in g of  wq[n, k] xq[r, k]
//
// The inner sums are exact, the outer ones run in ascending order, one chain per output, whatever the number of rows: a
// row's result is the same bits alone and in any company.
#pragma once

#include "inputs.h"
#include "pool.h"

namespace minispec {

template <class Kind>
inline size_t block_bytes(const Linear& l, Kind) {
  return Kind::kHead + static_cast<size_t>(groups_of(l.in)) * Kind::kStripe;
}

// Bytes.
inline int64_t packed_size(const Linear& l) {
  return with_kind(l.bits, [&](auto kind) { return static_cast<int64_t>(blocks_of(l) * block_bytes(l, kind)); });
}

// The inner loop: sums[m] of M rows and the outputs of one block. Everything of the rows' values lies at constant distances
// from one pointer. Factors have a base per three rows: (base), (base + stride), (base + 2 stride) are addresses the
// processor computes for free. The compiler would rather keep an offset per row, run out of registers, and read them back
// from memory each time.
template <class Kind, int M>
__attribute__((noinline)) void tile(const char* x, const typename Kind::Factor* factors, size_t stride, const uint8_t* block,
                                    int groups, Ahead ahead, float (*sums)[kBlock]) {
  const typename Kind::Factor* base[(M + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (M + 2) / 3; ++i) base[i] = factors + 3 * i * stride;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    _mm512_store_ps(sums[m], _mm512_setzero_ps());
    _mm512_store_ps(sums[m] + 16, _mm512_setzero_ps());
  }
  const uint8_t* stripe = block + Kind::kHead;
  for (int g = 0; g < groups; ++g, stripe += Kind::kStripe, x += M * Kind::kWords * 4) {
#pragma GCC unroll 16
    for (int i = 0; i < (M + 2) / 3; ++i) asm("" : "+r"(base[i]));
    asm("" : "+r"(sums) : : "memory");  // they stay in memory: registers are for the sums of the group
    __m512i sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = Kind::start(base[m / 3][m % 3 * stride]);
    const uint8_t* at = Kind::weights(stripe);
#pragma GCC unroll 16
    for (int j = 0; j < Kind::kWords; ++j, at += 4 * kBlock) {
      fetch(ahead, at);
      const __m512i w0 = _mm512_loadu_si512(at), w1 = _mm512_loadu_si512(at + 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        int32_t word;
        std::memcpy(&word, x + 4 * (m * Kind::kWords + j), sizeof word);
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
        float* to = sums[m] + 16 * half;
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m][half]), _mm512_mul_ps(weights, s), _mm512_load_ps(to)));
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
inline void tile_of(int rows, const char* x, const typename Kind::Factor* factors, size_t stride, const uint8_t* block,
                    int groups, Ahead ahead, float (*sums)[kBlock]) {
  if constexpr (M > 0) {
    if (rows == M)
      tile<Kind, M>(x, factors, stride, block, groups, ahead, sums);
    else
      tile_of<Kind, M - 1>(rows, x, factors, stride, block, groups, ahead, sums);
  }
}

// Where results go: rows of bfloat16 or of float32.
template <class T>
struct ToRows {
  static constexpr int kBlocks = 1;  // that a task takes

  const Linear& l;
  T* y;
  size_t stride;

  // Results go to as many lines of memory as there are rows, last held by whoever read them: ask for them in time.
  void expect(int block, int row, int rows) const {
    for (int m = 0; m < rows; ++m) __builtin_prefetch(y + (row + m) * stride + output_of(l, block, 0), 1);
  }

  void put(int block, int row, int rows, const float (*sums)[kBlock]) const {
    const int first = output_of(l, block, 0), second = output_of(l, block, 16);
    const __mmask16 m0 = lanes(l.paired ? l.out / 2 - first : l.out - first);
    const __mmask16 m1 = l.paired ? m0 : l.out > second ? lanes(l.out - second) : 0;
    for (int m = 0; m < rows; ++m) {
      T* to = y + (row + m) * stride;
      store(to + first, with_bias(l, first, m0, sums[m]), m0);
      store(to + second, with_bias(l, second, m1, sums[m] + 16), m1);
    }
  }

  static __m512 with_bias(const Linear& l, int output, __mmask16 mask, const float* sums) {
    const __m512 sum = _mm512_load_ps(sums);
    return l.bias ? _mm512_add_ps(sum, load_bf16(l.bias + output, mask)) : sum;
  }

 private:
  static void store(bf16* to, __m512 x, __mmask16 mask) { store_bf16(to, x, mask); }
  static void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
};

// silu(gate) * up, rounded to bfloat16 and then to the next product's inputs. Of a gate_up's blocks two make a group of these.
struct ToInner {
  static constexpr int kBlocks = 2;

  const Linear& l;
  Inputs& inner;
  float (*kept)[kGroup];  // [kRowTile]: a thread's own

  void expect(int, int, int) const {}

  void put(int block, int row, int rows, const float (*sums)[kBlock]) const {
    const int first = output_of(l, block, 0), half = block % 2 * 16;
    const __mmask16 mask = lanes(l.out / 2 - first);
    for (int m = 0; m < rows; ++m) {
      const __m512 gate = ToRows<bf16>::with_bias(l, first, mask, sums[m]);
      const __m512 up = ToRows<bf16>::with_bias(l, l.out / 2 + first, mask, sums[m] + 16);
      _mm512_store_ps(kept[m] + half, _mm512_maskz_mov_ps(mask, rounded(silu_mul(gate, up))));
      if (half == 0 && block + 1 == blocks_of(l)) _mm512_store_ps(kept[m] + 16, _mm512_setzero_ps());
      if (half || block + 1 == blocks_of(l)) inner.round(row + m, block / 2, 1, kept[m]);
    }
  }
};

// A task's blocks, one or two, for all rows. Next: the blocks that the thread turns to then.
template <class Kind, class To>
inline void blocks_rows(const Linear& l, int block, int count, const uint8_t* next, Inputs& x, const To& to) {
  const int groups = groups_of(l.in), rows = x.rows(), tiles = tiles_of(rows);
  const size_t bytes = block_bytes(l, Kind());
  const uint8_t* weight = static_cast<const uint8_t*>(l.weight) + block * bytes;
  for (int t = 0; t < tiles; ++t) {
    const int row = tile_start(rows, t), n = tile_start(rows, t + 1) - row;
    for (int i = 0; i < count; ++i) {
      alignas(64) float sums[kRowTile][kBlock];
      // two passes share the work, further ones fetch nothing: what is in the first cache anyway
      const size_t part = tiles == 1 ? i * bytes : (t * count + i) * (bytes / 2);
      const Ahead ahead{t < 2 ? next + part : reinterpret_cast<const uint8_t*>(sums), tiles == 1 ? 128 : t < 2 ? 64 : 0};
      to.expect(block + i, row, n);
      tile_of<Kind>(n, x.values<Kind>(row), x.factors<Kind>(row), x.stride(), weight + i * bytes, groups, ahead, sums);
      to.put(block + i, row, n, sums);
    }
  }
}

// Where a thread begins with a product.
template <class To>
inline const uint8_t* first_block(const Pool& pool, int thread, const Linear& l) {
  const int tasks = (blocks_of(l) + To::kBlocks - 1) / To::kBlocks;
  return with_kind(l.bits, [&](auto kind) {
    return static_cast<const uint8_t*>(l.weight) + pool.first_of(thread, tasks) * To::kBlocks * block_bytes(l, kind);
  });
}

// A whole product, shared by the team; called by all its threads. Then: what the thread reads behind it.
template <class To>
inline void gemm(Pool& pool, int thread, const Linear& l, Inputs& x, const To& to, const uint8_t* then) {
  with_kind(l.bits, [&](auto kind) {
    using Kind = decltype(kind);
    const int blocks = blocks_of(l), tasks = (blocks + To::kBlocks - 1) / To::kBlocks, end = pool.first_of(thread + 1, tasks);
    pool.phase(thread, tasks, [&](int task) {
      const int block = task * To::kBlocks;
      const uint8_t* weight = static_cast<const uint8_t*>(l.weight);
      const uint8_t* next = task + 1 == end ? then : weight + (block + To::kBlocks) * block_bytes(l, kind);
      blocks_rows<Kind>(l, block, std::min(To::kBlocks, blocks - block), next, x, to);
    });
  });
}

// One block of outputs from what weights.h says of its kind, and the way back.
inline void pack_block(const Linear& l, const void* plain, const bf16* scales, void* packed, int block) {
  with_kind(l.bits, [&](auto kind) {
    decltype(kind)::pack(l, plain, scales, static_cast<uint8_t*>(packed) + block * block_bytes(l, kind), block);
  });
}

inline void unpack_block(const Linear& l, void* plain, bf16* scales, int block) {
  with_kind(l.bits, [&](auto kind) {
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
