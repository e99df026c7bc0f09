// The index loops that grow with the number of samples, for megatron/data/sample_maps.py.
//
// Python allocates every output and has checked shapes and ranges; these functions only fill. They
// must give the same bytes as the NumPy twins beside them, which a property test holds. Compiled
// with -ffp-contract=off: a fused multiply-add would round the blending error differently.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace {

// Without forcecast a wrong type is a TypeError and never a silent copy into a temporary.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Row i of `sample_idx` says where token i * seq_length of the shuffled stream lies: (position in
// `doc_idx`, offset in that document). Documents of no tokens are stepped over.
template <typename DocId, typename Row>
void fill_sample_idx(const Array<std::int32_t>& sizes, const Array<DocId>& doc_idx,
                     std::int64_t seq_length, Array<Row>& sample_idx) {
  const auto size = sizes.template unchecked<1>();
  const auto document = doc_idx.template unchecked<1>();
  auto row = sample_idx.template mutable_unchecked<2>();
  const py::ssize_t num_documents = document.shape(0);
  const py::ssize_t num_rows = row.shape(0);
  if (num_rows == 0 || row.shape(1) != 2) throw std::invalid_argument("sample_idx is [rows, 2]");

  py::gil_scoped_release unlocked;
  py::ssize_t position = 0;
  std::int64_t offset = 0;
  row(0, 0) = 0;
  row(0, 1) = 0;
  for (py::ssize_t i = 1; i < num_rows; ++i) {
    std::int64_t steps = seq_length;
    for (;;) {
      if (position >= num_documents) throw std::out_of_range("doc_idx ends before sample_idx");
      const auto id = document(position);
      if (id < 0 || id >= size.shape(0)) throw std::out_of_range("doc_idx names no document");
      const std::int64_t left = static_cast<std::int64_t>(size(id)) - offset;
      if (steps < left) break;
      steps -= left;
      ++position;
      offset = 0;
    }
    offset += steps;
    row(i, 0) = static_cast<Row>(position);
    row(i, 1) = static_cast<Row>(offset);
  }
}

// For each k the component that lags its share most; the first one wins a tie.
template <typename Component>
void fill_blending_indices(const Array<double>& weights, Array<Component>& dataset_index,
                           Array<std::int64_t>& dataset_sample_index,
                           Array<std::int64_t>& counts) {
  const auto weight = weights.template unchecked<1>();
  auto chosen = dataset_index.template mutable_unchecked<1>();
  auto within = dataset_sample_index.template mutable_unchecked<1>();
  auto count = counts.template mutable_unchecked<1>();
  const py::ssize_t num_components = weight.shape(0);
  if (num_components == 0 || count.shape(0) != num_components ||
      within.shape(0) != chosen.shape(0)) {
    throw std::invalid_argument("the arrays of a blend differ in length");
  }

  py::gil_scoped_release unlocked;
  for (py::ssize_t k = 0; k < chosen.shape(0); ++k) {
    const double drawn = static_cast<double>(std::max<py::ssize_t>(k, 1));
    py::ssize_t best = 0;
    double most = weight(0) * drawn - static_cast<double>(count(0));
    for (py::ssize_t i = 1; i < num_components; ++i) {
      const double lag = weight(i) * drawn - static_cast<double>(count(i));
      if (lag > most) {
        most = lag;
        best = i;
      }
    }
    chosen(k) = static_cast<Component>(best);
    within(k) = count(best)++;
  }
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
             py::arg("dataset_sample_index").noconvert(), py::arg("counts").noconvert());
}

}  // namespace

PYBIND11_MODULE(_sample_maps, module) {
  module.doc() = "Compiled index loops; call them through megatron.data.sample_maps";
  module.attr("INTERFACE") = 2;  // sample_maps.py refuses a module built from other source
  define_fill_sample_idx<std::int32_t, std::int32_t>(module);
  define_fill_sample_idx<std::int32_t, std::int64_t>(module);
  define_fill_sample_idx<std::int64_t, std::int32_t>(module);
  define_fill_sample_idx<std::int64_t, std::int64_t>(module);
  define_fill_blending_indices<std::uint8_t>(module);
  define_fill_blending_indices<std::uint16_t>(module);
  define_sentence_maps<std::uint32_t>(module);
  define_sentence_maps<std::uint64_t>(module);
}
