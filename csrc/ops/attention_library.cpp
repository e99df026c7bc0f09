// The operator inside the gradient of attention. There is none for CUDA, whose fused attention
// needs no other.
#include "attention_call.h"
#include "operators.h"

namespace megatron {

static void attention_gradient_(
    const Tensor& scores, const Tensor& slopes, double scale, int64_t first, int64_t queries,
    bool causal) {
  STD_TORCH_CHECK(
      scores.dim() == 3 && scores.is_contiguous() && slopes.is_contiguous() && first >= 0 &&
          queries > 0,
      "megatron: scores are not contiguous [heads, rows, keys], or rows have no position");
  check(slopes, scores, scores.numel(), scores.scalar_type());
  AttentionCall call{};
  call.type = number_type(scores);
  call.causal = causal;
  call.heads = scores.size(0);
  call.rows = scores.size(1);
  call.keys = scores.size(2);
  call.first = first;
  call.queries = queries;
  call.scale = scale;
  call.scores = const_cast<void*>(scores.const_data_ptr());
  call.slopes = const_cast<void*>(slopes.const_data_ptr());
  run_rows(
      scores, call, call.heads * call.rows, call.keys, nullptr,
      KERNELS_OF_THIS_CPU(attention_kernels).gradient);
}

void register_attention(StableLibrary& library) {
  library.impl("attention_gradient_", TORCH_BOX(&attention_gradient_));
}

}  // namespace megatron
