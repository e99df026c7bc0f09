// The tokens of several items of a corpus as one int64 array, for megatron/data/indexed_dataset.py.
//
// It serves what needs no words: items that exist, whose every block was verified, and whose bytes
// can be read. For anything else it returns None, and the Python that calls it reads again, verifies
// and says what is wrong; so there is one place for every check and message.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Bytes of the token file that hold tokens of one or more neighbouring items.
struct Extent {
  std::int64_t start;
  std::int64_t stop;
};

// A value of an index that is mapped from its file, where nothing need be aligned.
template <typename T>
T load(const char* data, std::int64_t position) {
  T value;
  std::memcpy(&value, data + position * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename Token>
void widen(const char* data, std::int64_t count, std::int64_t* tokens) {
  for (std::int64_t i = 0; i < count; ++i) tokens[i] = load<Token>(data, i);
}

using Widen = void (*)(const char*, std::int64_t, std::int64_t*);

std::pair<Widen, std::int64_t> widening_of(const py::dtype& dtype) {
  const std::pair<char, py::ssize_t> type{dtype.kind(), dtype.itemsize()};
  if (type == std::pair<char, py::ssize_t>{'u', 1}) return {widen<std::uint8_t>, 1};
  if (type == std::pair<char, py::ssize_t>{'u', 2}) return {widen<std::uint16_t>, 2};
  if (type == std::pair<char, py::ssize_t>{'i', 1}) return {widen<std::int8_t>, 1};
  if (type == std::pair<char, py::ssize_t>{'i', 2}) return {widen<std::int16_t>, 2};
  if (type == std::pair<char, py::ssize_t>{'i', 4}) return {widen<std::int32_t>, 4};
  if (type == std::pair<char, py::ssize_t>{'i', 8}) return {widen<std::int64_t>, 8};
  throw py::type_error("tokens are integers of 8 to 64 bits");
}

class TokenReader {
 public:
  // `file` keeps `descriptor` open. `mapping` is all of the file, or None to read it. `sizes` are
  // int32 and `pointers` int64, one per item. `verified` has a byte per block of `block_bytes`, 0
  // where it was not compared with its checksum; or it is None.
  TokenReader(py::object file, int descriptor, const py::object& mapping, const py::dtype& dtype,
              const py::buffer& sizes, const py::buffer& pointers, const py::object& verified,
              std::int64_t block_bytes)
      : file_(std::move(file)), descriptor_(descriptor), block_bytes_(block_bytes),
        sizes_(sizes.request()), pointers_(pointers.request()), num_items_(sizes_.size) {
    std::tie(widen_, token_bytes_) = widening_of(dtype);
    if (sizes_.itemsize != 4 || pointers_.itemsize != 8 || pointers_.size != num_items_) {
      throw std::invalid_argument("sizes are int32 and pointers int64, one per item");
    }
    if (!mapping.is_none()) mapping_.emplace(mapping.cast<py::buffer>().request());
    if (!verified.is_none()) {
      if (block_bytes < 1) throw std::invalid_argument("a block has one byte or more");
      verified_.emplace(verified.cast<py::buffer>().request());
    }
  }

  // Tokens of `items` in order: of the first from `start` on, of the last before `stop`, or to its
  // end where `stop` is negative. None for what Python has to look at.
  template <typename Item>
  py::object join(const py::array_t<Item, py::array::c_style>& items, std::int64_t start,
                  std::int64_t stop) {
    extents_.clear();
    const std::int64_t count = plan(items.data(), items.size(), start, stop);
    if (count < 0) return py::none();
    py::array_t<std::int64_t> tokens(count);
    std::int64_t* out = tokens.mutable_data();
    for (const Extent& extent : extents_) {
      const std::int64_t bytes = extent.stop - extent.start;
      const char* data = bytes_at(extent.start, bytes);
      if (data == nullptr) return py::none();
      widen_(data, bytes / token_bytes_, out);
      out += bytes / token_bytes_;
    }
    return tokens;
  }

 private:
  // Fills `extents_`; returns the number of tokens, or -1 for what is not served here.
  template <typename Item>
  std::int64_t plan(const Item* items, py::ssize_t num_items, std::int64_t start,
                    std::int64_t stop) {
    const char* const sizes = static_cast<const char*>(sizes_.ptr);
    const char* const pointers = static_cast<const char*>(pointers_.ptr);
    std::int64_t count = 0;
    for (py::ssize_t i = 0; i < num_items; ++i) {
      const std::int64_t item = items[i];
      if (item < 0 || item >= num_items_) return -1;
      const std::int64_t size = load<std::int32_t>(sizes, item);
      const std::int64_t first = i == 0 ? start : 0;
      const std::int64_t last = i == num_items - 1 && stop >= 0 ? stop : size;
      if (first < 0 || first > last || last > size) return -1;
      const std::int64_t base = load<std::int64_t>(pointers, item);
      const Extent extent{base + first * token_bytes_, base + last * token_bytes_};
      count += last - first;
      if (extent.start == extent.stop) continue;
      if (!is_verified(extent)) return -1;
      if (!extents_.empty() && extents_.back().stop == extent.start) {
        extents_.back().stop = extent.stop;
      } else {
        extents_.push_back(extent);
      }
    }
    return count;
  }

  bool is_verified(const Extent& extent) const {
    if (!verified_) return true;
    const char* const verified = static_cast<const char*>(verified_->ptr);
    const std::int64_t last = (extent.stop - 1) / block_bytes_;
    if (extent.start < 0 || last >= verified_->size) return false;
    for (std::int64_t block = extent.start / block_bytes_; block <= last; ++block) {
      if (verified[block] == 0) return false;
    }
    return true;
  }

  // The bytes from `start` on, or null where they cannot be had. Good until the next call.
  const char* bytes_at(std::int64_t start, std::int64_t count) {
    if (mapping_) {
      const bool inside = start >= 0 && start + count <= mapping_->size;
      return inside ? static_cast<const char*>(mapping_->ptr) + start : nullptr;
    }
    if (buffer_.size() < static_cast<std::size_t>(count)) {
      buffer_.resize(static_cast<std::size_t>(count));
    }
    // The interpreter's lock is held: the buffer belongs to this object, and reads from the page
    // cache, which are nearly all of them, take less than handing the lock to and fro.
    std::int64_t done = 0;
    while (done < count) {
      const ssize_t got = ::pread(descriptor_, buffer_.data() + done,
                                  static_cast<std::size_t>(count - done), start + done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return nullptr;
      done += got;
    }
    return buffer_.data();
  }

  py::object file_;
  int descriptor_;
  std::int64_t block_bytes_;
  py::buffer_info sizes_, pointers_;
  std::optional<py::buffer_info> mapping_, verified_;
  std::int64_t num_items_;
  std::int64_t token_bytes_ = 0;
  Widen widen_ = nullptr;
  std::vector<Extent> extents_;
  std::vector<char> buffer_;
};

template <typename Item>
void define_join(py::class_<TokenReader>& reader) {
  reader.def("join", &TokenReader::join<Item>, py::arg("items").noconvert(), py::arg("start"),
             py::arg("stop"));
}

}  // namespace

PYBIND11_MODULE(_token_reader, module) {
  module.doc() = "Reads items of a corpus end to end; called by megatron.data.corpus.token_file";
  module.attr("INTERFACE") = 1;  // token_file.py refuses a module built from other source
  py::class_<TokenReader> reader(module, "TokenReader");
  reader.def(py::init<py::object, int, const py::object&, const py::dtype&, const py::buffer&,
                      const py::buffer&, const py::object&, std::int64_t>(),
             py::arg("file"), py::arg("descriptor"), py::arg("mapping"), py::arg("dtype"),
             py::arg("sizes"), py::arg("pointers"), py::arg("verified"), py::arg("block_bytes"));
  define_join<std::int32_t>(reader);
  define_join<std::int64_t>(reader);
}
