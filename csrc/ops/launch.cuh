// How kernels with a block for every row are started.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron::OPS_TARGET {

constexpr int kMostThreads = 512;

inline int threads_for(int64_t width, int elements) {
  const int64_t threads = (width + elements - 1) / elements;
  const int64_t warps = threads < 32 ? 1 : (threads + 31) / 32;
  return int(warps * 32 < kMostThreads ? warps * 32 : kMostThreads);
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 32 == 0; }

inline const char* error_of(cudaError_t code) {
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

// The number of elements that a thread moves at once, as a type.
template <int W>
struct Wide {
  static constexpr int value = W;
};

// Call launch(rows, Wide<W>()), W being what the type of the rows allows, or 1 unless `is_wide(W)`.
template <class Rows, class IsWide, class F>
void with_width(const Rows& rows, const IsWide& is_wide, const F& launch) {
  if (is_wide(Rows::kWide))
    launch(rows, Wide<Rows::kWide>());
  else
    launch(rows, Wide<1>());
}

}  // namespace megatron::OPS_TARGET
