"""Which files a source of text names: a file, a folder, one split of a data set, a member of
an archive."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from ..checksums import one_line
from ..files import folder_of
from ..limits import regular_file

HUB = "datasets:"
KINDS = (".txt", ".jsonl", ".parquet")
_IN_FOLDERS = (*KINDS, ".lines", ".texts")
_ARCHIVE = re.compile(r"(.+?\.(?:tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|zip))(?:/(.+))?")
_PUBLISHED = (  # text8, lines of One Billion Words, archives of OpenWebText, as they came
    (re.compile(r"(?:.*/)?text8"), ".txt"),
    (re.compile(r"(?:.*/)?news\.en(?:\.heldout)?-\d+-of-\d+"), ".lines"),
    (re.compile(r"(?:.*/)?urlsf_subset\d+-\d+_data"), ".texts"),
)
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "heldout"),
}
_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.parquet")
_FOLDERS = {"lm1b": ("1-billion-word-language-modeling-benchmark-r13output",)}  # unpacked


class NotHere(ValueError):
    """A file or folder of data is neither where it was said nor below PSIDIFF_DATA."""


class SourceFile(NamedTuple):
    """A file of a corpus, or a member of an archive."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @property
    def kind(self) -> str:
        """.txt or .jsonl, whether compressed or not, .json (a list), .parquet, .lines (a
        document a line) or .texts (an archive of documents); '' for all others."""
        name = str(self).removesuffix(".gz").removesuffix(".xz")
        found = next((kind for kind in (*KINDS, ".json") if name.endswith(kind)), "")
        if found == ".parquet" and name != str(self):
            return ""
        return found or next((kind for rule, kind in _PUBLISHED if rule.fullmatch(name)), "")


def find(path: str | Path) -> Path:
    """A path as it is, or else below the folder that PSIDIFF_DATA names."""
    given = Path(path).expanduser()
    places = dict.fromkeys((given.absolute(), folder_of("PSIDIFF_DATA").absolute() / given))
    for place in places:
        if place.exists():
            return place
    tried = " and no ".join(str(place) for place in places)
    raise NotHere(f"there is no {tried}: PSIDIFF_DATA may name the folder that has it")


def parts(source: str, split: str | None = None) -> list[SourceFile]:
    """The files that a source names, in order; split: of a folder, those whose names say it."""
    found = source_file(source)
    if found.path.is_dir() and found.member is None:
        return _files_below(found.path) if split is None else split_files(found.path, split)
    if split is not None:
        raise ValueError(
            f"{source} has no splits (got {split!r}): only folders and {HUB}... sources do"
        )
    if not found.kind:
        raise ValueError(
            f"{source} is of no known kind: text is read from {_or(KINDS)} files, .txt and "
            ".jsonl also as .gz or .xz, from folders of them and from .tar and .zip archives"
        )
    return [found._replace(path=regular_file(found.path))]


def source_file(name: str) -> SourceFile:
    """The file, folder or member of an archive of this name, if the file or folder is here."""
    archive = _ARCHIVE.fullmatch(name)
    if archive and not archive[2]:
        raise ValueError(f"{name} is an archive: name a file in it, as {name}/train.jsonl")
    return SourceFile(find(archive[1]), archive[2]) if archive else SourceFile(find(name))


def local_parts(source: str, split: str | None) -> list[SourceFile] | None:
    """The files of a `datasets:OWNER/NAME/CONFIG` below PSIDIFF_DATA, in the folder OWNER/NAME
    or NAME; None: there is no such folder."""
    name, _, revision = source.removeprefix(HUB).partition("@")
    words = name.split("/")
    config, last = "/".join(words[2:]) or None, words[:2][-1]
    places = ["/".join(words[:2]), last, *_FOLDERS.get(last, ())]
    for place in () if revision else places:
        folder = folder_of("PSIDIFF_DATA").absolute() / place
        if folder.is_dir():
            return split_files(folder, split or "train", config)
    return None


def folder_for(source: str) -> Path:
    """Where the files of a `datasets:OWNER/NAME/CONFIG` go, for `local_parts` to find them."""
    return folder_of("PSIDIFF_DATA") / "/".join(source.removeprefix(HUB).split("/")[:2])


def split_files(folder: Path, split: str, config: str | None = None) -> list[SourceFile]:
    """The files of one split below a folder, in the layouts of the Hub and of archives.

    The last part of a path with a word for a split (train, validation, valid, val, dev, test,
    heldout) says which it is of; where no path has one, all are of "train". config: a part of
    the path begins with it.
    """
    found = _known_below(folder, (*_IN_FOLDERS, ".json"))
    if config is not None:
        found = [each for each in found if _begins(each, folder, config)]
    named = [(each, _split_of(each.path.relative_to(folder))) for each in found]
    chosen = [each for each, said in named if said == split]
    if not chosen and split == "train" and not any(said for _, said in named):
        chosen = [each for each in found if each.kind != ".json"]
    if not chosen:
        of = "" if config is None else f" of {config}"
        raise NotHere(f"{folder} has no file{of} whose name says that it is of {split}")
    _check_complete(folder, chosen)
    return chosen


def _known_below(folder: Path, kinds: Iterable[str]) -> list[SourceFile]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [part for part in map(SourceFile, files) if part.kind in kinds]


def _files_below(folder: Path) -> list[SourceFile]:
    found = _known_below(folder, _IN_FOLDERS)
    if not found:
        raise ValueError(f"{folder} has no {_or(KINDS)} file in it")
    return found


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _begins(part: SourceFile, folder: Path, config: str) -> bool:
    names = part.path.relative_to(folder).parts
    return any(name.lower().startswith(config.lower()) for name in names)


def _split_of(path: PurePath) -> str | None:
    """The split that the last part of a path with a word for one says."""
    for name in reversed(path.parts):
        words = re.split(r"[^a-z0-9]+", name.lower())
        for split, said in _SPLITS.items():
            if any(word in words for word in said):
                return split
    return None


def _check_complete(folder: Path, chosen: list[SourceFile]) -> None:
    """All shards are there, of one configuration, and not only the first gigabytes."""
    names = [part.path.relative_to(folder) for part in chosen]
    if any(word.startswith("partial-") for name in names for word in name.parts):
        raise ValueError(
            f"{folder} has only the first part of it, as the Hub converts large data sets: get "
            "the data set's own files"
        )
    above = {name.parts[:-1] for name in names if name.suffix == ".parquet"}
    above = {
        tuple(word for word in each if _split_of(PurePath(word)) is None) for each in above
    }
    if len(above) > 1:
        several = one_line(", ".join(sorted("/".join(each) or "." for each in above)))
        raise ValueError(f"{folder} has several data sets ({several}): name the folder of one")
    there: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if shard := _SHARD.fullmatch(str(name)):
            there.setdefault((shard[1], shard[3]), set()).add(int(shard[2]))
    for (stem, count), numbers in there.items():
        if missing := sorted(set(range(int(count))) - numbers):
            first = f"{stem}{missing[0]:05d}-of-{count}.parquet"
            raise ValueError(
                f"{folder} lacks {len(missing):,} of the {int(count):,} files "
                f"{stem}*.parquet, such as {first}"
            )
