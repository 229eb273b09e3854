"""The zero-shot suite: corpora that a language model is judged by and did not learn from."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from typing import Any

import numpy as np

from ..checksums import damaged
from ..data.characters import Characters
from ..data.codec import Codec
from ..data.detokenizers import DETOKENIZERS
from ..data.hub import HubData, hub_data
from ..data.published import CORPORA, Published
from ..data.sequence_datasets import Packed
from ..data.source_files import NotHere, SourceFile
from ..data.text_sources import read_part, rows, text_of
from ..data.token_store import TokenStore
from ..data.tokenization import tokenize_documents
from ..limits import read_text


@dataclass(frozen=True)
class CorpusSource:
    """How the files of a published data set become documents.

    row: what becomes of a row, or of a line of a .txt; json_lines: a .txt is lines of JSON, as
    the papers came.
    """

    data: Published
    detokenizer: str | None = None
    row: Callable[[str], str] = str
    json_lines: bool = False

    def texts(self) -> Iterator[str]:
        """Its documents, as people write."""
        found = self.raw_texts()
        return found if self.detokenizer is None else map(DETOKENIZERS[self.detokenizer], found)

    def raw_texts(self) -> Iterator[str]:
        """Its documents as they are in its files, or as the `datasets` library has them."""
        parts, data = self.data.local(), self.data
        if parts is not None:
            return self.of_source(parts)
        try:
            return self.of_source(hub_data(data.source, data.split))
        except ValueError as error:
            raise NotHere(f"{data.missing()}, or let it be fetched: {error}") from error

    def of_source(self, source: list[SourceFile] | HubData) -> Iterator[str]:
        """The documents of files, or of what the library has."""
        if isinstance(source, HubData):
            column, place = self.data.columns[0], self.data.source
            found = (text_of(row, column, place) for row in source.rows)
        else:
            found = (text for part in source for text in self._of_file(part))
        return filter(None, map(self.row, found))

    def _of_file(self, part: SourceFile) -> Iterator[str]:
        if str(part).endswith(".csv"):
            yield from _news(part)
        elif part.kind == ".txt" and self.json_lines:
            for place, row in rows(part, kind=".jsonl"):
                yield _article(row, place)
        elif part.kind == ".txt":
            for text in read_part(part, ""):
                yield from StringIO(text, newline="\n")
        else:
            yield from read_part(part, self.data.columns[0])


def _article(row: Any, place: str) -> str:
    """A paper as it came: its paragraphs are lines."""
    found = row.get("article_text") if isinstance(row, dict) else None
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise ValueError(f"{place} has no list of text in article_text, as papers have")
    return "\n".join(found)


def _news(part: SourceFile) -> Iterator[str]:
    """A document a row (class, title, text) of a .csv: title and text, a space between."""
    lines, number = StringIO(read_text(part.path), newline=""), 0
    try:
        for number, row in enumerate(csv.reader(lines, skipinitialspace=True), 1):
            if len(row) != 3:
                raise ValueError(
                    f"row {number} of {part} must be class, title and text, "
                    f"got {len(row)} columns"
                )
            yield " ".join(row[1:])
    except csv.Error as error:
        raise damaged(f"row {number + 1} of {part}", str(error)) from None


def _blank_is_empty(line: str) -> str:
    """A line with its line feed; a blank one is an empty document."""
    return line if line.strip() else ""


SUITE = {
    "ptb": CorpusSource(CORPORA["ptb"], "ptb", str.strip),
    "wikitext2": CorpusSource(CORPORA["wikitext2"], "wikitext", _blank_is_empty),
    "lm1b": CorpusSource(CORPORA["lm1b"], "lm1b", str.strip),
    "lambada": CorpusSource(CORPORA["lambada"], "lambada"),
    "ag_news": CorpusSource(CORPORA["ag_news"]),
    "pubmed": CorpusSource(CORPORA["pubmed"], "scientific", json_lines=True),
    "arxiv": CorpusSource(CORPORA["arxiv"], "scientific", json_lines=True),
}
"""The parts that published evaluations used: validation, but test of lm1b and ag_news; LAMBADA
as OpenAI prepared it."""


def corpus(
    name: str,
    codec: Codec | None,
    length: int,
    framed: bool = False,
    drop_unknown: bool = False,
) -> Packed:
    """A corpus in blocks of the model's length, nothing between its documents.

    Always the same blocks: documents in order, and only the last, incomplete block is dropped.
    framed: blocks open with the codec's bos and close with its eos. drop_unknown: characters
    that an alphabet does not have are left out, otherwise they are an error.
    """
    if name not in SUITE:
        raise ValueError(f"{name!r} is no zero-shot corpus; these are: {', '.join(SUITE)}")
    if codec is None or codec.kind != "text":
        raise ValueError("zero-shot corpora are text: they need a model with a codec for text")
    try:
        texts = SUITE[name].texts()
        bos, eos = (codec.bos_id, codec.eos_id) if framed else (None, None)
        return Packed(stored(texts, codec, drop_unknown), length, bos_id=bos, eos_id=eos)
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith(f"{name} ") else f"{name}: {said}") from error


def stored(texts: Iterable[str], codec: Codec, drop_unknown: bool = False) -> TokenStore:
    """Documents in memory: corpora to be judged by are small."""
    if drop_unknown and isinstance(codec, Characters) and not codec.fold:
        unknown = re.compile(f"[^{re.escape(codec.alphabet)}]")
        texts = (unknown.sub("", text) for text in texts)
    parts = list(tokenize_documents(texts, codec, detokenizer=None, workers=1))
    if not any(len(ids) for ids, _ in parts):
        raise ValueError("there is not one token in it")
    starts = accumulate((len(ids) for ids, _ in parts), initial=0)
    ends = [start + stops for start, (_, stops) in zip(starts, parts, strict=False)]
    return TokenStore(np.concatenate([ids for ids, _ in parts]), np.concatenate(ends))
