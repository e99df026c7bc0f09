"""Rows of a HuggingFace dataset as JSON lines, by the optional package `datasets`.

A folder of `save_to_disk`, a file, a folder of files, or a name that is in the cache. What a reader
would get wrong: nothing is downloaded, whatever the environment has; and the size is an estimate
from a few rows, since a dataset does not record the size of its text.
"""

import difflib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError, DataError
from tools.preprocessing.documents import MAX_DOCUMENT_BYTES, DocumentRow
from tools.preprocessing.encoding import CHUNK_BYTES, Chunk

_BATCH_ROWS = 1000
_ROWS_WEIGHED = 64  # to estimate how long rows are
_TEXT_TYPES = ("string", "large_string")
_KINDS = {  # of files, as `datasets` calls their readers
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
}
_SAVED = ("dataset_info.json", "dataset_dict.json")  # one of them is in a folder of save_to_disk
_DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class DatasetName:
    """A dataset: path or name, configuration, and split."""

    name: str
    config: str | None = None
    split: str | None = None  # None: the only one, or train

    def __str__(self) -> str:
        config = f" ({self.config})" if self.config else ""
        return f"{self.name}{config}:{self.split or _DEFAULT_SPLIT}"


@dataclass(frozen=True, eq=False)
class DatasetSource:
    """Rows [start, stop) of an opened dataset."""

    name: DatasetName
    rows: Any  # a datasets.Dataset of the wanted columns only
    columns: tuple[str, ...]
    start: int
    stop: int
    bytes_per_row: int

    @property
    def size(self) -> int:
        """Estimated bytes of the rows as JSON."""
        return (self.stop - self.start) * self.bytes_per_row

    def chunks(self, chunk_size: int) -> Iterator[Chunk]:
        """Yield all rows, `chunk_size` at a time; rows are numbered from 1 over the whole split."""
        path = Path(str(self.name))
        rows: list[DocumentRow] = []
        size = 0
        for number in range(self.start, self.stop, _BATCH_ROWS):
            for row in self._batch(number, min(number + _BATCH_ROWS, self.stop)):
                rows.append(row)
                size += len(row.data)
                if len(rows) >= chunk_size or size >= CHUNK_BYTES:
                    yield Chunk(path, rows, len(rows) * self.bytes_per_row)
                    rows, size = [], 0
        yield Chunk(path, rows, len(rows) * self.bytes_per_row)

    def split(self, parts: int) -> list["DatasetSource"]:
        """Return equal numbers of rows."""
        count = self.stop - self.start
        borders = [self.start + count * part // parts for part in range(parts + 1)]
        return [
            DatasetSource(self.name, self.rows, self.columns, first, last, self.bytes_per_row)
            for first, last in pairwise(borders)
            if first < last
        ]

    def identity(self, *, times: bool = True) -> list[Any]:
        """Return name, number of rows, and the files of the opened dataset."""
        files = [Path(each["filename"]) for each in self.rows.cache_files]
        stamps = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns if times else 0]
            for path in files
        ]
        return [str(self.name), list(self.columns), self.start, self.stop, stamps]

    def __str__(self) -> str:
        return f"{self.stop - self.start} rows of {self.name}"

    def _batch(self, start: int, stop: int) -> Iterator[DocumentRow]:
        try:
            batch: Mapping[str, Sequence[object]] = self.rows[start:stop]
        except (ValueError, OSError) as error:  # of pyarrow, which reads the files
            raise DataError(
                "rows of the dataset cannot be read",
                found=f"{self.name}, rows {start + 1} to {stop}: {error}",
                fix="load it again from its source",
            ) from error
        cells = zip(*(batch[name] for name in self.columns))
        for number, row in enumerate(cells, start=start + 1):
            # ASCII, so that half of a surrogate pair arrives where it is refused.
            data = json.dumps(dict(zip(self.columns, row))).encode()
            if len(data) > MAX_DOCUMENT_BYTES:
                raise DataError(
                    f"one document is larger than {MAX_DOCUMENT_BYTES} bytes",
                    found=f"{self.name}, row {number}",
                    fix="cut it into documents",
                )
            yield DocumentRow(number, data)


def open_dataset(name: DatasetName, columns: Sequence[str]) -> DatasetSource:
    """Open a dataset that is on this machine; raises ConfigError or DataError."""
    module: Any = _datasets_module(name)
    try:
        found = _loaded(module, name)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # its readers raise whatever their formats do
        raise DataError(
            "the dataset cannot be opened, and nothing is downloaded here",
            found=f"--hf-dataset {name.name}: {type(error).__name__}: {error}",
            fix="give a folder of save_to_disk, a file, or a name that is in the cache; to put it "
            f'there: python -c "import datasets; datasets.load_dataset({name.name!r})"',
        ) from error
    if isinstance(found, Mapping):
        wanted = name.split or (next(iter(found)) if len(found) == 1 else _DEFAULT_SPLIT)
        if wanted not in found:
            raise ConfigError(
                f"the dataset has no split {wanted!r}",
                found=f"{name.name} has {', '.join(map(repr, found))}",
                fix=f"use --hf-split {next(iter(found), 'SPLIT')}",
            )
        found = found[wanted]
    _check_columns(name, found, columns)
    count = found.num_rows
    if not count:
        raise DataError(
            "the dataset has no rows",
            found=str(name),
            fix="choose another split with --hf-split",
        )
    rows = found.with_format(None).select_columns(list(columns))
    weighed = DatasetSource(name, rows, tuple(columns), 0, count, 1)
    return DatasetSource(name, rows, tuple(columns), 0, count, _bytes_per_row(weighed))


def _loaded(module: Any, name: DatasetName) -> Any:
    path = Path(name.name)
    if path.is_dir() and any((path / file).is_file() for file in _SAVED):
        return module.load_from_disk(str(path))
    if path.is_file():
        suffix = next((each for each in path.suffixes if each in _KINDS), None)
        if suffix is None:
            raise ConfigError(
                "the name of the file does not show its format",
                found=str(path),
                fix=f"rename it to end in one of {', '.join(_KINDS)}",
            )
        return module.load_dataset(_KINDS[suffix], data_files=str(path))
    if name.split is None:
        return module.load_dataset(name.name, name.config)
    return module.load_dataset(name.name, name.config, split=name.split)


def _check_columns(name: DatasetName, found: Any, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in found.features:
            near = difflib.get_close_matches(column, found.features, n=1)
            raise DataError(
                f"the dataset has no column {column!r}",
                found=f"{name}: columns {', '.join(map(repr, found.features))}",
                fix=f"use --hf-column {near[0] if near else next(iter(found.features), 'COLUMN')}",
            )
        kind = str(getattr(found.features[column], "dtype", found.features[column]))
        if kind not in _TEXT_TYPES:
            raise DataError(
                f"the column {column!r} does not hold text",
                found=f"{name}: {kind}",
                fix="name a string column with --hf-column",
            )


def _bytes_per_row(source: DatasetSource) -> int:
    chosen = np.linspace(0, source.stop - 1, min(source.stop, _ROWS_WEIGHED)).astype(int)
    sizes = [len(row.data) for at in chosen.tolist() for row in source._batch(at, at + 1)]
    return max(1, sum(sizes) // len(sizes))


def _datasets_module(name: DatasetName) -> Any:
    try:
        module: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            "a dataset is read by the package datasets, which is not installed",
            found=f"--hf-dataset {name.name}: {error}",
            fix="pip install datasets, or write the rows as .jsonl and give them with --input",
        ) from error
    _stay_offline(module)
    return module


def _stay_offline(module: Any) -> None:
    """Set both packages offline; they read these settings at each use, even after import."""
    module.config.HF_HUB_OFFLINE = module.config.HF_DATASETS_OFFLINE = True
    with suppress(ImportError):  # without it nothing could be downloaded
        importlib.import_module("huggingface_hub.constants").__dict__["HF_HUB_OFFLINE"] = True
