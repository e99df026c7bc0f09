"""The index loops of the sample orders: a compiled module when built, NumPy twins always.

Both fill arrays allocated here, so type and shape cannot differ; a property test holds the bytes
equal. What a reader would get wrong: row i of a sample index is the position of token `i *
seq_length` of the stream, so neighbouring rows share one token. The maps of sentences are in
`sentence_maps`, which uses `compiled` of this module.
"""

from types import ModuleType

import numpy as np
import numpy.typing as npt

from megatron.data.compiled import built_module, is_current, warn_of_python_twin

_built = built_module("sample_maps")
_INTERFACE = 3  # of csrc/data/sample_maps.cpp
_MOST_INT32 = np.iinfo(np.int32).max
_CHUNK_ROWS = 2**22  # bounds the temporaries of the twin to some hundred megabytes

Rows = npt.NDArray[np.signedinteger]  # int32 or int64
Components = npt.NDArray[np.unsignedinteger]  # uint8 or uint16


def compiled_is_used() -> bool:
    """Return whether the compiled module exists and was built from this source."""
    return is_current(_built, _INTERFACE)


def compiled() -> ModuleType | None:
    """Return the compiled module if it may be used; else None, after one warning."""
    if not compiled_is_used():
        warn_of_python_twin("sample_maps", _built)
        return None
    return _built


def build_sample_idx(
    sizes: npt.NDArray[np.int32],
    doc_idx: npt.NDArray[np.integer],
    *,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> Rows:
    """Return where each sample starts: (position in `doc_idx`, token offset), [samples + 1, 2].

    Sample i holds the `seq_length + 1` tokens from row i to row i + 1, both included; its last
    token is the first of sample i + 1. The rows are int32 when `doc_idx` is short enough for it.
    """
    tokens = num_epochs * tokens_per_epoch
    sizes, doc_idx, rows = _prepare_sample_idx(sizes, doc_idx, seq_length, tokens)
    built = compiled()
    if built is not None:
        _require_equal(built.fill_sample_idx(sizes, doc_idx, seq_length, rows), tokens)
    else:
        _fill_sample_idx(sizes, doc_idx, seq_length, rows, tokens)
    return rows


def build_sample_idx_with_numpy(
    sizes: npt.NDArray[np.int32],
    doc_idx: npt.NDArray[np.integer],
    *,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> Rows:
    """Return the NumPy twin of `build_sample_idx`."""
    tokens = num_epochs * tokens_per_epoch
    sizes, doc_idx, rows = _prepare_sample_idx(sizes, doc_idx, seq_length, tokens)
    _fill_sample_idx(sizes, doc_idx, seq_length, rows, tokens)
    return rows


def build_blending_indices(
    weights: npt.ArrayLike, size: int
) -> tuple[Components, npt.NDArray[np.int64]]:
    """Return the component of each of `size` samples and the sample's number within it.

    Greedy: sample k comes from the component i that maximises w_i * max(k, 1) - count_i. Weights
    are normalised here. Components are uint8 up to 256 of them, uint16 above.
    """
    shares, chosen, within = _prepare_blend(weights, size)
    built = compiled()
    if built is not None:
        built.fill_blending_indices(shares, chosen, within)
    else:
        _fill_blending_indices(shares, chosen, within)
    return chosen, within


def build_blending_indices_with_python(
    weights: npt.ArrayLike, size: int
) -> tuple[Components, npt.NDArray[np.int64]]:
    """Return the Python twin of `build_blending_indices`."""
    shares, chosen, within = _prepare_blend(weights, size)
    _fill_blending_indices(shares, chosen, within)
    return chosen, within


def _prepare_sample_idx(
    sizes: npt.NDArray[np.int32], doc_idx: npt.NDArray[np.integer], seq_length: int, tokens: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.integer], Rows]:
    """Check the inputs, make them contiguous and aligned, and allocate the rows."""
    if seq_length < 1 or tokens < 1:
        raise ValueError(f"seq_length {seq_length} and {tokens} tokens: both must be 1 or more")
    wide = doc_idx.dtype == np.int64
    doc_idx = np.require(doc_idx, np.int64 if wide else np.int32, ["C", "A"])
    # The index of a corpus is an unaligned view of its file; compiled code must not see that.
    sizes = np.require(sizes, np.int32, ["C", "A"])
    if len(doc_idx) == 0:
        raise ValueError("doc_idx names no document")
    fits = len(doc_idx) <= _MOST_INT32
    num_samples = (tokens - 1) // seq_length
    return sizes, doc_idx, np.zeros((num_samples + 1, 2), np.int32 if fits else np.int64)


def _require_equal(tokens_of_documents: int, tokens: int) -> None:
    if tokens_of_documents != tokens:
        raise ValueError(f"doc_idx names {tokens_of_documents} tokens, not {tokens}")


def _fill_sample_idx(
    sizes: npt.NDArray[np.int32],
    doc_idx: npt.NDArray[np.integer],
    seq_length: int,
    rows: Rows,
    tokens: int,
) -> None:
    """Fill in rows: row i lies in the first document that ends after token i * seq_length."""
    if int(doc_idx.min()) < 0 or int(doc_idx.max()) >= len(sizes):
        raise ValueError("doc_idx names no document")
    ends = np.cumsum(sizes[doc_idx], dtype=np.int64)
    _require_equal(int(ends[-1]), tokens)
    for start in range(1, len(rows), _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, len(rows))
        firsts = np.arange(start, stop, dtype=np.int64) * seq_length
        positions = np.searchsorted(ends, firsts, side="right")
        rows[start:stop, 0] = positions
        rows[start:stop, 1] = firsts - (ends[positions] - sizes[doc_idx[positions]])


def _prepare_blend(
    weights: npt.ArrayLike, size: int
) -> tuple[npt.NDArray[np.float64], Components, npt.NDArray[np.int64]]:
    shares = np.array(weights, np.float64)
    if shares.ndim != 1 or not 1 <= len(shares) <= 2**16:
        raise ValueError(f"weights of shape {shares.shape}: between 1 and 65536 components")
    if not np.isfinite(shares).all() or (shares < 0).any() or shares.sum() <= 0 or size < 0:
        raise ValueError(f"weights {shares.tolist()}, size {size}")
    shares /= shares.sum()
    chosen: Components = np.zeros(size, np.uint8 if len(shares) <= 2**8 else np.uint16)
    return shares, chosen, np.zeros(size, np.int64)


def _fill_blending_indices(
    shares: npt.NDArray[np.float64], chosen: Components, within: npt.NDArray[np.int64]
) -> None:
    """Fill in choices one by one, as each depends on all before; floats beat small arrays."""
    weights: list[float] = shares.tolist()
    counts = [0] * len(weights)
    for k in range(len(chosen)):
        drawn = float(max(k, 1))
        lags = [weight * drawn - count for weight, count in zip(weights, counts)]
        best = lags.index(max(lags))
        chosen[k] = best
        within[k] = counts[best]
        counts[best] += 1
