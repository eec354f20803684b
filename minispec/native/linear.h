// What products know of a weight: which output lies where, what is fetched ahead, and where results go.
#pragma once

#include <algorithm>

#include "vec.h"

namespace minispec {

constexpr int kBlock = 32;  // outputs per block
constexpr int kGroup = 32;  // inputs per group; rows of x are zero up to a multiple of this

inline int groups_of(int in) { return (in + kGroup - 1) / kGroup; }
inline int padded_inputs(int in) { return groups_of(in) * kGroup; }

struct Linear {
  const void* weight;  // packed; see weights.h
  const bf16* bias;    // [out], or null
  int32_t in, out;
  int32_t paired;      // 1: gate_up; blocks hold 16 outputs of the first half and the matching 16 of the second
  int32_t bits;        // of a weight, 16 or 8
};

inline int blocks_of(const Linear& l) { return l.paired ? (l.out / 2 + 15) / 16 : (l.out + kBlock - 1) / kBlock; }

// Where output `lane` of a block lies in [0, out).
inline int output_of(const Linear& l, int block, int lane) {
  if (!l.paired) return block * kBlock + lane;
  return lane < 16 ? block * 16 + lane : l.out / 2 + block * 16 + lane - 16;
}

// Whether a lane of a block is an output at all.
inline bool is_output(const Linear& l, int block, int lane) {
  return l.paired ? block * 16 + lane % 16 < l.out / 2 : block * kBlock + lane < l.out;
}

// Fetching of weights, beside the computation: the processor's own prefetching ends at a page. A pass over a block fetches
// what the thread turns to next, or where several passes share the work, a part of it.
struct Ahead {
  const uint8_t* at;
  int step;  // bytes for every 128 that the pass reads: 128, 64 or 0
};

// `weights` is what is read next: naming it keeps the compiler from fetching everything at once.
inline void fetch(Ahead& ahead, const uint8_t*& weights) {
  asm volatile("prefetcht1 (%1)\n\tprefetcht1 (%1,%2)" : "+r"(weights) : "r"(ahead.at), "r"(static_cast<int64_t>(ahead.step / 2)));
  ahead.at += ahead.step;
}

}  // namespace minispec
