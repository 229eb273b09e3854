"""What image metrics look at: the Inception network of FID from a file, or any classifier."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..checksums import in_short
from ..distributed import device_here
from ..limits import check_limit
from ..torch_files import read_torch_file
from .inception_network import InceptionV3

_STATE, _SCRIPT = "6726825d", "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
"""How the SHA-256 begins of the state dict and of the TorchScript file of the network of FID.

Both are translations of inception-2015-12-05.tgz; the first states its own digits in its name,
pt_inception-2015-12-05-6726825d.pth. TorchScript is a program: no other file of it is run.
"""


@runtime_checkable
class FeatureExtractor(Protocol):
    """Images (N, C, H, W) of uint8 -> features (N, d) and, if it has any, probabilities (N, c).

    Only the network that FID is defined by may say `is_inception`: its numbers are called FID.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_inception(self) -> bool: ...

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Classifier:
    """Any network or function as Features; it returns features, alone or with probabilities.

    A module is put into eval mode.
    """

    function: Callable[[Tensor], Any]
    name: str

    is_inception: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.function, nn.Module):
            self.function.eval()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self.function(images)
        return found if isinstance(found, tuple) else (found, None)


@dataclass(frozen=True)
class Inception:
    """The Inception network of FID: 2048 features, and probabilities of 1008 classes."""

    network: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    name: str
    is_inception: bool
    device: torch.device

    @classmethod
    def from_file(cls, path: str | Path, device: str = "auto") -> Inception:
        """From the published TorchScript file or state dict, known by its SHA-256.

        Another state dict that fits is used too, but numbers made with it are not called FID.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no Inception network at {path}: that is no file")
        size = path.stat().st_size
        check_limit("document", size, path, f"has {size:,} bytes")
        where = device_here(device)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        published = digest.startswith((_STATE, _SCRIPT))
        name = "inception-2015-12-05" if published else f"{path.name} {digest[:8]}"
        network: nn.Module
        if digest.startswith(_SCRIPT):
            network = TorchScriptInception(path)
        else:
            network = _from_state_dict(path, published)
        return cls(network.eval().to(where), name, published, where)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if images.shape[1] not in (1, 3):
            raise ValueError(f"Inception sees grey or RGB, got {images.shape[1]} channels")
        images = images.to(self.device).expand(-1, 3, -1, -1)
        full = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.no_grad(), full:  # TF32 would change the third digit of a feature
            return self.network(images)


class TorchScriptInception(nn.Module):
    """A TorchScript network that resizes by itself; with `return_features` as an option or not.

    Probabilities are those without the bias of the output, as in the first Inception Score.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.network = torch.jit.load(path, map_location="cpu")
        self.options = {given.name for given in self.network.forward.schema.arguments}

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if "return_features" not in self.options:
            return self.network(images), None
        bare = {"no_output_bias": True} if "no_output_bias" in self.options else {}
        return self.network(images, return_features=True), self.network(images, **bare)


def _state(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise ValueError("it is no file of torch.save, or one from before torch 1.6")
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ValueError("it is TorchScript, a program: only the published one is run")
    return read_torch_file(path)


def _from_state_dict(path: Path, published: bool) -> InceptionV3:
    """The published file is in torch's format before version 1.6, which only torch reads."""
    neither = f"{path} is neither the published TorchScript file nor a state dict"
    try:
        state = torch.load(path, "cpu", weights_only=True) if published else _state(path)
    except Exception as error:  # torch's own are of many kinds
        raise ValueError(f"{neither}: {in_short(error, 300)}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(neither)
    with torch.device("meta"):
        network = InceptionV3()
    wanted = network.state_dict()
    for name, value in wanted.items():
        if name.endswith("num_batches_tracked"):  # older files lack it, and nothing reads it
            state.setdefault(name, torch.zeros((), dtype=value.dtype))
    for name in (*wanted, *state):
        sizes = [tuple(s[name].shape) if name in s else None for s in (wanted, state)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{path} is not the Inception network of FID: {name} is {sizes[1]} in it, "
                f"{sizes[0]} in the network"
            )
    network.load_state_dict(state, assign=True)
    return network
