// Arguments of attention to keys and values in blocks: what the operator hands to the kernels.
#pragma once

#include "number_type.h"

namespace megatron {

// Rows of queries of one sequence that are computed together.
struct PagedTile {
  int64_t token;   // of the step, the first of its slice
  int64_t start;   // its position
  int64_t first;   // row of the slice: position after position, the queries of a group
  int64_t rows;    // kTileRows at most
  int64_t prefix;  // keys below this position are seen by all rows
  int64_t table;   // where the blocks of the sequence begin in `tables`
};

constexpr int64_t kTileRows = 32;

// A block of keys is [groups, width, block], one of values [groups, block, width].
struct PagedCall {
  NumberType type;  // float32 or bfloat16
  int64_t tokens, stored, groups, queries, width, block;
  int64_t window;     // of keys that a query sees, itself included; 0: all
  const void* query;  // [tokens, groups, queries, width], with strides in elements
  int64_t query_token, query_group, query_query;
  const void* key;  // [tokens, groups, width], with strides; only the first `stored` are stored
  int64_t key_token, key_group;
  const void* value;
  int64_t value_token, value_group;
  void* keys;
  void* values;
  const int64_t* slots;  // [stored] block x block size + offset
  const PagedTile* tiles;
  const int64_t* tables;
  void* out;  // [tokens, groups, queries, width]; zeros for tokens that are not stored
};

// Kernels of one instruction set: `store` over tokens, then `attend` over tiles x groups. Calls with
// disjoint ranges may run at the same time.
struct PagedKernels {
  void (*store)(const PagedCall&, int64_t first, int64_t last);
  void (*attend)(const PagedCall&, int64_t first, int64_t last);
};

namespace plain {
extern const PagedKernels paged_kernels;
}
namespace avx2 {
extern const PagedKernels paged_kernels;
}
namespace avx512 {
extern const PagedKernels paged_kernels;
}

}  // namespace megatron
