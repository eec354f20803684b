// A team of threads that runs one step together: phases of tasks with a barrier behind each.
//
// Every thread has its own share of a phase's tasks, neighbours in memory mostly, and the same in every step: what it will
// read is known beforehand. It takes them one by one from a counter, and whoever is through goes on with a neighbour's, so
// that a thread that another program has pushed aside holds up the rest by one task only. Waiting is a short spin and then
// a yield: a spinning thread on a busy machine takes the core from the very thread it waits for. Between jobs threads wait
// like this too before they sleep: a step is a dozen calls in quick succession, and waking a thread takes longer than some
// of them.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace minispec {

class Pool {
 public:
  explicit Pool(int threads) : size_(threads), shares_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // Run `job(thread)` on every thread of the team, the caller's included; returns when all are through.
  void run(const std::function<void(int)>& job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    barrier();
  }

  // A thread's share of `count` tasks begins here; it ends where the next one's begins.
  int first_of(int thread, int count) const { return static_cast<int>(static_cast<int64_t>(count) * thread / size_); }

  // Inside a job, by every thread with the same `count`: f(task) for each task in 0..count, then a barrier.
  template <class F>
  void phase(int thread, int count, F&& f) {
    // Two counters in turn: this phase's was set to 0 during the last one.
    const unsigned turn = shares_[thread].turn++ & 1;
    shares_[thread].taken[!turn].store(0, std::memory_order_relaxed);
    for (int i = 0; i < std::min(size_, kHelped + 1); ++i) {
      const int whose = (thread + i) % size_, first = first_of(whose, count), all = first_of(whose + 1, count) - first;
      std::atomic<int>& taken = shares_[whose].taken[turn];
      while (taken.load(std::memory_order_relaxed) < all) {
        const int task = taken.fetch_add(1, std::memory_order_relaxed);
        if (task < all) f(first + task);
      }
    }
    barrier();
  }

 private:
  void barrier() {
    const unsigned sense = sense_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      sense_.store(sense + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; sense_.load(std::memory_order_acquire) == sense; ++spins) idle(spins);
  }

  static void idle(int spins) {
    if (spins < 2000)
      _mm_pause();
    else
      sched_yield();
  }

  void work(int index) {
    unsigned seen = 0;
    while (true) {
      const auto called = [&] { return generation_.load(std::memory_order_acquire) != seen; };
      const auto asleep = std::chrono::steady_clock::now() + kPatience;
      for (int spins = 0; !called() && std::chrono::steady_clock::now() < asleep; ++spins) idle(spins);
      if (!called()) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, called);
      }
      seen = generation_.load(std::memory_order_relaxed);
      if (stop_) return;
      const std::function<void(int)>* job = job_;
      (*job)(index);
      barrier();
    }
  }

  static constexpr std::chrono::microseconds kPatience{1000};
  static constexpr int kHelped = 4;  // neighbours whose tasks a thread may take

  struct alignas(64) Share {
    std::atomic<int> taken[2] = {{0}, {0}};
    unsigned turn = 0;
  };

  const int size_;
  std::vector<Share> shares_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<unsigned> generation_{0};
  bool stop_ = false;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> sense_{0};
};

}  // namespace minispec
