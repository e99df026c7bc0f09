// Products of rows with a packed weight: out = x W^T + bias.
//
// Every output is one chain of multiply-adds in float32, input after input, whatever else is
// computed beside it: the bits of a row depend on nothing but the row. Weights of 16 and 8 bits are
// widened where they are used, which is exact: the product of a row reads their bytes alone.
#pragma once

#include "product_call.h"
#include "vectors.h"

namespace megatron::OPS_TARGET {

// Sums of kBlock rows times kVectors vectors stay in registers, beside the weights of one input.
#if defined(__AVX512F__)
constexpr int kVectors = 3, kBlock = 8;
#elif defined(__AVX2__)
constexpr int kVectors = 2, kBlock = 6;
#else
constexpr int kVectors = 2, kBlock = 4;
#endif
constexpr int kPanel = kVectors * kLanes;
constexpr int64_t kAhead = 4096;  // bytes that are fetched ahead
constexpr int64_t kWidened = 4 * kBlock;  // rows from which on a panel is widened once for all

// Fetch what is read kAhead bytes later: prefetchers of CPUs stop at the end of a page, and the
// first rows that use a panel wait for its weights.
template <bool kIsFirst>
LANE_FN void fetch(const void* from) {
  if (kIsFirst) __builtin_prefetch(static_cast<const char*>(from) + kAhead, 0, 2);
}

// The sums of R rows with one panel.
template <int R>
struct PanelSums {
  Floats of[R][kVectors] = {};

  LANE_FN void add(const float* x, int64_t inputs, const Floats (&weights)[kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) of[r][v] += weights[v] * x[r * inputs];
  }
};

template <bool kIsFirst, int R>
LANE_FN void add_panel(PanelSums<R>& sums, const float* x, int64_t inputs, const float* panel) {
  for (int64_t k = 0; k < inputs; ++k) {
    Floats weights[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const float* from = panel + k * kPanel + v * kLanes;
      fetch<kIsFirst>(from);
      weights[v] = load_floats(from);
    }
    sums.add(x + k, inputs, weights);
  }
}

// The weight `at` of the neighbours in each word.
LANE_FN Floats one_of(Words words, int at, BFloat16) {
  return (Floats)(at == 0 ? words << 16 : words & 0xffff0000u);
}
LANE_FN Floats one_of(Words words, int at, int8_t) {
  return __builtin_convertvector((Integers)(words << (24 - 8 * at)) >> 24, Floats);
}

template <bool kIsFirst, int R, class W>
LANE_FN void add_panel(PanelSums<R>& sums, const float* x, int64_t inputs, const W* panel) {
  constexpr int kNear = 4 / sizeof(W);
  for (int64_t k = 0; k < inputs; k += kNear) {
    Words words[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const W* from = panel + k * kPanel + v * kNear * kLanes;
      fetch<kIsFirst>(from);
      words[v] = load_vector<Words>(from);
    }
#pragma GCC unroll 4
    for (int at = 0; at < kNear; ++at) {
      if (k + at == inputs) break;
      Floats weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = one_of(words[v], at, W{});
      sums.add(x + k + at, inputs, weights);
    }
  }
}

// W is the type of weights, Y that of products.
template <class W, class Y>
struct ProductRows {
  static constexpr int64_t kNear = 4 / sizeof(W);  // inputs that are neighbours
  ProductCall call;

  // Return the elements of one panel.
  static int64_t panel_size(int64_t inputs) {
    return kPanel * ((inputs + kNear - 1) / kNear * kNear);
  }

  void pack(int64_t panel) const {
    W* to = static_cast<W*>(call.packed) + panel * panel_size(call.inputs);
    for (int64_t k = 0; k < panel_size(call.inputs) / kPanel; ++k)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t output = panel * kPanel + j;
        const bool is_there = output < call.outputs && k < call.inputs;
        to[k / kNear * kNear * kPanel + j * kNear + k % kNear] =
            is_there ? static_cast<const W*>(call.weight)[output * call.inputs + k] : W{};
      }
  }

  template <int R, bool kIsFirst, class P>
  void multiply(int64_t panel, int64_t row, const P* packed) const {
    PanelSums<R> sums;
    add_panel<kIsFirst>(sums, call.x + row * call.inputs, call.inputs, packed);
    const int64_t first = panel * kPanel, left = call.outputs - first;
    const int64_t count = left < kPanel ? left : kPanel;
    for (int r = 0; r < R; ++r) {
      float found[kPanel];
      __builtin_memcpy(found, sums.of[r], sizeof found);
      Y* out = static_cast<Y*>(call.out) + (row + r) * call.outputs + first;
      const Y* scales = static_cast<const Y*>(call.scales) + first;
      const Y* bias = static_cast<const Y*>(call.bias) + first;
      if (call.scales != nullptr)
        for (int64_t j = 0; j < count; ++j) found[j] *= to_accumulator(scales[j]);
      if (call.bias != nullptr)
        for (int64_t j = 0; j < count; ++j) found[j] += to_accumulator(bias[j]);
      for (int64_t j = 0; j < count; ++j) round_to(found[j], out[j]);
    }
  }

  // Multiply the rows from `row` on, R of them at most.
  template <int R, bool kIsFirst, class P>
  void multiply_some(int64_t panel, int64_t row, const P* packed) const {
    if (call.rows - row >= R) return multiply<R, kIsFirst>(panel, row, packed);
    if constexpr (R > 1) multiply_some<R - 1, kIsFirst>(panel, row, packed);
  }

  template <bool kIsFirst, class P>
  void multiply_all(int64_t panel, const P* packed) const {
    multiply_some<kBlock, kIsFirst>(panel, 0, packed);
    for (int64_t row = kBlock; row < call.rows; row += kBlock)
      multiply_some<kBlock, false>(panel, row, packed);
  }

  // Write the weights of a panel, narrower than float32, in float32, input after input.
  void widen(const W* packed, float* wide) const {
    for (int64_t k = 0; k < call.inputs; k += kNear)
      for (int v = 0; v < kVectors; ++v) {
        const Words words = load_vector<Words>(packed + k * kPanel + v * kNear * kLanes);
#pragma GCC unroll 4
        for (int at = 0; at < kNear; ++at) {
          if (k + at == call.inputs) break;
          store_vector(wide + (k + at) * kPanel + v * kLanes, one_of(words, at, W{}));
        }
      }
  }

  // Multiply with a panel; `wide` has room for one in float32, or is null.
  void multiply(int64_t panel, float* wide) const {
    const W* packed = static_cast<const W*>(call.packed) + panel * panel_size(call.inputs);
    if constexpr (kNear > 1)
      if (wide != nullptr) {
        widen(packed, wide);
        return multiply_all<false>(panel, wide);
      }
    multiply_all<true>(panel, packed);
  }
};

// Call `use` with ProductRows for the types of `call`.
template <class Use>
void with_products(const ProductCall& call, const Use& use) {
  const bool is_wide = call.type == NumberType::float32;
  if (call.is_int8 && is_wide) return use(ProductRows<int8_t, float>{call});
  if (call.is_int8) return use(ProductRows<int8_t, BFloat16>{call});
  if (is_wide) return use(ProductRows<float, float>{call});
  use(ProductRows<BFloat16, BFloat16>{call});
}

}  // namespace megatron::OPS_TARGET
