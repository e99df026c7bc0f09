// Places of blocks in one range of memory, of which only offsets are known here.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

class Blocks {
 public:
  static constexpr size_t kNone = ~size_t{0};

  explicit Blocks(size_t room = 0) : room_(room) {}

  // Returns the offset of a new block in the smallest gap that holds it, the first of several, else
  // at the end; kNone where no room is left. `size` is above 0.
  size_t take(size_t size) {
    size_t at = end_;
    const auto gap = by_size_.lower_bound({size, 0});
    if (gap != by_size_.end()) {
      const size_t found = gap->first;
      at = gap->second;
      remove_gap(at, found);
      if (found > size) add_gap(at + size, found - size);
    } else {
      if (size > room_ - end_) return kNone;
      end_ += size;
    }
    taken_[at] = size;
    in_use_ += size;
    return at;
  }

  // Ends the block at an offset; returns its size, 0 if there is none.
  size_t give(size_t at) {
    const auto block = taken_.find(at);
    if (block == taken_.end()) return 0;
    const size_t given = block->second;
    size_t size = given;  // of the gap
    taken_.erase(block);
    in_use_ -= size;
    const auto next = by_place_.lower_bound(at);
    if (next != by_place_.begin()) {
      const auto [place, length] = *std::prev(next);
      if (place + length == at) {
        remove_gap(place, length);
        at = place, size += length;
      }
    }
    const auto after = by_place_.find(at + size);
    if (after != by_place_.end()) {
      const size_t length = after->second;
      remove_gap(at + size, length);
      size += length;
    }
    if (at + size == end_) {
      end_ = at;
    } else {
      add_gap(at, size);
    }
    return given;
  }

  size_t end() const { return end_; }        // of the last block
  size_t in_use() const { return in_use_; }  // bytes of all blocks
  const std::map<size_t, size_t>& gaps() const { return by_place_; }  // offset to size

 private:
  void add_gap(size_t at, size_t size) {
    by_place_[at] = size;
    by_size_.insert({size, at});
  }

  void remove_gap(size_t at, size_t size) {
    by_place_.erase(at);
    by_size_.erase({size, at});
  }

  size_t room_, end_ = 0, in_use_ = 0;
  std::unordered_map<size_t, size_t> taken_;  // offset to size
  std::map<size_t, size_t> by_place_;         // no two of them touch, none is at the end
  std::set<std::pair<size_t, size_t>> by_size_;
};
