// The rows of a product's input as whole numbers, as weights.h has them, where all threads of a team read them.
//
// Rows go through a product in tiles. A tile's values lie as its inner loop reads them, one sequential read:
//
//     values[tile]{ group{ row{ 32 numbers } } }
//
// and a row's scales side by side. Whoever computes a row (a norm, attention, an activation) rounds it, a row or some groups
// of it: a line of memory has one writer.
#pragma once

#include "memory.h"
#include "weights.h"

namespace minispec {

constexpr int kRowTile = 14;  // rows that share one pass over a block: 28 sums, two weights and an input in 32 registers

inline int tiles_of(int rows) { return (rows + kRowTile - 1) / kRowTile; }

// First row of a tile: tiles are as equal as can be.
inline int tile_start(int rows, int tile) { return static_cast<int>(static_cast<int64_t>(rows) * tile / tiles_of(rows)); }

class Inputs {
 public:
  // Room for `rows` of `in` inputs, for weights of so many bits; by one thread, before others use it.
  void fit(int rows, int in, int bits) {
    rows_ = rows, groups_ = groups_of(in), bits_ = bits, stride_ = (groups_ + 15) / 16 * 16;
    at_least(values_, static_cast<size_t>(rows) * groups_ * kLine);
    at_least(factors_, static_cast<size_t>(rows) * stride_ * 2);
  }

  int rows() const { return rows_; }

  // `count` groups of a row from `group` on, of 32 floats each, zero where inputs run out.
  void round(int row, int group, int count, const float* x) {
    with_kind(bits_, [&](auto kind) {
      using Kind = decltype(kind);
      const int tile = static_cast<int>(((row + 1) * static_cast<int64_t>(tiles_of(rows_)) - 1) / rows_);
      const int start = tile_start(rows_, tile), rows = tile_start(rows_, tile + 1) - start;
      char* to = values<Kind>(start) + (static_cast<size_t>(group) * rows + row - start) * Kind::kWords * 4;
      auto* factor = reinterpret_cast<typename Kind::Factor*>(factors_.data()) + row * stride_ + group;
      for (int g = 0; g < count; ++g, x += kGroup, to += static_cast<size_t>(rows) * Kind::kWords * 4)
        factor[g] = Kind::round(x, to);
    });
  }

  void round_row(int row, const float* x) { round(row, 0, groups_, x); }

  // Of the tile that starts at a row: its values; and the factors of its first row, the others' a stride apart.
  template <class Kind>
  char* values(int start) {
    return values_.data() + static_cast<size_t>(start) * groups_ * Kind::kWords * 4;
  }
  template <class Kind>
  const typename Kind::Factor* factors(int start) const {
    return reinterpret_cast<const typename Kind::Factor*>(factors_.data()) + start * stride_;
  }
  size_t stride() const { return stride_; }

 private:
  Lines<char> values_;
  Lines<int32_t> factors_;
  size_t stride_ = 0;  // factors of a row
  int rows_ = 0, groups_ = 0, bits_ = 16;
};

}  // namespace minispec
