"""Tokenizers: the codecs of text. Here the subwords of published models and of our own.

Characters and bytes are in `characters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..checksums import in_short, reading
from ..limits import parse_json, read_text
from ..registry import optional_module
from ..types import as_count
from .characters import BLANK, Bytes, Characters
from .codec import CODECS, Codec
from .tokenizer_json import check_tokenizer

__all__ = ["Bytes", "Characters", "Subwords"]

# What published tokenizers call their special tokens.
_SEPARATORS = ("<|endoftext|>", "[SEP]", "</s>", "<eos>", "<|end_of_text|>")
_OPENING = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>")
_CLOSING = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>")
_PADDING = ("[PAD]", "<pad>")
_MASKS = ("[MASK]", "<mask>")
# What the space before is left out of, in this order.
_CLEANED = (".", "?", "!", ",", "' ", "n't", "'m", "'s", "'ve", "'re")


@CODECS.register("subwords")
@dataclass(frozen=True, repr=False)
class Subwords(Codec):
    """A tokenizer of the `tokenizers` library, as the text of its JSON file.

    `separator` names the token between documents; None looks for the usual names. Where no
    token opens or closes a row, the separator does both.
    """

    json: str
    separator: str | None = None

    def __post_init__(self) -> None:
        check_tokenizer(self.json)
        if not isinstance(self.separator, (str, type(None))):
            raise ValueError(f"separator must be a token, got {in_short(self.separator)}")
        tokenizer = self._tokenizer  # what the library finds wrong is said here
        if self.separator is not None and tokenizer.token_to_id(self.separator) is None:
            raise ValueError(f"the tokenizer has no token {self.separator!r} to separate with")
        between = self._id_of(_SEPARATORS if self.separator is None else [self.separator])
        opening, closing = self._id_of(_OPENING), self._id_of(_CLOSING)
        vars(self).update(
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            separator_id=between,
            end_id=between,
            bos_id=between if opening is None else opening,
            eos_id=between if closing is None else closing,
            pad_id=self._id_of(_PADDING),
            mask_id=self._id_of(_MASKS),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Subwords:
        """A tokenizer.json."""
        with reading(path):
            return cls(read_text(path))

    @classmethod
    def from_hub(cls, name: str) -> Subwords:
        """The tokenizer.json of a model on the Hugging Face hub, or of its local copy."""
        needs = "tokenizers of the hub need: pip install huggingface_hub"
        optional_module("huggingface_hub", needs)  # what from_pretrained downloads with
        from tokenizers import Tokenizer

        from .hub import hub_offline, unreachable_reason

        silent = unreachable_reason()
        try:
            with hub_offline() if silent else nullcontext():
                return cls(Tokenizer.from_pretrained(name).to_str())
        except Exception as error:  # the library's own are of many kinds, bare ones among them
            reason = silent or str(error).strip().split("\n")[0]
            raise ValueError(
                f"the tokenizer {name!r} is no known one and cannot be had from the hub, "
                f"which needs a network or an earlier download: {reason}"
            ) from error

    @classmethod
    def gpt2(cls, folder: str | Path, pad: bool = False) -> Subwords:
        """GPT-2's 50,257 tokens; `pad` adds [PAD], as the released Duo models have it."""
        vocabulary = _first(folder, "encoder.json", "vocab.json")
        merges = _first(folder, "vocab.bpe", "merges.txt")
        lines = (line.split() for line in read_text(merges).split("\n"))
        pairs = [
            (line[0], line[1]) for line in lines if len(line) == 2 and line[0] != "#version:"
        ]
        from tokenizers import models

        held = parse_json(read_text(vocabulary), vocabulary)
        tokenizer = _byte_level(
            _call_library(f"be made of {vocabulary}", models.BPE, held, pairs)
        )
        tokenizer.add_special_tokens(["<|endoftext|>"] + ["[PAD]"] * pad)
        return cls(tokenizer.to_str())

    @classmethod
    def wordpiece(cls, vocab_txt: str | Path) -> Subwords:
        """BERT's uncased tokenizer: lower case, no accents, Chinese by the character."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        words = read_text(vocab_txt).rstrip("\n").split("\n")
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
    def leading_spaces(self) -> bool:
        """Whether a word's token holds the space before it, as in byte-level BPE."""
        words = [self._tokenizer.id_to_token(int(i)) for i in self.encode("a a")[1:]]
        return self._tokenizer.decoder is not None and self._decode(words) == " a"

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        encode = partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        found = _call_library("encode this text", encode, list(texts))
        return [np.array(each.ids, dtype=np.int32) for each in found]

    def decode(self, tokens: Tensor) -> str:
        kept = [i for i in tokens.tolist() if i not in self._unseen]
        words = [self._shown(i) for i in kept]
        decoder = self._tokenizer.decoder
        return " ".join(words) if decoder is None else self._decode(words)

    def decode_as_released(self, tokens: Tensor) -> str:
        """With special tokens by their names, without spaces before punctuation.

        So did the library that the released code decodes with (transformers 4.38).
        """
        words = [self._shown(i) for i in tokens.tolist()]
        decoder = self._tokenizer.decoder
        text = " ".join(words) if decoder is None else self._decode(words)
        for ending in _CLEANED:
            text = text.replace(f" {ending}", ending.strip())
        return text

    def pieces(self, tokens: Tensor) -> list[str]:
        """Each token by itself, a special one by its name."""
        return [self._piece(i) for i in tokens.tolist()]

    def _shown(self, token: int) -> str:
        if token >= self.vocab_size or token == self.mask_id:
            return BLANK
        return self._tokenizer.id_to_token(token) or ""

    def _piece(self, token: int) -> str:
        word = self._shown(token)
        if self._tokenizer.decoder is None or token in self._unseen or word == BLANK:
            return word
        if word.startswith("##"):
            return word[2:]
        if token == self.separator_id:
            return "¶"
        begins = " " * (type(self._tokenizer.decoder).__name__ == "WordPiece")
        return begins + self._decode([word])

    def _decode(self, words: list[str]) -> str:
        text: str = _call_library("decode these tokens", self._tokenizer.decoder.decode, words)
        return text

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

        tokenizer = _call_library("be made of its JSON", Tokenizer.from_str, self.json)
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


def _call_library(what: str, function: Callable[..., Any], *values: Any) -> Any:
    """What the library answers. Its errors are bare ones, and panics that are no Exception."""
    try:
        return function(*values)
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer cannot {what}: {in_short(error)}") from error
