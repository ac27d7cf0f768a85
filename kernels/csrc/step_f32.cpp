// The step with nothing rounded.
#include "step_run.h"

std::unique_ptr<offbook::Step> offbook::make_f32_step(const Model& model, Pool& pool) {
  return std::make_unique<StepOf<F32Config>>(model, pool);
}
