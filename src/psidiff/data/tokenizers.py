"""Tokenizers: the codecs of text, from single characters to the subwords of a published model.

Every one has `encode`, `encode_all` and `decode`, and says which of its ids separate
documents, open, close or fill a row, or stand for a mask; None where there is no such token.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ..types import as_count

_FOLDED = " abcdefghijklmnopqrstuvwxyz"
_BLANK = "_"  # how an id after the last token is shown: a prior's mask


@dataclass(frozen=True)
class Characters:
    """One token a character. `fold`: lower case, and all that is not a-z is a single space."""

    alphabet: str
    fold: bool = False

    kind: ClassVar[str] = "text"
    bos_id: ClassVar[int | None] = None
    eos_id: ClassVar[int | None] = None
    pad_id: ClassVar[int | None] = None
    mask_id: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if len(self.alphabet) < 2:
            raise ValueError(
                f"alphabet must have two characters or more, got {self.alphabet!r}"
            )
        twice = next((c for c in self.alphabet if self.alphabet.count(c) > 1), None)
        if twice is not None:
            raise ValueError(
                f"alphabet must have each character once, {twice!r} is there twice"
            )
        if self.fold and self.alphabet != _FOLDED:
            raise ValueError(f"fold needs the alphabet {_FOLDED!r}, got {self.alphabet!r}")

    @classmethod
    def of(cls, text: str) -> Characters:
        """The characters that occur in `text`, in order."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def text8(cls) -> Characters:
        """The 27 characters of text8."""
        return cls(_FOLDED, fold=True)

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)

    @property
    def separator_id(self) -> int | None:
        """A line feed, or else a space."""
        return next((self.alphabet.index(c) for c in "\n " if c in self.alphabet), None)

    def encode(self, text: str) -> np.ndarray:
        return self._encode_folded(text) if self.fold else self._encode_exactly(text)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        shown = self.alphabet + _BLANK
        return "".join(shown[min(i, self.vocab_size)] for i in tokens.tolist())

    def describe(self) -> dict[str, Any]:
        return {"name": "characters", "alphabet": self.alphabet, "fold": self.fold}

    def _encode_exactly(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self._table[np.minimum(codes, len(self._table) - 1)]
        if len(ids) and ids.min() < 0:
            unknown = text[int(ids.argmin())]
            raise ValueError(
                f"the character {unknown!r} is not in the alphabet of the tokenizer"
            )
        return ids

    def _encode_folded(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.lower().encode("ascii", "replace"), dtype=np.uint8)
        ids = np.maximum(self._table[np.minimum(codes, len(self._table) - 1)], 0)
        space = ids == 0
        repeated = np.zeros_like(space)
        repeated[1:] = space[1:] & space[:-1]
        return ids[~repeated]

    @cached_property
    def _table(self) -> np.ndarray:
        """From code point to id; -1 for the unknown, as all after the last one are."""
        codes = [ord(c) for c in self.alphabet]
        table = np.full(max(codes) + 2, -1, dtype=np.int32)
        table[codes] = np.arange(len(codes), dtype=np.int32)
        return table


@dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8, and a separator after them."""

    kind: ClassVar[str] = "text"
    vocab_size: ClassVar[int] = 257
    separator_id: ClassVar[int | None] = 256
    bos_id: ClassVar[int | None] = None
    eos_id: ClassVar[int | None] = None
    pad_id: ClassVar[int | None] = None
    mask_id: ClassVar[int | None] = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        kept = (i for i in tokens.tolist() if i != self.separator_id)
        return bytes(i if i < 256 else ord(_BLANK) for i in kept).decode("utf-8", "replace")

    def describe(self) -> dict[str, Any]:
        return {"name": "bytes"}


# What published tokenizers call their special tokens.
_SEPARATORS = ("<|endoftext|>", "[SEP]", "</s>", "<eos>", "<|end_of_text|>")
_OPENING = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>")
_CLOSING = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>")
_PADDING = ("[PAD]", "<pad>")
_MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True, repr=False)
class Subwords:
    """A tokenizer of the `tokenizers` library, as the text of its JSON file.

    `separator` names the token between documents; None looks for the usual names. Where no
    token opens or closes a row, the separator does both.
    """

    json: str
    separator: str | None = None

    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if self.separator is not None and self._id_of([self.separator]) is None:
            raise ValueError(f"the tokenizer has no token {self.separator!r} to separate with")

    @classmethod
    def from_file(cls, path: str | Path) -> Subwords:
        """A tokenizer.json."""
        return cls(_read(Path(path)))

    @classmethod
    def from_hub(cls, name: str) -> Subwords:
        """The tokenizer.json of a model on the Hugging Face hub, or of its local copy."""
        try:
            import huggingface_hub  # noqa: F401  # what from_pretrained downloads with
        except ImportError as error:
            raise ValueError(
                "tokenizers of the hub need: pip install huggingface_hub"
            ) from error
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_pretrained(name).to_str())
        except Exception as error:  # the library's own are of many kinds, bare ones among them
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"the tokenizer {name!r} cannot be had from the hub, "
                f"which needs a network or an earlier download: {reason}"
            ) from error

    @classmethod
    def gpt2(cls, folder: str | Path, pad: bool = False) -> Subwords:
        """GPT-2's 50,257 tokens; `pad` adds [PAD], as the released Duo models have it."""
        vocabulary = _first(folder, "encoder.json", "vocab.json")
        merges = _first(folder, "vocab.bpe", "merges.txt")
        lines = (line.split() for line in _read(merges).split("\n"))
        pairs = [
            (line[0], line[1]) for line in lines if len(line) == 2 and line[0] != "#version:"
        ]
        from tokenizers import models

        tokenizer = _byte_level(models.BPE(json_format.loads(_read(vocabulary)), pairs))
        tokenizer.add_special_tokens(["<|endoftext|>"] + ["[PAD]"] * pad)
        return cls(tokenizer.to_str())

    @classmethod
    def wordpiece(cls, vocab_txt: str | Path) -> Subwords:
        """BERT's uncased tokenizer: lower case, no accents, Chinese by the character."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        words = _read(Path(vocab_txt)).rstrip("\n").split("\n")
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
        return cls(tokenizer.to_str())

    @classmethod
    def train_bpe(
        cls, texts: Iterable[str], vocab_size: int, separator: str = "<|endoftext|>"
    ) -> Subwords:
        """Byte-level BPE of a corpus: its most frequent pairs, merged one after another."""
        from tokenizers import models, pre_tokenizers, trainers

        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=as_count("vocab_size", vocab_size, least=257),
            special_tokens=[separator],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(), separator)

    def __repr__(self) -> str:
        return f"Subwords({self.vocab_size} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Subwords, (self.json, self.separator)

    @cached_property
    def vocab_size(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def separator_id(self) -> int | None:
        return self._id_of(_SEPARATORS if self.separator is None else [self.separator])

    @cached_property
    def bos_id(self) -> int | None:
        opening = self._id_of(_OPENING)
        return self.separator_id if opening is None else opening

    @cached_property
    def eos_id(self) -> int | None:
        closing = self._id_of(_CLOSING)
        return self.separator_id if closing is None else closing

    @cached_property
    def pad_id(self) -> int | None:
        return self._id_of(_PADDING)

    @cached_property
    def mask_id(self) -> int | None:
        return self._id_of(_MASKS)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def decode(self, tokens: Tensor) -> str:
        kept = [i for i in tokens.tolist() if i not in self._unseen]
        words = [self._shown(i) for i in kept]
        decoder = self._tokenizer.decoder
        return " ".join(words) if decoder is None else decoder.decode(words)

    def describe(self) -> dict[str, Any]:
        return {"name": "subwords", "json": self.json, "separator": self.separator}

    def _shown(self, token: int) -> str:
        if token >= self.vocab_size or token == self.mask_id:
            return _BLANK
        return self._tokenizer.id_to_token(token) or ""

    def _id_of(self, names: Sequence[str]) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    @cached_property
    def _unseen(self) -> frozenset[int]:
        """Special tokens that text is shown without."""
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        return frozenset(special - {self.separator_id, self.mask_id})

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(self.json)
        except Exception as error:  # the library raises bare ones
            raise ValueError(f"this is not the JSON of a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _byte_level(model: Any) -> Any:
    """A tokenizer of bytes, split as GPT-2 splits."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _first(folder: str | Path, *names: str) -> Path:
    """The first of these files that the folder has."""
    paths = [Path(folder) / name for name in names]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        raise ValueError(f"{folder} has neither {' nor '.join(names)}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
