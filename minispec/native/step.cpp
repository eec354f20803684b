// The whole forward of a Llama-family model on a CPU with AVX-512 bfloat16, in one call: what StepBatch is to the model
// (minispec/batch.py), Batch is here. Compiled on the machine it runs on and called through ctypes; see build.py.
#include <memory>

#include "choose.h"
#include "eagle.h"

using namespace minispec;

namespace {

class Runner {
 public:
  explicit Runner(int threads) : decoder_(threads), pool_(decoder_.pool), scorers_(threads) {}

  void forward(const Model& m, const Step& s) {
    const std::lock_guard<std::mutex> alone(alone_);
    if (s.batch.rows == 0) return;
    // a tap behind the last layer shows all rows
    decoder_.fit(m, s.batch, s.depth > 0 && (s.taps == 0 || s.tap_layers[s.taps - 1] < s.depth));
    pool_.run([&](int thread) { run(m, s, thread); });
  }

  void eagle(const Eagle& e, const EagleStep& s) {
    const std::lock_guard<std::mutex> alone(alone_);
    if (s.step.batch.rows == 0) return;
    eagle_.fit(decoder_, e, s.step.batch);
    pool_.run([&](int thread) { eagle_forward(decoder_, eagle_, e, s, thread); });
  }

  void best(const float* logits, int rows, int vocab, int k, const int64_t* names, int64_t* ids, float* values) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int thread) {
      pool_.phase(thread, rows, [&](int r) {
        best_of(logits + static_cast<int64_t>(r) * vocab, vocab, k, names, ids + static_cast<int64_t>(r) * k,
                values + static_cast<int64_t>(r) * k);
      });
    });
  }

  void children(const Draws& draws, const float* logits, int rows, int vocab, int k, const int64_t* names, int64_t* ids,
                float* values) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int thread) {
      pool_.phase(thread, rows, [&](int r) {
        const float* scores = scorers_[thread](draws, r, logits + static_cast<int64_t>(r) * vocab, vocab);
        best_of(scores, vocab, k, names, ids + static_cast<int64_t>(r) * k, values + static_cast<int64_t>(r) * k);
      });
    });
  }

  void sample(const Draws& draws, const float* logits, int rows, int vocab, int64_t* ids) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int thread) {
      pool_.phase(thread, rows, [&](int r) {
        const float* row = logits + static_cast<int64_t>(r) * vocab;
        const int64_t id = argmax(scorers_[thread](draws, r, row, vocab), vocab);
        ids[r] = std::isfinite(row[id]) ? id : -1;  // a row that is not finite is scored as it comes
      });
    });
  }

  void gumbel(const int64_t* keys, int rows, int vocab, float* noise) {
    const std::lock_guard<std::mutex> alone(alone_);
    const int chunk = 4096, chunks = (vocab + chunk - 1) / chunk;
    pool_.run([&](int thread) {
      pool_.phase(thread, rows * chunks, [&](int task) {
        const int r = task / chunks, first = task % chunks * chunk;
        gumbel_row(keys[2 * r], keys[2 * r + 1], first, std::min(chunk, vocab - first),
                   noise + static_cast<int64_t>(r) * vocab + first);
      });
    });
  }

  void gumbel_at(const int64_t* keys, const int64_t* tokens, int64_t stride, int rows, int k, float* noise) {
    const std::lock_guard<std::mutex> alone(alone_);
    const int chunk = 1024, chunks = (k + chunk - 1) / chunk;
    pool_.run([&](int thread) {
      pool_.phase(thread, rows * chunks, [&](int task) {
        const int r = task / chunks, first = task % chunks * chunk;
        minispec::gumbel_at(keys[2 * r], keys[2 * r + 1], tokens + r * stride + first, std::min(chunk, k - first),
                            noise + static_cast<int64_t>(r) * k + first);
      });
    });
  }

  void linear(const Linear& l, const bf16* x, int64_t stride, int rows, void* y, int64_t y_stride, bool wide) {
    const std::lock_guard<std::mutex> alone(alone_);
    given_.fit(rows, l.in);
    input_.fit(rows, l.in, l.bits);
    pool_.run([&](int thread) {
      pool_.phase(thread, rows, [&](int r) {
        for (int i = 0; i < l.in; i += 16) {
          const __mmask16 m = lanes(l.in - i);
          _mm512_mask_storeu_ps(given_.row(r) + i, m, load_bf16(x + r * stride + i, m));
        }
        input_.round_row(r, given_.row(r));
      });
      const uint8_t* then = first_block<ToRows<bf16>>(pool_, thread, l);
      if (wide)
        gemm(pool_, thread, l, input_, ToRows<float>{l, static_cast<float*>(y), static_cast<size_t>(y_stride)}, then);
      else
        gemm(pool_, thread, l, input_, ToRows<bf16>{l, static_cast<bf16*>(y), static_cast<size_t>(y_stride)}, then);
    });
  }

  // `plain` is [out, in] bfloat16, or int8 with its `scales` [out, groups].
  void pack(const Linear& l, const void* plain, const bf16* scales, void* packed) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int thread) {
      pool_.phase(thread, blocks_of(l), [&](int block) { pack_block(l, plain, scales, packed, block); });
    });
  }

  void unpack(const Linear& l, void* plain, bf16* scales) {
    const std::lock_guard<std::mutex> alone(alone_);
    pool_.run([&](int thread) {
      pool_.phase(thread, blocks_of(l), [&](int block) { unpack_block(l, plain, scales, block); });
    });
  }

 private:
  void run(const Model& m, const Step& s, int thread) {
    const Batch& b = s.batch;
    Decoder& d = decoder_;
    pool_.phase(thread, b.rows, [&](int r) {
      std::memcpy(d.stream.row(r), m.embedding + b.tokens[r] * m.hidden, sizeof(bf16) * m.hidden);
      d.rotation(m, r, b.positions[r]);
    });
    for (int i = 0; i < s.depth + !d.last_only(); ++i) {
      // the stream after i layers: add what the last one made, show it, norm it for the next
      pool_.phase(thread, b.rows, [&](int r) {
        if (i) add_to(d.stream.row(r), d.added.row(r), m.hidden);
        for (int t = 0; t < s.taps; ++t)
          if (s.tap_layers[t] == i)
            std::memcpy(s.tapped + (static_cast<int64_t>(r) * s.taps + t) * m.hidden, d.stream.row(r),
                        sizeof(bf16) * m.hidden);
        if (i < s.depth) d.norm(m, d.stream.row(r), m.layer[i].input_norm, r, d.all.input);
      });
      if (i < s.depth) d.layer(m, s, i, d.all.input, thread, d.begin_of(m, s, i + 1, thread));
    }
    if (b.samples == 0) return;
    pool_.phase(thread, b.samples, [&](int i) {
      bf16* x = d.stream.row(b.sample_rows[i]);
      if (d.last_only()) add_to(x, d.added.row(i), m.hidden);
      d.norm(m, x, m.norm, i, d.last);
    });
    d.logits(m, s, thread);
  }

  std::mutex alone_;  // a second caller waits
  Decoder decoder_;
  Pool& pool_;
  EagleRows eagle_;
  Rows<float> given_;
  Inputs input_;
  std::vector<Scorer> scorers_;
};

float random_bf16(unsigned& seed) {  // a multiple of 1/16 in [-1, 1)
  return static_cast<int>((seed = seed * 1664525u + 1013904223u) >> 27) / 16.0f - 1.0f;
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

void minispec_eagle(Runner* runner, const Eagle* head, const EagleStep* step) { runner->eagle(*head, *step); }

// logits [rows, vocab]; names [vocab] or null; ids, values [rows, k], k <= vocab.
void minispec_best(Runner* runner, const float* logits, int rows, int vocab, int k, const int64_t* names, int64_t* ids,
                   float* values) {
  runner->best(logits, rows, vocab, k, names, ids, values);
}

// The same of rows as they are drawn.
void minispec_children(Runner* runner, const Draws* draws, const float* logits, int rows, int vocab, int k,
                       const int64_t* names, int64_t* ids, float* values) {
  runner->children(*draws, logits, rows, vocab, k, names, ids, values);
}

// logits [rows, vocab]; ids [rows], -1 where a row is not finite.
void minispec_sample(Runner* runner, const Draws* draws, const float* logits, int rows, int vocab, int64_t* ids) {
  runner->sample(*draws, logits, rows, vocab, ids);
}

// keys [rows, 2], seed and position; noise [rows, vocab].
void minispec_gumbel(Runner* runner, const int64_t* keys, int rows, int vocab, float* noise) {
  runner->gumbel(keys, rows, vocab, noise);
}

// tokens [rows, k], or [k] for all rows with a stride of 0; noise [rows, k].
void minispec_gumbel_at(Runner* runner, const int64_t* keys, const int64_t* tokens, int64_t stride, int rows, int k,
                        float* noise) {
  runner->gumbel_at(keys, tokens, stride, rows, k, noise);
}
}
