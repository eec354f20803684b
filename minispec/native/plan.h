// What a step's attention consists of: its tasks, the keys of each, and which rows see which. Found once a step, the same
// for all layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace minispec {

constexpr int kChunk = 128;  // positions per chunk
constexpr int kLanes = 48;   // query rows per task
constexpr int kMore = 32;    // keys that may be read behind the last, whatever they are

// Fields as in StepBatch (minispec/batch.py).
struct Batch {
  int32_t rows, spans, samples, words, width, page_size;
  const int64_t *tokens, *positions, *kv_index, *sample_rows;
  const int32_t *row_start, *num_cached, *tree_size;
  const uint8_t* causal;
  const uint32_t* ancestors;  // [rows, words]
  const int32_t* page_table;  // [spans, width]
};

// The keys of one chunk for the query rows of a task, and which rows see which.
struct Keys {
  int64_t index;  // of the first one, in Plan::index
  int count, plain;  // keys; sixteens of them, the first ones, that every row sees
  int64_t masks;     // of the other sixteens, in Plan::masks: row by row
};

// What a task computes of: `count` query rows of a KV head, from head `head` of row `row` on; chunks [begin, end).
struct Tile {
  int row, head, kv_head, count, begin, end;
  int64_t keys;      // index of the first chunk's Keys in the plan
  int join;          // that it is a part of, -1: its chunks are all there are
  int64_t partial;   // then: index of its first partial result
};

// A partial result of a query row is top, total, sum [head_dim]: of its keys' scores (in powers of two) the largest, of
// 2^(score - top) the total, of the values weighed so the sum.
constexpr int kFront = 16;  // floats before the sum

struct Plan {
  std::vector<Tile> tiles;
  struct Join {  // query rows whose chunks are computed apart
    int64_t partial;
    int chunks, parts, left;  // parts: tasks; left: of these, not yet done
  };
  std::vector<Join> joins;
  Lines<float> partials;  // [chunks of joins][query rows][kFront + head_dim]
  std::vector<Keys> keys;
  std::vector<int64_t> index;   // per span and position, where in a head's cache it lies; and kMore a span
  std::vector<uint16_t> masks;  // sixteen keys each
  int threads = 0;

  void build(const Batch& b, int heads, int kv_heads, int head_dim, int64_t window, int team) {
    tiles.clear(), joins.clear(), keys.clear(), index.clear(), masks.clear(), threads = team;
    const int group = heads / kv_heads;
    int64_t partial = 0, all = 0;  // all: chunks of all tasks
    for (int s = 0; s < b.spans; ++s)
      all += static_cast<int64_t>((b.row_start[s + 1] - b.row_start[s]) * group + kLanes - 1) / kLanes * kv_heads *
             ((b.num_cached[s] + b.tree_size[s] - 1) / kChunk + 1);
    const int share = static_cast<int>(std::max<int64_t>(all / (8 * threads), 1));  // chunks of a task
    for (int s = 0; s < b.spans; ++s) {
      const int queries = (b.row_start[s + 1] - b.row_start[s]) * group;
      const int64_t places = static_cast<int64_t>(index.size());
      const int32_t* table = b.page_table + static_cast<int64_t>(s) * b.width;
      for (int64_t at = 0, end = b.num_cached[s] + b.tree_size[s]; at < end; ++table)
        for (int64_t i = 0; i < b.page_size && at < end; ++i, ++at)
          index.push_back((static_cast<int64_t>(*table) * b.page_size + i) * head_dim);
      index.resize(index.size() + kMore, index.back());
      for (int first = 0; first < queries; first += kLanes) {
        const int count = std::min(queries - first, kLanes);
        const Rows rows(b, s, first / group, (first + count - 1) / group + 1);
        const int begin = window ? static_cast<int>(std::max<int64_t>(rows.oldest - window + 1, 0) / kChunk) : 0;
        const int end = static_cast<int>(rows.newest / kChunk) + 1;
        const int64_t known = static_cast<int64_t>(keys.size());
        for (int c = begin; c < end; ++c) find_keys(b, s, rows, window, c, places);
        for (int h = 0; h < kv_heads; ++h) {
          Tile tile{rows.begin, h * group + first % group, h, count, begin, end, known, -1, 0};
          if (end - begin <= share) {
            tiles.push_back(tile);
            continue;
          }
          const int parts = (end - begin + share - 1) / share;
          tile.join = static_cast<int>(joins.size());
          joins.push_back({partial, end - begin, parts, parts});
          for (int c = begin; c < end; c += share) {
            tile.begin = c, tile.end = std::min(c + share, end), tile.keys = known + c - begin, tile.partial = partial;
            partial += static_cast<int64_t>(count) * (tile.end - c);
            tiles.push_back(tile);
          }
        }
      }
    }
    const size_t needed = static_cast<size_t>(partial) * (kFront + head_dim);
    at_least(partials, needed);
  }

 private:
  struct Rows {  // of a task
    int begin, end;  // in the batch
    int64_t oldest = INT64_MAX, newest = 0;  // positions
    Rows(const Batch& b, int span, int from, int to) : begin(b.row_start[span] + from), end(b.row_start[span] + to) {
      for (int row = begin; row < end; ++row)
        newest = std::max(newest, b.positions[row]), oldest = std::min(oldest, b.positions[row]);
    }
  };

  // Keys of chunk c, and which rows see which.
  void find_keys(const Batch& b, int span, const Rows& rows, int64_t window, int c, int64_t places) {
    const int64_t low = static_cast<int64_t>(c) * kChunk, high = low + kChunk;
    const int64_t prefix = b.num_cached[span], all = prefix + b.tree_size[span];
    const bool causal = b.causal[span];
    // tree keys lie behind the prefix in any order of positions; a causal span's lie at their own
    const int64_t from = low < prefix || causal ? low : prefix;
    const int64_t to = causal ? std::min(high, rows.newest + 1) : high <= prefix ? high : all;
    const int64_t straight = causal ? to : std::clamp(prefix, from, to);  // keys before it lie at their own positions
    const int plain = window ? 0 : static_cast<int>(std::max<int64_t>(std::min(straight, rows.oldest + 1) - from, 0) / 16);
    const int others = static_cast<int>(to - from + 15) / 16 - plain;
    const int64_t at = static_cast<int64_t>(masks.size());
    keys.push_back({places + from, static_cast<int>(to - from), plain, at});
    masks.resize(at + static_cast<int64_t>(rows.end - rows.begin) * others, 0);
    uint16_t* mask = masks.data() + at;
    for (int row = rows.begin; row < rows.end; ++row, mask += others) {
      const auto see = [&](int64_t key) { mask[(key - from) / 16 - plain] |= 1u << (key - from) % 16; };
      const int64_t position = b.positions[row];
      const int64_t oldest = window ? position - window + 1 : 0;
      for (int64_t key = std::max(from + 16 * plain, oldest); key < std::min(straight, position + 1); ++key) see(key);
      if (to == straight) continue;
      int64_t its = position;  // of the next set bit from the top: the row itself, its parent, and so on
      for (int w = b.words - 1; w >= 0; --w)
        for (uint32_t bits = b.ancestors[static_cast<int64_t>(row) * b.words + w]; bits; --its) {
          const int bit = 31 - __builtin_clz(bits);
          bits &= ~(1u << bit);
          if (its >= low && its < high) see(prefix + 32 * w + bit);
        }
    }
  }
};

}  // namespace minispec
