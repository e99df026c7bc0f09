// The norms on the CPU, for the instruction set that OPS_TARGET names and the compiler's flags allow.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "norm_types.h"

namespace megatron::OPS_TARGET {

static void forward(const NormCall& call, int64_t first, int64_t last) {
  with_norm(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.forward(ThreadLanes(), row);
  });
}

static void backward(const NormCall& call, int64_t first, int64_t last) {
  with_norm(call, [=](auto rows) {
    using A = typename decltype(rows)::A;
    const NormCall& c = rows.call;
    A* partials = static_cast<A*>(c.partials);
    for (int64_t chunk = first; chunk < last; ++chunk)
      rows.backward(
          ThreadLanes(), c.rows * chunk / c.chunks, c.rows * (chunk + 1) / c.chunks,
          partials + chunk * c.width, partials + (c.chunks + chunk) * c.width);
  });
}

// Add up the partial gradients of some columns, in the order of the chunks.
template <class A, class Y>
static void sum_columns(A* partials, const NormCall& call, void* out, int64_t first, int64_t last) {
  const ThreadLanes lanes;
  A* total = partials + first;
  for (int64_t chunk = 1; chunk < call.chunks; ++chunk)
    lanes.each<A>(
        last - first, [](A value, A& sum) { sum += value; }, In<A>{total + chunk * call.width},
        InOut<A>{total});
  lanes.each<A>(
      last - first, [](A value, A& y) { y = value; }, In<A>{total},
      Out<Y>{static_cast<Y*>(out) + first});
}

static void sum_partials(const NormCall& call, int64_t first, int64_t last) {
  with_norm(call, [=](auto rows) {
    using Rows = decltype(rows);
    using A = typename Rows::A;
    using Y = typename Rows::YType;
    const NormCall& c = rows.call;
    A* partials = static_cast<A*>(c.partials);
    sum_columns<A, Y>(partials, c, c.grad_weight, first, last);
    if constexpr (Rows::kIsCentered)
      sum_columns<A, Y>(partials + c.chunks * c.width, c, c.grad_bias, first, last);
  });
}

const NormKernels norm_kernels{forward, backward, sum_partials};

}  // namespace megatron::OPS_TARGET
