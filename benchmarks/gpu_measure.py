"""What the rows of `benchmarks/gpu.py` share: sizes, networks, seconds, bytes and floors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from psidiff.model import Model
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Uniform

GIB = 2**30
Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large a measurement is: the issue's, unless tiny."""

    vocab: int = 50_258
    wide: tuple[int, int] = (128_256, 262_144)  # other vocabularies
    length: int = 1024
    width: int = 768
    blocks: int = 12
    heads: int = 12
    batch: int = 8
    steps: int = 1024
    few: int = 64  # steps of shorter plans
    train_batch: int = 32
    train_steps: int = 180
    log_every: int = 20
    ends: tuple[int, int] = (16, 64)  # sequences from end to end
    batches: tuple[int, ...] = (8, 16, 32)  # among which the straightforward way chooses
    image: int = 32
    image_width: int = 128
    image_mult: tuple[int, ...] = (1, 2, 2, 2)
    train_images: int = 128
    images: int = 64
    matmul: int = 8192
    copy: int = 4 * GIB
    loss_rows: int = 256
    draws: int = 10_000


TINY = Sizes(
    vocab=101,
    wide=(211, 307),
    length=16,
    width=32,
    blocks=2,
    heads=2,
    batch=2,
    steps=8,
    few=4,
    train_batch=4,
    train_steps=6,
    log_every=2,
    ends=(2, 4),
    batches=(1, 2),
    image=8,
    image_width=16,
    image_mult=(1, 2),
    train_images=2,
    images=2,
    matmul=64,
    copy=2**16,
    loss_rows=8,
    draws=200,
)


@dataclass(frozen=True)
class Bench:
    """Where to measure, how large, and in which batches sequences go from end to end."""

    device: str
    sizes: Sizes
    end_batch: int = 32

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def ms(self, work: Callable[[], Any], repeats: int = 10, warm_up: int = 3) -> float:
        """Milliseconds a call, the mean over `repeats` that follow each other."""
        for _ in range(warm_up):
            work()
        self.wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - begun) / repeats * 1e3

    def forget(self) -> None:
        """Nothing of the measurement before is left, compiled code included."""
        gc.collect()
        if self.cuda:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def peak(self) -> Iterator[Record]:
        """gib: the most memory in use meanwhile; before_gib: what was in use before;
        reserved_gib: what the allocator had asked the GPU for. Zero off a GPU."""
        found: Record = {"gib": 0.0, "before_gib": 0.0, "reserved_gib": 0.0}
        if self.cuda:
            self.wait()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            found["before_gib"] = torch.cuda.memory_allocated() / GIB
        yield found
        if self.cuda:
            self.wait()
            found["gib"] = torch.cuda.max_memory_allocated() / GIB
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB

    def tokens(self, batch: int, length: int | None = None, vocab: int | None = None) -> Any:
        shape = (batch, length or self.sizes.length)
        return torch.randint(vocab or self.sizes.vocab, shape, device=self.device)

    def transformer(self, dropout: float = 0.0, vocab: int | None = None) -> Transformer:
        """Random weights in float32, the same ones each time; no layer is zero."""
        s = self.sizes
        torch.manual_seed(0)
        with torch.device(self.device):
            network = Transformer(vocab or s.vocab, s.width, s.blocks, s.heads, dropout=dropout)
        return awake(network)

    def unet(self, dropout: float = 0.0) -> UNet:
        s = self.sizes
        torch.manual_seed(0)
        with torch.device(self.device):
            return UNet(
                image_size=s.image,
                width=s.image_width,
                width_mult=s.image_mult,
                dropout=dropout,
                num_classes=None,
            )

    def ours(self, network: nn.Module, vocab: int) -> Any:
        """A denoiser to sample from: bfloat16 weights, compiled on a GPU."""
        prior = Uniform(vocab)
        denoiser = Parameterized(network, prior).to(torch.bfloat16).eval()
        denoiser.requires_grad_(False)
        if self.cuda:
            Model(denoiser, prior, LogLinear()).compile()
        return denoiser


def awake(network: Transformer) -> Transformer:
    """Layers that begin at zero get small random weights, as if trained for a while."""
    layers = [network.output_layer.linear, network.output_layer.adaLN_modulation]
    for layer in (*layers, *(block.adaLN_modulation for block in network.blocks)):
        nn.init.normal_(layer.weight, std=0.02)
    return network


def transformer_flops(sizes: Sizes, tokens: float, head_rows: float, vocab: int) -> float:
    """Multiplications and additions of a forward pass: 24 d^2 + 4 L d a block, 2 d K a row."""
    d = sizes.width
    return (
        tokens * sizes.blocks * (24 * d**2 + 4 * sizes.length * d) + head_rows * 2 * d * vocab
    )


def parameters_of(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
