"""The zero-shot suite: corpora that a language model is judged by and did not learn from."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate

import numpy as np

from ..checksums import damaged
from ..data.characters import Characters
from ..data.codec import Codec
from ..data.detokenizers import DETOKENIZERS
from ..data.sequence_datasets import Packed
from ..data.text_sources import documents, find
from ..data.token_store import TokenStore
from ..data.tokenization import tokenize_documents
from ..limits import read_text


def _documents(source: CorpusSource) -> Iterator[str]:
    return documents(source.where, source.field, source.split)


def _sentences(source: CorpusSource) -> Iterator[str]:
    """A document a line, without the spaces around it."""
    return filter(None, (line.strip() for line in _lines(source)))


def _lines(source: CorpusSource) -> Iterator[str]:
    """A document a line, with its line feed; a blank line is an empty document."""
    for text in _documents(source):
        yield from (line if line.strip() else "" for line in StringIO(text, newline="\n"))


def _news(source: CorpusSource) -> Iterator[str]:
    """A document a row (class, title, text) of a .csv: title and text, a space between."""
    lines = StringIO(read_text(find(source.where)), newline="")
    number = 0
    try:
        for number, row in enumerate(csv.reader(lines, skipinitialspace=True), 1):
            if len(row) != 3:
                raise ValueError(
                    f"row {number} of {source.where} must be class, title and text, "
                    f"got {len(row)} columns"
                )
            yield " ".join(row[1:])
    except csv.Error as error:
        raise damaged(f"row {number + 1} of {source.where}", str(error)) from None


@dataclass(frozen=True)
class CorpusSource:
    """Where a corpus is, below PSIDIFF_DATA or on the hub, and how its text is read."""

    where: str
    detokenizer: str | None = None
    field: str = "text"
    split: str | None = None
    read: Callable[[CorpusSource], Iterator[str]] = _documents

    def texts(self) -> Iterator[str]:
        """Its documents, as people write."""
        found = self.read(self)
        return found if self.detokenizer is None else map(DETOKENIZERS[self.detokenizer], found)


SUITE = {
    "ptb": CorpusSource("ptb/ptb.valid.txt", "ptb", read=_sentences),
    "wikitext2": CorpusSource("wikitext2/valid.txt", "wikitext", read=_lines),
    "lm1b": CorpusSource("datasets:lm1b", "lm1b", split="test"),
    "lambada": CorpusSource("lambada/lambada_test.jsonl", "lambada"),
    "ag_news": CorpusSource("ag_news/test.csv", read=_news),
    "pubmed": CorpusSource(
        "datasets:armanc/scientific_papers/pubmed", "scientific", "article", "validation"
    ),
    "arxiv": CorpusSource(
        "datasets:armanc/scientific_papers/arxiv", "scientific", "article", "validation"
    ),
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
        raise ValueError(f"{name}: {error}") from error


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
