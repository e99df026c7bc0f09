// Attention to keys and values in blocks on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "paged_rows.h"

namespace megatron::OPS_TARGET {

static void store(const PagedCall& call, int64_t first, int64_t last) {
  with_paged(call, [=](auto rows) {
    for (int64_t token = first; token < last; ++token) rows.store(token);
  });
}

static void attend(const PagedCall& call, int64_t first, int64_t last) {
  with_paged(call, [=](auto rows) {
    for (int64_t at = first; at < last; ++at)
      rows.attend(rows.call.tiles[at / rows.call.groups], at % rows.call.groups);
  });
}

const PagedKernels paged_kernels{store, attend};

}  // namespace megatron::OPS_TARGET
