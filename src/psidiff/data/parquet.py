"""Parquet, as the Hub serves data sets: rows a few at a time, never a whole file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checksums import one_line, reading
from ..limits import check_given, check_ratio, regular_file
from ..registry import optional_module

_BATCH_BYTES, _BATCH_ROWS = 2**24, 1024  # of what is decoded at once


def parquet_rows(
    path: Path, columns: Sequence[str] | None = None, place: Any = None
) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file in order, with these columns; None: with all.

    Text stays as the file's dictionaries have it until its row is asked for, so that a value
    that many rows share is in memory once. Rows with lists of text are decoded one by one.
    """
    place, packed, given = place or path, path.stat().st_size, 0
    with _opened(path, place) as file:
        with reading(place):
            batches = _batches(file, columns, packed, place)
        while True:
            with reading(place):  # not around what is done with the rows
                batch = next(batches, None)
            if batch is None:
                return
            found = list(zip(batch.schema.names, batch.columns, strict=True))
            for i in range(batch.num_rows):
                with reading(place):
                    row = {name: column[i].as_py() for name, column in found}
                given += _size(row)
                check_given(given, packed, place)
                yield row


def _size(value: Any) -> int:
    """Characters and bytes in a value and what is inside it."""
    if isinstance(value, str | bytes):
        return len(value)
    inside = value.values() if isinstance(value, dict) else value
    return sum(map(_size, inside)) if isinstance(value, dict | list) else 0


def count_parquet_rows(path: Path) -> int:
    """How many rows a Parquet file has, as its end says."""
    with _opened(path, path) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path, place: Any) -> Iterator[Any]:
    """The file with its text columns kept as dictionaries; no extension types of Arrow."""
    arrow = _pyarrow()
    with regular_file(path).open("rb") as stream:
        with reading(place):
            about = arrow.read_metadata(stream)
            texts = [path for path in _text_columns(about.schema) if "." not in path]
            options = {"read_dictionary": texts, "pre_buffer": False, "buffer_size": 2**20}
            file = arrow.ParquetFile(stream, metadata=about, **options)
        yield file


def _text_columns(schema: Any) -> list[str]:
    """The paths of its columns of text; those inside of lists, which Arrow cannot keep as
    dictionaries over several row groups, have dots."""
    leaves = [schema.column(i) for i in range(len(schema))]
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _pyarrow() -> Any:
    """Its part for Parquet. Versions before 14.0.1 run code that a file brings."""
    needs = "Parquet files need: pip install 'psidiff[data]'"
    arrow = optional_module("pyarrow", needs)
    numbers = [int(n) for n in re.findall(r"\d+", arrow.__version__)[:3]]
    if numbers < [14, 0, 1]:
        raise ValueError(f"{needs} (pyarrow {arrow.__version__} may run code in a file)")
    return optional_module("pyarrow.parquet", needs)


def _batches(
    file: Any, columns: Sequence[str] | None, packed: int, place: Any
) -> Iterator[Any]:
    """Batches of the columns; a file that promises more than the bounds is refused before."""
    about, names = file.metadata, file.schema_arrow.names
    for column in columns or ():
        if column not in names:
            known = one_line(", ".join(names[:8])) or "none"
            raise ValueError(f"{place} has no column {column!r}, but {known}")
    inside = [path.split(".")[0] for path in _text_columns(about.schema) if "." in path]
    nested = any(name in inside for name in columns or names)
    largest = _BATCH_BYTES if nested else 1
    for i in range(about.num_row_groups):
        group = about.row_group(i)  # its columns are not asked: damaged ones end the process
        check_ratio(group.total_byte_size, packed, place)
        largest = max(largest, group.total_byte_size // max(group.num_rows, 1))
    rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))
    found: Iterator[Any] = file.iter_batches(
        batch_size=rows, columns=None if columns is None else list(columns), use_threads=False
    )
    return found
