"""The data sets of the paper by name: where their files may be, and what is read of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..files import folder_of
from .source_files import (
    HUB,
    NotHere,
    SourceFile,
    find,
    local_parts,
    source_file,
    split_files,
)


@dataclass(frozen=True)
class Published:
    """A data set. Its files are looked for as `files`, in the folder of its own name, and in
    folders of its names on the Hub.

    files: each a file, or a member of an archive; A+B is A, where B is there too;
    hub: OWNER/NAME or OWNER/NAME/CONFIG; columns: those that are read; held_out: so many of the
    last documents are for validation, where there is no such split.
    """

    name: str
    hub: str
    split: str
    columns: tuple[str, ...]
    files: tuple[str, ...] = ()
    held_out: int = 0

    @property
    def source(self) -> str:
        """Its name for the `datasets` library."""
        return HUB + self.hub

    def local(self) -> list[SourceFile] | None:
        """Its files, in order; None: they are not here. Files of other splits do not count."""
        single = (f"{self.name}.parquet", f"{self.name}.jsonl")
        for file in (*self.files, *single):
            try:
                return [source_file(name) for name in file.split("+")][:1]
            except NotHere:
                continue
        try:
            folder = find(self.name)
            if folder.is_dir():
                return split_files(folder, self.split)
        except NotHere:
            pass
        try:
            return local_parts(self.source, self.split)
        except NotHere:
            return None

    def how_to_get(self) -> str:
        """Where its files are to be had, where they go and what they must have."""
        columns = " and ".join(filter(None, (", ".join(self.columns[:-1]), self.columns[-1])))
        many = "s" if len(self.columns) > 1 else ""
        split = f"{self.split} split of {self.hub} on the Hub"
        return (
            f"put the Parquet or JSON lines of the {split} (column{many} {columns}) into "
            f"{folder_of('PSIDIFF_DATA') / self.name}"
        )

    def missing(self) -> NotHere:
        """The sentence for a data set that is not here."""
        return NotHere(f"{self.name} is not here: {self.how_to_get()}")


def _table(*each: Published) -> dict[str, Published]:
    return {data.name: data for data in each}


_ARTICLES = "armanc/scientific_papers"


def _papers(name: str) -> Published:
    there = (f"{name}-dataset/val.txt", f"{name}-dataset.zip/{name}-dataset/val.txt")
    return Published(name, f"{_ARTICLES}/{name}", "validation", ("article",), there)


CORPORA = _table(
    Published("openwebtext", "Skylion007/openwebtext", "train", ("text",), held_out=100_000),
    Published(
        "ptb",
        "ptb-text-only/ptb_text_only/penn_treebank",
        "validation",
        ("sentence",),
        ("ptb/ptb.valid.txt",),
    ),
    Published(
        "wikitext2",
        "Salesforce/wikitext/wikitext-2-raw-v1",
        "validation",
        ("text",),
        ("wikitext2/valid.txt",),
    ),
    Published("lm1b", "lm1b", "test", ("text",)),
    Published(
        "lambada",
        "EleutherAI/lambada_openai/default",
        "test",
        ("text",),
        (
            "lambada/lambada_test.jsonl",
            "EleutherAI/lambada_openai/data/lambada_test.jsonl",
            "lambada_openai/data/lambada_test.jsonl",
        ),
    ),
    Published("ag_news", "fancyzhx/ag_news", "test", ("text",), ("ag_news/test.csv",)),
    _papers("pubmed"),
    _papers("arxiv"),
)
