// The whole forward of a Llama-family model on a CPU with AVX-512 bfloat16, in one call: what StepBatch is to the model
// (minispec/batch.py), Batch is here. Compiled on the machine it runs on and called through ctypes; see build.py.
#include <memory>

#include "attention.h"
#include "gemm8.h"

using namespace minispec;

namespace {

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
  bf16* tapped;               // [taps, rows, hidden]
  bf16 *k, *v;                // [layers, kv_heads, positions, head_dim]
  int64_t layer_stride, head_stride;  // elements
  float* logits;              // [samples, vocab]
};

// Rows, zero up to a multiple of kPadInputs.
template <class T>
struct Rows {
  std::vector<T> data;
  size_t stride = 0;
  int width = 0;
  void fit(int rows, int new_width) {
    if (width != new_width) data.clear();
    width = new_width, stride = padded_inputs(width);
    if (data.size() < rows * stride) data.resize(rows * stride, 0);
  }
  T* row(int64_t i) { return data.data() + i * stride; }
};

class Runner {
 public:
  explicit Runner(int threads) : pool_(threads), attenders_(threads) {}

  void forward(const Model& m, const Step& s) {
    const std::lock_guard<std::mutex> alone(alone_);
    const Batch& b = s.batch;
    if (b.rows == 0) return;
    const int qkv_width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    stream_.fit(b.rows, m.hidden);
    normed_.fit(b.rows, m.hidden);
    added_.fit(b.rows, m.hidden);
    qkv_.fit(b.rows, qkv_width);
    attended_.fit(b.rows, m.heads * m.head_dim);
    inner_.fit(b.rows, m.intermediate);
    room_for_rounded(b.rows, std::max({m.hidden, m.heads * m.head_dim, m.intermediate}));
    angles_.resize(static_cast<size_t>(b.rows) * m.head_dim);
    plan_.build(b, m.heads, m.kv_heads, m.window, pool_.size());
    if (partials_.size() < static_cast<size_t>(plan_.partials) * (m.head_dim + 2))
      partials_.resize(static_cast<size_t>(plan_.partials) * (m.head_dim + 2));
    pool_.run([&](int thread) { run(m, s, thread); });
  }

  void linear(const Linear& l, const bf16* x, int64_t stride, int rows, void* y, int64_t y_stride, bool wide) {
    const std::lock_guard<std::mutex> alone(alone_);
    given_.fit(rows, l.in);
    room_for_rounded(rows, l.in);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < l.in; i += 16) {
        const __mmask16 m = lanes(l.in - i);
        _mm512_mask_storeu_ps(given_.row(r) + i, m, load_bf16(x + r * stride + i, m));
      }
    pool_.run([&](int) {
      if (wide)
        gemm<To::kFloat>(pool_, l, given_.row(0), given_.stride, rows, rounded_.data(), y, y_stride);
      else
        gemm<To::kBf16>(pool_, l, given_.row(0), given_.stride, rows, rounded_.data(), y, y_stride);
    });
  }

  // `plain` is [out, in] bfloat16, or int8 with its `scales` [out, groups].
  void pack(const Linear& l, const void* plain, const bf16* scales, void* packed) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int) {
      pool_.phase(blocks_of(l), [&](int block) {
        if (l.bits == 8)
          pack_block8(l, static_cast<const int8_t*>(plain), scales, static_cast<uint8_t*>(packed), block);
        else
          pack_block(l, static_cast<const bf16*>(plain), static_cast<bf16*>(packed), block);
      });
    });
  }

  void unpack(const Linear& l, void* plain, bf16* scales) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int) {
      pool_.phase(blocks_of(l), [&](int block) {
        if (l.bits == 8)
          unpack_block8(l, static_cast<int8_t*>(plain), scales, block);
        else
          unpack_block(l, static_cast<bf16*>(plain), block);
      });
    });
  }

 private:
  void room_for_rounded(int rows, int inputs) {
    const size_t needed = static_cast<size_t>(rows) * padded_inputs(inputs) / kGroup;
    if (rounded_.size() < needed) rounded_.resize(needed);
  }

  void run(const Model& m, const Step& s, int thread) {
    const Batch& b = s.batch;
    const int half = m.head_dim / 2;
    Attention a{qkv_.row(0), static_cast<int64_t>(qkv_.stride), nullptr, nullptr, s.head_stride, attended_.row(0),
                static_cast<int64_t>(attended_.stride), m.heads, m.kv_heads, m.head_dim, m.scale, m.window};
    pool_.phase(b.rows, [&](int r) {
      std::memcpy(stream_.row(r), m.embedding + b.tokens[r] * m.hidden, sizeof(bf16) * m.hidden);
      // here, as torch's cosine wakes threads of its own from 128 values on, which then spin where this step wants to run
      float* angles = angles_.data() + static_cast<int64_t>(r) * m.head_dim;
      for (int i = 0; i < half; ++i) {
        const float angle = static_cast<float>(b.positions[r]) * m.inv_freq[i];
        angles[i] = std::cos(angle) * m.rope_scaling;
        angles[half + i] = std::sin(angle) * m.rope_scaling;
      }
    });
    for (int i = 0; i <= s.depth; ++i) {
      // the stream after i layers: add what the last one made, show it, norm it for the next
      pool_.phase(b.rows, [&](int r) {
        if (i) add_to(stream_.row(r), added_.row(r), m.hidden);
        for (int t = 0; t < s.taps; ++t)
          if (s.tap_layers[t] == i)
            std::memcpy(s.tapped + (static_cast<int64_t>(t) * b.rows + r) * m.hidden, stream_.row(r),
                        sizeof(bf16) * m.hidden);
        if (i < s.depth) rms_norm(stream_.row(r), m.layer[i].input_norm, m.hidden, m.eps, normed_.row(r));
      });
      if (i == s.depth) break;
      const Layer& l = m.layer[i];
      a.k = s.k + i * s.layer_stride;
      a.v = s.v + i * s.layer_stride;
      gemm<To::kBf16>(pool_, l.qkv, normed_.row(0), normed_.stride, b.rows, rounded_.data(), qkv_.row(0), qkv_.stride);
      pool_.phase(b.rows, [&](int r) {
        for (int h = 0; h < m.heads + 2 * m.kv_heads; ++h) {
          bf16* x = qkv_.row(r) + h * m.head_dim;
          const bool query = h < m.heads, value = h >= m.heads + m.kv_heads;
          if (!value) {
            const bf16* norm = query ? l.q_norm : l.k_norm;
            if (norm) rms_norm(x, norm, m.head_dim, m.eps, x);
            const float* angles = angles_.data() + static_cast<int64_t>(r) * m.head_dim;
            rotate(x, angles, angles + half, half, x);
          }
          if (query) continue;
          const int64_t at = (value ? h - m.heads - m.kv_heads : h - m.heads) * s.head_stride + b.kv_index[r] * m.head_dim;
          std::memcpy((value ? s.v : s.k) + i * s.layer_stride + at, x, sizeof(bf16) * m.head_dim);
        }
      });
      pool_.phase(static_cast<int>(plan_.tiles.size()), [&](int t) {
        attenders_[thread].run(a, b, plan_.tiles[t], partials_.data());
      });
      if (!plan_.joins.empty())
        pool_.phase(static_cast<int>(plan_.joins.size()), [&](int j) { plan_.join(a, j, partials_.data()); });
      gemm<To::kBf16>(pool_, l.o, attended_.row(0), attended_.stride, b.rows, rounded_.data(), added_.row(0), added_.stride);
      pool_.phase(b.rows, [&](int r) {
        add_to(stream_.row(r), added_.row(r), m.hidden);
        rms_norm(stream_.row(r), l.post_norm, m.hidden, m.eps, normed_.row(r));
      });
      gemm<To::kSilu>(pool_, l.gate_up, normed_.row(0), normed_.stride, b.rows, rounded_.data(), inner_.row(0), inner_.stride);
      gemm<To::kBf16>(pool_, l.down, inner_.row(0), inner_.stride, b.rows, rounded_.data(), added_.row(0), added_.stride);
    }
    if (b.samples == 0) return;
    pool_.phase(b.samples, [&](int i) {
      rms_norm(stream_.row(b.sample_rows[i]), m.norm, m.hidden, m.eps, normed_.row(i));
    });
    gemm<To::kFloat>(pool_, m.head, normed_.row(0), normed_.stride, b.samples, rounded_.data(), s.logits, m.vocab);
    if (m.exact)
      pool_.phase(b.samples, [&](int i) {
        rescore(s.logits + static_cast<int64_t>(i) * m.vocab, m.vocab, normed_.row(i), m.exact, m.hidden);
      });
  }

  std::mutex alone_;  // a second caller waits
  Pool pool_;
  std::vector<Attender> attenders_;
  Plan plan_;
  std::vector<float> partials_, angles_;  // angles: [rows, head_dim], cosines and sines
  Rows<bf16> stream_, added_, qkv_;
  Rows<float> normed_, attended_, inner_, given_;
  std::vector<Group> rounded_;
};

float random_bf16(unsigned& seed) {  // a multiple of 1/16 in [-1, 1)
  return static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 27) / 16.0f - 1.0f;
}

bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<bf16>(bits >> 16);
}

// Whether the products of this build are right, at sizes with every kind of edge; 0 if so.
int self_test() {
  Runner runner(2);
  const int in = 70, out = 52, groups = 3;
  for (const int bits : {16, 8})
    for (int paired = 0; paired < 2; ++paired)
      for (int rows = 1; rows <= 2 * kRowTile + 1; ++rows) {
        unsigned seed = 1;
        std::vector<float> w(in * out), x(rows * in);
        std::vector<bf16> x16(rows * in), w16(in * out), scales(out * groups, to_bf16(0.0625f)), scales_back(out * groups);
        std::vector<int8_t> w8(in * out);
        for (int i = 0; i < rows * in; ++i) x16[i] = to_bf16(x[i] = random_bf16(seed));
        for (int i = 0; i < in * out; ++i) w16[i] = to_bf16(w[i] = random_bf16(seed)), w8[i] = static_cast<int8_t>(w[i] * 16);
        Linear l{nullptr, nullptr, in, out, paired, bits};
        std::vector<uint8_t> packed(packed_size(l)), plain(in * out * bits / 8), back(plain.size());
        std::memcpy(plain.data(), bits == 8 ? static_cast<void*>(w8.data()) : w16.data(), plain.size());
        runner.pack(l, plain.data(), scales.data(), packed.data());
        l.weight = packed.data();
        runner.unpack(l, back.data(), scales_back.data());
        if (back != plain || (bits == 8 && scales_back != scales)) return 1;
        std::vector<float> y(rows * out, NAN);
        runner.linear(l, x16.data(), in, rows, y.data(), out, true);
        for (int r = 0; r < rows; ++r)
          for (int n = 0; n < out; ++n) {
            float sum = 0;
            for (int k = 0; k < in; ++k) sum += x[r * in + k] * w[n * in + k];
            // of 70 products of inputs that are each at most 1/254 off, in 8 bits
            if (!(std::fabs(sum - y[r * out + n]) < (bits == 8 ? 0.2f : 1e-3f))) return 2;
          }
      }
  return 0;
}

}  // namespace

extern "C" {

int minispec_self_test() { return self_test(); }

Runner* minispec_open(int threads) { return new Runner(threads); }
void minispec_close(Runner* runner) { delete runner; }

int64_t minispec_packed_size(const Linear* l) { return packed_size(*l); }

void minispec_pack(Runner* runner, const Linear* l, const void* plain, const bf16* scales, void* packed) {
  runner->pack(*l, plain, scales, packed);
}

void minispec_unpack(Runner* runner, const Linear* l, void* plain, bf16* scales) { runner->unpack(*l, plain, scales); }

void minispec_linear(Runner* runner, const Linear* l, const bf16* x, int64_t stride, int rows, void* y, int64_t y_stride,
                     int wide) {
  runner->linear(*l, x, stride, rows, y, y_stride, wide != 0);
}

void minispec_forward(Runner* runner, const Model* model, const Step* step) { runner->forward(*model, *step); }
}
