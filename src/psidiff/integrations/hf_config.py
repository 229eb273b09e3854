"""The config of our transformer in transformers."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from ..data.tokenizers import Subwords
from ..model import Model
from ..models import Transformer
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES

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
