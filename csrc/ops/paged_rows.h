// Attention of rows of queries to keys and values in blocks (FlashAttention, arXiv 2205.14135).
//
// Keys are taken a block at a time, and every sum is one chain of multiply-adds in float32: over the
// width for a score, over keys for an output. Keys that a row does not see are skipped by the block,
// or have a probability of zero. So the bits of a row depend on its query and its keys alone: not on
// the rows beside it, nor on how many keys others have.
#pragma once

#include "paged_call.h"
#include "vectors.h"

namespace megatron::OPS_TARGET {

constexpr int64_t kMostWidth = 512, kMostBlock = 256;
constexpr int kRows = 4;  // that share what is loaded
constexpr int kValues = kLanes == 16 ? 4 : 2;  // vectors of an output that are summed together

LANE_FN float sum_of(Floats values) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
  return sum;
}

// The rows of a tile while keys are added, one after the other: of `width`, and of `block`.
struct TileState {
  alignas(64) float query[kTileRows * kMostWidth];
  alignas(64) float out[kTileRows * kMostWidth];
  alignas(64) float shares[kTileRows * kMostBlock];
  alignas(64) Floats sum[kTileRows];
  float largest[kTileRows];
  int64_t low[kTileRows], high[kTileRows];  // the keys [low, high) that a row sees
};

template <class X>
struct PagedRows {
  PagedCall call;

  void store(int64_t token) const {
    const int64_t w = call.width, all = call.groups * w;
    if (token >= call.stored) {
      X* out = static_cast<X*>(call.out) + token * all * call.queries;
      for (int64_t i = 0; i < all * call.queries; ++i) out[i] = X{};
      return;
    }
    const int64_t slot = call.slots[token], block = slot / call.block, at = slot % call.block;
    for (int64_t group = 0; group < call.groups; ++group) {
      const X* key =
          static_cast<const X*>(call.key) + token * call.key_token + group * call.key_group;
      const X* value =
          static_cast<const X*>(call.value) + token * call.value_token + group * call.value_group;
      const int64_t first = (block * call.groups + group) * call.block * w;
      X* keys = static_cast<X*>(call.keys) + first + at;
      X* values = static_cast<X*>(call.values) + first + at * w;
      for (int64_t i = 0; i < w; ++i) keys[i * call.block] = key[i];
      for (int64_t i = 0; i < w; ++i) values[i] = value[i];
    }
  }

  // Fetch a block that is read after this one; blocks lie anywhere.
  LANE_FN void fetch(const X* keys, const X* values) const {
    constexpr int64_t kLine = 64 / sizeof(X);
    for (int64_t i = 0; i < call.block * call.width; i += kLine) {
      __builtin_prefetch(keys + i);
      __builtin_prefetch(values + i);
    }
  }

  // Write scores of R rows with V vectors of keys.
  template <int R, int V>
  LANE_FN void score(TileState& state, int64_t row, const X* keys, int64_t at) const {
    Floats sums[R][V] = {};
    for (int64_t i = 0; i < call.width; ++i) {
      Floats loaded[V];
      for (int v = 0; v < V; ++v) loaded[v] = load_floats(keys + i * call.block + at + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[r][v] += loaded[v] * state.query[(row + r) * call.width + i];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        store_vector(state.shares + (row + r) * call.block + at + v * kLanes, sums[r][v]);
  }

  // Add to V vectors of the outputs of R rows the first `count` values of a block.
  template <int R, int V>
  LANE_FN void add_values(
      TileState& state, int64_t row, const X* values, int64_t count, int64_t at) const {
    Floats sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sums[r][v] = load_floats(state.out + (row + r) * call.width + at + v * kLanes);
    for (int64_t key = 0; key < count; ++key) {
      Floats loaded[V];
      for (int v = 0; v < V; ++v)
        loaded[v] = load_floats(values + key * call.width + at + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
          sums[r][v] += loaded[v] * state.shares[(row + r) * call.block + key];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        store_vector(state.out + (row + r) * call.width + at + v * kLanes, sums[r][v]);
  }

  // Turn scores of a row with the keys from position `first` on into e^(score - largest), and scale
  // what was summed before to the new largest score.
  LANE_FN void share(TileState& state, int64_t row, int64_t first) const {
    float* shares = state.shares + row * call.block;
    const int64_t low = state.low[row] - first, high = state.high[row] - first;
    for (int64_t j = 0; j < low; ++j) shares[j] = -INFINITY;
    for (int64_t j = high; j < call.block; ++j) shares[j] = -INFINITY;
    Floats above = load_floats(shares);
    for (int64_t j = kLanes; j < call.block; j += kLanes)
      above = largest_of(above, load_floats(shares + j));
    const float here = largest_of(above), before = state.largest[row];
    const float largest = before > here ? before : here;
    for (int64_t j = 0; j < call.block; ++j) shares[j] = exponential(shares[j] - largest);
    const float scale = exponential(before - largest);
    state.largest[row] = largest;
    Floats sum = state.sum[row] * scale;
    for (int64_t j = 0; j < call.block; j += kLanes) sum += load_floats(shares + j);
    state.sum[row] = sum;
    float* out = state.out + row * call.width;
    for (int64_t i = 0; i < call.width; ++i) out[i] *= scale;
  }

  template <int R>
  LANE_FN void add_block(
      TileState& state, int64_t row, int64_t first, const X* keys, const X* values) const {
    bool is_seen[R];
    int64_t count = 0;  // of keys that any of the rows sees
    for (int r = 0; r < R; ++r) {
      const int64_t high = state.high[row + r] - first;
      is_seen[r] = state.low[row + r] < first + call.block && high > 0;
      if (is_seen[r] && high > count) count = high < call.block ? high : call.block;
    }
    if (count == 0) return;
    int64_t at = 0;
    for (; at + 2 * kLanes <= call.block; at += 2 * kLanes) score<R, 2>(state, row, keys, at);
    for (; at < call.block; at += kLanes) score<R, 1>(state, row, keys, at);
    for (int r = 0; r < R; ++r) {
      if (is_seen[r])
        share(state, row + r, first);
      else
        for (int64_t j = 0; j < call.block; ++j) state.shares[(row + r) * call.block + j] = 0;
    }
    for (at = 0; at + kValues * kLanes <= call.width; at += kValues * kLanes)
      add_values<R, kValues>(state, row, values, count, at);
    for (; at < call.width; at += kLanes) add_values<R, 1>(state, row, values, count, at);
  }

  // Set the keys that the query of a row at a position sees.
  LANE_FN void see(TileState& state, int64_t row, int64_t position, int64_t prefix) const {
    int64_t& low = state.low[row] = 0;
    int64_t& high = state.high[row] = position + 1 > prefix ? position + 1 : prefix;
    if (call.window == 0) return;
    if (position - call.window + 1 > 0) low = position - call.window + 1;
    if (high > position + call.window) high = position + call.window;
  }

  const X* in_block(const void* pool, const PagedTile& tile, int64_t group, int64_t number) const {
    const int64_t block = call.tables[tile.table + number];
    return static_cast<const X*>(pool) + (block * call.groups + group) * call.block * call.width;
  }

  void attend(const PagedTile& tile, int64_t group) const {
    TileState state;
    const float scale = 1 / squareroot(float(call.width));
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t at = tile.first + row;
      const X* query = static_cast<const X*>(call.query) +
                       (tile.token + at / call.queries) * call.query_token +
                       group * call.query_group + at % call.queries * call.query_query;
      for (int64_t i = 0; i < call.width; ++i) {
        state.query[row * call.width + i] = to_accumulator(query[i]) * scale;
        state.out[row * call.width + i] = 0;
      }
      state.sum[row] = Floats{};
      state.largest[row] = -INFINITY;
      see(state, row, tile.start + at / call.queries, tile.prefix);
    }
    // Later rows see later keys.
    const int64_t end = (state.high[tile.rows - 1] + call.block - 1) / call.block;
    for (int64_t number = state.low[0] / call.block; number < end; ++number) {
      const X* keys = in_block(call.keys, tile, group, number);
      const X* values = in_block(call.values, tile, group, number);
      if (number + 1 < end)
        fetch(
            in_block(call.keys, tile, group, number + 1),
            in_block(call.values, tile, group, number + 1));
      const int64_t first = number * call.block;
      int64_t row = 0;
      for (; row + kRows <= tile.rows; row += kRows)
        add_block<kRows>(state, row, first, keys, values);
      for (; row + 2 <= tile.rows; row += 2) add_block<2>(state, row, first, keys, values);
      for (; row < tile.rows; ++row) add_block<1>(state, row, first, keys, values);
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t at = tile.first + row, token = tile.token + at / call.queries;
      X* out = static_cast<X*>(call.out) +
               ((token * call.groups + group) * call.queries + at % call.queries) * call.width;
      const float sum = sum_of(state.sum[row]);
      for (int64_t i = 0; i < call.width; ++i)
        round_to(state.out[row * call.width + i] / sum, out[i]);
    }
  }
};

// Call `use` with PagedRows for the type of `call`.
template <class Use>
void with_paged(const PagedCall& call, const Use& use) {
  if (call.type == NumberType::float32) return use(PagedRows<float>{call});
  use(PagedRows<BFloat16>{call});
}

}  // namespace megatron::OPS_TARGET
