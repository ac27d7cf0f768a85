// The C interface of step.h: devices, steps, logits, and a parallel loop on a device's threads.
//
// Rules of this file: no exception leaves it; one thread calls a device at a time.
#include <exception>

#include "step_base.h"
#include "vec.h"

namespace offbook {
namespace {

thread_local Pool* current_pool = nullptr;  // of the device this thread called last: what offbook_parallel_for uses

struct Device {
  Model model;
  Pool pool;
  std::unique_ptr<Step> step;
  Device(const Model& m, int threads) : model(m), pool(threads) {
    step = m.bf16 ? make_bf16_step(model, pool) : make_f32_step(model, pool);
  }
};

}  // namespace
}  // namespace offbook

#define OFFBOOK_API extern "C" __attribute__((visibility("default")))
using namespace offbook;

OFFBOOK_API const char* offbook_vector_name() { return kVectorName; }

// model and all it points to must outlive the device. Null when memory runs out.
OFFBOOK_API void* offbook_device_create(const Model* model, int32_t threads) try {
  return new Device(*model, threads);
} catch (const std::exception&) {
  return nullptr;
}

OFFBOOK_API void offbook_device_destroy(void* device) {
  if (current_pool == &static_cast<Device*>(device)->pool) current_pool = nullptr;
  delete static_cast<Device*>(device);
}

// 0, or 1 when memory ran out (nothing was written then).
OFFBOOK_API int32_t offbook_forward(void* device, const Batch* batch) try {
  current_pool = &static_cast<Device*>(device)->pool;
  static_cast<Device*>(device)->step->forward(*batch);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// logits[end - begin][vocabulary] of the latest forward's logits rows begin..end-1.
OFFBOOK_API void offbook_head(void* device, int32_t begin, int32_t end, float* logits) {
  current_pool = &static_cast<Device*>(device)->pool;
  static_cast<Device*>(device)->step->head(begin, end, logits);
}

// body over 0..n-1 in pieces, on the threads of the device that the calling thread used last (alone when there is
// none).
OFFBOOK_API void offbook_parallel_for(int n, void (*body)(void* context, int begin, int end), void* context) {
  if (!current_pool || n < 2) return body(context, 0, n);
  std::atomic<int> next{0};
  const int piece = std::max(1, n / (4 * current_pool->threads()));
  current_pool->run([&](int) {
    for (int begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < n;)
      body(context, begin, std::min(n, begin + piece));
  });
}
