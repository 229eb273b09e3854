"""Our codecs of text as tokenizers of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..data.tokenizers import Bytes, Characters, Subwords
from ..model import Model

_tokenizers: Any = import_module("tokenizers")


def tokenizer_of(model: Model) -> Any:
    """A PreTrainedTokenizerFast with the ids of the model's codec; its mask is [MASK]."""
    codec, prior = model.codec, model.prior
    if isinstance(codec, Characters):
        backend = _of_characters(codec)
    elif isinstance(codec, Bytes):
        backend = _of_bytes()
    elif isinstance(codec, Subwords):
        backend = _tokenizers.Tokenizer.from_str(codec.json)
    else:
        raise ValueError("a tokenizer needs a model of text that has a codec")
    special: dict[str, str] = {}
    for name, i in (("bos", codec.bos_id), ("eos", codec.end_id), ("pad", codec.pad_id)):
        if i is not None:
            special[f"{name}_token"] = backend.id_to_token(i)
    mask = prior.mask_id if prior is not None else None
    if mask is not None and mask == codec.vocab_size:
        backend.add_special_tokens(["[MASK]"])
    if mask is not None and backend.id_to_token(mask) is not None:
        special["mask_token"] = backend.id_to_token(mask)
    made = import_module("transformers").PreTrainedTokenizerFast
    return made(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _of_characters(codec: Characters) -> Any:
    """One token a character, and nothing for those that the alphabet does not have."""
    vocabulary = {character: i for i, character in enumerate(codec.alphabet)}
    backend = _tokenizers.Tokenizer(_tokenizers.models.WordLevel(vocabulary, unk_token=""))
    each = _tokenizers.pre_tokenizers.Split(_tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.pre_tokenizer, backend.decoder = each, _tokenizers.decoders.Fuse()
    if codec.fold:
        normalizers = _tokenizers.normalizers
        other = normalizers.Replace(_tokenizers.Regex("[^a-z]+"), " ")
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), other])
    return backend


def _of_bytes() -> Any:
    """Bytes as the characters that stand for them in byte-level tokenizers; no merges."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [i for i in range(256) if i not in shown]
    characters = {i: chr(i) for i in shown} | {i: chr(256 + n) for n, i in enumerate(hidden)}
    vocabulary = {character: i for i, character in characters.items()}
    backend = _tokenizers.Tokenizer(_tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = _tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = _tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend
