// The two index loops that grow with the number of samples, for megatron/data/sample_maps.py.
//
// Python allocates every output and has checked shapes and ranges; these functions only fill. They
// must give the same bytes as the NumPy twins beside them, which a property test holds. Compiled
// with -ffp-contract=off: a fused multiply-add would round the blending error differently.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

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
  module.attr("INTERFACE") = 1;  // sample_maps.py refuses a module built from other source
  define_fill_sample_idx<std::int32_t, std::int32_t>(module);
  define_fill_sample_idx<std::int32_t, std::int64_t>(module);
  define_fill_sample_idx<std::int64_t, std::int32_t>(module);
  define_fill_sample_idx<std::int64_t, std::int64_t>(module);
  define_fill_blending_indices<std::uint8_t>(module);
  define_fill_blending_indices<std::uint16_t>(module);
}
