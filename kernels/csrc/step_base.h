// What the C interface knows of a step. Its two forms are compiled by themselves (step_bf16.cpp, step_f32.cpp), so that a
// first start can compile them side by side.
#pragma once
#include <memory>

#include "pool.h"
#include "step.h"

namespace offbook {

class Step {
 public:
  virtual ~Step() = default;
  virtual void forward(const Batch& batch) = 0;
  virtual void head(int begin, int end, float* logits) = 0;
};

// model and pool must outlive the step.
std::unique_ptr<Step> make_bf16_step(const Model& model, Pool& pool);
std::unique_ptr<Step> make_f32_step(const Model& model, Pool& pool);

}  // namespace offbook
