// The operators of the cross entropy.
#include "operators.h"

#include <limits>

#include "loss_call.h"

namespace megatron {

static LossCall call_for(const Tensor& logits, const Tensor& label, int64_t true_width) {
  STD_TORCH_CHECK(
      logits.dim() == 2 && logits.is_contiguous(), "megatron: logits are not contiguous rows");
  LossCall call{};
  call.type = number_type(logits);
  call.rows = logits.size(0);
  call.width = logits.size(1);
  call.true_width = true_width;
  STD_TORCH_CHECK(
      true_width >= 0 && true_width <= call.width &&
          call.width <= std::numeric_limits<int32_t>::max(),
      "megatron: the columns that count are not columns of the logits");
  check(label, logits, call.rows, ScalarType::Long);
  call.logits = const_cast<void*>(logits.const_data_ptr());
  call.label = static_cast<const int64_t*>(label.const_data_ptr());
  return call;
}

static Tensor cross_entropy_statistics(
    const Tensor& logits, const Tensor& labels, int64_t true_width) {
  const Tensor label = dense(labels);
  LossCall call = call_for(logits, label, true_width);
  const Tensor statistics = torch::stable::new_empty(
      logits, std::vector<int64_t>{3, call.rows}, statistics_type(logits));
  call.statistics = statistics.mutable_data_ptr();
  run_rows(
      logits, call, call.rows, call.width, ON_CUDA(loss_statistics),
      KERNELS_OF_THIS_CPU(loss_kernels).statistics);
  return statistics;
}

static void cross_entropy_gradient_(
    const Tensor& logits, const Tensor& labels, const Tensor& shifts, const Tensor& scales,
    const Tensor& at_labels, int64_t true_width) {
  const Tensor label = dense(labels), shift = dense(shifts), scale = dense(scales);
  const Tensor at_label = dense(at_labels);
  LossCall call = call_for(logits, label, true_width);
  for (const Tensor* factor : {&shift, &scale, &at_label})
    check(*factor, logits, call.rows, statistics_type(logits));
  call.shift = shift.const_data_ptr();
  call.scale = scale.const_data_ptr();
  call.at_label = at_label.const_data_ptr();
  run_rows(
      logits, call, call.rows, call.width, ON_CUDA(loss_gradient),
      KERNELS_OF_THIS_CPU(loss_kernels).gradient);
}

void register_losses(StableLibrary& library) {
  library.impl("cross_entropy_statistics", TORCH_BOX(&cross_entropy_statistics));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&cross_entropy_gradient_));
}

}  // namespace megatron
