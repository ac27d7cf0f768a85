// What this machine can do at most: multiply-adds of 16-bit words (or floats where it has nothing better) and reads of
// memory, on n threads at once. For bench_cpu_step.py.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// acc + x y, twice `kProducts` operations each.
#if defined(__AVX512VNNI__)
typedef __m512i Vector;
constexpr int kProducts = 32;
inline Vector multiply_add(Vector acc, Vector x, Vector y) { return _mm512_dpwssd_epi32(acc, x, y); }
#elif defined(__AVX2__)
typedef __m256i Vector;
constexpr int kProducts = 16;
inline Vector multiply_add(Vector acc, Vector x, Vector y) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(x, y));
}
#else
typedef float Vector __attribute__((vector_size(16)));
constexpr int kProducts = 4;
inline Vector multiply_add(Vector acc, Vector x, Vector y) { return acc * x + y; }
#endif

}  // namespace

// 10^9 operations a second (a product and a sum are two) of independent chains.
extern "C" __attribute__((visibility("default"))) double limit_gops(int threads) {
  constexpr long kTurns = 2000000;
  constexpr int kChains = 12;
  volatile char sink[64 * sizeof(Vector)];
  const double s = seconds(threads, [&](int t) {
    Vector acc[kChains], x, y;
    std::memset(&x, t + 1, sizeof x);
    std::memset(&y, t + 2, sizeof y);
    for (int c = 0; c < kChains; c++) std::memset(&acc[c], c + t, sizeof acc[c]);  // equal chains would be merged
    for (long i = 0; i < kTurns; i++)
#pragma GCC unroll 12
      for (auto& a : acc) a = multiply_add(a, x, y);
    for (auto& a : acc)
      for (size_t i = 0; i < sizeof a; i++) sink[t % 64 * sizeof a + i] = reinterpret_cast<const char*>(&a)[i];
  });
  (void)sink;
  return 2.0 * kProducts * kChains * kTurns * threads / s / 1e9;
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
