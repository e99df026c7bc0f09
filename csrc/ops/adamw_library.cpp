// The operator of AdamW.
#include "adamw_call.h"
#include "operators.h"

namespace megatron {

using Tensors = std::vector<Tensor>;

static void adamw_step_(
    const Tensors weights, const Tensors grads, const Tensors means, const Tensors squares,
    const Tensors published, const Tensor& scalars, const std::vector<double> numbers) {
  if (weights.empty()) return;
  STD_TORCH_CHECK(
      grads.size() == weights.size() && means.size() == weights.size() &&
          squares.size() == weights.size() &&
          (published.empty() || published.size() == weights.size()) && numbers.size() == 5,
      "megatron: lists of AdamW have different lengths");
  AdamwCall call{};
  call.is_split = weights[0].scalar_type() == ScalarType::Short;
  call.weight_type = call.is_split ? NumberType::float32 : number_type(weights[0]);
  call.grad_type = number_type(grads[0]);
  call.mean_type = number_type(means[0]);
  call.square_type = number_type(squares[0]);
  call.published_type = published.empty() ? call.weight_type : number_type(published[0]);
  const auto is_half = [](NumberType type) {
    return type == NumberType::bfloat16 || type == NumberType::float16;
  };
  const auto is_state = [&](NumberType type) {
    return type == call.weight_type || type == NumberType::bfloat16;
  };
  const bool is_double = call.weight_type == NumberType::float64;
  const bool has_kernel =
      (is_double || call.weight_type == NumberType::float32) && is_state(call.mean_type) &&
      is_state(call.square_type) && is_double == (call.grad_type == NumberType::float64) &&
      (published.empty() || (!is_double && is_half(call.published_type))) &&
      (!call.is_split || call.published_type == NumberType::bfloat16);
  STD_TORCH_CHECK(has_kernel, "megatron: no kernel of AdamW takes these dtypes together");
  call.rate = numbers[0];
  call.beta1 = numbers[1];
  call.beta2 = numbers[2];
  call.epsilon = numbers[3];
  call.decay = numbers[4];
  check(scalars, weights[0], 4, ScalarType::Double);
  STD_TORCH_CHECK(scalars.is_contiguous(), "megatron: scalars of AdamW are not contiguous");
  call.scalars = static_cast<const double*>(scalars.const_data_ptr());
  const auto run = [&] {
    run_rows(
        weights[0], call, call.rows, AdamwCall::kWidth, ON_CUDA(adamw_step),
        KERNELS_OF_THIS_CPU(adamw_kernels).step);
    call.tensors = 0;
    call.rows = 0;
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t elements = weights[i].numel();
    const auto place = [&](const Tensors& tensors) {
      check(tensors[i], weights[0], elements, tensors[0].scalar_type());
      STD_TORCH_CHECK(tensors[i].is_contiguous(), "megatron: a tensor of AdamW is not contiguous");
      return tensors[i].mutable_data_ptr();
    };
    AdamwCall::Slot& slot = call.slots[call.tensors++];
    slot = {
        place(weights), place(grads), place(means), place(squares),
        published.empty() ? nullptr : place(published), elements, call.rows};
    call.rows += (elements + AdamwCall::kWidth - 1) / AdamwCall::kWidth;
    if (call.tensors == AdamwCall::kTensors) run();
  }
  run();
}

void register_adamw(StableLibrary& library) {
  library.impl("adamw_step_", TORCH_BOX(&adamw_step_));
}

}  // namespace megatron
