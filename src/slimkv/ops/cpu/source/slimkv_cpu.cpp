// The library: three operations on pages, called through ctypes. A call returns a Status. If it is not OK, `fault`
// holds the value that was out of range, and nothing was written.
#include "attend.h"
#include "gather.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

std::atomic<GompParallel> gomp_parallel{nullptr};

template <typename Call>
static i32 guarded(Status (*run)(Call&), Call* call) {
  try {
    return run(*call);
  } catch (const std::bad_alloc&) { return OUT_OF_MEMORY; }
}

EXPORT i32 slimkv_store(TokensCall* call) { return guarded(store, call); }
EXPORT i32 slimkv_attend(AttendCall* call) { return guarded(attend, call); }
EXPORT i32 slimkv_gather(TokensCall* call) { return guarded(gather, call); }

// Sets the function that starts a team of threads: GOMP_parallel of the OpenMP library of torch, or null.
EXPORT void slimkv_set_team(void* function) { gomp_parallel.store((GompParallel)function, std::memory_order_release); }
