"""What a model is made of: the denoiser, its process, its codec and its description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from .checksums import in_short
from .data.codec import Codec
from .limits import check_limit
from .models import Parameterized
from .process import NoiseSchedule, Prior
from .types import as_count


@dataclass(eq=False)
class ModelConfig(Mapping[str, Any]):
    """The description of a model, as psidiff.json stores it beside prior and schedule.

    It can also be read as a mapping, of what `to_dict` gives.

    Args:
        network: the kind of the network, "transformer" or "unet"; None for a wrapped callable.
        options: the arguments that the network is built with.
        predicts: "loo" (leave-one-out) or "plain", what the network's logits stand for.
        length: the number of tokens of a training sequence; None if it is not known.
        name: what the model is called.
        kappa: the sampler that is recommended for it, in words such as "cap:0.01" or
            "constant:.95@.1-.5 schedule=cosine".
        recipe: the recipe it was trained by, if that has another name.
        framed: whether rows of text open with the codec's bos and close with its eos.
        bos_id: the token that an autoregressive network reads first.
        chat_template: how a chat becomes a prompt (Jinja).
        extra: what else its file says, kept as it is.

    Example:
        >>> ModelConfig(name="digits", length=64).recommended_kappa
        'cap:0.005'
    """

    network: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    predicts: str = "loo"
    length: int | None = None
    name: str | None = None
    kappa: str | None = None
    recipe: str | None = None
    framed: bool = False
    bos_id: int | None = None
    chat_template: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. What is null has its default; unknown names are kept.

        Raises:
            ValueError: a value is of another kind than it must be.
        """
        _check(values)
        known = {f.name for f in fields(cls)} - {"extra"}
        given = {n: v for n, v in values.items() if n in known and v is not None}
        return cls(**given, extra={n: v for n, v in values.items() if n not in known})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file: what is known, and what else the file said."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        if self.network is None:
            del named["options"]
        if not self.framed:
            del named["framed"]
        return {n: v for n, v in named.items() if v is not None} | self.extra

    def __getitem__(self, name: str) -> Any:
        return self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    @property
    def start_id(self) -> int:
        """`bos_id` of an autoregressive model; ValueError without it."""
        if self.bos_id is None:
            raise ValueError(
                "this autoregressive model does not say which token its rows open with: set "
                "config.bos_id"
            )
        return self.bos_id

    @property
    def title(self) -> str:
        """What a page or a report calls the model."""
        return self.name or self.network or "a model"

    @property
    def recommended_kappa(self) -> str:
        """The words of the sampler that kappa="auto" stands for."""
        return self.kappa or "cap:0.005"


@dataclass
class ModelParts:
    """What requests, conditioning and generation use of a `psidiff.Model`."""

    denoiser: Any
    prior: Prior | None
    schedule: NoiseSchedule
    codec: Codec | None = None
    config: ModelConfig = field(default_factory=ModelConfig)

    @property
    def network(self) -> nn.Module:
        """The network itself, under the prior's parameterization."""
        wrapped = isinstance(self.denoiser, Parameterized)
        return self.denoiser.network if wrapped else self.denoiser

    @property
    def num_parameters(self) -> int:
        """How many numbers of the network are learned."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    @property
    def autoregressive(self) -> bool:
        """Whether it goes left to right, without a prior, instead of by diffusion."""
        return self.prior is None

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens of the network; None: not known."""
        known = self.config.options.get("vocab_size")
        return known if self.prior is None else self.prior.vocab_size

    @property
    def num_classes(self) -> int | None:
        """How many labels there are to ask for; None: the network knows of none."""
        return self.config.options.get("num_classes")

    @property
    def length(self) -> int | None:
        """The number of tokens of its sequences; None: any."""
        return self.config.length or (None if self.codec is None else self.codec.length)

    @property
    def device(self) -> torch.device:
        module = self.denoiser if isinstance(self.denoiser, nn.Module) else nn.Module()
        return next((held.device for held in module.parameters()), torch.device("cpu"))


def _check(values: Mapping[str, Any]) -> None:
    """What a description says of a model is of the right kind."""
    if not isinstance(values.get("options", {}), (dict, type(None))):
        raise ValueError(f"options must be a mapping, got {in_short(values['options'])}")
    if (length := values.get("length")) is not None:
        check_limit("length", as_count("length", length), "the model", f"has length {length:,}")
    if values.get("bos_id") is not None:
        as_count("bos_id", values["bos_id"], least=0)
    for name in ("network", "name", "kappa", "recipe", "predicts", "chat_template"):
        value = values.get(name)
        if not isinstance(value, (str, type(None))):
            raise ValueError(f"{name} must be a word, got {in_short(value)}")
        if name != "chat_template" and not str(value).isprintable():  # the server prints names
            raise ValueError(f"{name} has {in_short(value)}, which no line can show")
    if not isinstance(values.get("framed", False), (bool, type(None))):
        raise ValueError(f"framed must be true or false, got {in_short(values['framed'])}")
