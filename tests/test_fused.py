"""The fused loss against the formula as it stands, and Muon."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import generator

from psidiff.kernels import fused_linear_loss, uniform_nelbo
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Masked, Mixed, Uniform
from psidiff.process.nelbo import nelbo
from psidiff.training import (
    Batch,
    Nelbo,
    NextToken,
    RelaxedNelbo,
    random_spans,
    stratified_times,
)
from psidiff.training.config import Settings
from psidiff.training.objective import FusedLossInputs
from psidiff.training.optimizers import Muon, block_matrices, optimizers_of, orthogonal
from psidiff.training.row_losses import uniform_row_loss
from psidiff.types import traits

K, L, B = 11, 6, 8
SCHEDULE = LogLinear(1e-3)
OBJECTIVES = {
    "uniform": (Uniform(K), Nelbo(Uniform(K), SCHEDULE)),
    "warped": (Uniform(K), Nelbo(Uniform(K), SCHEDULE, time_power=3.0)),
    "masked": (Masked(K, 4), Nelbo(Masked(K, 4), SCHEDULE)),
    "sparse": (Uniform(K), RelaxedNelbo(K, 2)),
    "dense": (Uniform(K), RelaxedNelbo(K, None)),
    "next-token": (None, NextToken(K - 1)),
}


def network(prior, dtype=torch.float64, **options):
    torch.manual_seed(0)
    made = Transformer(K, 16, 2, 2, 8, 0.0, causal=prior is None, **options)
    for parameter in made.parameters():  # the output layer begins at zero
        torch.nn.init.normal_(parameter, std=0.3)
    made = made.to(dtype)
    return made if prior is None else Parameterized(made, prior)


def batch(prior, given=True, padded=True):
    tokens = torch.randint(3, (B, L), generator=generator(1))
    held = random_spans((B, L), 0.6, generator(2)) if given and prior is not None else None
    real = (torch.arange(L) < L - 1).expand(B, L) if padded else None
    return Batch(tokens, stratified_times(B, generator(3)), given=held, real=real)


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("tied", (False, True), ids=("own", "tied"))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_fused_loss_and_its_gradients_are_those_of_the_formula(name, tied, monkeypatch):
    monkeypatch.setattr(
        fused_linear_loss, "_ENTRIES", 7 * K
    )  # chunks that do not divide the rows
    prior, objective = OBJECTIVES[name]
    module, asked = network(prior, tied=tied), batch(prior)
    plain = asked.mean(objective(module, asked, generator(4)))
    want = gradients(module, plain)
    fused = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked).loss(module)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-8)  # columns are float32
    for got, wanted in zip(gradients(module, 3 * fused), want, strict=True):
        torch.testing.assert_close(got, 3 * wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "next-token"])
def test_a_network_that_only_gives_logits_has_the_same_loss_and_gradients(name, monkeypatch):
    monkeypatch.setattr(fused_linear_loss, "_ENTRIES", 7 * K)
    prior, objective = OBJECTIVES[name]
    module, asked = network(prior), batch(prior)
    want = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked).loss(module)
    slopes = gradients(module, want)
    seen, inner = [], module.network

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, z, alpha, labels=None, mask=None):
            seen.append(alpha)
            return self.inner(z, alpha, labels, mask)

    module = Parameterized(Logits(), prior)
    assert traits(module).fusible and not traits(module).recordable
    got = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked).loss(module)
    assert seen[0].shape == (B, L, 1)  # told as every network is
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    for one, other in zip(gradients(module, 3 * got), slopes, strict=True):
        torch.testing.assert_close(one, 3 * other, rtol=1e-5, atol=1e-7)


def test_a_prior_without_a_closed_form_says_so():
    prior = Mixed(K, 4, 0.3)
    assert Nelbo(prior, SCHEDULE).prepare(batch(prior), generator(4)).row_loss is None


def test_float32_rows_agree_with_float64_from_almost_clean_to_almost_noise():
    """alpha near 0 and 1, x_theta near one-hot, r = i and r != i."""
    n, K = 4000, 50
    g = generator(0)
    alpha = torch.cat(
        (10.0 ** -torch.linspace(0.01, 3, n // 2), 1 - 10.0 ** -torch.linspace(0.01, 6, n // 2))
    )
    alpha = alpha.double()[:, None]
    scale = 10 ** (3 * torch.rand(n, 1, generator=g) - 1.5)
    logits = torch.randn(n, K, generator=g) * scale
    x = torch.randint(K, (n,), generator=g)
    z = torch.where(torch.rand(n, generator=g) < 0.5, x, torch.randint(K, (n,), generator=g))
    from psidiff.training.row_losses import nelbo_rows

    columns = nelbo_rows(
        Uniform(K), z[:, None], x[:, None], alpha, -torch.ones_like(alpha)
    ).columns
    flat = [c.flatten() for c in columns]
    loss, slope = uniform_row_loss(logits, *flat)
    exact = logits.double().requires_grad_()
    want = nelbo(
        Uniform(K),
        z[:, None],
        x[:, None],
        exact.log_softmax(-1)[:, None],
        alpha[..., None],
        -torch.ones_like(alpha)[..., None],
    )[:, 0]
    (wanted,) = torch.autograd.grad(want.sum(), exact)
    assert loss.isfinite().all() and slope.isfinite().all()
    assert (loss - want).norm() < 1e-5 * want.norm()
    assert (slope - wanted).norm() < 1e-4 * wanted.norm()


def test_the_kernels_polynomial_is_log1p():
    """1 + x = 2^e (1 + f), log1p(x) = e ln 2 + f + f^2 q(f); in float32, as in the kernel."""
    x = torch.cat((torch.logspace(-40, 30, 70_001), torch.linspace(0, 8, 70_001)))
    exponent = ((1 + x).view(torch.int32) - 0x3F400000) & -0x800000
    shrink = (0x3F800000 - exponent).view(torch.float32)
    f = x * shrink + (shrink - 1)
    q = torch.zeros_like(f)
    for coefficient in reversed(uniform_nelbo.LOG1P):
        q = coefficient + f * q
    got = exponent * (math.log(2) * 2.0**-23) + (f + f * f * q)
    want = x.double().log1p()
    assert f.min() >= -0.25 and f.max() < 0.5
    assert ((got - want).abs() <= 3e-7 * want).all()
    assert torch.equal(got[x < 1e-8], x[x < 1e-8])


def with_kernel(inputs, kernel):
    """The same loss by another kernel."""
    row_loss = inputs.row_loss
    return inputs._replace(
        row_loss=row_loss._replace(form=replace(row_loss.form, kernel=kernel))
    )


@pytest.mark.parametrize("name", ("uniform", "sparse"))
def test_where_there_are_kernels_a_question_is_judged_by_them_in_empty_columns_too(
    name, monkeypatch
):
    """The form that a question carries has its kernel; columns beyond K change nothing."""
    prior, objective = OBJECTIVES[name]
    module, asked = network(prior), batch(prior)
    question = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked)
    want = gradients(module, question.loss(module))
    seen = []

    def kernel(low, vocab, logits, offset, weights, *columns):
        seen.append(logits.shape[-1])
        return fused_linear_loss._weighted_loss(
            uniform_row_loss, low, vocab, logits, offset, weights, *columns
        )

    monkeypatch.setattr(fused_linear_loss, "_has_kernels", lambda rows: True)
    monkeypatch.setattr(fused_linear_loss, "_missing", lambda weight: -len(weight) % 16)
    assert question.row_loss.form.kernel is uniform_nelbo.uniform_nelbo_triton
    again = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked)
    assert question.row_loss.form == again.row_loss.form
    question = with_kernel(question, kernel)
    got = gradients(module, question.loss(module))
    assert seen == [16, 16]  # rows to be compared, then all
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fault", ("wrong", "slightly wrong", "raises"))
def test_a_kernel_that_is_wrong_or_cannot_be_built_is_said_and_not_used(fault, monkeypatch):
    prior, objective = OBJECTIVES["uniform"]
    module, asked = network(prior), batch(prior)
    question = FusedLossInputs.of(objective.prepare(asked, generator(4)), asked)
    want = gradients(module, question.loss(module))

    def kernel(low, vocab, logits, offset, weights, *columns):
        if fault == "raises":
            raise RuntimeError("no such instruction\nand much more")
        if fault == "wrong":
            return weights * 0 + 1, logits.to(low)
        made = fused_linear_loss._weighted_loss(
            uniform_row_loss, low, vocab, logits, offset, weights, *columns
        )
        return made[0], made[1] * torch.where(torch.arange(len(weights)) == 3, 1.02, 1)[:, None]

    monkeypatch.setattr(fused_linear_loss, "_has_kernels", lambda rows: True)
    question = with_kernel(question, kernel)
    said = "no such instruction" if fault == "raises" else "it is wrong here"
    with pytest.warns(UserWarning, match=f"is not used: {said}$"):
        got = gradients(module, question.loss(module))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_no_tensor_holds_all_logits(monkeypatch):
    monkeypatch.setattr(fused_linear_loss, "_ENTRIES", 10 * K)
    most = 0

    class Widest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == K:
                most = max(most, out.numel() // K)
            return out

    module, asked = network(Uniform(K)), batch(Uniform(K))
    with Widest():
        question = Nelbo(Uniform(K), SCHEDULE).prepare(asked, generator(4))
        FusedLossInputs.of(question, asked).loss(module).backward()
    assert 0 < most <= 16  # a chunk of ten rows, and the table of 16 x K


def test_muon_makes_matrices_orthogonal_and_takes_attention_apart():
    made = orthogonal(torch.randn(3, 12, 20, generator=generator(0)))
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.6 and values.max() < 1.3
    matrices = block_matrices(network(Uniform(K)))
    assert sorted(matrices.values()) == [1, 1, 1, 1, 1, 1, 3, 3]

    whole = torch.nn.Parameter(torch.zeros(6, 4))
    whole.grad = torch.randn(6, 4, generator=generator(1))
    Muon({whole: 3}, lr=1.0).step()
    for part, grad in zip(whole.detach().view(3, 2, 4), whole.grad.view(3, 2, 4), strict=True):
        torch.testing.assert_close(part, -orthogonal(0.05 * 1.95 * grad[None])[0])


def test_every_parameter_has_one_optimizer_and_muon_needs_blocks():
    module = network(Uniform(K))
    adamw, muon = optimizers_of(module, Settings(10, optimizer="muon", matrix_rate=0.03))
    counts = [sum(len(g["params"]) for g in o.param_groups) for o in (adamw, muon)]
    assert sum(counts) == len(list(module.parameters())) and counts[1] == 8
    assert muon.param_groups[0]["initial_rate"] == 0.03
    with pytest.raises(ValueError, match=r"muon needs model\.kind"):
        optimizers_of(torch.nn.Linear(2, 2), Settings(10, optimizer="muon"))
    with pytest.raises(ValueError, match="muon needs whole matrices"):
        Settings(10, optimizer="muon", parallel="fsdp")
