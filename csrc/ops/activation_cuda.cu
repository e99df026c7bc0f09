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
static const char* launch(const ActivationCall& call, int device, const F& start) {
  return launch_rows(
      device, {call.width}, {call.x, call.out, call.grad, call.grad_x},
      [&](const auto& use) { with_activation(call, use); }, start);
}

const char* activation_forward(const ActivationCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    activation_forward_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

const char* activation_backward(const ActivationCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    activation_backward_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

}  // namespace megatron::OPS_TARGET
