// Rotations by position on CUDA: a block for every token, in which threads of one y share a head.
#include "block_lanes.cuh"
#include "launch.cuh"
#include "rotary_rows.h"

namespace megatron::OPS_TARGET {

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) rotary_kernel(Rows rows) {
  const unsigned batch = rows.call.batch, heads = rows.call.heads;
  const auto at = rows.token(blockIdx.x / batch, blockIdx.x % batch);
  for (unsigned row = threadIdx.y; row < rows.call.groups * heads; row += blockDim.y)
    rows.rotate(BlockLanes<W>(), at, row / heads, row % heads);
}

// Return as many threads for a head as its pairs keep at work, and a block of whole warps.
static dim3 threads_of(const RotaryCall& call, int elements) {
  int64_t of_head = 1, heads = 1;
  while (of_head < 32 && of_head * elements < call.half) of_head *= 2;
  while (of_head * heads < 32 ||
         (of_head * heads < kMostThreads && heads < call.groups * call.heads))
    heads *= 2;
  return dim3(of_head, heads);
}

const char* rotate(const RotaryCall& call, int device, void* stream) {
  const int64_t* stride = call.stride;
  return launch_rows(
      device, {call.width, call.half, stride[0], stride[1], stride[2], stride[3]},
      {call.x, call.cos, call.sin, call.out}, [&](const auto& use) { with_rotary(call, use); },
      [&](auto rows, auto wide) {
        constexpr int W = decltype(wide)::value;
        rotary_kernel<W>
            <<<call.length * call.batch, threads_of(call, W), 0, cudaStream_t(stream)>>>(rows);
      });
}

}  // namespace megatron::OPS_TARGET
