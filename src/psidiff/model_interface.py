"""What requests, conditioning and generation use of a model; `psidiff.Model` has all of it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from .data.codec import Codec
from .model_config import ModelConfig
from .process import NoiseSchedule, Prior


@runtime_checkable
class ModelInterface(Protocol):
    """A denoiser with its process, its codec and its description."""

    @property
    def denoiser(self) -> Any: ...
    @property
    def prior(self) -> Prior | None: ...
    @property
    def schedule(self) -> NoiseSchedule: ...
    @property
    def codec(self) -> Codec | None: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def length(self) -> int | None: ...
    @property
    def num_classes(self) -> int | None: ...
    @property
    def device(self) -> torch.device: ...
