// The operators of LayerNorm and RMSNorm.
#include "operators.h"

#include <tuple>

#include "norm_call.h"

namespace megatron {

constexpr int64_t kFewestRows = 16;  // of a chunk; partial gradients are 1/16 of the input
constexpr int64_t kMostChunks = 128;  // does not depend on threads: nor do the sums

static std::vector<int64_t> shape_of_rows(const Tensor& x) {
  const auto sizes = x.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end() - 1);
}

// Return the part of a call that both directions share; x and weight are contiguous.
static NormCall call_for(const Tensor& x, const Tensor& weight, bool centered) {
  STD_TORCH_CHECK(x.dim() > 0, "megatron: a norm needs x of one dimension or more");
  NormCall call{};
  call.centered = centered;
  call.x_type = number_type(x);
  call.y_type = number_type(weight);
  const bool has_float64 =
      call.x_type == NumberType::float64 || call.y_type == NumberType::float64;
  STD_TORCH_CHECK(
      call.x_type == call.y_type || (!has_float64 && (call.x_type == NumberType::float32 ||
                                                      call.y_type == NumberType::float32)),
      "megatron: x and weight of a norm have one dtype, or one of them is float32");
  call.width = x.size(-1);
  call.rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) call.rows *= x.size(dim);
  check(weight, x, call.width, weight.scalar_type());
  call.x = x.const_data_ptr();
  call.weight = weight.const_data_ptr();
  return call;
}

static int64_t chunks_of(const NormCall& call, const Tensor& x) {
#ifdef MEGATRON_OPS_CUDA
  if (x.is_cuda()) return cuda::norm_chunks(call, x.get_device_index());
#endif
  const int64_t chunks = (call.rows + kFewestRows - 1) / kFewestRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

static void run_backward(const NormCall& call, const Tensor& x) {
  const NormKernels& kernels = KERNELS_OF_THIS_CPU(norm_kernels);
  run_rows(
      x, call, call.chunks, call.rows * call.width / call.chunks, ON_CUDA(norm_backward),
      kernels.backward);
  if (!x.is_cuda())
    run_rows(x, call, call.width, call.chunks, nullptr, kernels.sum_partials);
}

struct Normalised {
  Tensor out, sum, mean, rstd;
};

static Normalised forward(
    const Tensor& input, const OptionalTensor& residual, const Tensor& gain, const Tensor* shift,
    double epsilon) {
  const Tensor x = dense(input), weight = dense(gain);
  NormCall call = call_for(x, weight, shift != nullptr);
  call.epsilon = epsilon;
  OptionalTensor other, bias;
  if (residual) {
    check(*residual, x, x.numel(), x.scalar_type());
    other = dense(*residual);
    call.residual = other->const_data_ptr();
  }
  if (shift != nullptr) {
    check(*shift, x, call.width, weight.scalar_type());
    bias = dense(*shift);
    call.bias = bias->const_data_ptr();
  }
  const auto none = std::vector<int64_t>{0};
  const auto sizes = x.sizes();
  const auto rows = shape_of_rows(x);
  const auto statistics = statistics_type(x);
  Normalised made{
      torch::stable::new_empty(x, sizes, weight.scalar_type()),
      torch::stable::new_empty(x, residual ? sizes : torch::headeronly::IntHeaderOnlyArrayRef(none)),
      torch::stable::new_empty(x, call.centered ? rows : none, statistics),
      torch::stable::new_empty(x, rows, statistics)};
  call.out = made.out.mutable_data_ptr();
  call.sum = made.sum.mutable_data_ptr();
  call.mean = made.mean.mutable_data_ptr();
  call.rstd = made.rstd.mutable_data_ptr();
  run_rows(
      x, call, call.rows, call.width, ON_CUDA(norm_forward),
      KERNELS_OF_THIS_CPU(norm_kernels).forward);
  return made;
}

struct Gradients {
  Tensor x, weight, bias;
};

static Gradients backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const Tensor& input, const Tensor& gain,
    const Tensor* means, const Tensor& rstds) {
  const Tensor x = dense(input), weight = dense(gain), grad = dense(grad_out), rstd = dense(rstds);
  NormCall call = call_for(x, weight, means != nullptr);
  check(grad, x, x.numel(), weight.scalar_type());
  check(rstd, x, call.rows, statistics_type(x));
  call.grad = grad.const_data_ptr();
  call.rstd = const_cast<void*>(rstd.const_data_ptr());
  OptionalTensor other, mean;
  if (grad_sum) {
    check(*grad_sum, x, x.numel(), x.scalar_type());
    other = dense(*grad_sum);
    call.grad_sum = other->const_data_ptr();
  }
  if (means != nullptr) {
    check(*means, x, rstd.numel(), statistics_type(x));
    mean = dense(*means);
    call.mean = const_cast<void*>(mean->const_data_ptr());
  }
  const auto width = std::vector<int64_t>{call.width};
  Gradients made{
      torch::stable::new_empty(x, x.sizes()), torch::stable::new_empty(weight, width),
      torch::stable::new_empty(weight, width)};
  if (call.rows == 0) {
    torch::stable::zero_(made.weight);
    torch::stable::zero_(made.bias);
    return made;
  }
  call.chunks = chunks_of(call, x);
  const Tensor partials = torch::stable::new_empty(
      x, std::vector<int64_t>{call.centered ? 2 : 1, call.chunks, call.width}, statistics_type(x));
  call.partials = partials.mutable_data_ptr();
  call.grad_x = made.x.mutable_data_ptr();
  call.grad_weight = made.weight.mutable_data_ptr();
  call.grad_bias = made.bias.mutable_data_ptr();
  run_backward(call, x);
  return made;
}

static std::tuple<Tensor, Tensor, Tensor> rms_norm(
    const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double epsilon) {
  const Normalised made = forward(x, residual, weight, nullptr, epsilon);
  return {made.out, made.sum, made.rstd};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x, const Tensor& weight,
    const Tensor& rstd) {
  const Gradients made = backward(grad, grad_sum, x, weight, nullptr, rstd);
  return {made.x, made.weight};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(
    const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const Tensor& bias,
    double epsilon) {
  const Normalised made = forward(x, residual, weight, &bias, epsilon);
  return {made.out, made.sum, made.mean, made.rstd};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x, const Tensor& weight,
    const Tensor& mean, const Tensor& rstd) {
  const Gradients made = backward(grad, grad_sum, x, weight, &mean, rstd);
  return {made.x, made.weight, made.bias};
}

void register_norms(StableLibrary& library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace megatron
