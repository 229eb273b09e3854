"""From a recipe's data section to datasets and a codec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ..checksums import bytes_of, said_of
from ..data.codec import CODECS, Codec, as_codec
from ..data.countdown import Countdown, countdown_rows
from ..data.image_files import read_images
from ..data.image_formats import NoSuchSplit
from ..data.images import Images, Pixels, digits
from ..data.puzzle import Puzzle
from ..data.satisfiability import Satisfiability, satisfiability_rows
from ..data.sequence_datasets import Packed, Padded, TokenArray, read_tokens
from ..data.source_files import find
from ..data.sudoku import Sudoku, SudokuGrids
from ..data.text_sources import check_source, documents
from ..data.token_store import OnProgress, TokenStore, tokenize, trained_bpe
from ..data.tokenizers import Characters, Subwords
from ..kernels.counter_rng import fold_in, split
from ..types import Dataset, Rows
from .recipe import (
    CountdownData,
    ImageData,
    PuzzleData,
    RandomData,
    SudokuData,
    TextData,
    TokenData,
)


@dataclass(frozen=True)
class Corpus:
    """What to learn from, what to be judged by, and what the tokens mean.

    content: what stands for the data, whatever they are called; other data have another one.
    """

    train: Dataset
    valid: Dataset
    codec: Codec | None
    vocab_size: int  # the real tokens; a prior may add a mask
    num_classes: int | None = None
    image: tuple[int, int, int] | None = None
    content: str | None = None


def _content(*parts: Any) -> str:
    """A hash of arrays, tensors and words."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, (Tensor, np.ndarray)):
            part = torch.as_tensor(part)
            found.update(f"{part.dtype} {tuple(part.shape)} ".encode())
            found.update(bytes_of(part).data)
        else:
            found.update(f"{part!r} ".encode())
    return found.hexdigest()[:32]


def corpus(data: Any, codec: Codec | None = None, on_progress: OnProgress = None) -> Corpus:
    """The corpus of a section; `codec`, if there is one already, is not made again."""
    return _corpus(data, codec, on_progress)


@singledispatch
def _corpus(data: Any, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    raise AssertionError(f"no corpus for {data}")


def held_out_part(data: Any, codec: Codec | None = None) -> Dataset:
    """A corpus's `valid`; what takes minutes to draw and is not needed for it is not drawn."""
    if isinstance(data, SudokuData):
        return SudokuGrids(data.valid_grids, data.seed + 1)
    if isinstance(data, TextData) and data.valid is not None and codec is not None:
        store = _store(data, shipped_text(data.valid), data.valid_split, codec, None)
        return rows_from(data, store, codec)
    return corpus(data, codec).valid


@_corpus.register
def _text(data: TextData, codec: Codec | None = None, on_progress: OnProgress = None) -> Corpus:
    if data.valid is not None:  # before the corpus takes its time
        check_source(data.valid, data.valid_split)
    codec = codec or codec_of(data)
    if data.block_ends and (codec.bos_id is None or codec.eos_id is None):
        raise ValueError(
            "data.block_ends needs tokens that begin and end a block, and "
            f"data.tokenizer={data.tokenizer} has none"
        )
    train = _store(data, shipped_text(data.train), data.split, codec, on_progress)
    if data.valid is not None or data.valid_split is not None:
        source = shipped_text(data.valid or data.train)
        valid = _store(data, source, data.valid_split, codec, on_progress)
    else:
        train, valid = _split(train, data)
    crops, content = data.packing == "crops", _content(train.key, valid.key)
    rows = rows_from(data, train, codec, crops), rows_from(data, valid, codec)
    return Corpus(*rows, codec, codec.vocab_size, content=content)


def _store(
    data: TextData, source: str, split: str | None, codec: Codec, on_progress: OnProgress
) -> TokenStore:
    return tokenize(
        source,
        codec,
        detokenizer=data.detokenizer,
        field=data.field,
        split=split,
        on_progress=on_progress,
    )


def _split(store: TokenStore, data: TextData) -> tuple[TokenStore, TokenStore]:
    """All but the last documents, or the last share of the tokens, and these."""
    total = len(store.tokens)
    cut = total - int(total * data.valid_share)
    if data.valid_documents is not None:
        if data.valid_documents >= len(store):
            raise ValueError(
                f"data.valid_documents must be below the {len(store)} documents of the corpus, "
                f"got {data.valid_documents}"
            )
        cut = int(store.ends[-data.valid_documents - 1])
    if not 0 < cut < total:
        raise ValueError(
            f"data.valid_share must leave tokens on both sides, got {data.valid_share:g} of "
            f"{total} tokens"
        )
    return store.part(0, cut), store.part(cut, total)


def rows_from(data: TextData, store: TokenStore, codec: Codec, crops: bool = False) -> Dataset:
    """A store in rows, packed or padded as the recipe says."""
    with said_of(f"data.length={data.length}"):
        if data.packing == "padded":
            ids = (codec.bos_id, codec.eos_id, codec.pad_id)
            return Padded(store, data.length, *ids, mask_padding=data.padding == "masked")
        separator = codec.separator_id if data.separators else None
        bos, eos = (codec.bos_id, codec.eos_id) if data.block_ends else (None, None)
        return Packed(store, data.length, separator, bos, eos, crops)


def codec_of(data: TextData) -> Codec:
    """The tokenizer that a recipe names."""
    name = data.tokenizer
    if name == "characters":
        sources = [(data.train, data.split), (data.valid, data.valid_split)]
        seen: set[str] = set()
        for source, split in sources:
            if source is not None:
                for document in documents(shipped_text(source), data.field, split):
                    seen.update(document)
        return Characters.of(seen)
    if name == "bpe":
        assert data.vocab_size is not None  # the recipe checks it
        return trained_bpe(shipped_text(data.train), data.vocab_size, data.field, data.split)
    if name.endswith(".json"):
        return Subwords.from_file(find(name))
    if name == "bytes" or ".py:" in name:
        codec: Codec = CODECS.parse(name)
        return codec
    known: dict[str, Callable[[], Codec]] = {
        "text8": Characters.text8,
        "gpt2": lambda: Subwords.gpt2(find("tokenizers/gpt2"), pad=data.pad_token),
        "bert": lambda: Subwords.wordpiece(find("tokenizers/bert_base_uncased/vocab.txt")),
    }
    return known[name]() if name in known else Subwords.from_hub(name)


def shipped_text(source: str) -> str:
    """`shakespeare` is in the package; anything else is where it says."""
    inside = files("psidiff.data").joinpath("files", f"{source}.txt.xz")
    return str(inside) if inside.is_file() else source


@_corpus.register
def _images(data: ImageData, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    train, valid, names = _digits(data) if data.path == "digits" else _image_sets(data)
    channels, height, width = train.pixels.shape[1:]
    shown = names if data.labels else ()
    codec = Pixels(channels, height, width, data.levels, shown)
    if not data.labels:
        train.labels = valid.labels = None
    classes = len(names) if data.labels and train.labels is not None else None
    content = _content(train.pixels, train.labels, valid.pixels, valid.labels, names)
    size = (channels, height, width)
    return Corpus(train, valid, codec, data.levels, classes, size, content)


def _digits(data: ImageData) -> tuple[Images, Images, tuple[str, ...]]:
    if data.levels != 17:
        yours = "; a folder of yours is ./digits" if Path("digits").exists() else ""
        raise ValueError(f"data.levels must be 17 for the digits, got {data.levels}{yours}")
    _check_no_share(data)
    train = digits("train")
    train.flip = data.flip
    return train, digits("valid"), tuple("0123456789")


def _check_no_share(data: ImageData) -> None:
    """Images that come with a test set are not divided."""
    if data.valid_share != ImageData.valid_share:
        raise ValueError(
            f"data.valid_share={data.valid_share:g} is for images without a test set, and "
            f"{data.path} has one"
        )


def _image_sets(data: ImageData) -> tuple[Images, Images, tuple[str, ...]]:
    path = find(data.path)
    pixels, labels, names = read_images(path, "train")
    try:
        held, held_labels, _ = read_images(path, "test")
    except NoSuchSplit:
        chosen, rest = _shuffled_parts(data, len(pixels))
        held, pixels = pixels[rest], pixels[chosen]
        held_labels = None if labels is None else labels[rest]
        labels = None if labels is None else labels[chosen]
    else:
        _check_no_share(data)
    train = Images(pixels, labels, data.levels, data.flip)
    return train, Images(held, held_labels, data.levels), tuple(names)


def _shuffled_parts(data: ImageData | TokenData, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows to learn from and to hold out; what is alike may lie in a row."""
    cut = count - max(int(count * data.valid_share), 1)
    if cut < 1:
        raise ValueError(f"{data.path} has 1 row: some to learn from and some to hold out")
    order = np.random.RandomState(0).permutation(count)
    return order[:cut], order[cut:]


@_corpus.register
def _tokens(data: TokenData, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    codec = codec or as_codec(data.codec)
    size = data.vocab_size if codec is None else codec.vocab_size
    tokens = read_tokens(find(data.path), size)
    if codec is not None and codec.length not in (None, tokens.shape[1]):
        raise ValueError(
            f"{data.path} has sequences of {tokens.shape[1]} tokens, and those of "
            f"data.codec={data.codec} have {codec.length}"
        )
    train, valid = (TokenArray(tokens[part]) for part in _shuffled_parts(data, len(tokens)))
    size = size or max(int(tokens.max()) + 1, 2)
    return Corpus(train, valid, codec, size, content=_content(tokens))


@_corpus.register
def _sudoku(data: SudokuData, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    train = SudokuGrids(data.grids, data.seed, minimal=data.minimal)
    content = _content(train.grids, train.puzzles, train.solutions)
    return Corpus(train, held_out_part(data), Sudoku(), 9, content=content)


@_corpus.register
def _puzzles(data: PuzzleData, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    game: Puzzle = Satisfiability()
    rows = satisfiability_rows
    if isinstance(data, CountdownData):
        game, rows = Countdown(), countdown_rows
    train = rows(data.count, data.seed)
    valid = rows(data.valid_count, data.seed + 1, held_out=True)
    return Corpus(train, valid, game, game.vocab_size, content=_content(train.solved))


@_corpus.register
def _random(data: RandomData, codec: Codec | None, on_progress: OnProgress) -> Corpus:
    made = RandomTokens(data.vocab_size, data.length, data.classes)
    return Corpus(made, made, None, data.vocab_size, data.classes or None, data.image)


@dataclass(frozen=True)
class RandomTokens:
    """A dataset without meaning: rows drawn uniformly, each a function of its number."""

    vocab_size: int
    length: int
    classes: int = 0
    count: int = 4096

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        bits = split(fold_in(torch.zeros_like(indices), indices), self.length)
        tokens = (bits & (2**63 - 1)) % self.vocab_size
        return Rows(tokens, indices % self.classes if self.classes else None)
