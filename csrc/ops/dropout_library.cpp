// The operator of dropout with a residual.
#include "dropout_call.h"
#include "operators.h"

namespace megatron {

static Tensor dropout_add(
    const Tensor& input, const OptionalTensor& residual, double probability, const Tensor& seed,
    const Tensor& numbers) {
  const Tensor x = dense(input);
  DropoutCall call{};
  call.x_type = call.residual_type = number_type(x);
  OptionalTensor other;
  if (residual) {
    call.residual_type = number_type(*residual);
    STD_TORCH_CHECK(
        call.residual_type == call.x_type || (call.residual_type == NumberType::float32 &&
                                              call.x_type != NumberType::float64),
        "megatron: a residual has the dtype of x, or is float32 beside half precision");
    check(*residual, x, x.numel(), residual->scalar_type());
    other = dense(*residual);
    call.residual = other->const_data_ptr();
  }
  check(seed, x, 1, ScalarType::Long);
  STD_TORCH_CHECK(
      probability >= 0 && probability < 1, "megatron: a probability is outside [0, 1)");
  call.threshold = uint32_t(probability * 0x1p32);
  call.scale = 1 / (1 - probability);
  call.seed = static_cast<const int64_t*>(seed.const_data_ptr());
  call.rows = numbers.numel();
  const Tensor of_rows = dense(numbers);
  check(of_rows, x, call.rows, ScalarType::Long);
  STD_TORCH_CHECK(
      call.rows ? x.numel() % call.rows == 0 : x.numel() == 0,
      "megatron: the elements do not divide into as many rows as there are numbers");
  call.numbers = static_cast<const int64_t*>(of_rows.const_data_ptr());
  call.width = call.rows ? x.numel() / call.rows : 0;
  call.quarter = DropoutCall::quarter_of(call.width);
  const Tensor out = torch::stable::new_empty(x, x.sizes(), (residual ? *residual : x).scalar_type());
  call.x = x.const_data_ptr();
  call.out = out.mutable_data_ptr();
  run_rows(
      x, call, call.rows, call.width, ON_CUDA(dropout_add),
      KERNELS_OF_THIS_CPU(dropout_kernels).add);
  return out;
}

void register_dropout(StableLibrary& library) {
  library.impl("dropout_add", TORCH_BOX(&dropout_add));
}

}  // namespace megatron
