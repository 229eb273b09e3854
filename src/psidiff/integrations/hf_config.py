"""What transformers wants beside our transformer: its config, and a tokenizer."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from ..data.codec import codec_from
from ..data.tokenizers import Bytes, Characters, Subwords
from ..model import Model
from ..models import Transformer
from ..process import Prior
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES

_tokenizers: Any = import_module("tokenizers")
try:
    _transformers: Any = import_module("transformers")
except ImportError as error:
    raise ImportError(
        "models of transformers need: pip install 'psidiff[transformers]'"
    ) from error

PretrainedConfig: Any = _transformers.PretrainedConfig
PreTrainedTokenizerFast: Any = _transformers.PreTrainedTokenizerFast
_OPTIONS = {n: p.default for n, p in inspect.signature(Transformer).parameters.items()}


class PsidiffConfig(PretrainedConfig):
    """What psidiff.json says of a model.

    The options of `psidiff.models.Transformer` are attributes here. prior, schedule and codec
    are plain data; card is what else a model says of itself (name, kappa, ...). A codec of
    subwords is too large for a config: it goes into files of its own, by `tokenizer_of`.
    """

    model_type = "psidiff"
    attribute_map = {  # noqa: RUF012  # transformers reads a dict
        "num_hidden_layers": "num_blocks",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "length",
        "tie_word_embeddings": "tied",
    }

    def __init__(
        self,
        vocab_size: int = 256,
        prior: dict[str, Any] | None = None,
        schedule: dict[str, Any] | None = None,
        predicts: str = "loo",
        length: int | None = None,
        codec: dict[str, Any] | None = None,
        card: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.prior = prior or {"name": "uniform", "vocab_size": vocab_size}
        self.schedule = schedule or {"name": "loglinear", "eps": 1e-3}
        self.predicts, self.length, self.codec, self.card = predicts, length, codec, card or {}
        for name, default in _OPTIONS.items():
            setattr(self, name, others.pop(name, default))
        self.vocab_size = vocab_size
        super().__init__(**others)

    @classmethod
    def of(cls, model: Model) -> PsidiffConfig:
        """The config of a model of ours."""
        card, codec = model.config.to_dict(), model.codec
        if card.pop("network", None) != "transformer" or model.prior is None:
            raise ValueError(
                "only a diffusion transformer can be a masked LM of transformers, "
                f"this model is {model.config.network or 'a wrapped callable'}"
                f"{' and autoregressive' if model.prior is None else ''}"
            )
        return cls(
            prior=PRIORS.to_dict(model.prior),
            schedule=SCHEDULES.to_dict(model.schedule),
            predicts=card.pop("predicts", "loo"),
            length=card.pop("length", None),
            codec=None if codec is None or isinstance(codec, Subwords) else codec.describe(),
            **card.pop("options"),
            card=card,
        )

    @property
    def options(self) -> dict[str, Any]:
        """What the transformer is made with."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def prior_of(self, vocab_size: int) -> Prior:
        """The same noise over another number of tokens, of which the first stay what they are.

        Raises:
            ValueError: the prior or the codec does not allow it.
        """
        prior: Prior = PRIORS.from_dict(self.prior)
        if vocab_size == prior.vocab_size:
            return prior
        if "vocab_size" not in {field.name for field in fields(prior)}:  # type: ignore[arg-type]
            raise ValueError(
                f"{prior} has numbers of its own for each token: it cannot be resized to "
                f"{vocab_size} tokens"
            )
        least = 0 if self.codec is None else codec_from(self.codec).vocab_size
        if prior.mask_id is not None:
            least = max(least, prior.mask_id + 1)
        if vocab_size < least:
            raise ValueError(
                f"the model needs the tokens below {least} for its codec and its mask, and "
                f"cannot be resized to {vocab_size}"
            )
        return replace(prior, vocab_size=vocab_size)  # type: ignore[type-var]


class PsidiffTokenizer(PreTrainedTokenizerFast):
    """A tokenizer of a codec, which says what the codec has no token for.

    Without psidiff, AutoTokenizer reads its files as a plain PreTrainedTokenizerFast.
    """

    def _encode_plus(self, *args: Any, **options: Any) -> Any:
        """What every call goes through."""
        try:
            return super()._encode_plus(*args, **options)
        except Exception as error:
            if "Missing [UNK]" not in str(error):
                raise
            raise ValueError(
                "the text has a character that is not in the alphabet of the tokenizer, which "
                f"has no unknown token: it knows {''.join(sorted(self.get_vocab()))!r}"
            ) from error

    def _get_padding_truncation_strategies(self, *args: Any, **options: Any) -> Any:
        """What decides on padding."""
        try:
            return super()._get_padding_truncation_strategies(*args, **options)
        except ValueError as error:
            if "Asking to pad" not in str(error):
                raise
            raise ValueError(
                "this tokenizer has no padding token, because every token of its model means "
                "something: give texts of one length, or leave padding to "
                "DataCollatorForDiffusion"
            ) from error


def tokenizer_of(model: Model) -> PsidiffTokenizer:
    """A PreTrainedTokenizerFast with the ids of the model's codec; its mask is [MASK].

    Padding is the codec's, else the end of text. What has no token (padding of characters, a
    character outside the alphabet) is a ValueError.
    """
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
    pad = codec.end_id if codec.pad_id is None else codec.pad_id
    for name, i in (("bos", codec.bos_id), ("eos", codec.end_id), ("pad", pad)):
        if i is not None:
            special[f"{name}_token"] = backend.id_to_token(i)
    unknown = getattr(backend.model, "unk_token", None)
    if unknown and backend.token_to_id(unknown) is not None:
        special["unk_token"] = unknown
    mask = prior.mask_id if prior is not None else None
    if mask is not None and mask == codec.vocab_size:
        backend.add_special_tokens(["[MASK]"])
    if mask is not None and backend.id_to_token(mask) is not None:
        special["mask_token"] = backend.id_to_token(mask)
    return PsidiffTokenizer(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )


def _of_characters(codec: Characters) -> Any:
    """One token a character, and none for those that the alphabet does not have."""
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
