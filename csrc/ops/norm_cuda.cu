// The norms on CUDA: a block for every row forward, a block for every chunk of rows backward.
#include "block_lanes.cuh"
#include "launch.cuh"
#include "norm_types.h"

namespace megatron::OPS_TARGET {

constexpr int kSharedBytes = 48 * 1024;  // of a block without asking for more
constexpr int kTile = 32;                // columns, and slices of the chunks, of a block of sum_partials

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) forward_kernel(Rows rows) {
  rows.forward(BlockLanes<W>(), blockIdx.x);
}

// Sums of gradients stay in shared memory while they fit, and are in global memory otherwise.
template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) backward_kernel(Rows rows, bool is_shared) {
  using A = typename Rows::A;
  extern __shared__ __align__(32) unsigned char shared[];
  const NormCall& call = rows.call;
  const int64_t chunk = blockIdx.x, n = call.width;
  A* const weight = static_cast<A*>(call.partials) + chunk * n;
  A* const bias = weight + call.chunks * n;
  A* const near_weight = is_shared ? reinterpret_cast<A*>(shared) : weight;
  A* const near_bias = is_shared ? near_weight + n : bias;
  const BlockLanes<W> lanes;
  rows.backward(
      lanes, call.rows * chunk / call.chunks, call.rows * (chunk + 1) / call.chunks, near_weight,
      near_bias);
  if (!is_shared) return;
  const auto copy = [](A value, A& out) { out = value; };
  lanes.template each<A>(n, copy, In<A>{near_weight}, Out<A>{weight});
  if constexpr (Rows::kIsCentered)
    lanes.template each<A>(n, copy, In<A>{near_bias}, Out<A>{bias});
}

// Add up a column of the partial gradients in each of kTile slices of the chunks, then the slices.
template <class A, class Y>
__global__ void sum_partials_kernel(
    const A* partials, int64_t chunks, int64_t width, Y* grad_weight, Y* grad_bias) {
  __shared__ A sums[kTile][kTile + 1];
  const int64_t column = int64_t(blockIdx.x) * kTile + threadIdx.x;
  const A* of_output = partials + int64_t(blockIdx.y) * chunks * width;  // 0 is weight, 1 is bias
  A sum = 0;
  if (column < width)
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kTile)
      sum += of_output[chunk * width + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int slice = 1; slice < kTile; ++slice) sum += sums[slice][threadIdx.x];
  round_to(sum, (blockIdx.y == 0 ? grad_weight : grad_bias)[column]);
}

template <class F>
static const char* launch(const NormCall& c, int device, const F& start) {
  return launch_rows(
      device, {c.width},
      {c.x, c.weight, c.residual, c.sum, c.bias, c.out, c.grad, c.grad_sum, c.grad_x, c.partials},
      [&](const auto& use) { with_norm(c, use); }, start);
}

const char* norm_forward(const NormCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    forward_kernel<W><<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

const char* norm_backward(const NormCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    using A = typename decltype(rows)::A;
    using Y = typename decltype(rows)::YType;
    constexpr int W = decltype(wide)::value;
    const auto on = cudaStream_t(stream);
    const int outputs = call.centered ? 2 : 1;
    const int64_t bytes = outputs * call.width * int64_t(sizeof(A));
    const bool is_shared = bytes <= kSharedBytes - 1024;  // the rest is for block_sum
    backward_kernel<W><<<call.chunks, threads_for(call.width, W), is_shared ? bytes : 0, on>>>(
        rows, is_shared);
    if (call.width == 0) return;
    const dim3 grid((call.width + kTile - 1) / kTile, outputs);
    sum_partials_kernel<A, Y><<<grid, dim3(kTile, kTile), 0, on>>>(
        static_cast<const A*>(call.partials), call.chunks, call.width,
        static_cast<Y*>(call.grad_weight), static_cast<Y*>(call.grad_bias));
  });
}

// As many chunks as blocks can run at once with all threads of the device in use.
int64_t norm_chunks(const NormCall& call, int device) {
  int processors = 0;
  if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 0;
  const int64_t blocks = int64_t(processors) * (2048 / threads_for(call.width, 4));
  return call.rows < blocks ? call.rows : blocks;
}

}  // namespace megatron::OPS_TARGET
