"""The fused loss and its gradients against float64 on the same inputs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from gpu_measure import Bench, Record
from torch import Tensor
from torch.nn import functional as F

from psidiff.kernels.fused_linear_loss import FusedLinearLoss
from psidiff.process import Uniform
from psidiff.process.nelbo import integrand
from psidiff.training.row_losses import nelbo_rows

LEVELS = (1e-4, 1e-2, 0.5, 0.99, 1 - 1e-4)
KINDS = {"flat": 0.1, "peaked": 3.0, "one-hot": 1.0}  # deviations of the logits
HOT = 20.0  # the logit of one token, where p is near one-hot
LIMITS = {"bfloat16": (1e-3, 1e-2), "float32": (1e-5, 1e-4)}  # loss, gradients
MOST_LOGITS = 2048  # a vocabulary whose identity matrix is small


def loss_accuracy(bench: Bench) -> Record:
    """The largest relative errors over levels, kinds, z = x and z != x; and random draws.

    together: in norm over all cases, as one input. From hidden states and weights, and (logits)
    from given logits: there the output layer is the identity, so only the loss itself can err.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        found: Record = {}
        for dtype in (torch.bfloat16, torch.float32):
            found |= _worst(bench, dtype, _name(dtype), identity=False)
            found |= _worst(bench, dtype, f"{_name(dtype)}_logits", identity=True)
            found[f"{_name(dtype)}_finite_draws"] = _finite(bench, dtype)
    finally:
        torch.set_float32_matmul_precision(before)
    return found | {"ms": 0.0}


def _worst(bench: Bench, dtype: torch.dtype, name: str, identity: bool) -> Record:
    cases = {}
    for alpha in LEVELS:
        for kind in KINDS:
            for same in (True, False):
                errors = _errors(bench, dtype, alpha, kind, same, identity)
                cases[f"alpha={alpha:g} {kind} z{'=' if same else '!='}x"] = errors
    found: Record = {}
    for place, what in enumerate(("loss", "gradient")):
        limit = LIMITS[_name(dtype)][place]
        each = {case: _norm(errors[place]) for case, errors in cases.items()}
        together = torch.stack([errors[place] for errors in cases.values()]).square().sum(0)
        found[f"{name}_{what}_together_error"] = _norm(together.sqrt())
        found[f"{name}_{what}_worst_error"] = max(each.values())
        over = [f"{case}: {error:.1e}" for case, error in each.items() if not error <= limit]
        found[f"{name}_{what}_cases_over"] = over
    return found


def _errors(
    bench: Bench, dtype: torch.dtype, alpha: float, kind: str, same: bool, identity: bool
) -> tuple[Tensor, Tensor]:
    """Norms of error and truth, (1, 2) of the loss, (3, 2) of the gradients of rows, weight and
    bias."""
    s = bench.sizes
    vocab = min(s.vocab, MOST_LOGITS) if identity else s.vocab
    inputs = _inputs(bench, dtype, s.loss_rows, vocab, s.width, KINDS[kind])
    hidden, weight, bias, z, x = inputs
    if kind == "one-hot":  # at x in every other row
        hot = torch.where(torch.arange(len(x), device=x.device)[:, None] % 2 == 0, x, z)
        hidden = _rounded(HOT * F.normalize(weight[hot], dim=-1), dtype)
    if identity:
        hidden = _rounded(F.linear(hidden, weight, bias), dtype)
        weight, bias = torch.eye(vocab, device=x.device), torch.zeros_like(bias)
    z = x if same else torch.where(z == x, (x + 1) % vocab, z)
    a, da = (torch.full((s.loss_rows, 1), v, dtype=torch.float64) for v in (alpha, -1.0))
    fast = _fused(bench, dtype, hidden, weight, bias, z, x, a, da)
    held = [v.double().requires_grad_() for v in (hidden, weight, bias)]
    log_x = F.linear(*held).log_softmax(-1)
    levels = (a[..., None], da[..., None])  # on the CPU, where they stay float64
    true = integrand(Uniform(vocab), z, x, log_x, *levels).mean()
    true.backward()
    slopes = [_norms(got, v.grad) for got, v in zip(fast[1:], held, strict=True)]
    return torch.stack([_norms(fast[0], true.detach())]), torch.stack(slopes)


def _finite(bench: Bench, dtype: torch.dtype) -> int:
    """How many of the random draws have a loss and gradients that are numbers."""
    count, vocab, width = bench.sizes.draws, 256, 64
    levels = torch.rand(count, 1, dtype=torch.float64)
    levels[::4] = 10 ** (-6 * levels[::4])
    levels[1::4] = 1 - 10 ** (-6 * levels[1::4])
    hidden, weight, bias, z, x = _inputs(bench, dtype, count, vocab, width, 1.0)
    hidden = hidden * torch.logspace(-2, 2, count, device=bench.device)[:, None, None]
    z = torch.where(torch.rand(z.shape, device=z.device) < 0.5, x, z)
    down = torch.full_like(levels, -1.0)
    loss, *slopes = _fused(
        bench, dtype, hidden, weight, bias, z, x, levels.clamp(1e-6, 1 - 1e-6), down
    )
    sums = all(bool(v.isfinite().all()) for v in (loss, *slopes[1:]))  # over all draws
    return int(slopes[0].isfinite().all(-1).sum()) if sums else 0


def _fused(
    bench: Bench,
    dtype: torch.dtype,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor,
    x: Tensor,
    alpha: Tensor,
    dalpha: Tensor,
) -> tuple[Any, ...]:
    """Mean loss and gradients as the trainer makes them."""
    rows = nelbo_rows(Uniform(len(weight)), z, x, alpha, dalpha)
    assert rows is not None
    weights = torch.full(z.shape, 1 / z.numel(), device=bench.device)
    held = [v.clone().requires_grad_() for v in (hidden, weight, bias)]
    low = dtype is torch.bfloat16
    with torch.autocast(bench.device.split(":")[0], dtype) if low else nullcontext():
        loss = FusedLinearLoss(rows, weights, compiled=bench.cuda)(*held)
    loss.backward()
    return loss.detach().double(), *(v.grad for v in held)


def _inputs(
    bench: Bench, dtype: torch.dtype, rows: int, vocab: int, width: int, scale: float
) -> tuple[Tensor, ...]:
    """float32 tensors whose values `dtype` can hold, so both ways read the same numbers."""
    torch.manual_seed(1)
    device = bench.device
    hidden = torch.randn(rows, 1, width, device=device)
    weight = torch.randn(vocab, width, device=device) * (scale / width**0.5)
    bias = torch.randn(vocab, device=device) * 0.1
    ids = (torch.randint(vocab, (rows, 1), device=device) for _ in range(2))
    return *(_rounded(v, dtype) for v in (hidden, weight, bias)), *ids


def _rounded(v: Tensor, dtype: torch.dtype) -> Tensor:
    return v.to(dtype).float()


def _norms(got: Tensor, true: Any) -> Tensor:
    return torch.stack(((got.double() - true).norm(), true.norm())).cpu()


def _norm(norms: Tensor) -> float:
    """The relative error, of several tensors the largest."""
    return (norms[:, 0] / norms[:, 1]).max().item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
