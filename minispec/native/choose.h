// Choosing tokens: the best of a row of logits, or of its scores with a temperature, limits and noise. What these mean is in
// minispec/kernels/sample.py, top_children.py and support.py.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "noise.h"

namespace minispec {

inline __m512 load_or_none(const float* x, int n) {  // up to n floats, -inf behind them
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes(n), x);
}

// The indices of the k largest of a row, best first and equal ones in their order, and these. Of the indices where fewer
// are above -inf the rest is 0.
inline void top_of(const float* row, int vocab, int k, int64_t* ids, float* values) {
  int count = 0;
  float lowest = -INFINITY;  // what a value must exceed
  for (int i = 0; i < vocab; i += 16)
    for (uint32_t m = _mm512_cmp_ps_mask(load_or_none(row + i, vocab - i), _mm512_set1_ps(lowest), _CMP_GT_OQ); m; m &= m - 1) {
      const int id = i + __builtin_ctz(m);
      if (!(row[id] > lowest)) continue;
      int at = std::min(count, k - 1);
      for (; at > 0 && values[at - 1] < row[id]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
      values[at] = row[id], ids[at] = id;
      count = std::min(count + 1, k);
      if (count == k) lowest = values[k - 1];
    }
  for (int i = count; i < k; ++i) ids[i] = 0, values[i] = -INFINITY;
}

// The index of the largest, the first of equals, or of the first NaN.
inline int64_t argmax(const float* x, int n) {
  int64_t id = 0;
  float best = -INFINITY;
  for (int i = 0; i < n; i += 16) {
    const __m512 v = load_or_none(x + i, n - i);
    uint32_t m = _mm512_cmp_ps_mask(v, _mm512_set1_ps(best), _CMP_NLE_UQ);
    for (; m; m &= m - 1) {
      const int at = i + __builtin_ctz(m);
      if (std::isnan(x[at])) return at;
      if (x[at] > best) best = x[at], id = at;
    }
  }
  return id;
}

// Sum of e^(x - shift) over n floats.
inline float sum_exp(const float* x, int n, float shift) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16)
    sum = _mm512_add_ps(sum, exp512(_mm512_sub_ps(load_or_none(x + i, n - i), _mm512_set1_ps(shift))));
  return _mm512_reduce_add_ps(sum);
}

// The k best of a row, best first and equal ones in the order of their indices, with their log-probabilities. Their ids
// are what `names` has under their indices, or these if it is null. A row that is not finite has NaN for values; where
// fewer than k tokens are possible the rest has -inf.
inline void best_of(const float* row, int vocab, int k, const int64_t* names, int64_t* ids, float* values) {
  top_of(row, vocab, k, ids, values);
  const float highest = values[0];
  const float total = highest + std::log(sum_exp(row, vocab, highest));  // NaN and infinity end up in it
  for (int i = 0; i < k; ++i) {
    if (names) ids[i] = names[ids[i]];
    values[i] = std::isfinite(total) ? values[i] - total : NAN;
  }
}

// How rows are drawn: what SamplingBatch is in Python, and the noise. [rows] each.
struct Draws {
  const float* temperature;  // 0 is greedy
  const int64_t* top_k;      // 0 is off
  const float *top_p, *min_p;
  const int64_t* keys;        // [rows, 2], seed and position
  const int64_t* names;       // [vocab], whose noise it is; null where they are the indices
  const float* const* noise;  // per row [vocab]; not read in rows that are greedy or limited
};

// Scores of rows; the memory of one thread.
class Scorer {
 public:
  // What a row's tokens are ranked by, [vocab]: its logits where it is greedy, else (logit - largest) / temperature + noise,
  // and -inf outside its support. As it comes where it is not finite.
  const float* operator()(const Draws& draws, int r, const float* row, int vocab) {
    const float temperature = draws.temperature[r];
    if (!(temperature > 0.0f)) return row;
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 nan = 0;
    for (int i = 0; i < vocab; i += 16) {
      const __m512 v = load_or_none(row + i, vocab - i);
      top = _mm512_max_ps(top, v);
      nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    }
    const float best = _mm512_reduce_max_ps(top);
    if (nan || !std::isfinite(best)) return row;
    vocab_ = vocab;
    scores_.resize(vocab + 15), kept_.resize(vocab + 15);
    for (int i = 0; i < vocab; i += 16) {
      const __m512 below = _mm512_sub_ps(load_or_none(row + i, vocab - i), _mm512_set1_ps(best));
      _mm512_storeu_ps(&scores_[i], _mm512_div_ps(below, _mm512_set1_ps(temperature)));
    }
    if (draws.top_k[r] > 0 || draws.top_p[r] < 1.0f || draws.min_p[r] > 0.0f) {
      float floor = std::log(draws.min_p[r]);  // log 0 = -inf: off
      if (draws.top_k[r] > 0 && draws.top_k[r] < vocab) floor = std::max(floor, ranked(draws.top_k[r]));
      if (draws.top_p[r] < 1.0f) floor = nucleus(floor, draws.top_p[r]);
      add_noise_from(floor, draws.keys + 2 * r, draws.names);
    } else {
      for (int i = 0; i < vocab; i += 16) {
        const __m512 noise = _mm512_maskz_loadu_ps(lanes(vocab - i), draws.noise[r] + i);
        _mm512_storeu_ps(&scores_[i], _mm512_add_ps(_mm512_loadu_ps(&scores_[i]), noise));
      }
    }
    return scores_.data();
  }

 private:
  // Noise for the scores from `floor` on, which are few; -inf for the others.
  void add_noise_from(float floor, const int64_t* key, const int64_t* names) {
    inside_.clear(), tokens_.clear();
    for (int i = 0; i < vocab_; i += 16) {
      const __m512 v = _mm512_loadu_ps(&scores_[i]);
      const __mmask16 inside = _mm512_mask_cmp_ps_mask(lanes(vocab_ - i), v, _mm512_set1_ps(floor), _CMP_GE_OQ);
      _mm512_storeu_ps(&scores_[i], _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), inside, v));
      for (uint32_t m = inside; m; m &= m - 1) {
        const int at = i + __builtin_ctz(m);
        inside_.push_back(at), tokens_.push_back(names ? names[at] : at);
      }
    }
    gumbel_at(key[0], key[1], tokens_.data(), static_cast<int>(tokens_.size()), kept_.data());
    for (size_t i = 0; i < inside_.size(); ++i) scores_[inside_[i]] += kept_[i];
  }

  // The k-th largest score; 0 < k < vocab.
  float ranked(int64_t k) {
    // it is no smaller than the k-th largest maximum of 16, so most scores need no second look
    float least = -INFINITY;
    maxima_.clear();
    for (int i = 0; i < vocab_; i += 16) maxima_.push_back(_mm512_reduce_max_ps(_mm512_loadu_ps(&scores_[i])));
    if (k <= static_cast<int64_t>(maxima_.size())) {
      std::nth_element(maxima_.begin(), maxima_.begin() + k - 1, maxima_.end(), std::greater<float>());
      least = maxima_[k - 1];
    }
    const auto begin = kept_.begin(), end = begin + keep(least);
    std::nth_element(begin, begin + k - 1, end, std::greater<float>());
    return begin[k - 1];
  }

  // The least score of the fewest of the likeliest that have the share `top_p` of the mass at `floor` or above. Equals of
  // it are as good, and the best, at 0, is always one.
  float nucleus(float floor, float top_p) {
    const float total = sum_exp(kept_.data(), keep(floor), 0.0f), limit = top_p * total;
    // all that lie lower weigh less together than what is left out; by half, as sums are rounded
    int low = 0, high = keep(std::max(floor, std::log(0.5f * (total - limit) / static_cast<float>(vocab_))));
    for (float mass = 0.0f; high - low > 1;) {  // of the `low` largest, which is below the limit, or there are none
      const int middle = low + (high - low) / 2;
      std::nth_element(kept_.begin() + low, kept_.begin() + middle, kept_.begin() + high, std::greater<float>());
      const float more = mass + sum_exp(&kept_[low], middle - low, 0.0f);
      if (more >= limit)
        high = middle;
      else
        mass = more, low = middle;
    }
    return kept_[low];
  }

  // Copies the scores that are no smaller than `least`, and says how many.
  int keep(float least) {
    int count = 0;
    for (int i = 0; i < vocab_; i += 16) {
      const __m512 v = _mm512_loadu_ps(&scores_[i]);
      const __mmask16 m = _mm512_mask_cmp_ps_mask(lanes(vocab_ - i), v, _mm512_set1_ps(least), _CMP_GE_OQ);
      _mm512_storeu_ps(&kept_[count], _mm512_maskz_compress_ps(m, v));
      count += __builtin_popcount(m);
    }
    return count;
  }

  int vocab_ = 0;
  std::vector<float> scores_, kept_, maxima_;
  std::vector<int> inside_;
  std::vector<int64_t> tokens_;
};

}  // namespace minispec
