"""The documents of a source, counted once: how many there are, and the first of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from ..data.detokenizers import DETOKENIZERS
from ..data.hub import HubData
from ..data.parquet import count_parquet_rows
from ..data.source_files import SourceFile
from ..data.text_sources import read_part, text_of

OnCount = Callable[[int, int, int | None], None]
"""Called now and then: documents, characters, and how many documents there are if known."""

SHOWN, SHOWN_CHARACTERS = 3, 1000  # rows, and characters of each
HASHED = 1000  # documents
_EVERY = 1000  # documents between two calls of OnCount
_ENOUGH = 2**20  # characters that the first packed rows come from


@dataclass(frozen=True)
class SourceReport:
    """A source of documents. complete: all of it was counted; sha256: of its first documents
    as people write, up to 1,000; of what is no text, of everything."""

    part: str
    source: str
    files: list[str]
    bytes: int | None
    revision: str | None = None
    documents: int = 0
    characters: int = 0
    complete: bool = True
    sha256: str = ""


class Documents:
    """The documents of a source, counted once, the first of them kept."""

    def __init__(
        self,
        source: str,
        part: str,
        found: list[SourceFile] | HubData,
        texts: Iterable[str] | None = None,
        column: str = "text",
        detokenizer: str | None = None,
    ) -> None:
        self.source, self.part, self.found, self.column = source, part, found, column
        self.texts = self._texts() if texts is None else texts
        self.first: list[str] = []
        self.as_written = str if detokenizer is None else DETOKENIZERS[detokenizer]

    def _texts(self) -> Iterator[str]:
        if isinstance(self.found, HubData):
            return (text_of(row, self.column, self.source) for row in self.found.rows)
        return chain.from_iterable(read_part(part, self.column) for part in self.found)

    def count(self, on_count: OnCount | None = None) -> SourceReport:
        """Everything of it; a KeyboardInterrupt ends the counting."""
        total, digest, kept = self._total(), hashlib.sha256(), 0
        documents = characters = 0
        complete = False
        with suppress(KeyboardInterrupt):
            for text in self.texts:
                if documents < HASHED:
                    written = self.as_written(text)
                    data = written.encode()
                    digest.update(f"{len(data)} ".encode() + data)
                    if kept < _ENOUGH or len(self.first) < SHOWN:
                        self.first.append(written)
                        kept += len(written)
                documents, characters = documents + 1, characters + len(text)
                if on_count is not None and documents % _EVERY == 0:
                    on_count(documents, characters, total)
            complete = True
        if complete and not documents:
            raise ValueError(f"{self.source} has no documents in it")
        about = self._about()
        return replace(
            about,
            documents=documents,
            characters=characters,
            complete=complete,
            sha256=digest.hexdigest(),
        )

    def _total(self) -> int | None:
        """How many documents there are, where that is known before they are read."""
        if isinstance(self.found, HubData):
            return len(self.found.rows)
        if all(part.kind == ".parquet" and part.member is None for part in self.found):
            return sum(count_parquet_rows(part.path) for part in self.found)
        return None

    def _about(self) -> SourceReport:
        if isinstance(self.found, HubData):
            return SourceReport(self.part, self.source, [], None, self.found.revision)
        sizes = {part.path: part.path.stat().st_size for part in self.found}
        files = [str(part) for part in self.found]
        return SourceReport(self.part, self.source, files, sum(sizes.values()))


def shown(texts: list[str]) -> list[str]:
    """The first of them, cut."""
    return [text[:SHOWN_CHARACTERS] for text in texts[:SHOWN]]
