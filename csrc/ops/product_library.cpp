// The operators of products of rows with a packed weight. There are none for CUDA.
#include "operators.h"
#include "product_call.h"

namespace megatron {

static int64_t panels_of(int64_t outputs) {
  const int64_t panel = KERNELS_OF_THIS_CPU(product_kernels).panel;
  return (outputs + panel - 1) / panel;
}

static int64_t packed_size(const ProductCall& call) {
  const int64_t near = call.is_int8 ? 4 : call.type == NumberType::bfloat16 ? 2 : 1;
  const int64_t padded = (call.inputs + near - 1) / near * near;
  return panels_of(call.outputs) * KERNELS_OF_THIS_CPU(product_kernels).panel * padded;
}

// Set the types of a call with such a weight; `like` has that of scales and products.
static void set_types(ProductCall& call, const Tensor& weight, const Tensor& like) {
  call.is_int8 = weight.scalar_type() == ScalarType::Char;
  if (call.is_int8 && &like == &weight) return;  // it is only packed
  call.type = number_type(like);
  STD_TORCH_CHECK(
      (call.is_int8 || like.scalar_type() == weight.scalar_type()) &&
          (call.type == NumberType::float32 || call.type == NumberType::bfloat16),
      "megatron: packed weights are float32, bfloat16, or int8 with scales of one of these");
}

static Tensor pack_weight(const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.dim() == 2 && weight.is_contiguous(),
      "megatron: a weight to be packed is contiguous [outputs, inputs]");
  ProductCall call{};
  set_types(call, weight, weight);
  call.outputs = weight.size(0);
  call.inputs = weight.size(1);
  Tensor packed = torch::stable::new_empty(weight, {packed_size(call)});
  call.weight = weight.const_data_ptr();
  call.packed = packed.mutable_data_ptr();
  const ProductKernels& kernels = KERNELS_OF_THIS_CPU(product_kernels);
  run_rows(
      weight, call, panels_of(call.outputs), kernels.panel * call.inputs, nullptr, kernels.pack);
  return packed;
}

static Tensor packed_product(
    const Tensor& x, const Tensor& packed, const OptionalTensor& scales, const OptionalTensor& bias,
    int64_t outputs) {
  ProductCall call{};
  const Tensor& like = scales ? *scales : packed;
  set_types(call, packed, like);
  STD_TORCH_CHECK(
      call.is_int8 == scales.has_value(), "megatron: int8 has scales, and nothing else has");
  STD_TORCH_CHECK(
      x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::Float,
      "megatron: rows of a product are contiguous float32 [rows, inputs]");
  call.rows = x.size(0);
  call.inputs = x.size(1);
  call.outputs = outputs;
  check(packed, x, packed_size(call), packed.scalar_type());
  for (const OptionalTensor* each : {&scales, &bias}) {
    if (!*each) continue;
    STD_TORCH_CHECK((*each)->is_contiguous(), "megatron: scales or bias are not contiguous");
    check(**each, packed, outputs, like.scalar_type());
  }
  if (scales) call.scales = scales->const_data_ptr();
  if (bias) call.bias = bias->const_data_ptr();
  Tensor out = torch::stable::new_empty(like, {call.rows, outputs});
  call.x = static_cast<const float*>(x.const_data_ptr());
  call.packed = const_cast<void*>(packed.const_data_ptr());
  call.out = out.mutable_data_ptr();
  const ProductKernels& kernels = KERNELS_OF_THIS_CPU(product_kernels);
  const int64_t work = call.rows * call.inputs * kernels.panel;
  run_rows(x, call, panels_of(outputs), work, nullptr, kernels.multiply);
  return out;
}

void register_products(StableLibrary& library) {
  library.impl("pack_weight", TORCH_BOX(&pack_weight));
  library.impl("packed_product", TORCH_BOX(&packed_product));
}

}  // namespace megatron
