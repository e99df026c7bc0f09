// AdamW on CUDA: a block for every row of every tensor.
#include "adamw_rows.h"
#include "block_lanes.cuh"
#include "launch.cuh"

namespace megatron::OPS_TARGET {

// Threads move `Rows::kWide` elements at once where a tensor lets them, whatever the others do.
template <class Rows>
__global__ void __launch_bounds__(kMostThreads) adamw_kernel(const __grid_constant__ AdamwCall call) {
  const int64_t row = blockIdx.x;
  int first = 0, last = call.tensors - 1;  // the last tensor that begins at this row or before
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (call.slots[middle].first_row <= row)
      first = middle;
    else
      last = middle - 1;
  }
  const AdamwCall::Slot& slot = call.slots[first];
  const uintptr_t places = reinterpret_cast<uintptr_t>(slot.weight) |
                           reinterpret_cast<uintptr_t>(slot.grad) |
                           reinterpret_cast<uintptr_t>(slot.mean) |
                           reinterpret_cast<uintptr_t>(slot.square) |
                           reinterpret_cast<uintptr_t>(slot.published);
  if (places % 16 == 0 && slot.elements % Rows::kWide == 0)
    Rows::step(BlockLanes<Rows::kWide>(), call, slot, row);
  else
    Rows::step(BlockLanes<1>(), call, slot, row);
}

const char* adamw_step(const AdamwCall& call, int device, void* stream) {
  if (const char* error = error_of(cudaSetDevice(device))) return error;
  with_adamw(call, [&](auto rows) {
    adamw_kernel<decltype(rows)><<<call.rows, kMostThreads, 0, cudaStream_t(stream)>>>(call);
  });
  return error_of(cudaGetLastError());
}

}  // namespace megatron::OPS_TARGET
