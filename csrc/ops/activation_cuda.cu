// Activations on CUDA: a block for every row.
#include "activation_rows.h"
#include "block_lanes.cuh"
#include "launch.cuh"

namespace megatron::OPS_TARGET {

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) activation_forward_kernel(Rows rows) {
  rows.forward(BlockLanes<W>(), blockIdx.x);
}

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) activation_backward_kernel(Rows rows) {
  rows.backward(BlockLanes<W>(), blockIdx.x);
}

template <class F>
static const char* launch_rows(const ActivationCall& c, int device, const F& launch) {
  if (const char* error = error_of(cudaSetDevice(device))) return error;
  const auto is_wide = [&](int elements) {
    return c.width % elements == 0 && is_aligned(c.x) && is_aligned(c.out) && is_aligned(c.grad) &&
           is_aligned(c.grad_x);
  };
  with_activation(c, [&](auto rows) { with_width(rows, is_wide, launch); });
  return error_of(cudaGetLastError());
}

const char* activation_forward(const ActivationCall& call, int device, void* stream) {
  return launch_rows(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    activation_forward_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

const char* activation_backward(const ActivationCall& call, int device, void* stream) {
  return launch_rows(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    activation_backward_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

}  // namespace megatron::OPS_TARGET
