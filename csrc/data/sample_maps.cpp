// The index loops that grow with the number of samples, for megatron/data/orders/sample_maps.py.
//
// Python allocates every output and has checked shapes and ranges; these functions only fill. They
// must give the same bytes as the NumPy twins beside them, which a property test holds. Compiled
// with -ffp-contract=off: a fused multiply-add would round the blending error differently.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__GNUC__)  // and clang
#define MEGATRON_VECTORS
#endif
// Wheels are built for the oldest processors; a loader that can choose takes AVX2 where it is.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define MEGATRON_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#if defined(__GNUC__)
#define MEGATRON_RESTRICT __restrict__
#define MEGATRON_PREFETCH(address) __builtin_prefetch(address)
#else
#define MEGATRON_RESTRICT
#define MEGATRON_PREFETCH(address) static_cast<void>(address)
#endif
#ifndef MEGATRON_VECTOR_CLONES
#define MEGATRON_VECTOR_CLONES
#endif

namespace py = pybind11;

namespace {

// Without forcecast a wrong type is a TypeError and never a silent copy into a temporary.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Row i of `sample_idx` says where token i * seq_length of the shuffled stream lies: (position in
// `doc_idx`, offset in that document). Documents of no tokens are stepped over. Returns the tokens
// of all documents.
template <typename DocId, typename Row>
std::int64_t fill_sample_idx(const Array<std::int32_t>& sizes, const Array<DocId>& doc_idx,
                             std::int64_t seq_length, Array<Row>& sample_idx) {
  // Documents are shuffled, so each size is a miss of the cache unless it is asked for early.
  constexpr py::ssize_t kAhead = 32;
  const auto size = sizes.template unchecked<1>();
  const auto document = doc_idx.template unchecked<1>();
  auto row = sample_idx.template mutable_unchecked<2>();
  const py::ssize_t num_documents = document.shape(0);
  const py::ssize_t num_rows = row.shape(0);
  if (num_rows == 0 || row.shape(1) != 2) throw std::invalid_argument("sample_idx is [rows, 2]");

  py::gil_scoped_release unlocked;
  row(0, 0) = 0;
  row(0, 1) = 0;
  std::int64_t begin = 0;  // the first token of the document, in the stream
  py::ssize_t next_row = 1;
  std::int64_t wanted = seq_length;  // the token that the next row is for
  for (py::ssize_t position = 0; position < num_documents; ++position) {
    const auto id = document(position);
    if (id < 0 || id >= size.shape(0)) throw std::invalid_argument("doc_idx names no document");
    const auto soon = document(std::min(position + kAhead, num_documents - 1));
    if (soon >= 0 && soon < size.shape(0)) MEGATRON_PREFETCH(size.data(soon));
    const std::int64_t end = begin + size(id);
    for (; wanted < end && next_row < num_rows; ++next_row, wanted += seq_length) {
      row(next_row, 0) = static_cast<Row>(position);
      row(next_row, 1) = static_cast<Row>(wanted - begin);
    }
    begin = end;
  }
  if (next_row < num_rows) throw std::invalid_argument("doc_idx names too few tokens for sample_idx");
  return begin;
}

// The greedy order of a blend: for each k the component whose lag, weight * k - count, is largest in
// float64; the first one wins a tie. Components of one weight take turns, so a class of them is
// compared as one.
struct WeightClass {
  double weight;
  std::int32_t first;  // component; the others follow in `Shares::next`
  std::int64_t size;
};

struct Shares {
  explicit Shares(const Array<double>& weights) {
    std::map<double, std::size_t> class_of;
    std::vector<std::size_t> last;
    for (py::ssize_t i = 0; i < weights.size(); ++i) {
      const double weight = weights.data()[i];
      const auto [found, is_new] = class_of.try_emplace(weight, classes.size());
      const auto component = static_cast<std::int32_t>(i);
      if (is_new) {
        classes.push_back({weight, component, 0});
        last.push_back(static_cast<std::size_t>(i));
      }
      WeightClass& of = classes[found->second];
      ++of.size;
      next.push_back(of.first);
      next[last[found->second]] = component;
      next[static_cast<std::size_t>(i)] = of.first;
      last[found->second] = static_cast<std::size_t>(i);
    }
  }

  std::vector<WeightClass> classes;
  std::vector<std::int32_t> next;  // after each component the next of its class, round and round
};

// How far a blend is: what every class and component was drawn.
class Progress {
 public:
  explicit Progress(const Shares& shares) : rounds(shares.classes.size()), count(shares.next.size()) {
    for (const WeightClass& each : shares.classes) turn.push_back(each.first);
  }

  // A state that may well occur after `k` steps, from which the true one is soon reached.
  static Progress guess(const Shares& shares, std::int64_t k) {
    Progress guessed(shares);
    std::vector<std::int64_t> totals;
    std::int64_t left = k;
    for (const WeightClass& each : shares.classes) {
      const double whole = each.weight * static_cast<double>(each.size) * static_cast<double>(k);
      totals.push_back(std::min(left, static_cast<std::int64_t>(whole)));
      left -= totals.back();
    }
    for (std::size_t i = 0; left > 0; i = (i + 1) % totals.size(), --left) ++totals[i];
    for (std::size_t i = 0; i < totals.size(); ++i) {
      const std::int64_t rounds_of_all = totals[i] / shares.classes[i].size;
      std::int32_t member = shares.classes[i].first;
      for (std::int64_t m = 0; m < shares.classes[i].size; ++m) {
        const bool had_its_turn = m < totals[i] % shares.classes[i].size;
        guessed.count[static_cast<std::size_t>(member)] = rounds_of_all + (had_its_turn ? 1 : 0);
        member = shares.next[static_cast<std::size_t>(member)];
        if (had_its_turn) guessed.turn[i] = member;
      }
      guessed.rounds[i] = static_cast<double>(rounds_of_all);
    }
    return guessed;
  }

  // The class with the largest lag at step `k`, among those that `is_asked`.
  template <typename IsAsked>
  std::size_t furthest_behind(const Shares& shares, std::int64_t k, IsAsked is_asked) const {
    const double drawn = static_cast<double>(std::max<std::int64_t>(k, 1));
    std::size_t best = rounds.size();
    double most = 0.0;
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      if (!is_asked(i)) continue;
      const double lag = shares.classes[i].weight * drawn - rounds[i];
      if (best == rounds.size() || lag > most || (lag == most && turn[i] < turn[best])) {
        most = lag;
        best = i;
      }
    }
    return best;
  }

  // Draws the member of a class whose turn it is. True if each member was now drawn once more.
  bool draw(const Shares& shares, std::size_t number, std::int32_t& component,
            std::int64_t& within) {
    component = turn[number];
    within = count[static_cast<std::size_t>(component)]++;
    turn[number] = shares.next[static_cast<std::size_t>(component)];
    const bool round_ended = turn[number] == shares.classes[number].first;
    if (round_ended) rounds[number] += 1.0;
    return round_ended;
  }

  std::vector<double> rounds;  // per class: how often the member whose turn it is was drawn
  std::vector<std::int32_t> turn;  // per class: a component
  std::vector<std::int64_t> count;  // per component
};

template <typename Component>
struct BlendOutput {
  Component* chosen;
  std::int64_t* within;
  std::int64_t size;
};

// Steps [k, stop) one by one, all in float64.
template <typename Component>
void draw_exactly(const Shares& shares, Progress& progress, std::int64_t k, std::int64_t stop,
                  const BlendOutput<Component>& output) {
  for (; k < stop; ++k) {
    std::int32_t component;
    const std::size_t best = progress.furthest_behind(shares, k, [](std::size_t) { return true; });
    progress.draw(shares, best, component, output.within[k]);
    output.chosen[k] = static_cast<Component>(component);
  }
}

#ifdef MEGATRON_VECTORS
// Eight stretches of the order at once, one in each lane of a vector, the later ones from guessed
// states: whatever the state, the greedy order comes to the true one within some hundred steps, and
// `fill_blend` replaces these. Lags are compared in 32-bit fixed point; where the two largest of a
// lane are closer than its error, float64 decides.
class LaneBlend {
 public:
  static constexpr std::int64_t kLanes = 8;
  static constexpr std::int64_t kBlock = 256;  // steps between two computations in float64

  LaneBlend(const Shares& shares, std::vector<Progress>& lanes) : shares_(shares), lanes_(lanes) {
    while (static_cast<std::size_t>(mask_) + 1 < shares.classes.size()) mask_ = 2 * mask_ + 1;
    for (const WeightClass& each : shares.classes) {
      steps_.push_back(static_cast<std::int32_t>(each.weight * kOne) & ~mask_);
    }
    keys_.resize(shares.classes.size() * kLanes);
  }

  // Block number `block` of each lane; lane i begins at step i * stretch.
  template <typename Component>
  MEGATRON_VECTOR_CLONES void draw(std::int64_t block, std::int64_t stretch,
                                   const BlendOutput<Component>& output) {
    const std::int64_t begin = block * kBlock;
    bool fits = true;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      fits = load_keys(lane, lane * stretch + begin) && fits;
    }
    if (!fits) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) finish_exactly(lane, begin, 0, stretch, output);
      return;
    }
    // A key is rounded down at loading and at each step, by less than mask_ + 1.
    const std::int32_t error = static_cast<std::int32_t>(
        std::min<std::int64_t>((kBlock + 2) * (std::int64_t{mask_} + 1), kOne));
    const std::size_t num_classes = steps_.size();
    StoredRow* MEGATRON_RESTRICT const keys = reinterpret_cast<StoredRow*>(keys_.data());
    const std::int32_t* MEGATRON_RESTRICT const steps = steps_.data();
    for (std::int64_t step = 0; step < kBlock; ++step) {
      Row most = Row{} + std::numeric_limits<std::int32_t>::min();
      for (std::size_t i = 0; i < num_classes; ++i) {
        const Row moved = keys[i] + steps[i];
        keys[i] = moved;
        most = moved > most ? moved : most;
      }
      const Row near = most - error;
      Row num_near{};
      for (std::size_t i = 0; i < num_classes; ++i) num_near -= keys[i] >= near;
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        if (most[lane] >= kFar) {
          for (std::int64_t l = 0; l < kLanes; ++l) {
            finish_exactly(l, begin, step + (l < lane ? 1 : 0), stretch, output);
          }
          return;
        }
        const std::int64_t k = lane * stretch + begin + step;
        const std::size_t best =
            num_near[lane] == 1
                ? static_cast<std::size_t>(mask_ - (most[lane] & mask_))
                : of(lane).furthest_behind(shares_, k, [&](std::size_t i) {
                    return key(i, lane) >= near[lane];
                  });
        std::int32_t component;
        const bool round_ended = of(lane).draw(shares_, best, component, output.within[k]);
        if (round_ended) key(best, lane) -= kOne;
        output.chosen[k] = static_cast<Component>(component);
      }
    }
  }

 private:
  using Row = std::int32_t __attribute__((vector_size(4 * kLanes)));
  using StoredRow = std::int32_t __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
  // So that lags of [-4, 4) fit. No lag falls to -1, and with few components hardly one reaches 2;
  // from kFar on float64 decides alone, before a step, which adds up to 1, could overflow.
  static constexpr std::int32_t kOne = std::int32_t{1} << 29;
  static constexpr std::int32_t kFar = kOne / 2 * 5;

  std::int32_t& key(std::size_t number, std::int64_t lane) {
    return keys_[number * kLanes + static_cast<std::size_t>(lane)];
  }
  Progress& of(std::int64_t lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  // Lags as they were one step before `k`; false where one does not fit.
  bool load_keys(std::int64_t lane, std::int64_t k) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const double before =
          shares_.classes[i].weight * static_cast<double>(k - 1) - of(lane).rounds[i];
      if (!(before > -2.0 && before < 2.0)) return false;
      // The low bits are ~i, so that the largest key also says whose it is.
      key(i, lane) = (static_cast<std::int32_t>(before * kOne) & ~mask_) |
                       (mask_ - static_cast<std::int32_t>(i));
    }
    return true;
  }

  template <typename Component>
  void finish_exactly(std::int64_t lane, std::int64_t begin, std::int64_t done,
                      std::int64_t stretch, const BlendOutput<Component>& output) {
    const std::int64_t start = lane * stretch + begin;
    draw_exactly(shares_, of(lane), start + done, start + kBlock, output);
  }

  const Shares& shares_;
  std::vector<Progress>& lanes_;
  std::vector<std::int32_t> keys_;  // per class, a lag in each lane
  std::vector<std::int32_t> steps_;  // per class
  std::int32_t mask_ = 1;  // of the low bits
};

// Replaces steps from `k` on by those that follow `progress`, until `guessed` would be there too.
// Returns whether it was, before `stop`; `progress` is then at that step.
template <typename Component>
bool join_stretches(const Shares& shares, Progress& progress, const Progress& guessed,
                    std::int64_t k, std::int64_t stop, const BlendOutput<Component>& output) {
  std::vector<std::int64_t> ahead;  // of the guess, per component
  std::size_t num_different = 0;
  for (std::size_t i = 0; i < guessed.count.size(); ++i) {
    ahead.push_back(progress.count[i] - guessed.count[i]);
    num_different += ahead.back() != 0;
  }
  const auto move = [&](std::size_t component, std::int64_t by) {
    num_different -= ahead[component] != 0;
    ahead[component] += by;
    num_different += ahead[component] != 0;
  };
  for (; k < stop && num_different > 0; ++k) {
    move(static_cast<std::size_t>(output.chosen[k]), -1);
    draw_exactly(shares, progress, k, k + 1, output);
    move(static_cast<std::size_t>(output.chosen[k]), 1);
  }
  return num_different == 0;
}
#endif

template <typename Component>
void fill_blend(const Shares& shares, const BlendOutput<Component>& output) {
  Progress progress(shares);
  std::int64_t done = 0;
#ifdef MEGATRON_VECTORS
  using Blend = LaneBlend;
  const std::int64_t blocks = output.size / (Blend::kLanes * Blend::kBlock);
  const std::int64_t stretch = blocks * Blend::kBlock;
  if (blocks > 1) {
    std::vector<Progress> lanes;
    for (std::int64_t lane = 0; lane < Blend::kLanes; ++lane) {
      lanes.push_back(Progress::guess(shares, lane * stretch));
    }
    const std::vector<Progress> guesses = lanes;
    Blend blend(shares, lanes);
    for (std::int64_t block = 0; block < blocks; ++block) blend.draw(block, stretch, output);
    progress = lanes[0];
    for (std::size_t lane = 1; lane < lanes.size(); ++lane) {
      const std::int64_t start = static_cast<std::int64_t>(lane) * stretch;
      if (join_stretches(shares, progress, guesses[lane], start, start + stretch, output)) {
        progress = lanes[lane];
      }
    }
    done = Blend::kLanes * stretch;
  }
#endif
  draw_exactly(shares, progress, done, output.size, output);
}

template <typename Component>
void fill_blending_indices(const Array<double>& weights, Array<Component>& dataset_index,
                           Array<std::int64_t>& dataset_sample_index) {
  if (weights.ndim() != 1 || weights.size() == 0 || dataset_index.ndim() != 1 ||
      dataset_sample_index.size() != dataset_index.size()) {
    throw std::invalid_argument("the arrays of a blend differ in length");
  }
  const BlendOutput<Component> output{dataset_index.mutable_data(),
                                      dataset_sample_index.mutable_data(), dataset_index.size()};
  py::gil_scoped_release unlocked;
  fill_blend(Shares(weights), output);
}

// Cuts each document, sentences starts(d)..stops(d), into runs. `next_target()` is asked at the
// start of a document and after each run, also the last; `emit(run, begin, end, d, target, number)`
// gets the number of the run within its epoch. Returns how many runs there are in all epochs.
template <typename Target, typename Emit>
std::int64_t cut_into_runs(const Array<std::int32_t>& sizes, const Array<std::int64_t>& starts,
                           const Array<std::int64_t>& stops, std::int64_t epochs,
                           std::int64_t enough, std::int64_t min_left,
                           std::int64_t min_sentences, Target next_target, Emit emit) {
  const auto size = sizes.template unchecked<1>();
  const auto start = starts.template unchecked<1>();
  const auto stop = stops.template unchecked<1>();
  if (start.shape(0) != stop.shape(0)) throw std::invalid_argument("starts and stops differ");

  std::int64_t runs = 0;
  for (std::int64_t epoch = 0; epoch < epochs && runs < enough; ++epoch) {
    const std::int64_t before = runs;
    for (py::ssize_t d = 0; d < start.shape(0); ++d) {
      if (start(d) < 0 || start(d) > stop(d) || stop(d) > size.shape(0)) {
        throw std::out_of_range("a document lies outside of sizes");
      }
      std::int64_t begin = start(d);
      std::int64_t tokens = 0;
      std::int64_t target = next_target(d);
      for (std::int64_t end = begin + 1; end <= stop(d); ++end) {
        tokens += size(end - 1);
        const std::int64_t left = stop(d) - end;
        if (left == 0 || (tokens >= target && left >= min_left && end - begin >= min_sentences)) {
          emit(runs, begin, end, d, target, runs - before);
          ++runs;
          begin = end;
          tokens = 0;
          target = next_target(d);
        }
      }
    }
    if (runs == before) throw std::invalid_argument("no document has a sentence");
  }
  return runs;
}

// Rows (first sentence, end, target). Runs beyond the rows there are, are counted and not written.
template <typename Row>
std::int64_t fill_sentence_map(const Array<std::int32_t>& sizes,
                               const Array<std::int64_t>& starts,
                               const Array<std::int64_t>& stops, Array<Row>& rows,
                               std::int64_t epochs, std::int64_t enough, std::uint32_t max_tokens,
                               std::uint64_t short_ratio, std::uint32_t seed,
                               std::int64_t min_sentences) {
  auto row = rows.template mutable_unchecked<2>();
  if (row.shape(1) != 3) throw std::invalid_argument("a sentence map is [rows, 3]");
  if (max_tokens < 2) throw std::invalid_argument("max_tokens is 2 or more");

  py::gil_scoped_release unlocked;
  std::mt19937 random(seed);
  const auto next_target = [&](py::ssize_t) -> std::int64_t {
    if (short_ratio == 0) return max_tokens;
    const std::uint64_t drawn = random();
    if (drawn % short_ratio != 0) return max_tokens;
    return static_cast<std::int64_t>(2 + drawn % (max_tokens - 1));
  };
  const auto emit = [&](std::int64_t run, std::int64_t begin, std::int64_t end, py::ssize_t,
                        std::int64_t target, std::int64_t) {
    if (run >= row.shape(0)) return;
    row(run, 0) = static_cast<Row>(begin);
    row(run, 1) = static_cast<Row>(end);
    row(run, 2) = static_cast<Row>(target);
  };
  return cut_into_runs(sizes, starts, stops, epochs, enough, 2, min_sentences, next_target, emit);
}

// Rows (first sentence, end, document, number of the block in its epoch), else as above.
template <typename Row>
std::int64_t fill_block_map(const Array<std::int32_t>& sizes, const Array<std::int64_t>& starts,
                            const Array<std::int64_t>& stops, Array<Row>& rows,
                            std::int64_t epochs, std::int64_t enough,
                            const Array<std::int64_t>& targets,
                            const Array<std::int64_t>& documents, std::int64_t min_sentences) {
  auto row = rows.template mutable_unchecked<2>();
  const auto target_of = targets.template unchecked<1>();
  const auto document = documents.template unchecked<1>();
  if (row.shape(1) != 4) throw std::invalid_argument("a block map is [rows, 4]");
  if (target_of.shape(0) != starts.shape(0) || document.shape(0) != starts.shape(0)) {
    throw std::invalid_argument("starts and targets differ");
  }

  py::gil_scoped_release unlocked;
  const auto next_target = [&](py::ssize_t d) { return target_of(d); };
  const auto emit = [&](std::int64_t run, std::int64_t begin, std::int64_t end, py::ssize_t d,
                        std::int64_t, std::int64_t number) {
    if (run >= row.shape(0)) return;
    row(run, 0) = static_cast<Row>(begin);
    row(run, 1) = static_cast<Row>(end);
    row(run, 2) = static_cast<Row>(document(d));
    row(run, 3) = static_cast<Row>(number);
  };
  return cut_into_runs(sizes, starts, stops, epochs, enough, min_sentences, min_sentences,
                       next_target, emit);
}

// Megatron's shuffle; std::shuffle would draw otherwise from one library to another.
template <typename Row>
void shuffle_rows(Array<Row>& rows, std::uint64_t seed) {
  auto row = rows.template mutable_unchecked<2>();
  py::gil_scoped_release unlocked;
  std::mt19937_64 random(seed);
  for (py::ssize_t i = row.shape(0) - 1; i > 0; --i) {
    const auto j = static_cast<py::ssize_t>(random() % (static_cast<std::uint64_t>(i) + 1));
    for (py::ssize_t k = 0; k < row.shape(1); ++k) std::swap(row(i, k), row(j, k));
  }
}

template <typename Row>
void define_sentence_maps(py::module_& module) {
  module.def("fill_sentence_map", &fill_sentence_map<Row>, py::arg("sizes").noconvert(),
             py::arg("starts").noconvert(), py::arg("stops").noconvert(),
             py::arg("rows").noconvert(), py::arg("epochs"), py::arg("enough"),
             py::arg("max_tokens"), py::arg("short_ratio"), py::arg("seed"),
             py::arg("min_sentences"));
  module.def("fill_block_map", &fill_block_map<Row>, py::arg("sizes").noconvert(),
             py::arg("starts").noconvert(), py::arg("stops").noconvert(),
             py::arg("rows").noconvert(), py::arg("epochs"), py::arg("enough"),
             py::arg("targets").noconvert(), py::arg("documents").noconvert(),
             py::arg("min_sentences"));
  module.def("shuffle_rows", &shuffle_rows<Row>, py::arg("rows").noconvert(), py::arg("seed"));
}

template <typename DocId, typename Row>
void define_fill_sample_idx(py::module_& module) {
  module.def("fill_sample_idx", &fill_sample_idx<DocId, Row>, py::arg("sizes").noconvert(),
             py::arg("doc_idx").noconvert(), py::arg("seq_length"),
             py::arg("sample_idx").noconvert());
}

template <typename Component>
void define_fill_blending_indices(py::module_& module) {
  module.def("fill_blending_indices", &fill_blending_indices<Component>,
             py::arg("weights").noconvert(), py::arg("dataset_index").noconvert(),
             py::arg("dataset_sample_index").noconvert());
}

}  // namespace

PYBIND11_MODULE(_sample_maps, module) {
  module.doc() = "Compiled index loops; call them through megatron.data.orders.sample_maps";
  module.attr("INTERFACE") = 3;  // sample_maps.py refuses a module built from other source
  define_fill_sample_idx<std::int32_t, std::int32_t>(module);
  define_fill_sample_idx<std::int32_t, std::int64_t>(module);
  define_fill_sample_idx<std::int64_t, std::int32_t>(module);
  define_fill_sample_idx<std::int64_t, std::int64_t>(module);
  define_fill_blending_indices<std::uint8_t>(module);
  define_fill_blending_indices<std::uint16_t>(module);
  define_sentence_maps<std::uint32_t>(module);
  define_sentence_maps<std::uint64_t>(module);
}
