// What the operators of a family share: checked tensors of PyTorch's stable ABI in, plain pointers out.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "number_type.h"

// In libtorch_cuda only: null where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace megatron {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::StableLibrary;
using OptionalTensor = std::optional<Tensor>;

enum class InstructionSet { plain, avx2, avx512 };

// Return the best instruction set of this CPU that ATEN_CPU_CAPABILITY, which limits that of torch
// too, allows.
InstructionSet instruction_set();

// The table `name` of the kernels of this CPU; there is one for every instruction set.
#if defined(__x86_64__)
#define KERNELS_OF_THIS_CPU(name)                              \
  (instruction_set() == InstructionSet::avx512 ? avx512::name  \
   : instruction_set() == InstructionSet::avx2 ? avx2::name    \
                                               : plain::name)
#else
#define KERNELS_OF_THIS_CPU(name) (plain::name)
#endif

inline NumberType number_type(const Tensor& tensor) {
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
      STD_TORCH_CHECK(false, "megatron: kernels take float32, bfloat16, float16 and float64");
  }
}

// Return the dtype of sums over elements of `x`.
inline ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check(const Tensor& tensor, const Tensor& like, int64_t numel, ScalarType type) {
  STD_TORCH_CHECK(
      tensor.numel() == numel && tensor.scalar_type() == type &&
          tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(),
      "megatron: a tensor has another size, dtype or device than the others of its operator require");
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Return how many tasks of `elements` one thread takes at least.
inline int64_t grain_for(int64_t elements) {
  constexpr int64_t kGrain = 32768;  // elements that are worth a task of their own
  return kGrain / (elements + 1) + 1;
}

// The function `name` of the kernels of CUDA, or null where there are none.
#ifdef MEGATRON_OPS_CUDA
#define ON_CUDA(name) (&cuda::name)
#else
#define ON_CUDA(name) nullptr
#endif

// How functions are called that work on `Call`: those of CUDA return null, or what is wrong.
template <class Call>
struct FunctionsOf {
  using OnCuda = const char* (*)(const Call&, int device, void* stream);
  using OnCpu = void (*)(const Call&, int64_t first, int64_t last);
};

// Work on `call` on the device of x, in its current stream.
template <class Call>
void run_on_cuda(const Tensor& x, const Call& call, typename FunctionsOf<Call>::OnCuda on_cuda) {
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr, "megatron: this torch has no CUDA streams");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const char* error = on_cuda(call, device, stream);
  STD_TORCH_CHECK(error == nullptr, "megatron: CUDA reports: ", error);
}

// Work on `call`, which has `rows` of `elements`, where x is: on the CPU in ranges of rows.
template <class Call>
void run_rows(
    const Tensor& x, const Call& call, int64_t rows, int64_t elements,
    typename FunctionsOf<Call>::OnCuda on_cuda, typename FunctionsOf<Call>::OnCpu on_cpu) {
  if (rows == 0) return;
  if (x.is_cuda()) return run_on_cuda(x, call, on_cuda);
  torch::stable::parallel_for(
      0, rows, grain_for(elements),
      [&](int64_t first, int64_t last) { on_cpu(call, first, last); });
}

}  // namespace megatron
