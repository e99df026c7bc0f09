// How kernels with a block for every row are started.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace megatron::OPS_TARGET {

constexpr int kMostThreads = 512;

inline int threads_for(int64_t width, int elements) {
  const int64_t threads = (width + elements - 1) / elements;
  const int64_t warps = threads < 32 ? 1 : (threads + 31) / 32;
  return int(warps * 32 < kMostThreads ? warps * 32 : kMostThreads);
}

inline const char* error_of(cudaError_t code) {
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}

// The number of elements that a thread moves at once, as a type.
template <int W>
struct Wide {
  static constexpr int value = W;
};

// Call launch(rows, Wide<W>()) on `device`, with the rows that with_rows(f) calls f with. W is what
// their type allows, or 1 unless it divides all `sizes` and the `pointers` are aligned.
template <class WithRows, class F>
const char* launch_rows(
    int device, std::initializer_list<int64_t> sizes, std::initializer_list<const void*> pointers,
    const WithRows& with_rows, const F& launch) {
  if (const char* error = error_of(cudaSetDevice(device))) return error;
  bool aligned = true;
  for (const void* pointer : pointers)
    aligned = aligned && reinterpret_cast<uintptr_t>(pointer) % 32 == 0;
  with_rows([&](auto rows) {
    constexpr int kWide = decltype(rows)::kWide;
    bool is_wide = aligned;
    for (const int64_t size : sizes) is_wide = is_wide && size % kWide == 0;
    if (is_wide)
      launch(rows, Wide<kWide>());
    else
      launch(rows, Wide<1>());
  });
  return error_of(cudaGetLastError());
}

}  // namespace megatron::OPS_TARGET
