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

from .inception_network import InceptionV3

_PUBLISHED = ("6726825d", "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4")
"""How the SHA-256 begins of the state dict and of the TorchScript file of the network of FID.

Both are translations of inception-2015-12-05.tgz; the first states its own digits in its name,
pt_inception-2015-12-05-6726825d.pth.
"""


@runtime_checkable
class Features(Protocol):
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

        Another file that fits is used too, but numbers made with it are not called FID.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no Inception network at {path}: that is no file")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        published = digest.startswith(_PUBLISHED)
        name = "inception-2015-12-05" if published else f"{path.name} {digest[:8]}"
        network = Scripted(path) if _is_torchscript(path) else _from_state_dict(path)
        return cls(network.eval().to(device), name, published, torch.device(device))

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if images.shape[1] not in (1, 3):
            raise ValueError(f"Inception sees grey or RGB, got {images.shape[1]} channels")
        images = images.to(self.device).expand(-1, 3, -1, -1)
        full = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.no_grad(), full:  # TF32 would change the third digit of a feature
            return self.network(images)


class Scripted(nn.Module):
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


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return any(name.endswith("/constants.pkl") for name in file.namelist())


def _from_state_dict(path: Path) -> InceptionV3:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is neither a TorchScript file nor a state dict") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} is neither a TorchScript file nor a state dict")
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
