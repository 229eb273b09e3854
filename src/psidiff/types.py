"""The words all layers share: B sequences, L positions, K tokens.

jaxtyping describes shapes to type checkers and, under pytest, checks them at run time. The
package runs without it: the names are then plain tensors.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

FREE = -1  # in place of a token: a position that is not given, or not made yet
_ALIGNMENT = 64  # bytes

if TYPE_CHECKING or "pytest" in sys.modules:
    with suppress(ImportError):  # pytest of a project that has no jaxtyping
        from jaxtyping import Float, Int

if TYPE_CHECKING or "Float" in globals():
    Tokens = Int[Tensor, "B L"]
    Probs = Float[Tensor, "B L K"]
    PerToken = Float[Tensor, "B L"]
    LogitRows = Float[Tensor, "N K"]
    Level = float | int | Float[Tensor, "..."]
else:
    Tokens = Probs = PerToken = LogitRows = Tensor
    Level = float | int | Tensor
"""Level: alpha, one number for the batch, or a tensor that broadcasts to (B, L, 1)."""


class SoftTokens(NamedTuple):
    """A superposition of k tokens at each position, by falling weight.

    Args:
        ids: token ids, (B, L, k).
        weights: their weights, (B, L, k).
        hard: z_t, the token of the largest weight, (B, L).

    Example:
        >>> from psidiff.types import SoftTokens
        >>> ids, weights = torch.tensor([[[3, 1]]]), torch.tensor([[[0.9, 0.1]]])
        >>> SoftTokens(ids, weights, ids[..., 0]).hard
        tensor([[3]])
    """

    ids: Any  # (B, L, k)
    weights: Any  # (B, L, k)
    hard: Any  # (B, L)


class Levels(NamedTuple):
    """One level a sequence, and where tokens are given: there it is 1.

    What networks that know it are told; they then make two conditions a sequence, not L.
    """

    alpha: Any  # (B, 1, 1)
    given: Any  # (B, L)

    def per_position(self) -> Tensor:
        """What other networks are told: the level of each token, (B, L, 1)."""
        return torch.where(self.given[..., None], 1.0, self.alpha)


class Rows(NamedTuple):
    """Sequences of a dataset; `real` is False where a shorter one is padded.

    given marks what may be shown clean in training, for data that knows it (the clues of a
    puzzle); for others the trainer draws spans.
    """

    tokens: Any  # (n, L)
    labels: Any = None  # (n,) or None
    real: Any = None  # (n, L) or None
    given: Any = None  # (n, L) or None


@runtime_checkable
class Dataset(Protocol):
    """Sequences of one length, by number. Flips and other chances come from the generator."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows: ...


@runtime_checkable
class Denoiser(Protocol):
    """log x_theta: what each clean token is, given all the *other* noisy ones.

    z holds tokens (B, L); for networks that are trained with a curriculum also SoftTokens.
    Two optional methods let samplers and losses skip most of the output layer:
    `hidden(z, alpha, labels) -> (B, L, d)` and `head(rows) -> logits (N, K)`.
    """

    def __call__(self, z: Any, alpha: Level, labels: Tensor | None = None) -> Probs: ...


@dataclass(frozen=True)
class Traits:
    """What a denoiser, or the network in it, can do beyond its call.

    Args:
        head: `hidden` and `head` are its two halves.
        levels: takes `Levels` beside tensors (B, L, 1).
        padding: takes a fourth argument `mask` (B, L), False at padding.
        recordable: a pass is work on tensors of one device, which a GPU may replay.
        fusible: takes `then`, the loss fused with the output layer.
        reader: `reader(room)` gives logits from left to right, nothing computed twice.
        num_classes: number of labels; None: unknown, or unconditional.

    Example:
        >>> from psidiff.types import Traits
        >>> Traits(num_classes=10).head
        False
    """

    head: bool = False
    levels: bool = False
    padding: bool = False
    recordable: bool = False
    fusible: bool = False
    reader: bool = False
    num_classes: int | None = None


def traits(denoiser: Any) -> Traits:
    """The `Traits` that a denoiser declares as `.traits`; of other callables, what they define:
    `hidden` and `head`, `num_classes`, an argument `mask`."""
    declared = getattr(denoiser, "traits", None)
    if isinstance(declared, Traits):
        return declared
    return Traits(
        head=all(callable(getattr(denoiser, name, None)) for name in ("hidden", "head")),
        padding="mask" in _arguments(getattr(denoiser, "forward", denoiser)),
        num_classes=getattr(denoiser, "num_classes", None),
    )


def _arguments(function: Any) -> tuple[str, ...]:
    """Names of the arguments; `inspect.signature` takes longer than a step may."""
    call = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)  # a builtin has none
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def per_token(level: Level) -> Level:
    """A level that broadcasts to (B, L, 1), as one that broadcasts to (B, L)."""
    return level.squeeze(-1) if isinstance(level, Tensor) and level.ndim else level


def check_unit(name: str, value: Level) -> None:
    """`value` lies in [0, 1], every entry of it."""
    if isinstance(value, Tensor):
        wrong = ~((value >= 0) & (value <= 1))
        if not bool(wrong.any()):
            return
        value = value[wrong][0].item()
    if not 0 <= as_number(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value:g}")


def check_level(name: str, level: Level, shape: tuple[int, ...] = ()) -> None:
    """A number in [0, 1], or a tensor of them that broadcasts to (B, L, 1)."""
    check_unit(name, level)
    check_broadcasts(name, level, shape)


def check_broadcasts(name: str, level: Level, shape: tuple[int, ...] = ()) -> None:
    """A number, or a tensor that broadcasts to (B, L, 1); shape: (B, L), where it is known."""
    if not isinstance(level, Tensor):
        return
    sizes = zip(reversed(level.shape), (1, *reversed(shape)), strict=False)
    if level.ndim > 3 or any(have not in (1, wanted) for have, wanted in sizes):
        full = f" = {(*shape, 1)}" if shape else ""
        raise ValueError(
            f"{name} must broadcast to (B, L, 1){full}, got shape {tuple(level.shape)}"
        )


def check_alpha_order(alpha_s: Level, alpha_t: Level, shape: tuple[int, ...] = ()) -> None:
    """0 <= alpha_t <= alpha_s <= 1: a step goes from more noise to less."""
    check_level("alpha_t", alpha_t, shape)
    check_level("alpha_s", alpha_s, shape)
    late = torch.as_tensor(alpha_s < alpha_t)
    if bool(late.any()):
        s, t = (torch.as_tensor(a).expand(late.shape)[late][0] for a in (alpha_s, alpha_t))
        raise ValueError(f"alpha_s must not be below alpha_t, got {s:g} < {t:g}")


def as_ids(name: str, ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids as int64; they are integers in [0, vocab_size)."""
    check_integers(name, ids)
    ids = ids.long()
    wrong = (ids < 0) | (ids >= vocab_size)
    if bool(wrong.any()):
        got = ids[wrong][0].item()
        raise ValueError(f"{name} must hold token ids in [0, {vocab_size}), got {got}")
    return ids


def as_tokens(name: str, tokens: Tensor, vocab_size: int) -> Tensor:
    """Sequences of token ids, (B, L)."""
    check_tensor(name, tokens)
    if tokens.ndim != 2:
        raise ValueError(f"{name} must have shape (B, L), got {tuple(tokens.shape)}")
    return as_ids(name, tokens, vocab_size)


def as_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`, numpy's included."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        shown = textwrap.shorten(repr(value), 40) if isinstance(value, str) else value
        raise ValueError(f"{name} must be an integer of at least {least}, got {shown}")
    return count


def as_number(name: str, value: Any) -> float:
    """One number, numpy's and torch's included; a word is none."""
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            return float(value)
    raise ValueError(f"{name} must be one number, got {textwrap.shorten(repr(value), 40)}")


def check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """`value` is one of a few words."""
    if value not in allowed:
        *first, last = map(repr, allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def as_device(device: Any) -> torch.device:
    """The device of this name, as torch has it."""
    try:
        made = torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"device must be cpu, cuda, cuda:N or mps, got {device!r}") from None
    if made.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {made} is asked for, and torch sees no GPU here")
    return made


def device_here(name: str | torch.device = "auto") -> torch.device:
    """A device by its name, if this machine has it.

    "auto" is the GPU if there is one; "cuda" is, under torchrun, each process's own.
    """
    name = str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps(:0)?|cuda(:\d+)?", name):
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    device = as_device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device mps is asked for, and torch sees no Apple GPU here")
    if device.type != "cuda":
        return device
    index = device.index
    if index is None:
        index = int(os.environ.get("LOCAL_RANK") or torch.cuda.current_device())
    last = torch.cuda.device_count() - 1
    if index > last:
        raise ValueError(f"device cuda:{index} is asked for, and the last here is cuda:{last}")
    return torch.device("cuda", index)


def check_tensor(name: str, value: Any) -> None:
    """`value` is a tensor, not a list or an array."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {textwrap.shorten(repr(value), 40)}")


def check_integers(name: str, tensor: Tensor) -> None:
    """`tensor` holds integers: tokens, labels."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ValueError(f"{name} must hold integers, got dtype {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """`tensor` has exactly this shape."""
    check_tensor(name, tensor)
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_denoiser_output(answer: Any, vocab_size: int) -> None:
    """What a denoiser gives speaks of the prior's K tokens."""
    if not isinstance(answer, Tensor):
        kind = type(answer).__name__
        raise ValueError(f"the denoiser answered with {kind}; it should give (B, L, K)")
    if answer.shape[-1] != vocab_size:
        raise ValueError(
            f"the denoiser speaks of {answer.shape[-1]} tokens, the prior of {vocab_size}"
        )


def check_float64(device: torch.device | str) -> None:
    """float64 arithmetic exists on `device`; Apple's MPS has none."""
    if torch.device(device).type == "mps":
        raise ValueError(f"float64 does not exist on device {device}: use float32 or the CPU")


def at_least_float32(logits: Tensor) -> Tensor:
    """bfloat16 and float16 are for networks; probabilities begin at float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def align_memory(value: Tensor) -> Tensor:
    """The same numbers, beginning where torch would have put them: those read from a file lie
    anywhere in it, and some CPUs then add them up in another order."""
    astray = value.device.type == "cpu" and value.data_ptr() % _ALIGNMENT
    return value.clone() if astray else value


def working_dtype(device: torch.device | str) -> torch.dtype:
    """float64 on the CPU; float32 on accelerators, where float64 is slow or missing."""
    return torch.float64 if torch.device(device).type == "cpu" else torch.float32
