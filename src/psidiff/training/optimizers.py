"""What moves the parameters: AdamW, Muon, and their exponential moving average.

Muon is momentum whose singular values are all set to 1, for the matrices inside a network.
G = U S V^T becomes U V^T by five steps of a polynomial in G (Newton-Schulz), so that every
direction a gradient has is taken equally far. Matrices of one shape go through it together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import blocks_of, own
from .config import Settings

_A, _B, _C = 3.4445, -4.7750, 2.0315  # s -> a s + b s^3 + c s^5 lifts small s fastest
_STEPS = 5


def optimizers_of(network: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """AdamW for all; with Muon, AdamW for what is no matrix inside a block.

    Their state exists from the start, so that a checkpoint can be read into it. The rates of a
    step are `initial_rate` of each group times `Settings.lr_factor`.
    """
    matrices = block_matrices(network) if settings.optimizer == "muon" else {}
    if settings.optimizer == "muon" and not matrices:
        raise ValueError("train.optimizer=muon needs model.kind=transformer")
    rest = [p for p in network.parameters() if p not in matrices]
    made: list[torch.optim.Optimizer] = [_adamw(rest, settings)]
    if matrices:
        made.append(Muon(matrices, settings.matrix_rate, settings.weight_decay))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_rate"] = group["lr"]
    return made


def block_matrices(network: nn.Module) -> dict[Tensor, int]:
    """The weights of the linear layers in a transformer's blocks, and of how many parts each is
    made; not those that read the noise level, which begin at zero."""
    found: dict[Tensor, int] = {}
    for block in blocks_of(network):
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear) and "adaLN" not in name:
                found[layer.weight] = 3 if name.endswith("qkv") else 1
    return found


def _adamw(parameters: list[nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    fused = parameters[0].device.type == "cuda"
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class Muon(torch.optim.Optimizer):
    """W <- W - rate sqrt(max(1, rows/columns)) orth(momentum), after decaying W.

    A matrix of a layer that makes several things at once (queries, keys and values) is taken
    apart: `parts` has all parameters, and of how many each is made.
    """

    momentum = 0.95

    def __init__(self, parts: dict[Tensor, int], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(list(parts), {"lr": lr, "weight_decay": weight_decay})
        self.parts = parts
        for parameter in parts:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            grads = [p.grad for p in moved]
            memory = [self.state[p]["momentum"] for p in moved]
            torch._foreach_lerp_(memory, grads, 1 - self.momentum)
            ahead = torch._foreach_lerp(grads, memory, self.momentum)  # Nesterov's
            torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            for parameter, update in zip(moved, self._orthogonal(moved, ahead), strict=True):
                rows, columns = update.shape[-2:]
                size = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.sub_(update.reshape(parameter.shape), alpha=size)

    def _orthogonal(self, parameters: list[Tensor], grads: Any) -> list[Tensor]:
        """Each gradient made orthogonal, in its parts; one stack for each shape."""
        split = [
            g.unflatten(0, (self.parts[p], -1)) for p, g in zip(parameters, grads, strict=True)
        ]
        shapes: dict[tuple[int, ...], list[int]] = {}
        for place, g in enumerate(split):
            shapes.setdefault(tuple(g.shape[1:]), []).append(place)
        made: list[Tensor] = list(split)
        for places in shapes.values():
            whole = orthogonal(torch.cat([split[i] for i in places]))
            sizes = [len(split[i]) for i in places]
            for i, part in zip(places, whole.split(sizes), strict=True):
                made[i] = part
        return made


def orthogonal(stack: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with their singular values pushed into about [.7, 1.2].

    X <- a X + (b A + c A^2) X, A = X X^T, from X = G/|G|; in bfloat16 on a GPU.
    """
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.mT if tall else x).to(stack.dtype)


class EMA:
    """An exponential moving average of a network's parameters.

    shadow <- d shadow + (1 - d) parameter, d = min(decay, (1 + n)/(10 + n)) at update n.

    Args:
        network: its parameters are copied.
        decay: in [0, 1).

    Example:
        >>> from psidiff.training import EMA
        >>> network = torch.nn.Linear(2, 1)
        >>> ema = EMA(network)
        >>> ema.update(network)
        >>> bool((ema.shadow["weight"] == network.weight).all())
        True
    """

    def __init__(self, network: nn.Module, decay: float = 0.9999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay:g}")
        self.decay = decay
        self.updates: int = 0
        self.shadow: dict[str, Tensor] = {
            n: p.detach().clone() for n, p in network.named_parameters()
        }

    def rate(self) -> float:
        """The decay of the latest update: young averages forget faster."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        self.updates += 1
        parameters = dict(network.named_parameters())
        averages = [own(average) for average in self.shadow.values()]
        latest = [own(parameters[name]) for name in self.shadow]
        torch._foreach_lerp_(averages, latest, 1 - self.rate())
