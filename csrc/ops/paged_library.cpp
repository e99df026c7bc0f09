// The operator of attention to keys and values in blocks. There is none for CUDA.
#include "operators.h"
#include "paged_call.h"

namespace megatron {

static const int64_t* integers(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Long && !tensor.is_cuda(),
      "megatron: places of keys are contiguous int64 on the CPU");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

static Tensor paged_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pool, const Tensor& slots,
    const Tensor& tiles, const Tensor& tables, int64_t window) {
  PagedCall call{};
  call.type = number_type(q);
  STD_TORCH_CHECK(
      q.dim() == 4 && k.dim() == 3 && v.dim() == 3 && pool.dim() == 5 && q.stride(3) == 1 &&
          k.stride(2) == 1 && v.stride(2) == 1 && pool.is_contiguous() &&
          (call.type == NumberType::float32 || call.type == NumberType::bfloat16),
      "megatron: queries are [t, g, n, d], keys and values [t, g, d], blocks contiguous, and all "
      "float32 or bfloat16");
  call.tokens = q.size(0);
  call.groups = q.size(1);
  call.queries = q.size(2);
  call.width = q.size(3);
  call.block = pool.size(2);
  call.stored = slots.numel();
  call.window = window;
  STD_TORCH_CHECK(
      call.width % 16 == 0 && call.width <= 512 && call.block % 16 == 0 && call.block <= 256 &&
          call.stored <= call.tokens && tiles.dim() == 2 &&
          tiles.size(1) * sizeof(int64_t) == sizeof(PagedTile) && pool.size(0) == 2 &&
          pool.size(3) == call.groups && pool.size(4) == call.width,
      "megatron: widths up to 512 and blocks up to 256 are multiples of 16, and a tile is six "
      "numbers");
  check(k, q, call.tokens * call.groups * call.width, q.scalar_type());
  check(v, q, k.numel(), q.scalar_type());
  check(pool, q, pool.numel(), q.scalar_type());
  Tensor out = torch::stable::new_empty(q, {call.tokens, call.groups, call.queries, call.width});
  call.query = q.const_data_ptr();
  call.query_token = q.stride(0);
  call.query_group = q.stride(1);
  call.query_query = q.stride(2);
  call.key = k.const_data_ptr();
  call.key_token = k.stride(0);
  call.key_group = k.stride(1);
  call.value = v.const_data_ptr();
  call.value_token = v.stride(0);
  call.value_group = v.stride(1);
  const int64_t of_keys = pool.numel() / 2 * (call.type == NumberType::float32 ? 4 : 2);
  call.keys = const_cast<void*>(pool.const_data_ptr());
  call.values = static_cast<char*>(call.keys) + of_keys;
  call.slots = integers(slots);
  call.tiles = reinterpret_cast<const PagedTile*>(integers(tiles));
  call.tables = integers(tables);
  call.out = out.mutable_data_ptr();
  const PagedKernels& kernels = KERNELS_OF_THIS_CPU(paged_kernels);
  run_rows(q, call, call.tokens, 2 * call.groups * call.width, nullptr, kernels.store);
  const int64_t per_tile = 64 * call.queries * call.width;  // of a short sequence
  run_rows(q, call, tiles.size(0) * call.groups, per_tile, nullptr, kernels.attend);
  return out;
}

void register_paged(StableLibrary& library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace megatron
