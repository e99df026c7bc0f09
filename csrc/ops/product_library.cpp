// The operators of products of rows with a packed weight. There are none for CUDA.
#include "operators.h"
#include "product_call.h"

namespace megatron {

static int64_t panels_of(int64_t outputs) {
  const int64_t panel = KERNELS_OF_THIS_CPU(product_kernels).panel;
  return (outputs + panel - 1) / panel;
}

static int64_t packed_size(NumberType type, int64_t outputs, int64_t inputs) {
  const int64_t padded = type == NumberType::float32 ? inputs : inputs + inputs % 2;
  return panels_of(outputs) * KERNELS_OF_THIS_CPU(product_kernels).panel * padded;
}

static NumberType type_of_weight(const Tensor& weight) {
  const NumberType type = number_type(weight);
  STD_TORCH_CHECK(
      type == NumberType::float32 || type == NumberType::bfloat16,
      "megatron: packed weights are float32 or bfloat16");
  return type;
}

static Tensor pack_weight(const Tensor& weight) {
  STD_TORCH_CHECK(
      weight.dim() == 2 && weight.is_contiguous(),
      "megatron: a weight to be packed is contiguous [outputs, inputs]");
  ProductCall call{};
  call.type = type_of_weight(weight);
  call.outputs = weight.size(0);
  call.inputs = weight.size(1);
  Tensor packed =
      torch::stable::new_empty(weight, {packed_size(call.type, call.outputs, call.inputs)});
  call.weight = weight.const_data_ptr();
  call.packed = packed.mutable_data_ptr();
  run_rows(
      weight, call, panels_of(call.outputs), weight.size(1), nullptr,
      KERNELS_OF_THIS_CPU(product_kernels).pack);
  return packed;
}

static Tensor packed_product(
    const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t outputs) {
  ProductCall call{};
  call.type = type_of_weight(packed);
  STD_TORCH_CHECK(
      x.dim() == 2 && x.is_contiguous() && x.scalar_type() == ScalarType::Float,
      "megatron: rows of a product are contiguous float32 [rows, inputs]");
  call.rows = x.size(0);
  call.inputs = x.size(1);
  call.outputs = outputs;
  check(packed, x, packed_size(call.type, outputs, call.inputs), packed.scalar_type());
  if (bias) {
    STD_TORCH_CHECK(bias->is_contiguous(), "megatron: the bias of a product is not contiguous");
    check(*bias, packed, outputs, packed.scalar_type());
    call.bias = bias->const_data_ptr();
  }
  Tensor out = torch::stable::new_empty(packed, {call.rows, outputs});
  call.x = static_cast<const float*>(x.const_data_ptr());
  call.packed = const_cast<void*>(packed.const_data_ptr());
  call.out = out.mutable_data_ptr();
  run_rows(
      x, call, panels_of(outputs), call.rows * call.inputs, nullptr,
      KERNELS_OF_THIS_CPU(product_kernels).multiply);
  return out;
}

void register_products(StableLibrary& library) {
  library.impl("pack_weight", TORCH_BOX(&pack_weight));
  library.impl("packed_product", TORCH_BOX(&packed_product));
}

}  // namespace megatron
