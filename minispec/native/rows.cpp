// Copies of rows, which in torch or in Python take longer than what they are for.
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

// `count` rows of `from`, which are `size` bytes each, one behind the other.
void minispec_gather(char* to, const char* from, int64_t size, const int64_t* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * size, from + rows[i] * size, size);
}

// Moves in a KV cache, see KVCache.commit in minispec/kv_cache.py: in each of `planes` of memory, `stride` bytes apart, row
// source[i] to the place of row target[i], `size` bytes each. A target may be another row's source: all are read before any
// is written.
void minispec_move(char* memory, int64_t planes, int64_t stride, int64_t size, const int64_t* source,
                   const int64_t* target, int64_t count) {
  std::vector<char> rows(count * size);
  for (int64_t p = 0; p < planes; ++p, memory += stride) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(&rows[i * size], memory + source[i] * size, size);
    for (int64_t i = 0; i < count; ++i) std::memcpy(memory + target[i] * size, &rows[i * size], size);
  }
}
}
