// The operators of activations and gated units.
#include "activation_call.h"
#include "operators.h"

namespace megatron {

// Return a call without outputs; x is contiguous.
static ActivationCall call_for(const Tensor& x, int64_t kind, bool gated) {
  STD_TORCH_CHECK(
      x.dim() > 0 && (!gated || x.size(-1) % 2 == 0),
      "megatron: an activation takes rows, and a gated unit rows of two halves");
  STD_TORCH_CHECK(
      kind >= 0 && kind <= int64_t(ActivationKind::identity),
      "megatron: there is no activation of this number");
  ActivationCall call{};
  call.type = number_type(x);
  call.kind = ActivationKind(kind);
  call.gated = gated;
  call.width = x.size(-1) / (gated ? 2 : 1);
  call.rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) call.rows *= x.size(dim);
  if (!gated) {  // one row of every 1,024 elements: a short one would leave lanes without work
    const int64_t elements = call.rows * call.width;
    for (call.width = 1024; call.width > 1 && elements % call.width != 0;) call.width /= 2;
    call.rows = elements / call.width;
  }
  call.x = x.const_data_ptr();
  return call;
}

static Tensor activate(const Tensor& input, int64_t kind, bool gated) {
  const Tensor x = dense(input);
  ActivationCall call = call_for(x, kind, gated);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  if (gated) shape.back() /= 2;
  const Tensor out = torch::stable::new_empty(x, shape);
  call.out = out.mutable_data_ptr();
  run_rows(
      x, call, call.rows, call.width, ON_CUDA(activation_forward),
      KERNELS_OF_THIS_CPU(activation_kernels).forward);
  return out;
}

// Write the gradient of x, which may be x itself.
static void write_gradient(
    const Tensor& grad_out, const Tensor& x, const Tensor& grad_x, int64_t kind, bool gated) {
  const Tensor grad = dense(grad_out);
  ActivationCall call = call_for(x, kind, gated);
  check(grad, x, call.rows * call.width, x.scalar_type());
  call.grad = grad.const_data_ptr();
  call.grad_x = grad_x.mutable_data_ptr();
  run_rows(
      x, call, call.rows, call.width, ON_CUDA(activation_backward),
      KERNELS_OF_THIS_CPU(activation_kernels).backward);
}

static Tensor activate_backward(
    const Tensor& grad, const Tensor& input, int64_t kind, bool gated) {
  const Tensor x = dense(input);
  const Tensor grad_x = torch::stable::new_empty(x, x.sizes());
  write_gradient(grad, x, grad_x, kind, gated);
  return grad_x;
}

static void activate_backward_(const Tensor& grad, const Tensor& x, int64_t kind, bool gated) {
  STD_TORCH_CHECK(x.is_contiguous(), "megatron: a gradient takes the place of a contiguous input");
  write_gradient(grad, x, x, kind, gated);
}

void register_activations(StableLibrary& library) {
  library.impl("activate", TORCH_BOX(&activate));
  library.impl("activate_backward", TORCH_BOX(&activate_backward));
  library.impl("activate_backward_", TORCH_BOX(&activate_backward_));
}

}  // namespace megatron
