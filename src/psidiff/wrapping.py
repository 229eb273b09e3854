"""A network of somebody else's as a Model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .data.codec import Codec, as_codec
from .model import Model
from .model_config import ModelConfig
from .models import Parameterized
from .process import NoiseSchedule, Prior
from .types import Level, SoftTokens, Tokens, Traits, as_count, check_choice, traits


def wrap(
    module_or_callable: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    codec: Codec | str | None = None,
    time: str | None = "alpha",
    predicts: str = "loo",
    *,
    length: int | None = None,
    per_position_levels: bool = True,
) -> Model:
    """Make a Model of a network or function of your own.

    Args:
        module_or_callable: called as network(z, time, labels) without what it does not take,
            with z (B, L); gives logits (B, L, K).
        prior: the noise it was trained with.
        schedule: the noise schedule.
        codec: what tokens mean (psidiff.data.codec), or its words, such as FILE.py:NAME of a
            file that was imported; None: samples are tokens only.
        time: what the second argument is: "alpha", "sigma" (= -log alpha) or "t"; None: there
            is
            none. It is a number, or (B, L, 1) once tokens are given.
        predicts: "loo" for a network trained by the NELBO, "plain" for one trained by
            cross-entropy on p(x_l | z).
        per_position_levels: False: the time is always (B,), of the smallest level in a
            sequence,
            for a network that was not trained with given tokens.

    Returns:
        The `Model`.

    Raises:
        ValueError: if an argument is no network, prior, schedule or known word.

    Example:
        >>> import psidiff
        >>> from psidiff.process import LogLinear, Uniform
        >>> def network(z, alpha):
        ...     return torch.nn.functional.one_hot((z + 1) % 5, 5).float()
        >>> model = psidiff.wrap(network, Uniform(5), LogLinear())
        >>> model.sample(2, num_steps=8, length=6).tokens.shape
        torch.Size([2, 6])
    """
    check_choice("time", time, ("alpha", "sigma", "t", None))
    network = module_or_callable
    if isinstance(network, (Model, Parameterized, TimeArgument)):
        raise ValueError(
            f"module_or_callable is wrapped already, in a {type(network).__name__}: give the "
            "network inside, or use the model as it is"
        )
    if not callable(network) or isinstance(network, type):
        raise ValueError(f"module_or_callable must be a network or a function, got {network!r}")
    if not isinstance(prior, Prior):
        raise ValueError(f"prior must be an object such as Uniform(K), got {prior!r}")
    if isinstance(schedule, type) or not callable(getattr(schedule, "alpha", None)):
        raise ValueError(f"schedule must be an object such as LogLinear(), got {schedule!r}")
    adapted = TimeArgument(network, time, schedule, per_position_levels)
    parameterized = Parameterized(adapted, prior, predicts).eval()
    length = None if length is None else as_count("length", length)
    config = ModelConfig(length=length, predicts=predicts)
    return Model(parameterized, prior, schedule, as_codec(codec), config)


class TimeArgument(nn.Module):
    """A network, called with the level in its own units, and with labels if there are any."""

    def __init__(
        self,
        network: Any,
        time: str | None,
        schedule: NoiseSchedule,
        per_position_levels: bool = True,
    ) -> None:
        super().__init__()
        self.network = network
        self.time = time
        self.schedule = schedule
        self.per_position_levels = per_position_levels
        inside = traits(network)
        self.traits: Traits = Traits(head=inside.head, num_classes=inside.num_classes)
        if inside.head:
            self.hidden = self._hidden
            self.head: Any = network.head

    def forward(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        return self.network(*self._arguments(z, alpha, labels))

    def _hidden(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        return self.network.hidden(*self._arguments(z, alpha, labels))

    def _arguments(self, z: Tokens, alpha: Level, labels: Tensor | None) -> list[Tensor]:
        tokens = z.hard if isinstance(z, SoftTokens) else z
        level = torch.as_tensor(alpha, dtype=torch.float32, device=tokens.device)
        if not self.per_position_levels:
            level = level.expand(len(tokens), *tokens.shape[1:2], 1).flatten(1).amin(1)
        if self.time == "sigma":
            level = -level.log()
        elif self.time == "t":
            level = self.schedule.time(level).clamp(max=1)
        time = [] if self.time is None else [level]
        return [z, *time, *([] if labels is None else [labels])]
