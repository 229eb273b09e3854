"""One process or many: the few things a training loop asks of the others."""

from __future__ import annotations

import atexit
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from .types import device_here

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among those that work together.

    Args:
        rank: its number.
        world: how many there are.
        device: its device.
        ours: whether `join` made their group.

    Example:
        >>> from psidiff.training import Processes
        >>> Processes.join("cpu").first  # without torchrun there is one
        True
    """

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU
    ours: bool = False

    @classmethod
    def join(cls, device: str = "auto") -> Processes:
        """What torchrun's environment says; without it, one process."""
        world, place = int(os.environ.get("WORLD_SIZE", "1")), device_here(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world == 1:
            return cls(device=place)
        ours = not dist.is_initialized()
        if ours:
            # What is imported after the processes have met may keep their group, as defaults of
            # `torch.distributed.nn` do. Destroyed, the group then lives on with its threads,
            # and what lets go of the last tensors while Python ends aborts the process.
            importlib.import_module("torch.distributed.nn.functional")
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
            atexit.register(_leave)
        return cls(dist.get_rank(), world, place, ours)

    @property
    def first(self) -> bool:
        """Whether this one writes the files."""
        return self.rank == 0

    def share(self, pieces: int) -> range:
        """The pieces of a batch that are this process's."""
        if pieces % self.world:
            raise ValueError(
                f"{self.world} processes cannot share {pieces} pieces of a batch: choose "
                "train.micro_batch so that batch_size / micro_batch is a multiple of them"
            )
        return range(self.rank, pieces, self.world)

    def spread(
        self, module: nn.Module, kind: str, compiled: bool = False, recompute: bool = False
    ) -> Callable[..., Tensor]:
        """The module as something to call: replicated (ddp), or sharded in place (fsdp)."""
        call: Any = module
        if recompute:
            _recompute(module)
        if compiled:
            compile_blocks(module)
        if self.world > 1 and kind == "fsdp":
            _shard(module)
        elif self.world > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            call = nn.parallel.DistributedDataParallel(module, device_ids=ids)
        return call

    def compiles(self) -> bool:
        """Whether networks are compiled here unless a recipe says otherwise."""
        return self.device.type == "cuda" and importlib.util.find_spec("triton") is not None

    @contextmanager
    def accumulating(self, call: Any, module: Any, last: bool) -> Iterator[None]:
        """Gradients travel between the processes after the last piece only."""
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(last)
        quiet = not last and hasattr(call, "no_sync")
        with call.no_sync() if quiet else nullcontext():
            yield

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        if self.world == 1:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total / self.world

    def any(self, flag: bool) -> bool:
        """Whether it is true in one of them."""
        return bool(self.mean(torch.tensor(float(flag))) > 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def told(self, work: Callable[[], Any]) -> Any:
        """What `work` gives in the first process, in all of them; its mistake likewise, so that
        none waits for one that has left."""
        return self.each(lambda: work() if self.first else None)[0]

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` gives in each process, in all of them; what goes wrong in one of them is
        raised in all, a signal before anything else."""
        if self.world == 1:
            return [work()]
        said: tuple[Any, BaseException | None] = None, None
        try:
            said = work(), None
        except BaseException as error:
            said = None, error
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, said)
        errors = [error for _, error in found if error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Exception))
        return [made for made, _ in found]

    def leave(self) -> None:
        """The threads that talk to the others end here, while there is a Python to end in. A
        group that was there before stays: who made it leaves it."""
        if self.ours:
            _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def compile_blocks(module: nn.Module, **options: Any) -> None:
    """In place: blocks alike once; without any, what a network says, or else all of it.

    options: those of torch.compile, instead of what keeps its gradients right.
    """
    for part in blocks_of(module) or _named(module, "compilable") or [module]:
        part.compile(**(options or _safe_inductor_options()))


def _safe_inductor_options() -> dict[str, Any]:
    """Without what loses gradients on a GPU.

    A fusion (torch 2.10 to 2.13): those of a vector that modulates the whole batch, as that of
    given tokens does (pytorch#193061). Padded strides (2.11, 2.12): those of attention are read
    where they are not, if length times width of a head is no multiple of 32 (pytorch#194281).
    """
    known = torch._inductor.list_options()
    wrong = ("triton.mix_order_reduction", "comprehensive_padding")
    return {"options": {name: False for name in wrong if name in known}}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer: layers of one kind, one after the other."""
    return _named(module, "blocks")


def _named(module: nn.Module, name: str) -> list[nn.Module]:
    return [b for m in module.modules() for b in getattr(m, name, ())]


class CheckpointedBlock(nn.Module):
    """A block that keeps nothing but its inputs, and is computed again in the backward pass.

    Dropout falls as it fell. A block that is compiled is compiled with this inside, so that a
    CUDA graph can hold it (`training.cuda_graph`).
    """

    def forward(self, *inputs: Any) -> Tensor:
        return checkpoint(super().forward, *inputs, use_reentrant=False)


def _recompute(module: nn.Module) -> None:
    """The blocks, in place; names of parameters stay, and blocks alike stay of one kind."""
    blocks = blocks_of(module) or _named(module, "residual_blocks")
    if not blocks:
        raise ValueError(
            "train.recompute needs a network with `blocks` or `residual_blocks`, and "
            f"{type(module).__name__} has none"
        )
    for block in blocks:
        kind: Any = type(block)
        block.__class__ = _recomputed(kind)


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"CheckpointedBlock{kind.__name__}", (CheckpointedBlock, kind), {})


def whole(value: Tensor) -> Tensor:
    """A tensor that is sharded, in one piece; every process must ask."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def own(value: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return value.to_local() if hasattr(value, "to_local") else value


def _shard(module: nn.Module) -> None:
    """Parameters and all that goes with them in parts: each layer of a list, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in list(module.modules()):
        if isinstance(part, nn.ModuleList):
            for layer in part:
                fully_shard(layer)
    fully_shard(module)
