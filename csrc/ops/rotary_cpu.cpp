// Rotations by position on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "rotary_rows.h"

namespace megatron::OPS_TARGET {

static void rotate(const RotaryCall& call, int64_t first, int64_t last) {
  with_rotary(call, [=](auto rows) {
    for (int64_t token = first; token < last; ++token) {
      const auto at = rows.token(token / rows.call.batch, token % rows.call.batch);
      for (int part = 0; part < rows.call.part_count; ++part)
        for (int64_t group = 0; group < rows.call.groups; ++group)
          for (int64_t head = 0; head < rows.call.parts[part].heads; ++head)
            rows.rotate(ThreadLanes(), rows.call.parts[part], at, group, head);
    }
  });
}

const RotaryKernels rotary_kernels{rotate};

}  // namespace megatron::OPS_TARGET
