// The operator of rotations by position.
#include "operators.h"
#include "rotary_call.h"

namespace megatron {

static Tensor rotate(const Tensor& heads, const Tensor& cosines, const Tensor& sines, bool back) {
  STD_TORCH_CHECK(
      heads.dim() == 5 && cosines.dim() == 5 && cosines.size(0) == heads.size(0) &&
          (cosines.size(1) == 1 || cosines.size(1) == heads.size(1)) && cosines.size(2) == 1 &&
          cosines.size(3) == 1 && 2 * cosines.size(4) <= heads.size(4),
      "megatron: a rotation takes [s, b, g, n, d], and angles [s, 1 or b, 1, 1, up to d / 2]");
  const Tensor x = heads.stride(4) == 1 ? heads : dense(heads);
  const Tensor cos = dense(cosines), sin = dense(sines);
  check(cos, x, cos.numel(), x.scalar_type());
  check(sin, x, cos.numel(), x.scalar_type());
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  RotaryCall call{};
  call.type = number_type(x);
  call.back = back;
  call.length = x.size(0);
  call.batch = x.size(1);
  call.groups = x.size(2);
  call.heads = x.size(3);
  call.width = x.size(4);
  call.half = cos.size(4);
  for (int dim = 0; dim < 4; ++dim) call.stride[dim] = x.stride(dim);
  call.rows_of_position = cos.size(1);
  call.x = x.const_data_ptr();
  call.cos = cos.const_data_ptr();
  call.sin = sin.const_data_ptr();
  call.out = out.mutable_data_ptr();
  run_rows(
      x, call, call.length * call.batch, call.groups * call.heads * call.width, ON_CUDA(rotate),
      KERNELS_OF_THIS_CPU(rotary_kernels).rotate);
  return out;
}

void register_rotary(StableLibrary& library) { library.impl("rotate", TORCH_BOX(&rotate)); }

}  // namespace megatron
