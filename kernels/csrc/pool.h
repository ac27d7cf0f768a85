// The threads of one device, and the phases of one step.
//
// Rules of this file: a phase ends when its items are done, never when "everybody has arrived", so a thread that lost
// its core blocks nobody; items go to whoever is free, and no result may depend on who computes an item. Workers spin
// for a moment after a job, then sleep on a futex.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "vec.h"

namespace offbook {

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  Pool(const Pool&) = delete;
  ~Pool() {
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Runs job(thread) on the caller (thread 0) and on every worker that comes before the caller has finished.
  template <class Job>
  void run(Job&& job) {
    if (threads_ == 1) return job(0);
    call_ = [](void* context, int thread) { (*static_cast<std::remove_reference_t<Job>*>(context))(thread); };
    context_ = &job;
    gate_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    job(0);
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int i = 0; gate_.load(std::memory_order_acquire) != 0; i++) pause(i);
  }

  static void pause(int turns) {
    if (turns < 2000)
      relax();
    else
      sched_yield();
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;  // the rest of gate_ counts the workers inside the job

  bool enter() {
    uint32_t gate = gate_.load(std::memory_order_acquire);
    while (gate & kOpen)
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  void work(int thread) {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; generation_.load(std::memory_order_acquire) == seen; i++) {
        if (i < 4000)
          relax();
        else
          generation_.wait(seen);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      if (!enter()) continue;
      call_(context_, thread);
      gate_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  const int threads_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

struct alignas(64) Phase {
  std::atomic<int> next{0};
  alignas(64) std::atomic<int> done{0};
};

// One thread's walk through the phases of a job: all threads call run() with the same arguments in the same order.
class Crew {
 public:
  Crew(Phase* phases, int threads, int thread) : phases_(phases), threads_(threads), thread_(thread) {}
  int thread() const { return thread_; }
  int threads() const { return threads_; }

  // item(i) once for every i in 0..items-1, on some thread; before its first item a thread calls setup().
  template <class Setup, class Item>
  void run(int items, int chunk, Setup&& setup, Item&& item) {
    Phase& phase = *phases_++;
    bool first = true;
    while (phase.next.load(std::memory_order_relaxed) < items) {
      const int begin = phase.next.fetch_add(chunk, std::memory_order_acq_rel);
      if (begin >= items) break;
      if (first) setup();
      first = false;
      const int end = std::min(items, begin + chunk);
      for (int i = begin; i < end; i++) item(i);
      phase.done.fetch_add(end - begin, std::memory_order_acq_rel);
    }
    for (int i = 0; phase.done.load(std::memory_order_acquire) < items; i++) Pool::pause(i);
  }
  template <class Item>
  void run(int items, int chunk, Item&& item) {
    run(items, chunk, [] {}, item);
  }

 private:
  Phase* phases_;
  const int threads_, thread_;
};

}  // namespace offbook
