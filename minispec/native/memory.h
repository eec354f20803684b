// Vectors that begin with a line of memory: what a thread writes sixteen at a time then never lies across two.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace minispec {

constexpr std::size_t kLine = 64;  // bytes

template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(kLine))); }
  void deallocate(T* at, std::size_t) { ::operator delete(at, std::align_val_t(kLine)); }
};

template <class T, class U>
bool operator==(const LineAllocator<T>&, const LineAllocator<U>&) {
  return true;
}
template <class T, class U>
bool operator!=(const LineAllocator<T>&, const LineAllocator<U>&) {
  return false;
}

template <class T>
using Lines = std::vector<T, LineAllocator<T>>;

// Room for so many; what it holds is lost where it grows.
template <class T>
void at_least(Lines<T>& lines, std::size_t count) {
  if (lines.size() < count) lines = Lines<T>(count);
}

}  // namespace minispec
