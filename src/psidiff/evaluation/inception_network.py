"""Inception-v3, the network that FID is defined by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SIDE = 299
_FORK = "1x3 beside 3x1"
_ROW, _COLUMN = (1, 7), (7, 1)
Branches = dict[str, list[Any]]


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
        self.Mixed_6a = InceptionBlock(288, down, 0, "max", 2)
        self.Mixed_6b, self.Mixed_6c = _mixed_6(128), _mixed_6(160)
        self.Mixed_6d, self.Mixed_6e = _mixed_6(160), _mixed_6(192)
        long = [(192, 1), (192, _ROW), (192, _COLUMN), (192, 3)]
        down = {"branch3x3": [(192, 1), (320, 3)], "branch7x7x3": long}
        self.Mixed_7a = InceptionBlock(768, down, 0, "max", 2)
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
    chain of one, a and b for the two of a fork. `stride` is that of the last in each chain.
    """

    def __init__(
        self, width: int, branches: Branches, pooled: int, pool: str, stride: int
    ) -> None:
        super().__init__()
        self.pool, self.stride = pool, stride
        self.chains: list[list[list[str]]] = []
        self.out = pooled or width
        for branch, chain in branches.items():
            before, names = width, []
            for i, (out, kernel) in enumerate(chain, 1):
                step = stride if i == len(chain) else 1
                stem = branch if len(chain) == 1 else f"{branch}_{i}"
                fork = {f"{stem}a": (1, 3), f"{stem}b": (3, 1)}
                made = fork if kernel == _FORK else {stem: kernel}
                for name, size in made.items():
                    self.add_module(name, Convolution(before, out, size, step))
                names.append(list(made))
                before = out * len(made)
            self.chains.append(names)
            self.out += before
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
        if self.stride == 2:
            return F.max_pool2d(x, 3, 2)
        if self.pool == "max":
            return self.branch_pool(F.max_pool2d(x, 3, 1, 1))
        return self.branch_pool(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))


def _mixed_5(width: int, pooled: int) -> InceptionBlock:
    double = [(64, 1), (96, 3), (96, 3)]
    branches: Branches = {
        "branch1x1": [(64, 1)],
        "branch5x5": [(48, 1), (64, 5)],
        "branch3x3dbl": double,
    }
    return InceptionBlock(width, branches, pooled, "average", 1)


def _mixed_6(c: int) -> InceptionBlock:
    once = [(c, 1), (c, _ROW), (192, _COLUMN)]
    twice = [(c, 1), (c, _COLUMN), (c, _ROW), (c, _COLUMN), (192, _ROW)]
    branches: Branches = {"branch1x1": [(192, 1)], "branch7x7": once, "branch7x7dbl": twice}
    return InceptionBlock(768, branches, 192, "average", 1)


def _mixed_7(width: int, pool: str) -> InceptionBlock:
    double = [(448, 1), (384, 3), (384, _FORK)]
    branches: Branches = {"branch1x1": [(320, 1)], "branch3x3": [(384, 1), (384, _FORK)]}
    branches["branch3x3dbl"] = double
    return InceptionBlock(width, branches, 192, pool, 1)


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
