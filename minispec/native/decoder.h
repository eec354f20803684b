// Decoder layers over a step's rows, with the working memory they need: what a model and a draft head share.
#pragma once

#include <vector>

#include "attention.h"
#include "gemm.h"

namespace minispec {

struct Layer {
  const bf16* input_norm;
  Linear qkv;
  const bf16 *q_norm, *k_norm;  // [head_dim], or null
  Linear o;
  const bf16* post_norm;
  Linear gate_up, down;
};

struct Model {
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, window;
  float eps, scale;
  const Layer* layer;
  const bf16 *embedding, *norm;
  Linear head;
  const bf16* exact;  // [vocab, hidden]: the head as it was, where it has 8 bits; or null
  const float* inv_freq;  // [head_dim / 2], of RoPE
  float rope_scaling;     // of its cosines and sines
};

// Everything of one forward that is not the model.
struct Step {
  Batch batch;
  int32_t depth, taps;        // layers to run, hidden states wanted
  const int32_t* tap_layers;  // [taps] ascending
  bf16* tapped;               // [rows, taps, hidden]
  bf16 *k, *v;                // [layers, kv_heads, positions, head_dim]
  int64_t layer_stride, head_stride;  // elements
  float* logits;              // [samples, vocab]
};

// Rows, zero up to a multiple of kGroup.
template <class T>
struct Rows {
  Lines<T> data;
  size_t stride = 0;
  int width = 0;
  void fit(int rows, int new_width) {
    if (width != new_width) data.clear();
    width = new_width, stride = padded_inputs(width);
    if (data.size() < rows * stride) data.resize(rows * stride, 0);
  }
  T* row(int64_t i) { return data.data() + i * stride; }
};

// The rows that a layer's attention and MLP are computed for, and their inputs.
struct Queries {
  Plan plan;
  Inputs input, mixed, inner;  // of a layer's products: the norms of the stream, of the output and of the down projection
  void fit(const Model& m, const Batch& b, int threads) {
    input.fit(b.rows, m.hidden, m.layer[0].gate_up.bits);
    mixed.fit(b.rows, m.heads * m.head_dim, m.layer[0].o.bits);
    inner.fit(b.rows, m.intermediate, m.layer[0].down.bits);
    plan.build(b, m.heads, m.kv_heads, m.head_dim, m.window, threads);
  }
};

// The sampled rows of a batch as a batch, whose keys are those of the whole. Of the last layer the others' KV is all that
// anybody reads: nearly all rows of a prompt.
class Sampled {
 public:
  std::vector<int> of;  // [rows], which sample a row is; -1: none

  const Batch& fit(const Batch& b) {
    of.assign(b.rows, -1), positions_.clear(), ancestors_.clear(), row_start_.assign(1, 0);
    for (int i = 0, span = 0; i < b.samples; ++i) {
      const int64_t row = b.sample_rows[i];
      of[row] = i;
      for (; b.row_start[span + 1] <= row; ++span) row_start_.push_back(i);
      positions_.push_back(b.positions[row]);
      ancestors_.insert(ancestors_.end(), b.ancestors + row * b.words, b.ancestors + (row + 1) * b.words);
    }
    row_start_.resize(b.spans + 1, b.samples);
    batch_ = b;
    batch_.rows = b.samples, batch_.positions = positions_.data(), batch_.ancestors = ancestors_.data();
    batch_.row_start = row_start_.data();
    return batch_;
  }

  const Batch& batch() const { return batch_; }

 private:
  Batch batch_;
  std::vector<int64_t> positions_;
  std::vector<uint32_t> ancestors_;
  std::vector<int32_t> row_start_;
};

// `fit` is for one thread, before the team runs; the rest is called by all its threads, inside a job.
class Decoder {
 public:
  explicit Decoder(int threads) : pool(threads), attenders_(threads), kept_(threads) {}

  Pool pool;
  Rows<bf16> stream, added;  // the residual stream, and what is to be added to it next
  Rows<float> normed;
  Queries all;
  Inputs last;  // of the head: the sampled rows

  // Last only: of the last layer only the sampled rows are wanted; `added` has those alone then, in order.
  void fit(const Model& m, const Batch& b, bool last_only) {
    stream.fit(b.rows, m.hidden);
    normed.fit(b.rows, m.hidden);
    added.fit(b.rows, m.hidden);
    qkv_.fit(b.rows, (m.heads + 2 * m.kv_heads) * m.head_dim);
    attended_.fit(b.rows, m.heads * m.head_dim);
    last.fit(b.samples, m.hidden, m.head.bits);
    angles_.resize(static_cast<size_t>(b.rows) * m.head_dim);
    all.fit(m, b, pool.size());
    last_only_ = last_only && b.samples < b.rows;
    if (last_only_ && b.samples) {
      few_.fit(m, sampled_.fit(b), pool.size());
      asked_.fit(b.samples, m.heads * m.head_dim);
    }
  }

  bool last_only() const { return last_only_; }

  // Cosines and sines of a row; one thread of them. Here, as torch's cosine wakes threads of its own from 128 values on,
  // which then spin where this step wants to run.
  void rotation(const Model& m, int row, int64_t position) {
    const int half = m.head_dim / 2;
    float* angles = angles_.data() + static_cast<int64_t>(row) * m.head_dim;
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * m.inv_freq[i];
      angles[i] = std::cos(angle) * m.rope_scaling;
      angles[half + i] = std::sin(angle) * m.rope_scaling;
    }
  }

  // A row's norm, which is the input of what comes next.
  void norm(const Model& m, const bf16* x, const bf16* weight, int row, Inputs& to) {
    rms_norm(x, weight, m.hidden, m.eps, normed.row(row));
    to.round_row(row, normed.row(row));
  }

  // Layer `i` on its normed input `x`: attention goes into the stream, what the MLP makes into `added`. Then: what the thread
  // reads behind it.
  void layer(const Model& m, const Step& s, int i, Inputs& x, int thread, const uint8_t* then) {
    const Batch& b = s.batch;
    const Layer& l = m.layer[i];
    const int half = m.head_dim / 2;
    const bool few = last_only_ && i == s.depth - 1;
    bf16 *k = s.k + i * s.layer_stride, *v = s.v + i * s.layer_stride;
    gemm(pool, thread, l.qkv, x, ToRows<bf16>{l.qkv, qkv_.row(0), qkv_.stride}, first_block<ToRows<bf16>>(pool, thread, l.o));
    pool.phase(thread, b.rows, [&](int r) {
      const int sample = few && b.samples ? sampled_.of[r] : -1;
      for (int h = few && sample < 0 ? m.heads : 0; h < m.heads + 2 * m.kv_heads; ++h) {
        bf16* part = qkv_.row(r) + h * m.head_dim;
        const bool query = h < m.heads, value = h >= m.heads + m.kv_heads;
        if (!value) {
          const bf16* norm = query ? l.q_norm : l.k_norm;
          if (norm) rms_norm(part, norm, m.head_dim, m.eps, part);
          const float* angles = angles_.data() + static_cast<int64_t>(r) * m.head_dim;
          rotate(part, angles, angles + half, half, part);
        }
        if (query) continue;
        const int64_t at = (value ? h - m.heads - m.kv_heads : h - m.heads) * s.head_stride + b.kv_index[r] * m.head_dim;
        std::memcpy((value ? v : k) + at, part, sizeof(bf16) * m.head_dim);
      }
      if (sample >= 0) std::memcpy(asked_.row(sample), qkv_.row(r), sizeof(bf16) * m.heads * m.head_dim);
    });
    if (few && b.samples == 0) return;
    Queries& q = few ? few_ : all;
    const Batch& rows = few ? sampled_.batch() : b;
    Rows<bf16>& queries = few ? asked_ : qkv_;
    const Attention a{queries.row(0), static_cast<int64_t>(queries.stride), k, v, s.head_stride,
                      m.heads, m.kv_heads, m.head_dim, m.scale, m.window};
    const bool apart = m.head_dim % kGroup == 0;  // whether a head's outputs are groups of their own
    pool.phase(thread, static_cast<int>(q.plan.tiles.size()), [&](int t) {
      attenders_[thread].run(a, rows, q.plan, t, [&](const float* partial, int row, int head) {
        float* out = attended_.row(row) + head * m.head_dim;
        finish(partial, m.head_dim, out);
        if (apart) q.mixed.round(row, head * m.head_dim / kGroup, m.head_dim / kGroup, out);
      });
    });
    if (!apart) pool.phase(thread, rows.rows, [&](int r) { q.mixed.round_row(r, attended_.row(r)); });
    gemm(pool, thread, l.o, q.mixed, ToRows<bf16>{l.o, added.row(0), added.stride}, first_block<ToInner>(pool, thread, l.gate_up));
    pool.phase(thread, rows.rows, [&](int r) {
      bf16* x = stream.row(few ? b.sample_rows[r] : r);
      add_to(x, added.row(r), m.hidden);
      norm(m, x, l.post_norm, r, q.input);
    });
    gemm(pool, thread, l.gate_up, q.input, ToInner{l.gate_up, q.inner, kept_[thread].rows},
         first_block<ToRows<bf16>>(pool, thread, l.down));
    gemm(pool, thread, l.down, q.inner, ToRows<bf16>{l.down, added.row(0), added.stride}, then);
  }

  // Where a thread begins with layer `i`, and behind the last one with the head.
  const uint8_t* begin_of(const Model& m, const Step& s, int i, int thread) const {
    if (i < s.depth) return first_block<ToRows<bf16>>(pool, thread, m.layer[i].qkv);
    return first_block<ToRows<float>>(pool, thread, m.head);
  }

  // Logits of the samples, of which `last` has the norms and `normed` as well.
  void logits(const Model& m, const Step& s, int thread) {
    const int samples = s.batch.samples;
    gemm(pool, thread, m.head, last, ToRows<float>{m.head, s.logits, static_cast<size_t>(m.vocab)},
         first_block<ToRows<float>>(pool, thread, m.head));
    if (m.exact)
      pool.phase(thread, samples, [&](int i) {
        rescore(s.logits + static_cast<int64_t>(i) * m.vocab, m.vocab, normed.row(i), m.exact, m.hidden);
      });
  }

 private:
  std::vector<Attender> attenders_;
  bool last_only_ = false;
  Sampled sampled_;
  Queries few_;       // the sampled rows, of the last layer
  Rows<bf16> asked_;  // their queries
  std::vector<float> angles_;  // [rows, head_dim], cosines and sines
  Rows<bf16> qkv_;
  Rows<float> attended_;
  struct alignas(64) Kept {
    float rows[kRowTile][kGroup];
  };
  std::vector<Kept> kept_;
};

}  // namespace minispec
