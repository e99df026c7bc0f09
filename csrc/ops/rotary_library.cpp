// The operators of rotations by position.
#include <tuple>

#include "operators.h"
#include "rotary_call.h"

namespace megatron {

// Some heads of every group of [s, b, g, n, d].
struct Heads {
  const Tensor& tensor;
  int64_t first;

  template <class Pointer>
  Pointer at(Pointer data) const {
    return data + first * tensor.stride(3) * tensor.element_size();
  }
};

// `count` heads of every group of x, which are rotated, or copied, into out.
struct Part {
  Heads x, out;
  int64_t count;
  bool rotates;
};

static Tensor with_neighbours(const Tensor& heads) {
  STD_TORCH_CHECK(heads.dim() == 5, "megatron: a rotation takes [s, b, g, n, d]");
  return heads.stride(4) == 1 ? heads : dense(heads);
}

static void run(
    std::initializer_list<Part> parts, const Tensor& cosines, const Tensor& sines, bool back) {
  const Tensor& first = parts.begin()->x.tensor;
  STD_TORCH_CHECK(
      cosines.dim() == 5 && cosines.size(0) == first.size(0) &&
          (cosines.size(1) == 1 || cosines.size(1) == first.size(1)) && cosines.size(2) == 1 &&
          cosines.size(3) == 1 && 2 * cosines.size(4) <= first.size(4),
      "megatron: a rotation takes [s, b, g, n, d], and angles [s, 1 or b, 1, 1, up to d / 2]");
  const Tensor cos = dense(cosines), sin = dense(sines);
  check(cos, first, cos.numel(), first.scalar_type());
  check(sin, first, cos.numel(), first.scalar_type());
  RotaryCall call{};
  call.type = number_type(first);
  call.back = back;
  call.length = first.size(0);
  call.batch = first.size(1);
  call.groups = first.size(2);
  call.width = first.size(4);
  call.half = cos.size(4);
  call.rows_of_position = cos.size(1);
  call.cos = cos.const_data_ptr();
  call.sin = sin.const_data_ptr();
  int64_t heads_of_group = 0;
  for (const auto& [x, out, count, rotates] : parts) {
    RotaryPart& part = call.parts[call.part_count++];
    part.x = x.at(static_cast<const char*>(x.tensor.const_data_ptr()));
    part.out = out.at(static_cast<char*>(out.tensor.mutable_data_ptr()));
    part.heads = count;
    part.half = rotates ? call.half : 0;
    for (int dim = 0; dim < 4; ++dim) {
      part.stride[dim] = x.tensor.stride(dim);
      part.out_stride[dim] = out.tensor.stride(dim);
    }
    heads_of_group += count;
  }
  run_rows(
      first, call, call.length * call.batch, call.groups * heads_of_group * call.width,
      ON_CUDA(rotate), KERNELS_OF_THIS_CPU(rotary_kernels).rotate);
}

static Tensor rotate(const Tensor& heads, const Tensor& cos, const Tensor& sin, bool back) {
  const Tensor x = with_neighbours(heads);
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  run({{{x, 0}, {out, 0}, x.size(3), true}}, cos, sin, back);
  return out;
}

static std::tuple<Tensor, Tensor, Tensor> split_rotated(
    const Tensor& grouped, const Tensor& cos, const Tensor& sin, bool back) {
  const Tensor x = with_neighbours(grouped);
  const int64_t queries = x.size(3) - 2;
  STD_TORCH_CHECK(queries >= 1, "megatron: a group has queries, a key and a value");
  const auto empty = [&](int64_t heads) {
    return torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2), heads, x.size(4)});
  };
  const Tensor q = empty(queries), k = empty(1), v = empty(1);
  run({{{x, 0}, {q, 0}, queries, true},
       {{x, queries}, {k, 0}, 1, true},
       {{x, queries + 1}, {v, 0}, 1, false}},
      cos, sin, back);
  return {q, k, v};
}

static Tensor join_rotated(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& cos,
    const Tensor& sin, bool back) {
  const Tensor q = with_neighbours(queries), k = with_neighbours(keys), v = with_neighbours(values);
  const int64_t tokens = q.size(0) * q.size(1) * q.size(2) * q.size(4);
  for (const Tensor* one : {&k, &v}) {
    check(*one, q, tokens, q.scalar_type());
    for (const int dim : {0, 1, 2, 4})
      STD_TORCH_CHECK(
          one->size(dim) == q.size(dim), "megatron: keys and values are those of the queries");
  }
  const int64_t count = q.size(3);
  const Tensor out = torch::stable::new_empty(
      q, {q.size(0), q.size(1), q.size(2), count + 2, q.size(4)});
  run({{{q, 0}, {out, 0}, count, true},
       {{k, 0}, {out, count}, 1, true},
       {{v, 0}, {out, count + 1}, 1, false}},
      cos, sin, back);
  return out;
}

void register_rotary(StableLibrary& library) {
  library.impl("rotate", TORCH_BOX(&rotate));
  library.impl("split_rotated", TORCH_BOX(&split_rotated));
  library.impl("join_rotated", TORCH_BOX(&join_rotated));
}

}  // namespace megatron
