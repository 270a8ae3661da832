// Threads: torch's OpenMP team if it was found (its threads are awake after a matrix product, and a second team would
// compete with them), otherwise threads of this library for long work.
#pragma once

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "types.h"

typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);
extern std::atomic<GompParallel> gomp_parallel;

// Calls body(i) for i in 0..count on up to `threads` threads, which take indices in order. `work`: an estimate in
// nanoseconds.
template <typename Body>
static void parallel_for(i64 count, int threads, double work, const Body& body) {
  struct Shared {
    std::atomic<i64> next{0};
    i64 count;
    const Body* body;
    std::atomic<bool> out_of_memory{false};
    static void run(void* data) {
      Shared& shared = *(Shared*)data;
      try {
        for (i64 i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) (*shared.body)(i);
      } catch (const std::bad_alloc&) {  // must not escape a thread of the team
        shared.out_of_memory.store(true);
      }
    }
  } shared;
  shared.count = count;
  shared.body = &body;
  const GompParallel team = gomp_parallel.load(std::memory_order_acquire);
#if defined(SLIMKV_ALWAYS_THREADS)  // for tests under a sanitizer
  const double least = 0;
#else
  const double least = team != nullptr ? 2e4 : 1e6;  // for less work, waking threads costs more than it saves
#endif
  if (threads > count) threads = (int)count;
  if (threads <= 1 || work < least) {
    Shared::run(&shared);
  } else if (team != nullptr) {
    team(&Shared::run, &shared, (unsigned)threads, 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(&Shared::run, (void*)&shared);
    Shared::run(&shared);
    for (std::thread& thread : others) thread.join();
  }
  if (shared.out_of_memory.load()) throw std::bad_alloc();
}
