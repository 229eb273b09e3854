"""What transformers wants beside our transformer: its config, and a tokenizer."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..data.tokenizers import Bytes, Characters, Subwords
from ..model import Model
from ..models import Transformer
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES

_tokenizers: Any = import_module("tokenizers")
try:
    PretrainedConfig: Any = import_module("transformers").PretrainedConfig
except ImportError as error:
    raise ImportError(
        "models of transformers need: pip install 'psidiff[transformers]'"
    ) from error

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
