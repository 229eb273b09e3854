"""Logits read where they lie: the plain form, and the kernels beside it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toys import generator

from psidiff.integrations import step_graph
from psidiff.integrations.psi_settings import Settings
from psidiff.integrations.psi_steps import PsiSteps
from psidiff.kernels import logit_rows, logit_step, mix_kernel
from psidiff.kernels.counter_rng import MULTIPLY, _mix, blocked_race
from psidiff.kernels.logit_rows import LogitBlock
from psidiff.sampling.dense_logits import row_filters
from psidiff.sampling.filters import chain

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(
    not (GPU and logit_step.has_triton), reason="there is no GPU with Triton here"
)
FILTERS = {
    "none": chain(),
    "temperature": chain(0.7),
    "keep": chain(top_p=0.9, static=True),
    "drop": chain(1.3, top_p=0.5, nucleus="drop", static=True),
    "one": chain(top_p=0.01, static=True),
}


def rows(width, count=(2, 3), dtype=torch.float32, scale=3.0, apart=False):
    """Logits (B, L, K), tokens, and random words; apart: with other rows between sequences."""
    g = generator(width)
    made = scale * torch.randn(count[0], count[1] + 2, width, generator=g)
    logits = made.to(dtype).to(DEVICE)[:, : count[1]]
    z = torch.randint(width, count, generator=g).to(DEVICE)
    bits = torch.randint(-(2**63), 2**63 - 1, (z.numel(),), generator=g).to(DEVICE)
    return logits if apart else logits.contiguous(), z, bits


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("chunk", [1, 40, 10**6])
def test_rows_are_what_softmax_and_the_race_say_in_pieces_of_any_size(
    apart, chunk, monkeypatch
):
    logits, z, bits = rows(19, apart=apart)
    monkeypatch.setattr(logit_rows, "_CHUNK", {"cpu": chunk, "cuda": chunk})
    found = logit_rows.plain(LogitBlock(logits, z), bits, row_filters(chain(0.7)))
    x = (logits / 0.7).flatten(0, 1).softmax(-1)
    every = torch.arange(len(x))
    assert torch.equal(found.best, x.argmax(-1))
    assert torch.equal(found.drawn, blocked_race(x, bits))
    torch.testing.assert_close(found.at_best, x.amax(-1))
    torch.testing.assert_close(found.at_z, x[every, z.flatten()])
    torch.testing.assert_close(found.at_drawn, x[every, found.drawn])


def test_the_logit_of_z_is_shifted_and_the_mask_is_impossible():
    logits, z, bits = rows(19)
    z[0, 0], shift = 18, torch.randn(z.shape, generator=generator(1))
    found = logit_rows.plain(LogitBlock(logits, z, shift, 18), bits, row_filters(chain()))
    changed = logits.scatter_add(-1, z[..., None], shift[..., None])
    changed[..., 18] = -torch.inf
    x = changed.softmax(-1).gather(-1, z[..., None]).flatten()
    torch.testing.assert_close(found.at_z, x)
    assert not (found.drawn == 18).any() and not (found.best == 18).any()


def test_on_a_cpu_only_what_is_asked_is_drawn():
    logits, z, bits = rows(19)
    block, how = LogitBlock(logits, z), row_filters(chain())
    every = logit_rows.plain(block, bits, how)
    asked = torch.tensor([True, False, False, True, False, True], device=DEVICE)
    some = logit_rows.plain(block, bits, how, asked)
    assert torch.equal(some.drawn[asked], every.drawn[asked])
    none = logit_rows.plain(block, bits, how, ~asked & False)
    assert GPU or torch.equal(none.drawn, none.best)


def test_filters_that_no_kernel_knows_are_left_to_torch():
    assert row_filters(chain(0.5, top_p=0.9)).simple
    assert not row_filters(chain(top_k=4)).simple
    assert not row_filters(chain(min_p=0.1)).simple


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("width", [2, 27, 1000])
def test_the_kernels_find_what_the_plain_form_finds(width, name, changed, dtype):
    logits, z, bits = rows(width, dtype=dtype, apart=True)
    shift = 4 * torch.randn(z.shape, generator=generator(2)).to(DEVICE)
    block = LogitBlock(logits, z, shift, width // 2) if changed else LogitBlock(logits, z)
    how = row_filters(FILTERS[name])
    got, want = (f(block, bits, how) for f in (logit_rows.by_kernel, logit_rows.plain))
    assert torch.equal(got.best, want.best) and torch.equal(got.drawn, want.drawn)
    for one, other in zip(got[1::2], want[1::2], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-4, atol=1e-7)
    greedy = logit_rows.by_kernel(block, None, how)
    assert torch.equal(greedy.drawn, want.best)


@kernels
@pytest.mark.parametrize("scale", [0.0, 0.01, 30.0])
def test_a_row_of_ties_or_of_one_token_is_cut_as_in_the_plain_form(scale, monkeypatch):
    monkeypatch.setattr(logit_step, "_PASSES", {2: 1, 4: 1})  # much is left to settle
    monkeypatch.setattr(logit_step, "_PASS_ROWS", 16)
    logits, z, bits = rows(300, dtype=torch.bfloat16, scale=scale)
    for name in ("keep", "drop"):
        block, how = LogitBlock(logits, z), row_filters(FILTERS[name])
        got, want = (f(block, bits, how) for f in (logit_rows.by_kernel, logit_rows.plain))
        assert torch.equal(got.drawn, want.drawn)
        torch.testing.assert_close(got.at_best, want.at_best, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(not logit_step.has_triton, reason="Triton is not installed")
def test_in_tritons_interpreter_the_kernels_find_what_the_plain_form_finds():
    script = Path(__file__).with_name("kernels_interpreted.py")
    known = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@kernels
def test_a_row_without_a_number_is_told_and_breaks_nothing():
    logits, z, bits = rows(40)
    logits[0, 0], logits[0, 1, 3] = -torch.inf, torch.nan
    for name in ("none", "keep"):
        found = logit_rows.by_kernel(LogitBlock(logits, z), bits, row_filters(FILTERS[name]))
        assert (~found.at_best.isfinite()).tolist() == [True, True, False, False, False, False]
        assert bool((found.drawn < 40).all()) and bool((found.drawn >= 0).all())


@kernels
def test_the_hash_in_one_kernel_is_the_hash():
    words = torch.arange(-700, 700, device=DEVICE).view(2, 700) * MULTIPLY[1]
    assert torch.equal(mix_kernel.mix_in_place(words.clone(), MULTIPLY), _mix(words.clone()))


@pytest.mark.skipif(not GPU, reason="there is no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 1.0},
        {"kappa": "ancestral", "posterior": "marginal", "temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "predicts": "plain"},
    ],
)
def test_no_step_but_the_last_waits_for_a_gpu(config, dtype):
    steps = PsiSteps(Settings.of(config), 4)
    logits, z, _ = rows(500, dtype=dtype, apart=True)
    cold = torch.Generator("cuda").manual_seed(0)
    for _ in range(3):  # kernels are built and compared once, then the rest is recorded
        steps.step(logits, 1, z, generator=cold)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.step(logits, 2, z, generator=cold)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not GPU, reason="there is no GPU here")
def test_a_gpu_says_on_the_last_step_what_was_wrong():
    steps = PsiSteps(Settings.of({"temperature": 1.0}), 4)
    logits, z, _ = rows(50)
    steps.step(logits, 2, z + 50)
    with pytest.raises(ValueError, match="sample must hold token ids"):
        steps.step(logits, 3, z)
    steps.step(logits * torch.nan, 2, z)
    with pytest.raises(ValueError, match="NaN"):
        steps.step(logits, 3, z)


def test_a_cpu_says_at_once_what_is_wrong():
    steps = PsiSteps(Settings.of({"temperature": 1.0}), 4)
    logits, z, _ = (each.cpu() for each in rows(50))
    with pytest.raises(ValueError, match=r"token ids in \[0, 50\)"):
        steps.step(logits, 2, z + 50)
    with pytest.raises(ValueError, match="NaN"):
        steps.step(logits * torch.nan, 3, z)


@pytest.mark.parametrize("posterior", ["plugin", "marginal"])
@pytest.mark.parametrize("predicts", ["plain", "loo"])
@pytest.mark.parametrize(("mask", "temperature"), [(None, 1.0), (49, 0.7), (None, 0.0)])
def test_a_step_that_is_recorded_is_the_step(
    mask, temperature, predicts, posterior, monkeypatch
):
    """On a CPU the same functions, not recorded."""
    config = {"temperature": temperature, "predicts": predicts, "posterior": posterior}
    made = [PsiSteps(Settings.of({**config, "kappa": "cap:.1"}), 6) for _ in range(2)]
    monkeypatch.setattr(made[0], "records", lambda batch: batch.confidence is None)
    monkeypatch.setattr(made[1], "records", lambda batch: False)
    logits, z, _ = rows(50)
    for i in range(6):
        got, want = (
            each.step(logits, i, z, mask_id=mask, generator=generator(i)) for each in made
        )
        assert torch.equal(got.z, want.z) and torch.equal(got.route, want.route)
        assert torch.equal(got.tokens, want.tokens)
        torch.testing.assert_close(got.probs, want.probs)
        z = got.z


def test_a_step_that_cannot_be_recorded_is_made_without(monkeypatch):
    def refuses(*arguments, **options):
        def replay():
            raise RuntimeError("capture failed")

        return replay

    monkeypatch.setattr(step_graph, "GraphRecorder", refuses)
    z = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    graph = SimpleNamespace(z=z, _recorded={})

    def work():
        return (torch.ones(2),)

    with pytest.warns(UserWarning, match="are not recorded: capture failed"):
        found = step_graph.StepGraph._run(graph, "words", work)
    assert torch.equal(found[0], torch.ones(2)) and graph._recorded == {"words": work}
    assert torch.equal(step_graph.StepGraph._run(graph, "words", work)[0], torch.ones(2))
