// Row algorithms of activations and gated units, over lanes.
#pragma once

#include "activation_call.h"
#include "lanes.h"

namespace megatron::OPS_TARGET {

// 1 / (1 + e^-x). Below -87, where it is less than every normal number, it stays what it is there.
template <class A>
LANE_FN A sigmoid(A x) {
  return A(1) / (A(1) + exponential(x < A(-87) ? A(87) : -x));
}

// What an activation is at x, and its derivative there.
template <class A>
struct Point {
  A value, slope;
};

// x / 2 (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3); Hendrycks and Gimpel
// 2016, arXiv 1606.08415, section 2.
struct GeluTanh {
  static constexpr double kTwice = 2 * 0.79788456080286535588, kCubic = 0.044715;
  template <class A>
  LANE_FN Point<A> operator()(A x) const {
    const A square = x * x, gate = sigmoid(A(kTwice) * x * (1 + A(kCubic) * square));
    const A inner = A(kTwice) * (1 + A(3 * kCubic) * square);
    return {x * gate, gate + x * gate * (1 - gate) * inner};
  }
};

struct Silu {  // x sigmoid(x); section 2 there, named by Elfwing et al. 2017, arXiv 1702.03118
  template <class A>
  LANE_FN Point<A> operator()(A x) const {
    const A gate = sigmoid(x);
    return {x * gate, gate * (1 + x * (1 - gate))};
  }
};

struct Relu {
  template <class A>
  LANE_FN Point<A> operator()(A x) const {
    return {x < 0 ? A(0) : x, x > 0 ? A(1) : A(0)};
  }
};

struct SquaredRelu {  // So et al. 2021, arXiv 2109.08668
  template <class A>
  LANE_FN Point<A> operator()(A x) const {
    const A positive = x < 0 ? A(0) : x;
    return {positive * positive, 2 * positive};
  }
};

struct Identity {
  template <class A>
  LANE_FN Point<A> operator()(A x) const {
    return {x, A(1)};
  }
};

template <class X, class F>
struct ActivationRows {
  using A = Accumulator<X>;
  static constexpr int kWide = sizeof(X) == 8 ? 1 : 16 / sizeof(X);  // elements of one move
  ActivationCall call;

  // The elements of x that belong to `row` of the output; of a gated unit those of the gates.
  LANE_FN int64_t begin_of(int64_t row) const { return row * call.width * (call.gated ? 2 : 1); }

  template <class Lanes>
  LANE_FN void forward(const Lanes& lanes, int64_t row) const {
    const X* x = static_cast<const X*>(call.x) + begin_of(row);
    const Out<X> out{static_cast<X*>(call.out) + row * call.width};
    if (call.gated)
      lanes.template each<A>(
          call.width, [](A gate, A up, A& y) { y = F()(gate).value * up; }, In<X>{x},
          In<X>{x + call.width}, out);
    else
      lanes.template each<A>(call.width, [](A v, A& y) { y = F()(v).value; }, In<X>{x}, out);
  }

  template <class Lanes>
  LANE_FN void backward(const Lanes& lanes, int64_t row) const {
    const X* x = static_cast<const X*>(call.x) + begin_of(row);
    X* grad_x = static_cast<X*>(call.grad_x) + begin_of(row);
    const In<X> grad{static_cast<const X*>(call.grad) + row * call.width};
    if (call.gated)
      lanes.template each<A>(
          call.width,
          [](A g, A gate, A up, A& of_gate, A& of_up) {
            const Point<A> at = F()(gate);
            of_gate = g * up * at.slope;
            of_up = g * at.value;
          },
          grad, In<X>{x}, In<X>{x + call.width}, Out<X>{grad_x}, Out<X>{grad_x + call.width});
    else
      lanes.template each<A>(
          call.width, [](A g, A v, A& dx) { dx = g * F()(v).slope; }, grad, In<X>{x},
          Out<X>{grad_x});
  }
};

template <class X, class Use>
void with_kind(const ActivationCall& call, const Use& use) {
  switch (call.kind) {
    case ActivationKind::gelu_tanh:
      return use(ActivationRows<X, GeluTanh>{call});
    case ActivationKind::silu:
      return use(ActivationRows<X, Silu>{call});
    case ActivationKind::relu:
      return use(ActivationRows<X, Relu>{call});
    case ActivationKind::squared_relu:
      return use(ActivationRows<X, SquaredRelu>{call});
    case ActivationKind::identity:
      return use(ActivationRows<X, Identity>{call});
  }
}

// Call `use` with ActivationRows for the type and the kind of `call`.
template <class Use>
void with_activation(const ActivationCall& call, const Use& use) {
  switch (call.type) {
    case NumberType::float32:
      return with_kind<float>(call, use);
    case NumberType::float64:
      return with_kind<double>(call, use);
    case NumberType::bfloat16:
      return with_kind<BFloat16>(call, use);
    case NumberType::float16:
      return with_kind<Float16>(call, use);
  }
}

}  // namespace megatron::OPS_TARGET
