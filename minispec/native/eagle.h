// The forward of an EAGLE head, one layer of a drafted tree per call; the formulas are in minispec/drafters/eagle_head.py.
//
// Beside the head's own layers it is what a model's forward is: rows read the embedding of a token and a hidden state, and
// the sampled ones give back their own hidden state g, which their children in the tree read.
#pragma once

#include "decoder.h"

namespace minispec {

struct Eagle {
  Model model;              // norm may be null, and input_norm of the first layer of version 1
  Linear fc;                // version 1: to the first layer's input
  const bf16* hidden_norm;  // version 3
  int32_t version, norm_before_residual;
};

struct EagleStep {
  Step step;                 // its batch's positions are places in the head's cache
  const int64_t* positions;  // [rows], of the text, for RoPE
  const bf16* hidden;        // [rows, hidden]
  bf16* g;                   // [samples, hidden]
};

// Memory of the head's own, beside the decoder's.
struct EagleRows {
  Rows<float> wide;  // [embedding, hidden state]
  Inputs input;      // the same
  void fit(Decoder& d, const Eagle& e, const Batch& b) {
    d.fit(e.model, b, true);
    wide.fit(b.rows, 2 * e.model.hidden);
    input.fit(b.rows, 2 * e.model.hidden, e.model.layer[0].qkv.bits);
  }
};

// x, or its norm, as float.
inline void norm_or_widen(const bf16* x, const bf16* weight, int dim, float eps, float* y) {
  if (weight) return rms_norm(x, weight, dim, eps, y);
  for (int i = 0; i < dim; i += 16) {
    const __mmask16 m = lanes(dim - i);
    _mm512_mask_storeu_ps(y + i, m, load_bf16(x + i, m));
  }
}

// By all threads of the team.
inline void eagle_forward(Decoder& d, EagleRows& own, const Eagle& e, const EagleStep& es, int thread) {
  const Model& m = e.model;
  const Batch& b = es.step.batch;
  const bool first = e.version == 1;
  d.pool.phase(thread, b.rows, [&](int r) {
    const bf16 *embedded = m.embedding + b.tokens[r] * m.hidden, *hidden = es.hidden + static_cast<int64_t>(r) * m.hidden;
    norm_or_widen(embedded, first ? nullptr : m.layer[0].input_norm, m.hidden, m.eps, own.wide.row(r));
    norm_or_widen(hidden, first ? nullptr : e.hidden_norm, m.hidden, m.eps, own.wide.row(r) + m.hidden);
    own.input.round_row(r, own.wide.row(r));
    if (e.norm_before_residual)
      rms_norm(hidden, e.hidden_norm, m.hidden, m.eps, d.stream.row(r));
    else
      std::memcpy(d.stream.row(r), hidden, sizeof(bf16) * m.hidden);
    d.rotation(m, r, es.positions[r]);
  });
  if (first) {
    gemm(d.pool, thread, e.fc, own.input, ToRows<bf16>{e.fc, d.stream.row(0), d.stream.stride},
         d.begin_of(m, es.step, 0, thread));
    d.pool.phase(thread, b.rows, [&](int r) {
      norm_or_widen(d.stream.row(r), m.layer[0].input_norm, m.hidden, m.eps, d.normed.row(r));
      d.all.input.round_row(r, d.normed.row(r));
    });
  }
  for (int i = 0; i < m.layers; ++i) {
    if (i)
      d.pool.phase(thread, b.rows, [&](int r) {
        add_to(d.stream.row(r), d.added.row(r), m.hidden);
        d.norm(m, d.stream.row(r), m.layer[i].input_norm, r, d.all.input);
      });
    d.layer(m, es.step, i, i == 0 && !first ? own.input : d.all.input, thread, d.begin_of(m, es.step, i + 1, thread));
  }
  if (b.samples == 0) return;
  d.pool.phase(thread, b.samples, [&](int i) {
    const int64_t r = b.sample_rows[i];
    add_to(d.stream.row(r), d.added.row(d.last_only() ? i : r), m.hidden);
    std::memcpy(es.g + static_cast<int64_t>(i) * m.hidden, d.stream.row(r), sizeof(bf16) * m.hidden);
    norm_or_widen(d.stream.row(r), m.norm, m.hidden, m.eps, d.normed.row(i));
    d.last.round_row(i, d.normed.row(i));
  });
  d.logits(m, es.step, thread);
}

}  // namespace minispec
