// What this machine can do at most: fused multiply-adds and reads of memory, on n threads at once. For bench_cpu_step.py.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class Work>
double seconds(int threads, Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back([&, t] { work(t); });
  work(0);
  for (auto& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));

}  // namespace

// GFLOP/s of independent chains of fused multiply-adds.
extern "C" __attribute__((visibility("default"))) double limit_gflops(int threads) {
  constexpr long kTurns = 2000000;
  constexpr int kChains = 12;
  volatile float sink[64];
  const double s = seconds(threads, [&](int t) {
    Vector acc[kChains], x = Vector{} + 0.999f, y = Vector{} + 0.001f;
    for (int c = 0; c < kChains; c++) acc[c] = Vector{} + static_cast<float>(c + t);  // equal chains would be merged
    for (long i = 0; i < kTurns; i++)
#pragma GCC unroll 12
      for (auto& a : acc) a = a * x + y;
    Vector total = {};
    for (auto& a : acc) total += a;
    sink[t % 64] = total[0];
  });
  (void)sink;
  return 2.0 * kLanes * kChains * kTurns * threads / s / 1e9;
}

// GB/s of reading memory once, in order, each thread its own part; lines are asked for in advance.
extern "C" __attribute__((visibility("default"))) double limit_read_gb(int threads, const uint8_t* memory, size_t bytes) {
  volatile uint64_t sink[64];
  const double s = seconds(threads, [&](int t) {
    const size_t part = bytes / threads / 256 * 256;
    const uint8_t* p = memory + part * t;
    typedef uint64_t Words __attribute__((vector_size(32)));
    Words sum[2] = {};
    for (size_t i = 0; i < part; i += 64) {
      __builtin_prefetch(p + i + 3072);
      for (int half = 0; half < 2; half++) {
        Words w;
        std::memcpy(&w, p + i + 32 * half, 32);
        sum[half] ^= w;
      }
    }
    sink[t % 64] = sum[0][0] ^ sum[1][3];
  });
  (void)sink;
  return static_cast<double>(bytes) / s / 1e9;
}
