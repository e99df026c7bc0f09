// Lanes: what computes a row. Row algorithms are written once over them.
//
// Lanes have three operations over the elements of a row:
//   each<A>(n, f, spans...)    calls f with the element of every span; Out and InOut are references
//   sum<A>(n, f, spans...)     returns the sum of f over the elements, the same value to every lane
//   sum_exp<A>(n, f, spans...) returns the largest f and the sum of its exponentials, likewise
// and `is_first()`, true for the one lane that writes results of the whole row. Spans convert
// elements to the accumulator A and back. Every operation gives a lane the same elements of a row,
// so that a lane may read what it wrote itself without synchronisation.
//
// On CUDA the lanes are the threads of a block (block_lanes.cuh), here one thread of the CPU whose
// loop the compiler turns into vector instructions.
#pragma once

#include "numbers.h"

namespace megatron::OPS_TARGET {

template <class T>
struct In {
  const T* data;
};
template <class T>
struct Out {
  T* data;
};
template <class T>
struct InOut {
  T* data;
};
struct Nothing {};  // reads as zero, and what is written to it is dropped
struct Index {};    // reads as the number of the element in its row, below 2^31

// The sum of e^(x - largest) over values x of which `largest` is the largest.
template <class A>
struct ExpSum {
  A largest, sum;
};

template <class A>
LANE_FN ExpSum<A> no_exponentials() {
  return {-A(INFINITY), A(0)};
}

// Return what is subtracted from values up to `largest`: of no finite value nothing, so that e^-inf
// stays zero.
template <class A>
LANE_FN A shift_for(A largest) {
  return largest == -A(INFINITY) ? A(0) : largest;
}

template <class A>
LANE_FN ExpSum<A> both(ExpSum<A> a, ExpSum<A> b) {
  const A largest = a.largest > b.largest ? a.largest : b.largest, shift = shift_for(largest);
  return {
      largest, a.sum * exponential(a.largest - shift) + b.sum * exponential(b.largest - shift)};
}

// W neighbouring elements that one instruction loads or stores.
template <class T, int W>
struct alignas(sizeof(T) * W) [[gnu::may_alias]] Vector {
  T values[W];
};

// The W values of a span from element `i` on, in registers.
template <class A, int W, class Span>
struct Pack;

template <class A, int W>
struct Pack<A, W, Nothing> {
  A values[W];
  LANE_FN Pack(Nothing, int64_t) {
    for (int j = 0; j < W; ++j) values[j] = 0;
  }
  LANE_FN void store() {}
};

template <class A, int W>
struct Pack<A, W, Index> {
  int32_t values[W];
  LANE_FN Pack(Index, int64_t i) {
    for (int j = 0; j < W; ++j) values[j] = int32_t(i) + j;
  }
  LANE_FN void store() {}
};

template <class A, int W, class T>
struct Pack<A, W, In<T>> {
  A values[W];
  LANE_FN Pack(In<T> span, int64_t i) {
    const auto loaded = *reinterpret_cast<const Vector<T, W>*>(span.data + i);
    for (int j = 0; j < W; ++j) values[j] = to_accumulator(loaded.values[j]);
  }
  LANE_FN void store() {}
};

template <class A, int W, class T>
struct Pack<A, W, Out<T>> {
  A values[W];
  T* data;
  LANE_FN Pack(Out<T> span, int64_t i) : data(span.data + i) {
    for (int j = 0; j < W; ++j) values[j] = 0;
  }
  LANE_FN void store() {
    Vector<T, W> stored;
    for (int j = 0; j < W; ++j) round_to(values[j], stored.values[j]);
    *reinterpret_cast<Vector<T, W>*>(data) = stored;
  }
};

template <class A, int W, class T>
struct Pack<A, W, InOut<T>> : Pack<A, W, Out<T>> {
  LANE_FN Pack(InOut<T> span, int64_t i) : Pack<A, W, Out<T>>(Out<T>{span.data}, i) {
    const auto loaded = *reinterpret_cast<const Vector<T, W>*>(span.data + i);
    for (int j = 0; j < W; ++j) this->values[j] = to_accumulator(loaded.values[j]);
  }
};

template <int W, class F, class... Packs>
LANE_FN void call_each(F& f, Packs... packs) {
  for (int j = 0; j < W; ++j) f(packs.values[j]...);
  (packs.store(), ...);
}

template <class A, int W, class F, class... Packs>
LANE_FN A call_sum(F& f, Packs... packs) {
  A total = f(packs.values[0]...);
  for (int j = 1; j < W; ++j) total += f(packs.values[j]...);
  return total;
}

template <class A, int W, class F, class... Packs>
LANE_FN ExpSum<A> call_sum_exp(F& f, Packs... packs) {
  A values[W];
  A largest = -A(INFINITY), sum = 0;
  for (int j = 0; j < W; ++j) {
    values[j] = f(packs.values[j]...);
    largest = values[j] > largest ? values[j] : largest;
  }
  const A shift = shift_for(largest);
  for (int j = 0; j < W; ++j) sum += exponential(values[j] - shift);
  return {largest, sum};
}

// Call f for W elements from `i` on, and store what it wrote.
template <class A, int W, class F, class... Spans>
LANE_FN void visit(int64_t i, F& f, Spans... spans) {
  call_each<W>(f, Pack<A, W, Spans>(spans, i)...);
}

// Return the sum of f over W elements from `i` on.
template <class A, int W, class F, class... Spans>
LANE_FN A visit_sum(int64_t i, F& f, Spans... spans) {
  return call_sum<A, W>(f, Pack<A, W, Spans>(spans, i)...);
}

// Return the exponentials of f over W elements from `i` on.
template <class A, int W, class F, class... Spans>
LANE_FN ExpSum<A> visit_sum_exp(int64_t i, F& f, Spans... spans) {
  return call_sum_exp<A, W>(f, Pack<A, W, Spans>(spans, i)...);
}

#ifndef __CUDACC__

struct ThreadLanes {
  // Sums of so many elements are added up one after the other: in a long row the error of fp32
  // grows with the length of a block and with the number of blocks, not with their product.
  static constexpr int64_t kBlock = 4096;

  bool is_first() const { return true; }

  template <class A, class F, class... Spans>
  LANE_FN void each(int64_t n, F f, Spans... spans) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) visit<A, 1>(i, f, spans...);
  }

  template <class A, class F, class... Spans>
  LANE_FN A sum(int64_t n, F f, Spans... spans) const {
    A total = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      A block = 0;
#pragma omp simd reduction(+ : block)
      for (int64_t i = begin; i < end; ++i) block += visit_sum<A, 1>(i, f, spans...);
      total += block;
    }
    return total;
  }

  template <class A, class F, class... Spans>
  LANE_FN ExpSum<A> sum_exp(int64_t n, F f, Spans... spans) const {
    ExpSum<A> total = no_exponentials<A>();
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = n - begin < kBlock ? n : begin + kBlock;
      A largest = -A(INFINITY), sum = 0;
#pragma omp simd reduction(max : largest)
      for (int64_t i = begin; i < end; ++i) {
        const A value = visit_sum<A, 1>(i, f, spans...);
        largest = value > largest ? value : largest;
      }
      const A shift = shift_for(largest);
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; ++i)
        sum += exponential(visit_sum<A, 1>(i, f, spans...) - shift);
      total = both(total, ExpSum<A>{largest, sum});
    }
    return total;
  }
};

#endif

}  // namespace megatron::OPS_TARGET
