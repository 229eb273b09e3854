"""Which optimizer moves which parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..distributed import blocks_of
from .config import Settings
from .muon import Muon

Optimizers = tuple[torch.optim.Optimizer, ...]


def optimizers_of(network: nn.Module, settings: Settings) -> Optimizers:
    """AdamW for all; with Muon, AdamW for what is no matrix inside a block.

    Their state exists from the start, so that a checkpoint can be read into it. The rates of a
    step are `initial_rate` of each group times `Settings.pace`.
    """
    matrices = block_matrices(network) if settings.optimizer == "muon" else {}
    if settings.optimizer == "muon" and not matrices:
        raise ValueError("train.optimizer=muon needs model.kind=transformer")
    rest = [p for p in network.parameters() if p not in matrices]
    made: list[torch.optim.Optimizer] = [_adamw(rest, settings)]
    if matrices:
        decay = settings.weight_decay
        rate = settings.matrix_rate
        made.append(Muon(list(matrices), rate, weight_decay=decay, parts=matrices))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_rate"] = group["lr"]
    return tuple(made)


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
