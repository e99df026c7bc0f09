// Registers the kernels with PyTorch's dispatcher, over LibTorch's stable ABI alone, so that one
// library serves every torch from 2.10 on and every Python.
//
// The schemas are in megatron/ops/*.py. Nothing is registered when the library is loaded: Python
// first compares `megatron_ops_interface` with its own number, then calls `megatron_ops_register`.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "norm_call.h"

// In libtorch_cuda only: null where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace megatron {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 32768;       // elements that are worth a task of their own
constexpr int64_t kFewestRows = 16;     // of a chunk; partial gradients are 1/16 of the input
constexpr int64_t kMostChunks = 128;    // does not depend on threads: nor do the sums

// Return the kernels of the best instruction set of this CPU that ATEN_CPU_CAPABILITY, which limits
// those of torch too, allows.
static const NormKernels& choose_kernels() {
#if defined(__x86_64__)
  const char* value = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view limit = value == nullptr ? "avx512" : value;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && limit != "avx2" && limit != "default") return avx512::norm_kernels;
  if (has_avx2 && limit != "default") return avx2::norm_kernels;
#endif
  return plain::norm_kernels;
}

static const NormKernels& cpu_kernels() {
  static const NormKernels& kernels = choose_kernels();
  return kernels;
}

static NumberType number_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return NumberType::float32;
    case ScalarType::BFloat16:
      return NumberType::bfloat16;
    case ScalarType::Half:
      return NumberType::float16;
    case ScalarType::Double:
      return NumberType::float64;
    default:
      STD_TORCH_CHECK(false, "megatron: norms take float32, bfloat16, float16 and float64");
  }
}

static void check(const Tensor& tensor, const Tensor& like, int64_t numel, ScalarType type) {
  STD_TORCH_CHECK(
      tensor.numel() == numel && tensor.scalar_type() == type &&
          tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(),
      "megatron: a tensor of a norm has another size, dtype or device than x and weight require");
}

static Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

static std::vector<int64_t> shape_of_rows(const Tensor& x) {
  const auto sizes = x.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end() - 1);
}

static ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
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

#ifdef MEGATRON_OPS_CUDA
template <class F>
static void run_on_cuda(const Tensor& x, F f) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr, "megatron: this torch has no CUDA streams");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const char* error = f(device, stream);
  STD_TORCH_CHECK(error == nullptr, "megatron: CUDA reports: ", error);
}
#endif

// Return how many tasks of `elements` one thread takes at least.
static int64_t grain_for(int64_t elements) { return kGrain / (elements + 1) + 1; }

static void run_forward(const NormCall& call, const Tensor& x) {
  if (call.rows == 0) return;
#ifdef MEGATRON_OPS_CUDA
  if (x.is_cuda())
    return run_on_cuda(x, [&](int device, void* s) { return cuda::norm_forward(call, device, s); });
#endif
  const NormKernels& kernels = cpu_kernels();
  torch::stable::parallel_for(0, call.rows, grain_for(call.width), [&](int64_t first, int64_t last) {
    kernels.forward(call, first, last);
  });
}

static int64_t chunks_of(const NormCall& call, const Tensor& x) {
#ifdef MEGATRON_OPS_CUDA
  if (x.is_cuda()) return cuda::norm_chunks(call, x.get_device_index());
#endif
  const int64_t chunks = (call.rows + kFewestRows - 1) / kFewestRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

static void run_backward(const NormCall& call, const Tensor& x) {
#ifdef MEGATRON_OPS_CUDA
  if (x.is_cuda())
    return run_on_cuda(x, [&](int device, void* s) { return cuda::norm_backward(call, device, s); });
#endif
  const NormKernels& kernels = cpu_kernels();
  const int64_t chunk_elements = call.rows * call.width / call.chunks;
  torch::stable::parallel_for(
      0, call.chunks, grain_for(chunk_elements),
      [&](int64_t first, int64_t last) { kernels.backward(call, first, last); });
  torch::stable::parallel_for(
      0, call.width, grain_for(call.chunks),
      [&](int64_t first, int64_t last) { kernels.sum_partials(call, first, last); });
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
  run_forward(call, x);
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

static void register_for(const char* dispatch_key) {
  using torch::stable::detail::StableLibrary;
  // Never deleted: the kernels stay for the life of the process.
  auto* library = new StableLibrary(
      StableLibrary::Kind::IMPL, "megatron", dispatch_key, __FILE__, __LINE__);
  library->impl("rms_norm", TORCH_BOX(&rms_norm));
  library->impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library->impl("layer_norm", TORCH_BOX(&layer_norm));
  library->impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace megatron

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Changes with the schemas, or with what they mean; megatron/ops/library.py has the same number.
EXPORTED int64_t megatron_ops_interface() { return 1; }

EXPORTED const char* megatron_ops_instruction_set() {
  return megatron::cpu_kernels().instruction_set;
}

EXPORTED void megatron_ops_register() {
  megatron::register_for("CPU");
#ifdef MEGATRON_OPS_CUDA
  megatron::register_for("CUDA");
#endif
}
