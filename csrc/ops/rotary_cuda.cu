// Rotations by position on CUDA: a block for every token, in which threads of one y share a head.
#include "block_lanes.cuh"
#include "launch.cuh"
#include "rotary_rows.h"

namespace megatron::OPS_TARGET {

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) rotary_kernel(const __grid_constant__ Rows rows) {
  const unsigned batch = rows.call.batch;
  const auto at = rows.token(blockIdx.x / batch, blockIdx.x % batch);
#pragma unroll 1
  for (int number = 0; number < rows.call.part_count; ++number) {
    const RotaryPart& part = rows.call.parts[number];
    const unsigned heads = part.heads;
    for (unsigned row = threadIdx.y; row < rows.call.groups * heads; row += blockDim.y)
      rows.rotate(BlockLanes<W>(), part, at, row / heads, row % heads);
  }
}

// Return as many threads for a head as its pairs keep at work, and a block of whole warps.
static dim3 threads_of(const RotaryCall& call, int elements) {
  int64_t of_head = 1, heads = 1, most_heads = 0;
  for (int part = 0; part < call.part_count; ++part)
    if (call.parts[part].heads > most_heads) most_heads = call.parts[part].heads;
  while (of_head < 32 && of_head * elements < call.half) of_head *= 2;
  while (of_head * heads < 32 ||
         (of_head * heads < kMostThreads && heads < call.groups * most_heads))
    heads *= 2;
  return dim3(of_head, heads);
}

const char* rotate(const RotaryCall& call, int device, void* stream) {
  // A power of two divides numbers where it divides all their bits together.
  int64_t sizes = call.width | call.half;
  uintptr_t places = uintptr_t(call.cos) | uintptr_t(call.sin);
  for (int number = 0; number < call.part_count; ++number) {
    const RotaryPart& part = call.parts[number];
    for (int dim = 0; dim < 4; ++dim) sizes |= part.stride[dim] | part.out_stride[dim];
    places |= uintptr_t(part.x) | uintptr_t(part.out);
  }
  return launch_rows(
      device, {sizes}, {reinterpret_cast<const void*>(places)},
      [&](const auto& use) { with_rotary(call, use); },
      [&](auto rows, auto wide) {
        constexpr int W = decltype(wide)::value;
        rotary_kernel<W>
            <<<call.length * call.batch, threads_of(call, W), 0, cudaStream_t(stream)>>>(rows);
      });
}

}  // namespace megatron::OPS_TARGET
