"""Model: a denoiser with its prior, schedule and config; loaded, saved, wrapped."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .models import Parameterized, Transformer, UNet
from .process import Cosine, LogLinear, Masked, Mixed, NoiseSchedule, Prior, Uniform, Unigram
from .types import Level, Tokens, has_head

FORMAT_VERSION = 1
_NETWORKS = {"transformer": Transformer, "unet": UNet}
_PRIORS = {"masked": Masked, "uniform": Uniform, "mixed": Mixed, "unigram": Unigram}
_SCHEDULES = {"loglinear": LogLinear, "cosine": Cosine}


@dataclass
class Model:
    """What sampling, evaluation and training need of a trained network.

    denoiser gives log x_theta in float32, in eval mode. config describes the network: `network`
    ("transformer", "unet" or None for a wrapped callable), its `options`, what it `predicts`,
    and its `length`. prior is None for an autoregressive network.
    """

    denoiser: Any
    prior: Prior | None
    schedule: NoiseSchedule
    codec: Any = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> nn.Module:
        """The network itself, under the prior's parameterization."""
        return (
            self.denoiser.network if isinstance(self.denoiser, Parameterized) else self.denoiser
        )

    def save(self, folder: str | Path) -> None:
        """model.safetensors and psidiff.json, from which `load` makes the same model."""
        if self.config.get("network") not in _NETWORKS:
            raise ValueError(
                "only a transformer or a U-Net can be saved, not a wrapped callable"
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        described = {
            "format_version": FORMAT_VERSION,
            "prior": None if self.prior is None else _describe(self.prior),
            "schedule": _describe(self.schedule),
            **self.config,
        }
        weights = {n: v.contiguous() for n, v in self.network.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        (folder / "psidiff.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


def assemble(
    state: dict[str, Tensor],
    prior: Prior | None,
    schedule: NoiseSchedule,
    config: dict[str, Any],
) -> Model:
    """A model from parameters and a description; every parameter must find its place."""
    with torch.device("meta"):
        network = _NETWORKS[config["network"]](**config["options"])
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    for name in (*wanted, *given):
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"parameter {name} does not fit: the network has {wanted.get(name)}, "
                f"the file {given.get(name)}"
            )
    network.load_state_dict(state, assign=True)
    network.eval().requires_grad_(False)
    denoiser = network
    if prior is not None:
        denoiser = Parameterized(network, prior, config.get("predicts", "loo")).eval()
    return Model(denoiser, prior, schedule, None, config)


def load(
    name_or_path: str | Path, device: str = "auto", dtype: str | torch.dtype = "auto"
) -> Model:
    """A model from a folder that `Model.save` wrote, a released .ckpt, or a hub-style folder.

    device "auto" is the GPU if there is one; dtype "auto" leaves the parameters as they are.
    """
    path = Path(name_or_path)
    if (path / "psidiff.json").is_file():
        model = _load_own(path)
    elif path.exists():
        from .integrations import official

        model = official.load(path)
    else:
        raise ValueError(f"there is no model at {name_or_path}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.denoiser.to(device)
    if dtype != "auto":
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16', got {dtype!r}")
        model.denoiser.to(kind)
    return model


def _load_own(folder: Path) -> Model:
    described = json.loads((folder / "psidiff.json").read_text(encoding="utf-8"))
    version = described.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format_version {version}; this psidiff reads {FORMAT_VERSION}"
        )
    prior, schedule = described.pop("prior"), described.pop("schedule")
    return assemble(
        load_file(folder / "model.safetensors"),
        None if prior is None else _make(_PRIORS, prior),
        _make(_SCHEDULES, schedule),
        described,
    )


def wrap(
    denoiser: Any,
    prior: Prior,
    schedule: NoiseSchedule,
    codec: Any = None,
    time: str | None = "alpha",
    predicts: str = "loo",
) -> Model:
    """Somebody's network as a Model. `time`: what its second argument is; None: it has none.

    "alpha", "sigma" (= -log alpha) or "t"; labels go third if the call has any.
    """
    if time not in ("alpha", "sigma", "t", None):
        raise ValueError(f"time must be 'alpha', 'sigma', 't' or None, got {time!r}")

    parameterized = Parameterized(Told(denoiser, time, schedule), prior, predicts).eval()
    return Model(parameterized, prior, schedule, codec, {"network": None, "predicts": predicts})


class Told(nn.Module):
    """A network that hears of the level in its own words, and of labels if there are any."""

    def __init__(self, network: Any, time: str | None, schedule: NoiseSchedule) -> None:
        super().__init__()
        self.network, self.time, self.schedule = network, time, schedule
        if has_head(network):
            self.hidden, self.head = self._hidden, network.head

    def forward(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        return self.network(*self._arguments(z, alpha, labels))

    def _hidden(self, z: Tokens, alpha: Level, labels: Tensor | None = None) -> Tensor:
        return self.network.hidden(*self._arguments(z, alpha, labels))

    def _arguments(self, z: Tokens, alpha: Level, labels: Tensor | None) -> list[Tensor]:
        level = torch.as_tensor(alpha, dtype=torch.float32, device=z.device)
        words = {"sigma": lambda: -level.log(), "t": lambda: self.schedule.time(level)}
        told = [] if self.time is None else [words.get(self.time, lambda: level)()]
        return [z, *told, *([] if labels is None else [labels])]


def _describe(thing: Any) -> dict[str, Any]:
    """A prior or a schedule as plain data."""
    return {"name": type(thing).__name__.lower(), **asdict(thing)}


def _make(known: dict[str, Any], described: dict[str, Any]) -> Any:
    options = dict(described)
    name = options.pop("name", None)
    if name not in known:
        raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return known[name](**options)
