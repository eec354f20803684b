// Attention of a step's rows over the paged KV cache: prefill chunks, trees and single tokens alike, nothing copied.
//
//     out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]
//
// A task takes up to 48 query rows (rows times the query heads that share a KV head), reads each key and value once for
// all of them, and keeps nothing but their scores of one chunk of 128 positions. Chunks are merged by log-sum-exp in
// ascending order (flash-decoding: Dao et al. 2023), side by side where there are few tasks. Scores are computed with
// sixteen keys as lanes, whatever the number of query rows, and turned over: softmax and values have query rows as lanes.
//
// The result of a row depends on the sequence of keys it sees and on nothing else: sums run key by key, a key that is not
// seen adds an exact zero, and chunks are cut by a key's position, not by where in a tree it lies. So a node of a tree
// gets the bits that plain decoding would have given it.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace minispec {

constexpr int kChunk = 128;  // positions per chunk
constexpr int kLanes = 48;   // query rows per task

// One layer's attention; fields as in StepBatch (minispec/batch.py).
struct Attention {
  const bf16 *q;  // [rows, heads, head_dim], rotated
  int64_t q_stride;
  const bf16 *k, *v;  // [kv_heads, positions, head_dim], this layer's cache
  int64_t head_stride;  // elements between KV heads
  float* out;  // rounded to bfloat16
  int64_t out_stride;
  int heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
};

struct Batch {
  int32_t rows, spans, samples, words, width, page_size;
  const int64_t *tokens, *positions, *kv_index, *sample_rows;
  const int32_t *row_start, *num_cached, *tree_size;
  const uint8_t* causal;
  const uint32_t* ancestors;  // [rows, words]
  const int32_t* page_table;  // [spans, width]
};

// The keys of one chunk for the query rows of a task, and which of these see each.
struct Keys {
  int64_t index;     // of the first one, in Plan::index
  int count, plain;  // keys; the first ones that everyone sees
  int64_t masks;     // of the others, in Plan::masks: kLanes bits each
};

// What a task computes of: query rows [first, first + count) of a span, one KV head, chunks [begin, end).
struct Tile {
  int span, kv_head, first, count, begin, end;
  int64_t keys;     // index of the first chunk's Keys in the plan
  int64_t partial;  // index of its first partial result, -1: it writes the output itself
};

// Softmax in progress: top [lanes], total [lanes], sum [lanes, head_dim].
struct State {
  std::vector<float> data;
  int head_dim = 0;
  void fit(int dim) {
    head_dim = dim;
    data.resize(static_cast<size_t>(kLanes) * (dim + 2));
  }
  float* top() { return data.data(); }
  float* total() { return data.data() + kLanes; }
  float* sum(int lane) { return data.data() + 2 * kLanes + static_cast<size_t>(lane) * head_dim; }
};

// (top, total, sum) of one query row, joined with those of later keys.
__attribute__((noinline)) inline void merge(float* top, float* total, float* sum, float top2, float total2,
                                            const float* sum2, int head_dim) {
  if (total2 == 0) return;
  if (*total == 0) {
    *top = top2, *total = total2;
    std::memcpy(sum, sum2, sizeof(float) * head_dim);
    return;
  }
  const float high = std::max(*top, top2);
  const __m512 a = exp512(_mm512_set1_ps(*top - high)), b = exp512(_mm512_set1_ps(top2 - high));
  for (int i = 0; i < head_dim; i += 16)
    _mm512_storeu_ps(sum + i,
                     _mm512_fmadd_ps(_mm512_loadu_ps(sum + i), a, _mm512_mul_ps(_mm512_loadu_ps(sum2 + i), b)));
  *total = *total * _mm512_cvtss_f32(a) + total2 * _mm512_cvtss_f32(b);
  *top = high;
}

inline void finish(const float* sum, float total, int head_dim, float* out) {
  const __m512 factor = _mm512_set1_ps(1.0f / total);
  for (int i = 0; i < head_dim; i += 16)
    _mm512_storeu_ps(out + i, rounded(_mm512_mul_ps(_mm512_loadu_ps(sum + i), factor)));
}

// How a step's attention is shared out; the same for all layers.
struct Plan {
  std::vector<Tile> tiles;
  struct Join {  // one query row whose chunks were computed apart
    int row, head, chunks;
    int64_t partial, stride;
  };
  std::vector<Join> joins;
  int64_t partials = 0;
  std::vector<Keys> keys;
  std::vector<int64_t> index;   // per span and position, where in the cache it lies
  std::vector<uint16_t> masks;  // per key that not every lane sees, kLanes bits

  void build(const Batch& b, int heads, int kv_heads, int64_t window, int threads) {
    tiles.clear(), joins.clear(), keys.clear(), index.clear(), masks.clear(), partials = 0;
    const int group = heads / kv_heads;
    int64_t whole = 0;
    for (int s = 0; s < b.spans; ++s)
      whole += ((b.row_start[s + 1] - b.row_start[s]) * group + kLanes - 1) / kLanes * kv_heads;
    const bool apart = whole < 4 * threads;
    for (int s = 0; s < b.spans; ++s) {
      const int queries = (b.row_start[s + 1] - b.row_start[s]) * group;
      const int64_t places = static_cast<int64_t>(index.size());
      const int32_t* table = b.page_table + static_cast<int64_t>(s) * b.width;
      for (int64_t at = 0, end = b.num_cached[s] + b.tree_size[s]; at < end; ++table)
        for (int64_t i = 0; i < b.page_size && at < end; ++i, ++at)
          index.push_back(static_cast<int64_t>(*table) * b.page_size + i);
      for (int first = 0; first < queries; first += kLanes) {
        const int count = std::min(queries - first, kLanes);
        int64_t newest = 0, oldest = INT64_MAX;
        for (int row = first / group; row <= (first + count - 1) / group; ++row) {
          const int64_t position = b.positions[b.row_start[s] + row];
          newest = std::max(newest, position), oldest = std::min(oldest, position);
        }
        const int begin = window ? static_cast<int>(std::max<int64_t>(oldest - window + 1, 0) / kChunk) : 0;
        const int end = static_cast<int>(newest / kChunk) + 1;
        const int64_t known = static_cast<int64_t>(keys.size());
        for (int c = begin; c < end; ++c) find_keys(b, s, first, count, group, window, c, places);
        for (int h = 0; h < kv_heads; ++h) {
          if (!apart || end - begin == 1) {
            tiles.push_back({s, h, first, count, begin, end, known, -1});
            continue;
          }
          for (int i = 0; i < count; ++i)
            joins.push_back({b.row_start[s] + (first + i) / group, h * group + (first + i) % group, end - begin,
                             partials + i, count});
          for (int c = begin; c < end; ++c, partials += count)
            tiles.push_back({s, h, first, count, c, c + 1, known + c - begin, partials});
        }
      }
    }
  }

  // Keys of chunk c, and which lanes see each.
  void find_keys(const Batch& b, int span, int first, int count, int group, int64_t window, int c, int64_t places) {
    const int64_t low = static_cast<int64_t>(c) * kChunk, high = low + kChunk;
    const int64_t prefix = b.num_cached[span], all = prefix + b.tree_size[span];
    const bool causal = b.causal[span];
    const int row0 = b.row_start[span];
    // tree keys lie behind the prefix in any order of positions; a causal span's lie at their own
    const int64_t from = low < prefix || causal ? low : prefix;
    const int64_t to = high <= prefix ? high : causal ? std::min(high, all) : all;
    const int before = static_cast<int>(std::clamp<int64_t>(prefix - from, 0, to - from));  // keys of the prefix
    const int plain = window ? 0 : before;
    const int64_t at = static_cast<int64_t>(masks.size());
    keys.push_back({places + from, static_cast<int>(to - from), plain, at});
    masks.resize(at + (to - from - plain) * (kLanes / 16), 0);
    const auto see = [&](int64_t key, int begin, int end) {
      for (int lane = begin; lane < end; ++lane)
        masks[at + (key - from - plain) * (kLanes / 16) + lane / 16] |= 1u << lane % 16;
    };
    for (int row = row0 + first / group; row <= row0 + (first + count - 1) / group; ++row) {
      const int begin = std::max((row - row0) * group - first, 0);
      const int end = std::min((row - row0 + 1) * group - first, count);
      const int64_t position = b.positions[row];
      const int64_t oldest = window ? position - window : -1;  // sees positions above it
      if (window)
        for (int64_t key = std::max(from, oldest + 1); key < from + before; ++key) see(key, begin, end);
      if (causal) {
        for (int64_t key = std::max(from + before, oldest + 1); key < to && key <= position; ++key) see(key, begin, end);
      } else if (to > from + before) {
        int64_t its = position;  // of the next set bit from the top: the row itself, its parent, and so on
        for (int w = b.words - 1; w >= 0; --w)
          for (uint32_t bits = b.ancestors[static_cast<int64_t>(row) * b.words + w]; bits; --its) {
            const int bit = 31 - __builtin_clz(bits);
            bits &= ~(1u << bit);
            if (its >= low && its < high) see(prefix + 32 * w + bit, begin, end);
          }
      }
    }
  }

  void join(const Attention& a, int which, float* partial) const {
    const Join& j = joins[which];
    const int64_t size = a.head_dim + 2;
    float* into = partial + j.partial * size;
    for (int c = 1; c < j.chunks; ++c) {
      const float* next = into + c * j.stride * size;
      merge(into, into + 1, into + 2, next[0], next[1], next + 2, a.head_dim);
    }
    finish(into + 2, into[1], a.head_dim, a.out + j.row * a.out_stride + static_cast<int64_t>(j.head) * a.head_dim);
  }
};

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

// A thread's working memory, and the computation of one task.
class Attender {
 public:
  void run(const Attention& a, const Batch& b, const Plan& plan, const Tile& t, float* partials) {
    running_.fit(a.head_dim);
    chunk_.fit(a.head_dim);
    load_queries(a, b, t);
    std::fill_n(running_.total(), kLanes, 0.0f);
    k_ = a.k + t.kv_head * a.head_stride;
    v_ = a.v + t.kv_head * a.head_stride;
    for (int c = t.begin; c < t.end; ++c) {
      State& to = c == t.begin ? running_ : chunk_;
      const Keys& keys = plan.keys[t.keys + c - t.begin];
      if (keys.count == 0) {
        std::fill_n(to.total(), kLanes, 0.0f);
        continue;
      }
      keys_ = keys.count, plain_ = keys.plain;
      index_ = plan.index.data() + keys.index;
      masks_ = plan.masks.data() + keys.masks;
      score(a, t.count, to);
      soften(t.count, to);
      weigh(a, t.count, to);
      if (&to == &chunk_)
        for (int i = 0; i < t.count; ++i)
          merge(running_.top() + i, running_.total() + i, running_.sum(i), chunk_.top()[i], chunk_.total()[i],
                chunk_.sum(i), a.head_dim);
    }
    const int group = a.heads / a.kv_heads;
    const int first_row = b.row_start[t.span];
    for (int i = 0; i < t.count; ++i) {
      if (t.partial >= 0) {
        float* p = partials + (t.partial + i) * (a.head_dim + 2);
        p[0] = running_.top()[i], p[1] = running_.total()[i];
        std::memcpy(p + 2, running_.sum(i), sizeof(float) * a.head_dim);
      } else {
        const int query = t.first + i;
        finish(running_.sum(i), running_.total()[i], a.head_dim,
               a.out + (first_row + query / group) * a.out_stride + (t.kv_head * group + query % group) * a.head_dim);
      }
    }
  }

 private:
  static constexpr int kTurned = 64;  // keys turned over at a time
  static constexpr int kTile = 12;    // lanes that share one pass over the values

  // [lane][head_dim] float32; lanes without a query row are zero.
  void load_queries(const Attention& a, const Batch& b, const Tile& t) {
    const int group = a.heads / a.kv_heads;
    queries_.resize(static_cast<size_t>(kLanes) * a.head_dim);
    for (int i = 0; i < t.count; ++i) {
      const int query = t.first + i;
      const bf16* q = a.q + (b.row_start[t.span] + query / group) * a.q_stride +
                      static_cast<int64_t>(t.kv_head * group + query % group) * a.head_dim;
      float* to = &queries_[static_cast<size_t>(i) * a.head_dim];
      for (int d = 0; d < a.head_dim; d += 16) _mm512_storeu_ps(to + d, load_bf16(q + d));
    }
    std::fill(queries_.begin() + static_cast<size_t>(t.count) * a.head_dim, queries_.end(), 0.0f);
  }

  // Keys i to i + 16 turned over: turned[dim][16].
  void turn_keys(int i, int head_dim, float* turned) {
    for (int d = 0; d < head_dim; d += 32) {
      const int pairs = std::min(head_dim - d, 32) / 2;
      const __mmask16 m = lanes(pairs);
      __m512i r[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j)
        r[j] = _mm512_maskz_loadu_epi32(m, k_ + index_[std::min(i + j, keys_ - 1)] * head_dim + d);
      transpose(r);
      float* to = turned + d * 16;
#pragma GCC unroll 16
      for (int p = 0; p < 16; ++p)
        if (p < pairs) {
          _mm512_store_ps(to + 32 * p, even(r[p]));
          _mm512_store_ps(to + 32 * p + 16, odd(r[p]));
        }
    }
  }

  // Scores of the chunk's keys, -inf where a lane does not see one, and the tops.
  void score(const Attention& a, int count, State& to) {
    scores_.resize(static_cast<size_t>(keys_ + kTurned) * kLanes);
    turned_.resize(static_cast<size_t>(kTurned) * a.head_dim + 16);
    float* turned = turned_.data() + (-(reinterpret_cast<uintptr_t>(turned_.data()) / sizeof(float)) & 15);
    std::fill_n(to.top(), kLanes, -INFINITY);
    for (int i = 0; i < keys_; i += kTurned) {
      const int end = std::min(i + kTurned, keys_);
      for (int j = i; j < end; ++j)  // the cache of many slots, or of a long context, is far away
        for (int d = 0; d < a.head_dim; d += 32) {
          _mm_prefetch(reinterpret_cast<const char*>(k_ + index_[std::min(j + 32, keys_ - 1)] * a.head_dim + d), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(v_ + index_[j] * a.head_dim + d), _MM_HINT_T0);
        }
      for (int j = i; j < end; j += 16) turn_keys(j, a.head_dim, turned + static_cast<size_t>(j - i) * a.head_dim);
      for (int lane = 0; lane < count; lane += 16) {
        if (count - lane <= 4)
          score_block<4, 4>(a, turned, i, end, lane, to);
        else if (count - lane <= 8)
          score_block<8, 2>(a, turned, i, end, lane, to);
        else
          score_block<16, 1>(a, turned, i, end, lane, to);
      }
    }
  }

  // Those of keys [begin, end) with up to M lanes from `lane` on, G sixteens of keys at a time.
  template <int M, int G>
  void score_block(const Attention& a, const float* turned, int begin, int end, int lane, State& to) {
    const int n = lane / 16, dim = a.head_dim;
    const float* q = &queries_[static_cast<size_t>(lane) * dim];
    const __m512 scale = _mm512_set1_ps(a.scale), lowest = _mm512_set1_ps(-INFINITY);
    __m512 top = _mm512_loadu_ps(to.top() + lane);
    for (int i = begin; i < end; i += 16 * G, turned += static_cast<size_t>(16) * G * dim) {
      __m512 acc[M][G];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[m][g] = _mm512_setzero_ps();
      for (int d = 0; d < dim; ++d) {
        __m512 key[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) key[g] = _mm512_load_ps(turned + (static_cast<size_t>(g) * dim + d) * 16);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512 value = _mm512_set1_ps(q[m * dim + d]);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) acc[m][g] = _mm512_fmadd_ps(value, key[g], acc[m][g]);
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int m = 0; m < 16; ++m) r[m] = m < M ? _mm512_castps_si512(acc[m < M ? m : 0][g]) : _mm512_setzero_si512();
        transpose(r);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) {
          const int key = i + 16 * g + j;
          const __mmask16 seen = key < end ? mask(key, n) : 0;
          const __m512 score = _mm512_mask_mul_ps(lowest, seen, _mm512_castsi512_ps(r[j]), scale);
          top = _mm512_max_ps(top, score);
          _mm512_storeu_ps(&scores_[static_cast<size_t>(key) * kLanes + lane], score);
        }
      }
    }
    _mm512_storeu_ps(to.top() + lane, top);
  }

  // Scores to exp(score - top), and the totals.
  void soften(int count, State& to) {
    for (int lane = 0; lane < count; lane += 16) {
      const __m512 top = _mm512_loadu_ps(to.top() + lane);
      __m512 total = _mm512_setzero_ps();
      for (int i = 0; i < keys_; ++i) {
        float* at = &scores_[static_cast<size_t>(i) * kLanes + lane];
        // a lane that sees no key of the chunk has no top: -inf less -inf is masked out
        const __m512 weight = _mm512_maskz_mov_ps(mask(i, lane / 16), exp512(_mm512_sub_ps(_mm512_loadu_ps(at), top)));
        total = _mm512_add_ps(total, weight);
        _mm512_storeu_ps(at, weight);
      }
      _mm512_storeu_ps(to.total() + lane, total);
    }
  }

  __mmask16 mask(int key, int n) const {
    return key < plain_ ? 0xffff : masks_[static_cast<size_t>(key - plain_) * (kLanes / 16) + n];
  }

  // sum[lane] = sum over keys of weight * value.
  void weigh(const Attention& a, int count, State& to) {
    const int tiles = (count + kTile - 1) / kTile;
    for (int t = 0, lane = 0; t < tiles; ++t) {
      const int rows = (count - lane) / (tiles - t);
      for (int d = 0; d < a.head_dim; d += 32) weigh_rows<kTile>(rows, a.head_dim, lane, d, to);
      lane += rows;
    }
  }

  template <int M>
  void weigh_rows(int rows, int head_dim, int lane, int d, State& to) {
    if constexpr (M > 0) {
      if (rows == M)
        weigh_tile<M>(head_dim, lane, d, to);
      else
        weigh_rows<M - 1>(rows, head_dim, lane, d, to);
    }
  }

  // Dims d to d + 32 of M lanes.
  template <int M>
  void weigh_tile(int head_dim, int lane, int d, State& to) {
    const __mmask16 m16 = lanes((head_dim - d) / 2);
    __m512 acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (int i = 0; i < keys_; ++i) {
      const __m512i pairs = _mm512_maskz_loadu_epi32(m16, v_ + index_[i] * head_dim + d);
      const __m512 v0 = even(pairs), v1 = odd(pairs);
      const float* weights = &scores_[static_cast<size_t>(i) * kLanes + lane];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 weight = _mm512_set1_ps(weights[m]);
        acc[m][0] = _mm512_fmadd_ps(weight, v0, acc[m][0]);
        acc[m][1] = _mm512_fmadd_ps(weight, v1, acc[m][1]);
      }
    }
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const bool both = head_dim - d > 16;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      float* sum = to.sum(lane + m) + d;
      _mm512_storeu_ps(sum, _mm512_permutex2var_ps(acc[m][0], low, acc[m][1]));
      if (both) _mm512_storeu_ps(sum + 16, _mm512_permutex2var_ps(acc[m][0], high, acc[m][1]));
    }
  }

  State running_, chunk_;
  std::vector<float> queries_, turned_, scores_;
  const int64_t* index_ = nullptr;
  const uint16_t* masks_ = nullptr;
  int keys_ = 0, plain_ = 0;
  const bf16 *k_ = nullptr, *v_ = nullptr;
};

}  // namespace minispec
