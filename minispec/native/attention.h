// Attention of a step's rows over the paged KV cache: prefill chunks, trees and single tokens alike, nothing copied.
//
//     out[r] = softmax(scale * q[r] K[visible(r)]^T) V[visible(r)]
//
// A task takes up to 48 query rows (rows times the query heads that share a KV head) as lanes, reads each key and value
// once for all of them, and keeps nothing but their scores of one chunk of 256 positions. Chunks are merged by
// log-sum-exp in ascending order (flash-decoding: Dao et al. 2023), side by side where there are few tasks.
//
// The result of a row depends on the sequence of keys it sees and on nothing else: sums run key by key, a key that is not
// seen adds an exact zero, and chunks are cut by a key's position, not by where in a tree it lies. So a node of a tree
// gets the bits that plain decoding would have given it.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace minispec {

constexpr int kChunk = 256;  // positions per chunk
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

// What a task computes of: query rows [first, first + count) of a span, one KV head, chunks [begin, end).
struct Tile {
  int span, kv_head, first, count, begin, end;
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

// A thread's working memory, and the computation of one task.
class Attender {
 public:
  void run(const Attention& a, const Batch& b, const Tile& t, float* partials) {
    running_.fit(a.head_dim);
    chunk_.fit(a.head_dim);
    load_queries(a, b, t);
    std::fill_n(running_.total(), kLanes, 0.0f);
    for (int c = t.begin; c < t.end; ++c) {
      State& to = c == t.begin ? running_ : chunk_;
      if (!find_keys(a, b, t, c)) {
        std::fill_n(to.total(), kLanes, 0.0f);
        continue;
      }
      switch ((t.count + 15) / 16) {
        case 1: softmax<1, 16>(a, to); break;
        case 2: softmax<2, 12>(a, to); break;
        default: softmax<3, 8>(a, to);
      }
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
  // Query rows as lanes: queries_[pair of dims][lane] are pairs of bfloat16.
  void load_queries(const Attention& a, const Batch& b, const Tile& t) {
    const int group = a.heads / a.kv_heads, pairs = a.head_dim / 2;
    queries_.assign(static_cast<size_t>(pairs) * kLanes, 0);
    for (int i = 0; i < t.count; ++i) {
      const int query = t.first + i;
      const bf16* q = a.q + (b.row_start[t.span] + query / group) * a.q_stride +
                      static_cast<int64_t>(t.kv_head * group + query % group) * a.head_dim;
      for (int p = 0; p < pairs; ++p) std::memcpy(&queries_[static_cast<size_t>(p) * kLanes + i], q + 2 * p, 4);
    }
  }

  // Keys of one chunk of positions, and which lanes see each; false if there are none.
  bool find_keys(const Attention& a, const Batch& b, const Tile& t, int c) {
    const int64_t low = static_cast<int64_t>(c) * kChunk, high = low + kChunk;
    const int64_t prefix = b.num_cached[t.span], size = b.tree_size[t.span];
    const bool causal = b.causal[t.span];
    const int group = a.heads / a.kv_heads, row0 = b.row_start[t.span];
    const int first_row = row0 + t.first / group, last_row = row0 + (t.first + t.count - 1) / group;
    const int64_t prefix_end = std::min(high, prefix);
    const int before = static_cast<int>(std::max<int64_t>(prefix_end - low, 0));
    // tree keys lie behind the prefix in any order of positions; a causal span's lie at their own
    const int64_t past_begin = causal ? std::max(low, prefix) : prefix;
    const int64_t past_end = high <= prefix ? past_begin : causal ? std::min(high, prefix + size) : prefix + size;
    const int past = static_cast<int>(std::max<int64_t>(past_end - past_begin, 0));
    keys_ = before + past;
    if (keys_ == 0) return false;

    index_.resize(keys_ + 16);
    const int32_t* table = b.page_table + static_cast<int64_t>(t.span) * b.width;
    for (int i = 0; i < keys_; ++i) {
      const int64_t at = i < before ? low + i : past_begin + i - before;
      index_[i] = static_cast<int64_t>(table[at / b.page_size]) * b.page_size + at % b.page_size;
    }
    for (int i = keys_; i < keys_ + 16; ++i) index_[i] = index_[keys_ - 1];
    k_ = a.k + t.kv_head * a.head_stride;
    v_ = a.v + t.kv_head * a.head_stride;

    masked_from_ = a.window ? 0 : before;
    masks_.assign(static_cast<size_t>(keys_ - masked_from_) * 3, a.window ? 0xffff : 0);
    if (a.window) std::fill(masks_.begin() + static_cast<size_t>(before) * 3, masks_.end(), 0);
    for (int row = first_row; row <= last_row; ++row) {
      const int begin = std::max((row - row0) * group - t.first, 0);
      const int end = std::min((row - row0 + 1) * group - t.first, t.count);
      const int64_t position = b.positions[row];
      const int64_t oldest = a.window ? position - a.window : -1;  // sees positions above it
      if (a.window)
        for (int i = 0; i < before && low + i <= oldest; ++i) set(i, begin, end, false);
      if (causal) {
        for (int64_t at = std::max(past_begin, oldest + 1); at < past_end && at <= position; ++at)
          set(before + static_cast<int>(at - past_begin), begin, end, true);
      } else if (past) {
        int64_t at = position;  // of the next set bit from the top: the row itself, its parent, and so on
        for (int w = b.words - 1; w >= 0; --w)
          for (uint32_t bits = b.ancestors[static_cast<int64_t>(row) * b.words + w]; bits; --at) {
            const int bit = 31 - __builtin_clz(bits);
            bits &= ~(1u << bit);
            if (at >= low && at < high) set(before + 32 * w + bit, begin, end, true);
          }
      }
    }
    return true;
  }

  void set(int key, int begin, int end, bool seen) {
    for (int lane = begin; lane < end; ++lane) {
      uint16_t& word = masks_[static_cast<size_t>(key - masked_from_) * 3 + lane / 16];
      word = seen ? word | (1u << lane % 16) : word & ~(1u << lane % 16);
    }
  }

  // Scores of the chunk's keys, then exp(score - top), with the tops and totals; B vectors of lanes, K keys at a time.
  template <int B, int K>
  void softmax(const Attention& a, State& to) {
    const int pairs = a.head_dim / 2;
    scores_.resize(static_cast<size_t>(keys_ + 16) * kLanes);
    const __m512 scale = _mm512_set1_ps(a.scale), lowest = _mm512_set1_ps(-INFINITY);
    __m512 top[B], total[B];
    for (int n = 0; n < B; ++n) top[n] = lowest, total[n] = _mm512_setzero_ps();
    for (int i = 0; i < keys_; i += K) {
      __m512 acc[K][B];
      const bf16* key[K];
      for (int j = 0; j < K; ++j) {
        key[j] = k_ + index_[std::min(i + j, keys_)] * a.head_dim;
        for (int n = 0; n < B; ++n) acc[j][n] = _mm512_setzero_ps();
      }
      for (int p = 0; p < pairs; ++p) {
        __m512bh query[B];
        for (int n = 0; n < B; ++n)
          query[n] = (__m512bh)_mm512_loadu_si512(&queries_[static_cast<size_t>(p) * kLanes + 16 * n]);
        for (int j = 0; j < K; ++j) {
          int32_t pair;
          std::memcpy(&pair, key[j] + 2 * p, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
          for (int n = 0; n < B; ++n) acc[j][n] = _mm512_dpbf16_ps(acc[j][n], query[n], both);
        }
      }
      for (int j = 0; j < K && i + j < keys_; ++j)
        for (int n = 0; n < B; ++n) {
          const __m512 score = _mm512_mask_mul_ps(lowest, mask(i + j, n), acc[j][n], scale);
          top[n] = _mm512_max_ps(top[n], score);
          _mm512_storeu_ps(&scores_[static_cast<size_t>(i + j) * kLanes + 16 * n], score);
        }
    }
    for (int i = 0; i < keys_; ++i)
      for (int n = 0; n < B; ++n) {
        float* at = &scores_[static_cast<size_t>(i) * kLanes + 16 * n];
        // a lane that sees no key of the chunk has no top: -inf less -inf is masked out
        const __m512 weight = exp512(_mm512_sub_ps(_mm512_loadu_ps(at), top[n]));
        const __m512 kept = _mm512_maskz_mov_ps(mask(i, n), weight);
        total[n] = _mm512_add_ps(total[n], kept);
        _mm512_storeu_ps(at, kept);
      }
    for (int n = 0; n < B; ++n) {
      _mm512_storeu_ps(to.top() + 16 * n, top[n]);
      _mm512_storeu_ps(to.total() + 16 * n, total[n]);
    }
  }

  __mmask16 mask(int key, int n) const {
    return key < masked_from_ ? 0xffff : masks_[static_cast<size_t>(key - masked_from_) * 3 + n];
  }

  // sum[lane] = sum over keys of weight * value.
  void weigh(const Attention& a, int count, State& to) {
    for (int lane = 0; lane < count; lane += 6) {
      const int n = std::min(count - lane, 6);
      int d = 0;
      for (; d + 64 <= a.head_dim; d += 64) weigh_rows<4>(n, a.head_dim, lane, d, to);
      for (; d < a.head_dim; d += 16) weigh_rows<1>(n, a.head_dim, lane, d, to);
    }
  }

  template <int D>
  void weigh_rows(int rows, int head_dim, int lane, int d, State& to) {
    switch (rows) {
      case 1: return weigh_tile<1, D>(head_dim, lane, d, to);
      case 2: return weigh_tile<2, D>(head_dim, lane, d, to);
      case 3: return weigh_tile<3, D>(head_dim, lane, d, to);
      case 4: return weigh_tile<4, D>(head_dim, lane, d, to);
      case 5: return weigh_tile<5, D>(head_dim, lane, d, to);
      default: return weigh_tile<6, D>(head_dim, lane, d, to);
    }
  }

  template <int M, int D>
  void weigh_tile(int head_dim, int lane, int d, State& to) {
    __m512 acc[M][D];
    for (int m = 0; m < M; ++m)
      for (int x = 0; x < D; ++x) acc[m][x] = _mm512_setzero_ps();
    for (int i = 0; i < keys_; ++i) {
      const bf16* value = v_ + index_[i] * head_dim + d;
      __m512 wide[D];
      for (int x = 0; x < D; ++x) wide[x] = load_bf16(value + 16 * x);
      const float* weights = &scores_[static_cast<size_t>(i) * kLanes + lane];
      for (int m = 0; m < M; ++m) {
        const __m512 weight = _mm512_set1_ps(weights[m]);
        for (int x = 0; x < D; ++x) acc[m][x] = _mm512_fmadd_ps(weight, wide[x], acc[m][x]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int x = 0; x < D; ++x) _mm512_storeu_ps(to.sum(lane + m) + d + 16 * x, acc[m][x]);
  }

  State running_, chunk_;
  std::vector<uint32_t> queries_;
  std::vector<float> scores_;
  std::vector<int64_t> index_;
  std::vector<uint16_t> masks_;
  int keys_ = 0, masked_from_ = 0;
  const bf16 *k_ = nullptr, *v_ = nullptr;
};

// How a step's attention is shared out; the same for all layers.
struct Plan {
  std::vector<Tile> tiles;
  struct Join {  // one query row whose chunks were computed apart
    int row, head, chunks;
    int64_t partial, stride;
  };
  std::vector<Join> joins;
  int64_t partials = 0;

  void build(const Batch& b, int heads, int kv_heads, int64_t window, int threads) {
    tiles.clear(), joins.clear(), partials = 0;
    const int group = heads / kv_heads;
    int64_t whole = 0;
    for (int s = 0; s < b.spans; ++s)
      whole += ((b.row_start[s + 1] - b.row_start[s]) * group + kLanes - 1) / kLanes * kv_heads;
    const bool apart = whole < 4 * threads;
    for (int s = 0; s < b.spans; ++s) {
      const int queries = (b.row_start[s + 1] - b.row_start[s]) * group;
      for (int first = 0; first < queries; first += kLanes) {
        const int count = std::min(queries - first, kLanes);
        int64_t newest = 0, oldest = INT64_MAX;
        for (int row = first / group; row <= (first + count - 1) / group; ++row) {
          const int64_t position = b.positions[b.row_start[s] + row];
          newest = std::max(newest, position), oldest = std::min(oldest, position);
        }
        const int begin = window ? static_cast<int>(std::max<int64_t>(oldest - window + 1, 0) / kChunk) : 0;
        const int end = static_cast<int>(newest / kChunk) + 1;
        for (int h = 0; h < kv_heads; ++h) {
          if (!apart || end - begin == 1) {
            tiles.push_back({s, h, first, count, begin, end, -1});
            continue;
          }
          for (int i = 0; i < count; ++i)
            joins.push_back({b.row_start[s] + (first + i) / group, h * group + (first + i) % group, end - begin,
                             partials + i, count});
          for (int c = begin; c < end; ++c, partials += count)
            tiles.push_back({s, h, first, count, c, c + 1, partials});
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

}  // namespace minispec
