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
from torch.nn import functional as F

from ..checksums import in_short
from ..distributed import device_here
from ..limits import check_limit
from ..torch_files import read_torch_file

_STATE = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_SCRIPT = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
"""The SHA-256 of the state dict and of the TorchScript file of the network of FID.

Both are translations of inception-2015-12-05.tgz; the first is called
pt_inception-2015-12-05-6726825d.pth. TorchScript is a program: no other file of it is run.
"""

_SIDE = 299
_FORK = "1x3 beside 3x1"
_ROW, _COLUMN = (1, 7), (7, 1)
Branches = dict[str, list[Any]]


@runtime_checkable
class FeatureExtractor(Protocol):
    """Images (N, C, H, W) of uint8 -> features (N, d) and, if it has any, probabilities (N, c).

    Only the network that FID is defined by may say `is_inception`: its numbers are called FID.
    Statistics of features are kept on disk where there is a `fingerprint`, a word that no
    other features have.
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
    fingerprint: str | None = None

    is_inception: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.function, nn.Module):
            self.function.eval()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self.function(images)
        return found if isinstance(found, tuple) else (found, None)


PIXELS = Classifier(lambda images: images.flatten(1).double() / 255, "pixels")


@dataclass(frozen=True)
class Inception:
    """The Inception network of FID: 2048 features, and probabilities of 1008 classes."""

    network: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    name: str
    is_inception: bool
    device: torch.device
    fingerprint: str | None = None  # the SHA-256 of its file

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
        published = digest in (_STATE, _SCRIPT)
        name = "inception-2015-12-05" if published else f"{path.name} {digest[:8]}"
        network: nn.Module
        if digest == _SCRIPT:
            network = TorchScriptInception(path)
        else:
            network = _from_state_dict(path, published)
        return cls(network.eval().to(where), name, published, where, digest)

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


class InceptionV3(nn.Module):
    """Inception-v3 as FID has it: averages leave out the rim, the last pool takes the maximum.

    The names of its parameters are those of pt_inception-2015-12-05-6726825d.pth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padded=False)
        self.Mixed_5b, self.Mixed_5c = _mixed_5(192, 32), _mixed_5(256, 64)
        self.Mixed_5d = _mixed_5(288, 64)
        down: Branches = {"branch3x3": [(384, 3)], "branch3x3dbl": [(64, 1), (96, 3), (96, 3)]}
        self.Mixed_6a = InceptionBlock(288, down)
        self.Mixed_6b, self.Mixed_6c = _mixed_6(128), _mixed_6(160)
        self.Mixed_6d, self.Mixed_6e = _mixed_6(160), _mixed_6(192)
        long = [(192, 1), (192, _ROW), (192, _COLUMN), (192, 3)]
        down = {"branch3x3": [(192, 1), (320, 3)], "branch7x7x3": long}
        self.Mixed_7a = InceptionBlock(768, down)
        self.Mixed_7b, self.Mixed_7c = _mixed_7(1280, "average"), _mixed_7(2048, "max")
        self.fc = nn.Linear(2048, 1008)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, 2048) and probabilities (N, 1008), these without the output's bias."""
        x = (resize(images) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"):
            x = self.get_submodule(f"Mixed_{name}")(x)
        features = x.mean((2, 3))
        return features, (features @ self.fc.weight.T).softmax(-1)


class InceptionBlock(nn.Module):
    """Branches side by side: chains of convolutions (out, kernel), and a pool.

    The names are those of the usual state dict: branch_1, branch_2, ..., without a number in a
    chain of one, a and b for the two of a fork. Without `pooled` channels out of the pool, the
    last in each chain halves the size, and so does the pool.
    """

    def __init__(
        self, width: int, branches: Branches, pooled: int = 0, pool: str = "average"
    ) -> None:
        super().__init__()
        self.pool = pool if pooled else "half"
        self.chains: list[list[list[str]]] = []
        for branch, chain in branches.items():
            before, names = width, []
            for i, (out, kernel) in enumerate(chain, 1):
                step = 2 if i == len(chain) and not pooled else 1
                stem = branch if len(chain) == 1 else f"{branch}_{i}"
                fork = {f"{stem}a": (1, 3), f"{stem}b": (3, 1)}
                made = fork if kernel == _FORK else {stem: kernel}
                for name, size in made.items():
                    self.add_module(name, Convolution(before, out, size, step))
                names.append(list(made))
                before = out * len(made)
            self.chains.append(names)
        if pooled:
            self.branch_pool = Convolution(width, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for chain in self.chains:
            y = x
            for names in chain:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            found.append(y)
        return torch.cat([*found, self._pooled(x)], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool == "half":
            return F.max_pool2d(x, 3, 2)
        if self.pool == "max":
            return self.branch_pool(F.max_pool2d(x, 3, 1, 1))
        return self.branch_pool(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))


def _mixed_5(width: int, pooled: int) -> InceptionBlock:
    branches: Branches = {"branch1x1": [(64, 1)], "branch5x5": [(48, 1), (64, 5)]}
    branches["branch3x3dbl"] = [(64, 1), (96, 3), (96, 3)]
    return InceptionBlock(width, branches, pooled)


def _mixed_6(c: int) -> InceptionBlock:
    once = [(c, 1), (c, _ROW), (192, _COLUMN)]
    twice = [(c, 1), (c, _COLUMN), (c, _ROW), (c, _COLUMN), (192, _ROW)]
    branches: Branches = {"branch1x1": [(192, 1)], "branch7x7": once, "branch7x7dbl": twice}
    return InceptionBlock(768, branches, 192)


def _mixed_7(width: int, pool: str) -> InceptionBlock:
    branches: Branches = {"branch1x1": [(320, 1)], "branch3x3": [(384, 1), (384, _FORK)]}
    branches["branch3x3dbl"] = [(448, 1), (384, 3), (384, _FORK)]
    return InceptionBlock(width, branches, 192, pool)


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU; at stride 1 the size stays, unless `padded` is False."""

    def __init__(
        self,
        width: int,
        out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        rim = tuple(k // 2 for k in sides) if padded and stride == 1 else 0
        self.conv = nn.Conv2d(width, out, sides, stride, rim, bias=False)  # type: ignore[arg-type]
        self.bn = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def resize(images: Tensor) -> Tensor:
    """299 x 299 as TensorFlow 1 did it: output pixel i is read at i * size / 299, bilinearly.

    So pixel 0 is pixel 0, and what lies beyond the last pixel repeats it. affine_grid puts the
    centre of pixel i at (2i + 1) / size - 1; the offsets 1/W - 1/299 take both halves out.
    """
    height, width = images.shape[2:]
    theta = torch.eye(2, 3, device=images.device)
    theta[0, 2], theta[1, 2] = 1 / width - 1 / _SIDE, 1 / height - 1 / _SIDE
    size = [len(images), images.shape[1], _SIDE, _SIDE]
    grid = F.affine_grid(theta.expand(len(images), 2, 3), size, align_corners=False)
    return F.grid_sample(
        images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
