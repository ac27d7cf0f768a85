// Runs a block of threads as fibers on one host thread, in a chosen order, and tells when they do not agree.
//
// Rules of this file: for tests only. A fiber runs until it waits (block barrier, warp operation) or ends; the next one
// is chosen by the schedule, so code that needs a barrier which is not there gives other bits under another schedule.
// A barrier that not all threads reach, or that they reach at different lines, is an error told in words, not a hang.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#if !defined(__x86_64__)
#error "the fiber harness switches stacks by hand and knows x86-64 only"
#endif

// Saves the callee-saved registers and stack pointer in *save, continues at `load`.
extern "C" void offbook_fiber_switch(void** save, void* load);
asm(R"(
.text
.type offbook_fiber_switch,@function
offbook_fiber_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size offbook_fiber_switch,.-offbook_fiber_switch
)");

namespace fiber {

enum class State { ready, at_barrier, at_warp, done };

struct Fiber {
  void* stack_pointer = nullptr;
  State state = State::ready;
  int line = 0;       // where it waits
  uint64_t sent = 0;  // its contribution to the operation it waits in
  int source = 0;     // the lane it wants to read
  uint64_t got = 0;
};

// What to break on purpose: barriers on a line are left out, or left out by some threads only. 0 = nothing.
struct Fault {
  int skip_line = 0;
  int diverge_line = 0;
};

constexpr int WARP_LANES = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Machine {
  std::vector<Fiber> fibers;
  std::function<void()> body;
  void* scheduler = nullptr;
  char* stacks = nullptr;
  int current = 0;
  unsigned block = 0, grid = 0;
  Fault fault;
  char error[200] = "";
};
inline Machine* machine = nullptr;

inline void wait(State state, int line) {
  Machine& m = *machine;
  Fiber& me = m.fibers[m.current];
  me.state = state;
  me.line = line;
  offbook_fiber_switch(&me.stack_pointer, m.scheduler);
}

// __syncthreads_or: the OR of all contributions.
inline int barrier(int line, int contribution = 0) {
  Machine& m = *machine;
  const Fault& fault = m.fault;
  if (line == fault.skip_line || (line == fault.diverge_line && m.current < 100)) return contribution;
  Fiber& me = m.fibers[m.current];
  me.sent = contribution != 0;
  me.source = 0;
  wait(State::at_barrier, line);
  return (int)me.got;
}

// Every lane of a warp gives a value and gets that of `source`; ballot passes source -1 and gets one bit a lane.
inline uint64_t exchange(int line, uint64_t value, int source) {
  Fiber& me = machine->fibers[machine->current];
  me.sent = value;
  me.source = source;
  wait(State::at_warp, line);
  return me.got;
}

// __syncwarp
inline void warp_barrier(int line) {
  if (line != machine->fault.skip_line) exchange(line, 0, -1);
}

inline void entry() {
  machine->body();
  wait(State::done, 0);
}

inline bool complain(const char* what, int a, int b, int line_a, int line_b) {
  snprintf(machine->error, sizeof machine->error, "%s: thread %d at line %d, thread %d at line %d", what, a, line_a, b,
           line_b);
  return false;
}

// Lets the group begin..end go on if all of it waits in the same operation. False when that can never happen.
inline bool release(int begin, int end, State state, bool* released) {
  Machine& m = *machine;
  for (int i = begin; i < end; i++) {
    const Fiber &a = m.fibers[begin], &f = m.fibers[i];
    if (f.state == State::done && a.state == state) return complain("a thread ended early", i, begin, 0, a.line);
    if (f.state != state) return true;
    if (f.line != a.line || (f.source < 0) != (a.source < 0))
      return complain("threads wait at different places", begin, i, a.line, f.line);
  }
  uint64_t votes = 0;
  for (int i = begin; i < end; i++)
    votes |= state == State::at_barrier ? m.fibers[i].sent : (uint64_t)(m.fibers[i].sent != 0) << (i - begin);
  for (int i = begin; i < end; i++) {
    Fiber& f = m.fibers[i];
    f.got = state == State::at_barrier || f.source < 0 ? votes : m.fibers[begin + f.source].sent;
  }
  for (int i = begin; i < end; i++) m.fibers[i].state = State::ready;
  *released = true;
  return true;
}

// The order of round `round`: schedule 0 forward, 1 backward, others shuffled anew each round.
inline void arrange(std::vector<int>& order, int schedule, uint64_t round) {
  const int n = (int)order.size();
  if (schedule < 2) {
    for (int i = 0; i < n; i++) order[i] = schedule ? n - 1 - i : i;
    return;
  }
  uint64_t state = (uint64_t)schedule * 0x9E3779B97F4A7C15ull + round * 0xD1342543DE82EF95ull + 1;
  for (int i = n - 1; i > 0; i--) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[i], order[(state >> 33) % (unsigned)(i + 1)]);
  }
}

// Whether a warp stands still in a round, so that others run ahead of it: half of them, 8 rounds at a time, in
// shuffled schedules.
inline bool is_slow(int warp, int schedule, uint64_t round) {
  uint64_t mixed = ((round / 8) * 64 + (uint64_t)warp + 1) * (uint64_t)schedule * 0x9E3779B97F4A7C15ull;
  return schedule >= 2 && (mixed >> 40 & 1);
}

inline bool run_block(Machine& m, int schedule) {
  const int n = (int)m.fibers.size();
  for (int i = 0; i < n; i++) {
    // The first switch pops six registers and returns into entry with the stack as after a call.
    void** top = (void**)(m.stacks + (size_t)(i + 1) * STACK_BYTES);
    *--top = nullptr;
    *--top = (void*)entry;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    m.fibers[i] = Fiber{};
    m.fibers[i].stack_pointer = top;
  }
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (uint64_t round = 0;; round++) {
    arrange(order, schedule, round);
    bool passed_over = false;
    for (int i : order)
      if (m.fibers[i].state == State::ready) {
        if (is_slow(i / WARP_LANES, schedule, round)) {
          passed_over = true;
          continue;
        }
        m.current = i;
        offbook_fiber_switch(&m.scheduler, m.fibers[i].stack_pointer);
      }
    bool released = false;
    for (int w = 0; w < n; w += WARP_LANES)
      if (!release(w, w + WARP_LANES, State::at_warp, &released)) return false;
    if (!released && !release(0, n, State::at_barrier, &released)) return false;
    if (released || passed_over) continue;
    for (int i = 0; i < n; i++)
      if (m.fibers[i].state != m.fibers[0].state)
        return complain("threads wait for one another", 0, i, m.fibers[0].line, m.fibers[i].line);
    return true;  // all done
  }
}

// Runs `grid` blocks of `threads` fibers, one after another. Returns "" or what went wrong.
inline const char* launch(unsigned grid, int threads, int schedule, Fault fault, std::function<void()> body) {
  static Machine m;
  if ((int)m.fibers.size() != threads) {
    m.fibers.resize(threads);
    m.stacks = (char*)mmap(nullptr, (size_t)threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  machine = &m;
  m.body = std::move(body);
  m.grid = grid;
  m.fault = fault;
  m.error[0] = 0;
  for (m.block = 0; m.block < grid; m.block++)
    if (!run_block(m, schedule)) break;
  return m.error;
}

}  // namespace fiber
