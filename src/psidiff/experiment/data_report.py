"""What is there of some data, before anything is trained on it or judged by it: files, counts,
how they are split, encoded and packed, and the first rows. Nothing is fetched."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from ..checksums import said_of
from ..data.codec import Codec
from ..data.hub import HubData, hub_data, hub_offline
from ..data.published import CORPORA, Published
from ..data.sequence_datasets import read_tokens
from ..data.source_files import HUB, NotHere, SourceFile, find, local_parts, parts
from ..evaluation.multiple_choice import TASKS
from ..evaluation.zero_shot import SUITE, stored
from ..types import Dataset
from .datasets import codec_of, corpus, rows_from, shipped_text
from .document_counts import (
    HASHED,
    SHOWN,
    Documents,
    OnCount,
    SourceReport,
    shown,
)
from .recipe import TextData
from .recipe_files import read_recipe, shipped

_OF_DOCUMENTS = ("text", "multiple choice")


@dataclass(frozen=True)
class DataReport:
    """Data under a name. rows: the first ones, cut; rows_sha256: of their tokens."""

    name: str
    kind: str
    sources: list[SourceReport] = field(default_factory=list)
    split: str = ""
    detokenizer: str | None = None
    tokenizer: str = ""
    packing: str = ""
    rows: list[str] = field(default_factory=list)
    rows_sha256: str | None = None

    @property
    def complete(self) -> bool:
        """Whether everything was counted."""
        return all(source.complete for source in self.sources)

    @property
    def hashed(self) -> str:
        """What the hash of a source is of."""
        return f"first {HASHED:,} documents" if self.kind in _OF_DOCUMENTS else "data"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def names() -> dict[str, Published]:
    """The data sets that have a name here, corpora before tasks."""
    return {**CORPORA, **{name: task.data for name, task in TASKS.items()}}


def report(name: str, on_count: OnCount | None = None) -> DataReport:
    """What is there of a data set by name, of a recipe's data, or of a file or folder.

    Whoever stops it while it counts gets what was counted, marked as not complete.
    """
    if name in TASKS:
        return _of_task(name, on_count)
    if name in CORPORA:
        return _of_corpus(name, on_count)
    if name in shipped() or name.endswith((".yaml", ".yml")):
        return _of_recipe(name, read_recipe(name).data, on_count)
    if name.endswith(".npy"):
        tokens = read_tokens(find(name))
        size = find(name).stat().st_size
        found = SourceReport("all", name, [str(find(name))], size, None, len(tokens))
        rows = [" ".join(map(str, row.tolist())) for row in tokens[:SHOWN]]
        return DataReport(name, "token ids", [found], rows=rows)
    documents = Documents(name, "all", _resolved(name, None))
    return DataReport(name, "text", [documents.count(on_count)], rows=shown(documents.first))


def _resolved(source: str, split: str | None) -> list[SourceFile] | HubData:
    """The files of a source, or what the caches of the Hub's libraries have of it."""
    if not source.startswith(HUB):
        return parts(source, split)
    found = local_parts(source, split)
    if found is not None:
        return found
    hub = source.removeprefix(HUB)
    known = next((data for data in CORPORA.values() if data.hub == hub), None)
    data = known or Published(hub.split("/")[-1], hub, split or "train", ("text",))
    return _cached(replace(data, split=split or data.split))


def _cached(data: Published) -> HubData:
    with suppress(ImportError):
        import_module("datasets")  # before its switch is set
    try:
        with hub_offline():
            return hub_data(data.source, data.split)
    except ValueError as error:
        raise data.missing() from error


def _of_corpus(name: str, on_count: OnCount | None) -> DataReport:
    data, zero_shot = CORPORA[name], SUITE.get(name)
    files = data.local()
    found = _cached(data) if files is None else files
    texts = None if zero_shot is None else zero_shot.of_source(found)
    detokenizer = None if zero_shot is None else zero_shot.detokenizer
    column = data.columns[0]
    documents = Documents(data.source, data.split, found, texts, column, detokenizer)
    counted = documents.count(on_count)
    first = shown(documents.first)
    if data.held_out:
        split = f"the last {data.held_out:,} documents are for validation"
        return DataReport(name, "text", [counted], split, rows=first)
    split, packing = f"the {data.split} split", "blocks of the model's length, no separators"
    encoded = ("the model's", packing)
    return DataReport(name, "text", [counted], split, detokenizer, *encoded, first)


def _of_task(name: str, on_count: OnCount | None) -> DataReport:
    task = TASKS[name]
    files = task.data.local()
    if files is None:
        raise task.data.missing()
    texts = (
        "\n".join(
            f"{'*' if i == question.gold else ' '} {context}{answer}"
            for i, (context, answer) in enumerate(question.pairs())
        )
        for question in task.questions(files)
    )
    documents = Documents(task.data.source, task.data.split, files, texts)
    counted, split = documents.count(on_count), f"the {task.data.split} split"
    packing = "a row for each answer; the right one has a star"
    encoded = ("the model's", packing)
    return DataReport(
        name, "multiple choice", [counted], split, None, *encoded, shown(documents.first)
    )


def _of_recipe(name: str, data: Any, on_count: OnCount | None) -> DataReport:
    if not isinstance(data, TextData):
        return _of_rows(name, data)
    sources = [("train", data.train, data.split)]
    if data.valid is not None or data.valid_split is not None:
        sources.append(("validation", data.valid or data.train, data.valid_split))
    counted: list[SourceReport] = []
    first: list[str] = []
    for part, source, split in sources:
        files = _resolved(shipped_text(source), split)
        documents = Documents(source, part, files, None, data.field, data.detokenizer)
        counted.append(documents.count(on_count))
        first = first or documents.first
        if not counted[-1].complete:
            break
    encoded = (data.detokenizer, data.tokenizer, _packing(data), shown(first))
    about = DataReport(name, "text", counted, _split_rule(data), *encoded)
    return replace(about, **_packed_rows(data, first))


def _of_rows(name: str, data: Any) -> DataReport:
    """Of images, token ids, grids: as many rows as there are."""
    made = corpus(data)
    path = getattr(data, "path", data.kind)
    both = (("train", made.train), ("validation", made.valid))
    found = [
        SourceReport(part, path, [], None, None, len(rows), sha256=made.content or "")
        for part, rows in both
    ]
    return DataReport(name, data.kind, found, **_first_rows(made.train, made.codec))


def _split_rule(data: TextData) -> str:
    if data.valid is not None or data.valid_split is not None:
        split = "" if data.valid_split is None else f"the {data.valid_split} split of "
        return f"{split}{data.valid or data.train} is for validation"
    if data.valid_documents is not None:
        return f"the last {data.valid_documents:,} documents are for validation"
    return f"the last {data.valid_share:.4g} of the tokens are for validation"


def _packing(data: TextData) -> str:
    if data.packing == "padded":
        return f"a document a row, cut to {data.length:,} tokens or filled up to them"
    starts = "anywhere in the documents" if data.packing == "crops" else "end to end"
    between = "a separator after each document" if data.separators else "no separators"
    ends = ", between bos and eos" if data.block_ends else ""
    return f"blocks of {data.length:,} tokens{ends}, {starts}, {between}"


def _packed_rows(data: TextData, texts: list[str]) -> dict[str, Any]:
    """The first rows as a model meets them, by a tokenizer that is not made of the corpus."""
    if data.tokenizer in ("characters", "bpe"):
        return {"tokenizer": f"{data.tokenizer}, made of the corpus by the run"}
    try:
        codec: Codec = codec_of(data)
    except NotHere as error:
        return {"tokenizer": f"{data.tokenizer} is not here: {error}"}
    with said_of(f"data.tokenizer={data.tokenizer}"):
        store = stored(texts, codec)
    if data.packing != "padded" and len(store.tokens) < data.length:
        return {}  # a corpus of less than a block
    return _first_rows(rows_from(data, store, codec), codec)


def _first_rows(rows: Dataset, codec: Codec | None) -> dict[str, Any]:
    """Decoded, but ids of images and of tokens without a codec; and the hash of their ids."""
    tokens = rows.rows(torch.arange(min(SHOWN, len(rows)))).tokens
    if codec is None or codec.kind == "image":
        said = [" ".join(map(str, row)) for row in tokens.tolist()]
    else:
        said = [codec.decode(row) for row in tokens]
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    return {"rows": shown(said), "rows_sha256": digest}
