// Growing, aligned memory for a step's activations.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace offbook {

// `count` items, zeroed when (re)allocated; what it held is lost when it grows. 64-byte aligned.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* reserve(size_t count) {
    if (count > count_) {
      constexpr size_t kHuge = size_t{2} << 20;
      const size_t unit = count * sizeof(T) >= kHuge ? kHuge : 64;
      const size_t bytes = (count * sizeof(T) + unit - 1) / unit * unit;
      std::free(data_);
      count_ = 0;
      data_ = static_cast<T*>(std::aligned_alloc(unit, bytes));
      if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      if (unit == kHuge) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
      std::memset(static_cast<void*>(data_), 0, bytes);
      count_ = bytes / sizeof(T);
    }
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace offbook
