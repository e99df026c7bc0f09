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

  // Add to V vectors of the outputs of R rows the values of a block.
  template <int R, int V>
  LANE_FN void add_values(TileState& state, int64_t row, const X* values, int64_t at) const {
    Floats sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        sums[r][v] = load_floats(state.out + (row + r) * call.width + at + v * kLanes);
    for (int64_t key = 0; key < call.block; ++key) {
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
  LANE_FN void share(TileState& state, int64_t row, int64_t first, int64_t low, int64_t high) const {
    float* shares = state.shares + row * call.block;
    float largest = state.largest[row];
    for (int64_t j = 0; j < call.block; ++j) {
      const int64_t key = first + j;
      shares[j] = key >= low && key < high ? shares[j] : -INFINITY;
      largest = largest > shares[j] ? largest : shares[j];
    }
    for (int64_t j = 0; j < call.block; ++j) shares[j] = exponential(shares[j] - largest);
    const float scale = exponential(state.largest[row] - largest);
    state.largest[row] = largest;
    Floats sum = state.sum[row] * scale;
    for (int64_t j = 0; j < call.block; j += kLanes) sum += load_floats(shares + j);
    state.sum[row] = sum;
    float* out = state.out + row * call.width;
    for (int64_t i = 0; i < call.width; ++i) out[i] *= scale;
  }

  template <int R>
  LANE_FN void add_block(
      TileState& state, const PagedTile& tile, int64_t row, int64_t first, const X* keys,
      const X* values) const {
    bool is_seen[R], any = false;
    int64_t low[R], high[R];
    for (int r = 0; r < R; ++r) {
      const int64_t position = tile.start + (tile.first + row + r) / call.queries;
      seen_by(tile, position, low[r], high[r]);
      is_seen[r] = low[r] < first + call.block && high[r] > first;
      any = any || is_seen[r];
    }
    if (!any) return;
    int64_t at = 0;
    for (; at + 2 * kLanes <= call.block; at += 2 * kLanes) score<R, 2>(state, row, keys, at);
    for (; at < call.block; at += kLanes) score<R, 1>(state, row, keys, at);
    for (int r = 0; r < R; ++r) {
      if (is_seen[r])
        share(state, row + r, first, low[r], high[r]);
      else
        for (int64_t j = 0; j < call.block; ++j) state.shares[(row + r) * call.block + j] = 0;
    }
    for (at = 0; at + 2 * kLanes <= call.width; at += 2 * kLanes)
      add_values<R, 2>(state, row, values, at);
    for (; at < call.width; at += kLanes) add_values<R, 1>(state, row, values, at);
  }

  // The keys [low, high) that the query at a position sees.
  LANE_FN void seen_by(const PagedTile& tile, int64_t position, int64_t& low, int64_t& high) const {
    low = 0;
    high = position + 1 > tile.prefix ? position + 1 : tile.prefix;
    if (call.window == 0) return;
    if (position - call.window + 1 > 0) low = position - call.window + 1;
    if (high > position + call.window) high = position + call.window;
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
    }
    int64_t low, high, unused;
    seen_by(tile, tile.start + tile.first / call.queries, low, unused);
    seen_by(tile, tile.start + (tile.first + tile.rows - 1) / call.queries, unused, high);
    for (int64_t number = low / call.block; number * call.block < high; ++number) {
      const int64_t block = call.tables[tile.table + number];
      const int64_t place = (block * call.groups + group) * call.block * call.width;
      const X* keys = static_cast<const X*>(call.keys) + place;
      const X* values = static_cast<const X*>(call.values) + place;
      const int64_t first = number * call.block;
      int64_t row = 0;
      for (; row + kRows <= tile.rows; row += kRows)
        add_block<kRows>(state, tile, row, first, keys, values);
      for (; row + 2 <= tile.rows; row += 2) add_block<2>(state, tile, row, first, keys, values);
      for (; row < tile.rows; ++row) add_block<1>(state, tile, row, first, keys, values);
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
