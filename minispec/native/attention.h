// Attention of a step's rows over the paged KV cache: prefill chunks, trees and single tokens alike, nothing copied.
//
//     out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]
//
// A task takes up to 48 query rows (rows times the query heads that share a KV head), reads each key and value once for
// all of them, and keeps nothing but their scores of one chunk of 128 positions. Chunks are merged by log-sum-exp in
// ascending order (flash-decoding: Dao et al. 2023), side by side where there are few tasks: whoever is through last
// with a query row's chunks merges them. While a chunk's scores are computed its values are on their way from memory, and
// while these are summed the next chunk's keys. Scores have sixteen keys as lanes, sums of values sixteen dimensions,
// whatever the number of rows.
//
// The result of a row depends on the sequence of keys it sees and on nothing else: a key that is not seen adds an exact
// zero, chunks are cut by a key's position, not by where in a tree it lies, and weights are totalled in sixteen sums by
// position. So a node of a tree gets the bits that plain decoding would have given it.
#pragma once

#include "memory.h"
#include "plan.h"
#include "vec.h"

namespace minispec {

// One layer's attention.
struct Attention {
  const bf16 *q;  // [rows, heads, head_dim], rotated
  int64_t q_stride;
  const bf16 *k, *v;  // [kv_heads, positions, head_dim], this layer's cache
  int64_t head_stride;  // elements between KV heads
  int heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
};

// 2^x for x <= 0, within 2 ulp down to the smallest normal number; a polynomial of degree 5 (minimax, exact at 0).
inline __m512 power512(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 p = _mm512_set1_ps(1.8793186e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.9909947e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5818677e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4015927e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9315171e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // by floor(x)
}

// A query row's partial result, joined with that of later keys.
inline void merge(float* into, const float* later, int head_dim) {
  if (later[1] == 0) return;
  if (into[1] == 0) {
    std::memcpy(into, later, sizeof(float) * (kFront + head_dim));
    return;
  }
  const float high = std::max(into[0], later[0]);
  const __m512 a = power512(_mm512_set1_ps(into[0] - high)), b = power512(_mm512_set1_ps(later[0] - high));
  into[0] = high;
  into[1] = into[1] * _mm512_cvtss_f32(a) + later[1] * _mm512_cvtss_f32(b);
  for (int i = kFront; i < kFront + head_dim; i += 16)
    _mm512_storeu_ps(into + i,
                     _mm512_fmadd_ps(_mm512_loadu_ps(into + i), a, _mm512_mul_ps(_mm512_loadu_ps(later + i), b)));
}

// The result, rounded to bfloat16.
inline void finish(const float* partial, int head_dim, float* out) {
  const __m512 factor = _mm512_set1_ps(1.0f / partial[1]);
  for (int i = 0; i < head_dim; i += 16)
    _mm512_storeu_ps(out + i, rounded(_mm512_mul_ps(_mm512_loadu_ps(partial + kFront + i), factor)));
}

// Sixteen rows of sixteen 32-bit values, rows and columns exchanged.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Thirty-two values of bfloat16 as two vectors: those of even index and those of odd.
inline __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Keys and values on their way: from memory into the second cache, a chunk ahead, and then into the first. The processor's
// own prefetching ends with a page of 4 KiB; what it can have on the way at a time is little, so all computation but the
// softmax has its share of requests in it.
inline void fetch(const bf16* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
inline void fetch_near(const bf16* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
constexpr int kNear = 12;  // values ahead

// A thread's working memory, and the computation of one task.
class Attender {
 public:
  // done(partial, row, head) for every query row of the task, unless others have a part in it that are not through.
  template <class F>
  void run(const Attention& a, const Batch& b, Plan& plan, int which, F&& done) {
    const Tile& t = plan.tiles[which];
    const int size = kFront + a.head_dim;
    at_least(running_, static_cast<size_t>(kLanes) * size), at_least(chunk_, static_cast<size_t>(kLanes) * size);
    load_queries(a, t);
    float* first = t.join < 0 ? running_.data() : &plan.partials[t.partial * size];
    k_ = a.k + t.kv_head * a.head_stride;
    v_ = a.v + t.kv_head * a.head_stride;
    for (int c = t.begin; c < t.end; ++c) {
      const Keys& keys = plan.keys[t.keys + c - t.begin];
      keys_ = keys.count, plain_ = keys.plain;
      index_ = &plan.index[keys.index];
      masks_ = plan.masks.data() + keys.masks;
      look_ahead(a, plan, which, c);
      float* to = c == t.begin ? first : t.join < 0 ? chunk_.data() : first + (c - t.begin) * t.count * size;
      score(a.head_dim, t.count);
      soften(a, b, t, c, to);
      weigh(a.head_dim, t.count, to);
      if (to == chunk_.data())
        for (int i = 0; i < t.count; ++i) merge(first + i * size, to + i * size, a.head_dim);
    }
    if (t.join >= 0) {
      Plan::Join& join = plan.joins[t.join];
      if (__atomic_sub_fetch(&join.left, 1, __ATOMIC_ACQ_REL)) return;
      join.left = join.parts;  // for the next layer
      first = &plan.partials[join.partial * size];
      for (int c = 1; c < join.chunks; ++c)
        for (int i = 0; i < t.count; ++i) merge(first + i * size, first + (c * t.count + i) * size, a.head_dim);
    }
    each_lane(a, t, [&](int i, int row, int head) { done(first + i * size, row, head); });
  }

 private:
  static constexpr int kTile = 12;  // lanes that share one pass over keys or values

  // The keys that are likely to be wanted next: those of the next chunk, or of a task that follows.
  void look_ahead(const Attention& a, const Plan& plan, int which, int c) {
    const bool more = c + 1 < plan.tiles[which].end;
    const Tile& t = plan.tiles[more ? which : std::min<size_t>(which + 1, plan.tiles.size() - 1)];
    const Keys& keys = plan.keys[more ? t.keys + c + 1 - t.begin : t.keys];
    next_k_ = a.k + t.kv_head * a.head_stride;
    next_index_ = &plan.index[keys.index];
    next_keys_ = keys.count;
  }

  // f(lane, row, head) for the query rows of a task.
  template <class F>
  static void each_lane(const Attention& a, const Tile& t, F&& f) {
    const int heads_end = (t.kv_head + 1) * (a.heads / a.kv_heads);
    for (int i = 0, row = t.row, head = t.head; i < t.count; ++i) {
      f(i, row, head);
      if (++head == heads_end) head -= a.heads / a.kv_heads, ++row;
    }
  }

  // f(number, first) for tiles of up to kTile lanes; the number is a constant.
  template <class F>
  static void each_tile(int count, F&& f) {
    const int tiles = (count + kTile - 1) / kTile;
    for (int t = 0, lane = 0; t < tiles; ++t) {
      const int rows = (count - lane) / (tiles - t);
      sized<kTile>(rows, [&](auto number) { f(number, lane); });
      lane += rows;
    }
  }

  template <int M, class F>
  static void sized(int rows, F&& f) {
    if constexpr (M > 0) {
      if (rows == M)
        f(std::integral_constant<int, M>());
      else
        sized<M - 1>(rows, f);
    }
  }

  // By tiles of lanes: [dim][16] float32, times what makes scores of powers of two; zero from head_dim on.
  void load_queries(const Attention& a, const Tile& t) {
    const __m512 scale = _mm512_set1_ps(a.scale * 1.44269504088896341f);
    dims_ = (a.head_dim + 31) / 32 * 32;
    at_least(queries_, static_cast<size_t>(kLanes) / kTile * 16 * dims_);
    const bf16* rows[kLanes];
    each_lane(a, t, [&](int i, int row, int head) {
      rows[i] = a.q + row * a.q_stride + static_cast<int64_t>(head) * a.head_dim;
    });
    float* to = queries_.data();
    each_tile(t.count, [&](auto m, int lane) {
      for (int d = 0; d < dims_; d += 16, to += 256) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j)
          r[j] = j < m && d < a.head_dim ? _mm512_castps_si512(_mm512_mul_ps(load_bf16(rows[lane + j] + d), scale))
                                         : _mm512_setzero_si512();
        transpose(r);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) _mm512_store_si512(to + 16 * j, r[j]);
      }
    });
  }

  // Scores of the chunk's keys: [lane][stride_], whether seen or not.
  void score(int head_dim, int count) {
    stride_ = (keys_ + 31) / 32 * 32 + 16;
    at_least(scores_, static_cast<size_t>(kLanes) * stride_);
    if (count <= kTile) {
      sized<kTile>(count, [&](auto m) { score_few<m>(head_dim); });
      return;
    }
    at_least(turned_, static_cast<size_t>(16) * dims_);
    for (int i = 0; i < keys_; i += 32) {
      const bool two = keys_ - i > 16;
      float* to = turned_.data();
      for (int j = 0; j < (two ? 32 : 16); j += 16)
        for (int d = 0; d < dims_; d += 32, to += 256) {
          __m512i r[16];
          turn_keys(i + j, head_dim, d, r);
#pragma GCC unroll 16
          for (int p = 0; p < 16; ++p) {
            fetch(v_ + index_[i + j + p] + d);
            _mm512_store_si512(to + 16 * p, r[p]);
          }
        }
      const float* q = queries_.data();
      each_tile(count, [&](auto m, int lane) {
        if (two)
          score_tile<m, 2>(q, i, lane);
        else
          score_tile<m, 1>(q, i, lane);
        q += 16 * dims_;
      });
    }
  }

  // Dims d to d + 32 of keys i to i + 16 turned over: by pairs of dims, sixteen keys each.
  void turn_keys(int i, int head_dim, int d, __m512i (&r)[16]) const {
    const bf16* k = k_ + d;
    const int64_t* index = index_ + i;
    if (head_dim - d >= 32) {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) r[j] = _mm512_loadu_si512(k + index[j]);
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) r[j] = _mm512_maskz_loadu_epi32(0xff, k + index[j]);
    }
    transpose(r);
  }

  // Those of all lanes, where these are few: keys are not kept.
  template <int M>
  __attribute__((noinline)) void score_few(int head_dim) {
    for (int i = 0; i < keys_; i += 16) {
      const float* q = queries_.data();
      __m512 acc[M];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_ps();
      for (int d = 0; d < dims_; d += 32, q += 512) {
        __m512i r[16];
        turn_keys(i, head_dim, d, r);
#pragma GCC unroll 16
        for (int p = 0; p < 16; ++p) {
          fetch(v_ + index_[i + p] + d);
          fetch_near(k_ + index_[i + p + 16] + d);
          const __m512 first = even(r[p]), second = odd(r[p]);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) acc[m] = _mm512_fmadd_ps(_mm512_set1_ps(q[32 * p + m]), first, acc[m]);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) acc[m] = _mm512_fmadd_ps(_mm512_set1_ps(q[32 * p + 16 + m]), second, acc[m]);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) _mm512_storeu_ps(&scores_.data()[m * stride_ + i], acc[m]);
    }
  }

  // Those of M lanes with the G sixteens of keys that are turned over, from i on.
  template <int M, int G>
  __attribute__((noinline)) void score_tile(const float* q, int i, int lane) {
    const float* turned = turned_.data();
    const int next = 8 * dims_;  // sixteen keys further
    __m512 acc[M][G];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) acc[m][g] = _mm512_setzero_ps();
    for (int d = 0; d < dims_; d += 2, turned += 16, q += 32) {
      __m512i pairs[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) pairs[g] = _mm512_load_si512(turned + g * next);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512 key[G];
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) key[g] = half ? odd(pairs[g]) : even(pairs[g]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512 value = _mm512_set1_ps(q[16 * half + m]);
#pragma GCC unroll 2
          for (int g = 0; g < G; ++g) acc[m][g] = _mm512_fmadd_ps(value, key[g], acc[m][g]);
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) _mm512_storeu_ps(&scores_.data()[(lane + m) * stride_ + i + 16 * g], acc[m][g]);
  }

  // Scores to 2^(score - top), zero where a key is not seen; tops and totals.
  void soften(const Attention& a, const Batch& b, const Tile& t, int c, float* to) {
    const int sixteens = (keys_ + 15) / 16, size = kFront + a.head_dim;
    const auto seen_by = [&](int row) { return masks_ + (row - t.row) * (sixteens - plain_) - plain_; };
    each_lane(a, t, [&](int i, int row, int) {
      const uint16_t* seen = seen_by(row);
      const float* scores = scores_.data() + i * stride_;
      __m512 high = _mm512_set1_ps(-INFINITY);
      for (int n = 0; n < plain_; ++n) high = _mm512_max_ps(high, _mm512_load_ps(scores + 16 * n));
      for (int n = plain_; n < sixteens; ++n)
        high = _mm512_mask_max_ps(high, seen[n], high, _mm512_load_ps(scores + 16 * n));
      to[i * size] = _mm512_reduce_max_ps(high);
    });
    const __m512i iota = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    each_lane(a, t, [&](int i, int row, int) {
      const uint16_t* seen = seen_by(row);
      float* scores = scores_.data() + i * stride_;
      const __m512 top = _mm512_set1_ps(to[i * size]);
      __m512 total = _mm512_setzero_ps();
      for (int n = 0; n < plain_; ++n) {
        const __m512 weight = power512(_mm512_sub_ps(_mm512_load_ps(scores + 16 * n), top));
        total = _mm512_add_ps(total, weight);
        _mm512_store_ps(scores + 16 * n, weight);
      }
      // of the others a row sees those of consecutive positions: what lies between is of other branches
      const int64_t oldest = a.window ? b.positions[row] - a.window + 1 : 0;
      int position = static_cast<int>(std::max<int64_t>(oldest - c * kChunk, 0)) % 16;  // of the next one that is seen
      for (int n = plain_; n < sixteens; ++n) {
        // a row that sees no key of the chunk has no top: -inf less -inf is masked out
        const __m512 weight = _mm512_maskz_mov_ps(seen[n], power512(_mm512_sub_ps(_mm512_load_ps(scores + 16 * n), top)));
        _mm512_store_ps(scores + 16 * n, weight);
        const __m512i from = _mm512_sub_epi32(iota, _mm512_set1_epi32(position));
        total = _mm512_add_ps(total, _mm512_permutexvar_ps(from, _mm512_maskz_compress_ps(seen[n], weight)));
        position += __builtin_popcount(seen[n]);
      }
      to[i * size + 1] = _mm512_reduce_add_ps(total);
    });
  }

  // sum[lane] = sum over keys of weight * value.
  void weigh(int dim, int count, float* to) {
    each_tile(count, [&](auto m, int lane) {
      for (int d = 0; d < dim;) {
        constexpr int W = m <= kTile / 2 ? 2 : 1;
        if (dim - d < 64)
          weigh_tile<m, 1, true>(dim, lane, d, to), d += 32;
        else if (lane == 0)
          weigh_tile<m, W, true>(dim, lane, d, to), d += 32 * W;
        else
          weigh_tile<m, W, false>(dim, lane, d, to), d += 32 * W;
      }
    });
  }

  // Dims d to d + 32 * W of M lanes.
  template <int M, int W, bool first>
  __attribute__((noinline)) void weigh_tile(int dim, int lane, int d, float* to) {
    const bool whole = dim - d >= 32;
    const int last = next_keys_ - 1;
    const int64_t stride = stride_;
    const float* weights = scores_.data() + lane * stride;
    const float* by_three[4] = {weights, weights + 3 * stride, weights + 6 * stride, weights + 9 * stride};
    __m512 acc[M][W][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) acc[m][w][0] = acc[m][w][1] = _mm512_setzero_ps();
    for (int i = 0; i < keys_; ++i) {
      const bf16* v = v_ + index_[i] + d;
      if (first) {
        const bf16 *near = v_ + index_[i + kNear] + d, *next = next_k_ + next_index_[std::min(i, last)] + d;
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) fetch_near(near + 32 * w), fetch(next + 32 * w);
      }
      __m512 value[W][2];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        const __m512i pairs = whole ? _mm512_loadu_si512(v + 32 * w) : _mm512_maskz_loadu_epi32(0xff, v);
        value[w][0] = even(pairs), value[w][1] = odd(pairs);
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 weight = _mm512_set1_ps(by_three[m / 3][m % 3 * stride + i]);
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
          acc[m][w][0] = _mm512_fmadd_ps(weight, value[w][0], acc[m][w][0]);
          acc[m][w][1] = _mm512_fmadd_ps(weight, value[w][1], acc[m][w][1]);
        }
      }
    }
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        float* sum = to + (lane + m) * (kFront + dim) + kFront + d + 32 * w;
        _mm512_storeu_ps(sum, _mm512_permutex2var_ps(acc[m][w][0], low, acc[m][w][1]));
        if (whole) _mm512_storeu_ps(sum + 16, _mm512_permutex2var_ps(acc[m][w][0], high, acc[m][w][1]));
      }
  }

  Lines<float> running_, chunk_;  // partial results of all lanes
  Lines<float> queries_, scores_, turned_;
  int64_t stride_ = 0;  // of scores
  int dims_ = 0;        // head_dim up to a multiple of 32
  const int64_t *index_ = nullptr, *next_index_ = nullptr;
  const uint16_t* masks_ = nullptr;
  int keys_ = 0, plain_ = 0, next_keys_ = 0;
  const bf16 *k_ = nullptr, *v_ = nullptr, *next_k_ = nullptr;
};

}  // namespace minispec
