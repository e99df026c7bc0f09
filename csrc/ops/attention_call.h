// Arguments of the softmax inside the gradient of attention: what the operator hands to the kernels.
#pragma once

#include "number_type.h"

namespace megatron {

// Rows are contiguous: `rows` of them for every head, one for each query of a position after the
// other.
struct AttentionCall {
  NumberType type;
  bool causal;
  int64_t heads, rows, keys;
  int64_t first;    // position of the first row of a head; that of the first key is 0
  int64_t queries;  // of one position
  double scale;
  // With m the number of keys that a row sees, q k - (log-sum-exp - log m / 2) / scale; overwritten
  // by the probability, e^(scale * score) / sqrt(m).
  void* scores;
  void* slopes;  // gradient of the probability, minus its mean; overwritten by that of q k
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct AttentionKernels {
  void (*gradient)(const AttentionCall&, int64_t first_row, int64_t last_row);
};

namespace plain {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

}  // namespace megatron
