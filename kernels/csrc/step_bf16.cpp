// The step with activations and KV rounded.
#include "step_run.h"

std::unique_ptr<offbook::Step> offbook::make_bf16_step(const Model& model, Pool& pool) {
  return std::make_unique<StepOf<Bf16Config>>(model, pool);
}
