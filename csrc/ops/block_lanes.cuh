// Lanes that are the threads of one CUDA block; the only code of the kernels that synchronises.
#pragma once

#include "lanes.h"

namespace megatron::OPS_TARGET {

// Return the sum of `value` over the block to every thread, in an order that depends only on the
// size of the block. blockDim.x is a multiple of 32, at most 1024; every thread must call it.
template <class A>
__device__ A block_sum(A value) {
  __shared__ A of_warp[32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return value;
  __syncthreads();  // the sums of the call before have been read by all threads
  if (lane == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? of_warp[lane] : A(0);
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// The same for exponentials.
template <class A>
__device__ ExpSum<A> block_sum_exp(ExpSum<A> value) {
  __shared__ A largest_of_warp[32], sum_of_warp[32];
  const auto of_both = [](ExpSum<A> own, int step) {
    return both(
        own, ExpSum<A>{__shfl_xor_sync(0xffffffffu, own.largest, step),
                       __shfl_xor_sync(0xffffffffu, own.sum, step)});
  };
  for (int step = 16; step > 0; step /= 2) value = of_both(value, step);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return value;
  __syncthreads();  // the results of the call before have been read by all threads
  if (lane == 0) {
    largest_of_warp[threadIdx.x / 32] = value.largest;
    sum_of_warp[threadIdx.x / 32] = value.sum;
  }
  __syncthreads();
  value = no_exponentials<A>();
  if (lane < warps) value = {largest_of_warp[lane], sum_of_warp[lane]};
  for (int step = 16; step > 0; step /= 2) value = of_both(value, step);
  return value;
}

// Each thread takes W neighbouring elements at a time. Rows start at multiples of W elements and
// have multiples of W, unless W is 1.
template <int W>
struct BlockLanes {
  LANE_FN bool is_first() const { return threadIdx.x == 0; }

  template <class A, class F, class... Spans>
  LANE_FN void each(int64_t n, F f, Spans... spans) const {
#pragma unroll 1  // packs of W keep enough loads in flight; more copies of them would spill
    for (int64_t i = int64_t(threadIdx.x) * W; i < n; i += int64_t(blockDim.x) * W)
      visit<A, W>(i, f, spans...);
  }

  template <class A, class F, class... Spans>
  LANE_FN A sum(int64_t n, F f, Spans... spans) const {
    A value = 0;
#pragma unroll 1  // packs of W keep enough loads in flight; more copies of them would spill
    for (int64_t i = int64_t(threadIdx.x) * W; i < n; i += int64_t(blockDim.x) * W)
      value += visit_sum<A, W>(i, f, spans...);
    return block_sum(value);
  }

  template <class A, class F, class... Spans>
  LANE_FN ExpSum<A> sum_exp(int64_t n, F f, Spans... spans) const {
    ExpSum<A> value = no_exponentials<A>();
#pragma unroll 1
    for (int64_t i = int64_t(threadIdx.x) * W; i < n; i += int64_t(blockDim.x) * W)
      value = both(value, visit_sum_exp<A, W>(i, f, spans...));
    return block_sum_exp(value);
  }
};

}  // namespace megatron::OPS_TARGET
