"""PsiScheduler: in the stock pipelines, and held to what diffusers holds its own to."""

import json
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from tiny_gemma import tiny_gemma
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from toys import JOINT, chi_square, generator

from psidiff.cli.verify import _schedulers
from psidiff.evaluation.verify import CheckResult, revision_rates
from psidiff.process import Cosine, LogLinear, Masked, Uniform, psi, to_leave_one_out
from psidiff.sampling import PRESETS, Sampler, Trace
from psidiff.sampling.logit_sources import PrecomputedLogits
from psidiff.sampling.step import psi_step
from psidiff.sampling.steppers import sample_x0_first

pytest.importorskip("diffusers", "0.39", reason="PsiScheduler is for diffusers 0.39 and later")
pytest.importorskip("transformers", "5.11", reason="the pipelines run models of transformers")

from diffusers import (
    BlockRefinementScheduler,
    DiffusionGemmaPipeline,
    DiscreteDDIMScheduler,
    EntropyBoundScheduler,
    LLaDA2Pipeline,
)
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from psidiff.integrations import verify_schedulers
from psidiff.integrations.diffusers import PsiScheduler
from psidiff.integrations.scored_corrector import SELECTIONS
from psidiff.integrations.trace_recorder import Recorder
from psidiff.process.prior import PRIORS as KINDS

RULES = (
    "ancestral",
    "constant:.95@.1-.5",
    "cap:.01",
    "rescale:.05",
    "rescale-released:.05",
    "loop:.02",
    "confidence:.05",
    "fb",
    "dfm",
)
CANVAS, VOCABULARY = 8, 64


def scheduler(**config):
    return PsiScheduler(**{"num_inference_steps": 8, **config})


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w1", unk_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


@pytest.fixture(scope="module")
def gemma():
    return tiny_gemma(VOCABULARY, CANVAS)


@pytest.fixture
def pipe(gemma):
    made = DiffusionGemmaPipeline(gemma, scheduler(temperature=1.0), tokenizer())
    made.set_progress_bar_config(disable=True)
    return made


def ask(pipe, **options):
    usual = {
        "prompt": "w3 w4 w5",
        "gen_length": 2 * CANVAS,
        "num_inference_steps": 4,
        "eos_early_stop": False,
        "output_type": "seq",
        "generator": generator(0),
    }
    return pipe(**{**usual, **options})


# What diffusers asserts of its own discrete schedulers, under the names it has there.


def test_set_timesteps():
    made = scheduler()
    made.set_timesteps(16)
    assert made.num_inference_steps == len(made.timesteps) == 16
    assert made.timesteps[0] == 0 and made.timesteps[-1] == 15
    assert made.times.tolist() == pytest.approx([1 - i / 16 for i in range(16)])


@pytest.mark.parametrize("steps", [0, -3, None])
def test_set_timesteps_invalid(steps):
    with pytest.raises(ValueError, match="num_inference_steps must be an integer"):
        scheduler().set_timesteps(steps)


@pytest.mark.parametrize("config", [{}, {"posterior": "marginal"}, {"last": "greedy"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_last_step_commits_predicted_tokens(config, temperature):
    sample = torch.randint(0, 100, (2, 16))
    made = scheduler(**config).step(
        torch.zeros(2, 16, 100), timestep=7, sample=sample, temperature=temperature
    )
    assert torch.equal(made.prev_sample, made.sampled_tokens)


def test_intermediate_step_keeps_agreeing_positions():
    sample = torch.zeros(1, 256, dtype=torch.long)
    made = scheduler().step(torch.zeros(1, 256, 100), 4, sample, temperature=0.0)
    assert (made.prev_sample == sample).sum() >= 250


def test_step_output_shapes():
    sample, logits = torch.randint(0, 100, (3, 16)), torch.randn(3, 16, 100)
    made = scheduler().step(logits, timestep=2, sample=sample, temperature=1.0)
    for name in ("prev_sample", "sampled_tokens", "sampled_probs", "route"):
        assert getattr(made, name).shape == sample.shape
    assert made.prev_sample.dtype == torch.long
    assert made.pred_logits.shape == logits.shape


def test_return_tuple():
    sample, logits = torch.randint(0, 100, (1, 16)), torch.randn(1, 16, 100)
    made = scheduler().step(logits, 2, sample, return_dict=False)
    assert isinstance(made, tuple) and len(made) == 4
    made = scheduler().step(logits, 2, sample, mask_token_id=99, return_dict=False)
    assert len(made) == 6 and made[1].dtype == made[2].dtype == torch.bool


def test_save_load_config_round_trip(tmp_path):
    config = {
        "kappa": "constant:.95@.1-.5",
        "posterior": "marginal",
        "predicts": "plain",
        "schedule": "cosine",
        "eps": 1e-3,
        "temperature": 0.7,
        "top_p": 0.9,
        "prior": {"name": "mixed", "vocab_size": 9, "mask_id": 8, "uniform": 0.1},
        "timestep_type": "continuous",
    }
    scheduler(**config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert written["_class_name"] == "PsiScheduler"
    loaded = PsiScheduler.from_pretrained(tmp_path)
    assert {name: loaded.config[name] for name in config} == config
    assert loaded.settings == scheduler(**config).settings


def test_from_config():
    first = scheduler(kappa="cap:.02", top_k=5)
    second = PsiScheduler.from_config(first.config, kappa="fb")
    assert second.config.kappa == "fb" and second.config.top_k == 5


def test_negative_temperature_raises():
    sample, logits = torch.randint(0, 100, (1, 16)), torch.randn(1, 16, 100)
    for config in ({}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="temperature must be >= 0, got -1"):
            scheduler(**config).step(logits, 2, sample, temperature=-1.0)
    with pytest.raises(ValueError, match="temperature must be >= 0, got -2"):
        scheduler(temperature=-2.0)


def test_step_prompt_mask_prevents_editing():
    sample, logits = torch.tensor([[10, 20, 31, 31]]), torch.zeros(1, 4, 32)
    logits[..., 15] = 20.0
    prompt = torch.tensor([True, True, False, False])
    for i in range(2):
        made = scheduler(num_inference_steps=2, kappa="constant:0").step(
            logits, i, sample, mask_token_id=31, prompt_mask=prompt, generator=generator(3)
        )
        assert not made.editing_transfer_index[0, :2].any()
        assert made.prev_sample[0, :2].tolist() == [10, 20]


def test_schedulers_are_interchangeable(pipe):
    others = (DiscreteDDIMScheduler(), EntropyBoundScheduler(), BlockRefinementScheduler())
    for other in others:
        pipe.scheduler = PsiScheduler.from_config(other.config)
        assert ask(pipe, gen_length=CANVAS).sequences.shape == (1, CANVAS)
        back = type(other).from_config(pipe.scheduler.config)
        assert back.config.num_inference_steps == other.config.num_inference_steps
    assert {type(each) for each in others} <= set(pipe.scheduler.compatibles)


def test_callback_receives_advertised_keys(pipe):
    seen = []
    ask(
        pipe,
        callback_on_step_end=lambda pipe, step, index, tensors: (
            seen.append((step, index, *sorted(tensors))) or {}
        ),
        callback_on_step_end_tensor_inputs=["canvas", "logits"],
        confidence_threshold=None,
    )
    assert seen == [(i, i % 4, "canvas", "logits") for i in range(8)]


def test_static_cache_matches_dynamic(pipe):
    for temperature in (0.0, 1.0):
        pipe.scheduler = scheduler(temperature=temperature)
        dynamic, static = (
            ask(pipe, cache_implementation=kind).sequences for kind in (None, "static")
        )
        assert torch.equal(dynamic, static)


def test_step_correct_resamples_at_most_k():
    made = scheduler(corrector_steps=1, corrector_k=3)
    sample, logits = torch.randint(0, 100, (4, 16)), torch.randn(4, 16, 100)
    out = made.step_correct(logits, timestep=2, sample=sample)
    assert out.prev_sample.shape == sample.shape and out.prev_sample.dtype == sample.dtype
    assert ((out.prev_sample != sample).sum(-1) <= 3).all()
    assert len(made.step_correct(logits, 2, sample, return_dict=False)) == 4


# Configs that came from, or go to, diffusers' own; and what their schedulers offer beside.

THEIRS = (DiscreteDDIMScheduler, EntropyBoundScheduler, BlockRefinementScheduler)


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("by", ["config", "file"])
def test_a_config_goes_to_ours_and_back_with_every_value(theirs, by, tmp_path):
    first = theirs(num_inference_steps=12)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if by == "config":
            ours = PsiScheduler.from_config(first.config)
            back = theirs.from_config(ours.config)
        else:
            first.save_pretrained(tmp_path / "theirs")
            ours = PsiScheduler.from_pretrained(tmp_path / "theirs")
            ours.save_pretrained(tmp_path / "ours")
            back = theirs.from_pretrained(tmp_path / "ours")
    assert ours.num_inference_steps == back.num_inference_steps == 12
    names = {name for name in first.config if not name.startswith("_")}
    assert {name: back.config[name] for name in names} == {n: first.config[n] for n in names}
    said = " ".join(str(each.message) for each in told)
    for name in names - set(PsiScheduler().config):
        assert first.config[name] is None or f"{name}=" in said, name
    assert bool(said) == (theirs is not DiscreteDDIMScheduler)


@pytest.mark.parametrize("select", [*SELECTIONS, "random", "uncertain"])
def test_what_ours_saves_runs_as_theirs(select, tmp_path):
    sample, logits = torch.randint(0, 50, (2, 8)), torch.randn(2, 8, 50)
    made = scheduler(corrector_steps=1, corrector_k=3, corrector_selection=select)
    made.save_pretrained(tmp_path)
    again = PsiScheduler.from_pretrained(tmp_path)
    assert again.steps.corrector == made.steps.corrector
    for theirs in THEIRS:
        other = theirs.from_pretrained(tmp_path)
        other.step(logits, 2, sample)
        if theirs is DiscreteDDIMScheduler:
            out = other.step_correct(logits, 2, sample).prev_sample
            assert ((out != sample).sum(-1) <= 3).all()
    out = made.step_correct(logits, 2, sample).prev_sample
    assert ((out != sample).sum(-1) <= 3).all()


@pytest.mark.parametrize("select", SELECTIONS)
def test_the_selections_of_diffusers_choose_the_positions_that_it_chooses(select):
    """At tau near 0 the least sure positions are redrawn, and no others."""
    logits, z = torch.randn(1, 12, 20), torch.randint(0, 20, (1, 12))
    config = {"corrector_selection": select, "corrector_selection_tau": 1e-6}
    config |= {"corrector_steps": 1, "corrector_k": 4, "num_inference_steps": 8}
    ours, theirs = PsiScheduler(predicts="plain", **config), DiscreteDDIMScheduler(**config)
    changed = [torch.zeros_like(z, dtype=torch.bool) for _ in range(2)]
    for i in range(60):
        for which, made in enumerate((ours, theirs)):
            out = made.step_correct(logits, 3, z, generator=generator(i)).prev_sample
            changed[which] |= out != z
    assert torch.equal(*changed) and changed[0].sum() == 4


def test_options_of_other_schedulers_are_refused_in_words():
    config = BlockRefinementScheduler().config
    for name in ("threshold", "editing_threshold", "minimal_topk", "entropy_bound", "t_max"):
        with pytest.raises(ValueError, match=f"PsiScheduler has no {name}: say "):
            PsiScheduler.from_config(config, **{name: 0.5})


def test_an_end_of_text_is_seen_without_a_scheduler():
    cur_x = torch.tensor([[9, 1, 5, 3, 3], [9, 7, 1, 5, 3], [9, 1, 1, 1, 1]])
    done = torch.zeros(3, dtype=torch.bool)
    found = PsiScheduler.check_eos_finished(
        cur_x=cur_x,
        sampled_tokens=cur_x[:, 1:],
        final_transfer=cur_x[:, 1:] > 0,
        finished=done,
        eos_token_id=5,
        mask_token_id=7,
        prompt_length=1,
    )
    assert found.tolist() == [True, False, False]


@pytest.mark.parametrize("masks", [True, False])
def test_noise_is_added_block_by_block_in_two_complementary_views(masks):
    made = scheduler(block_length=16)
    tokens, real = torch.randint(0, 30, (200, 68)), torch.ones(200, 68, dtype=torch.long)
    real[:, -2:] = 0
    how = {"mask_token_id": 31} if masks else {"vocab_size": 31}
    noisy, noisy_rev, masked, masked_rev = made.add_noise(
        tokens, real, prompt_length=4, generator=generator(0), **how
    )
    assert torch.equal(masked ^ masked_rev, (real == 1) & (torch.arange(68) >= 4))
    for view, where in ((noisy, masked), (noisy_rev, masked_rev)):
        assert torch.equal(view[~where], tokens[~where])
        assert bool((view[where] == 31).all()) == masks
    shares = masked[:, 4:52].view(200, 3, 16).double().mean(-1)
    assert abs(shares.mean() - 0.5) < 0.1 and shares.std() > 0.25  # a time for each block
    assert torch.corrcoef(shares.T)[0, 1].abs() < 0.7
    theirs = BlockRefinementScheduler().add_noise(
        tokens, real, prompt_length=4, block_length=16, mask_token_id=31
    )
    assert [each.dtype for each in theirs] == [noisy.dtype] * 2 + [masked.dtype] * 2


def test_noise_needs_a_vocabulary():
    with pytest.raises(ValueError, match="add_noise needs mask_token_id, or vocab_size"):
        scheduler().add_noise(torch.zeros(1, 4, dtype=torch.long))


def test_shaped_logits_are_made_when_they_are_read():
    sample, logits = torch.randint(0, 100, (2, 16)), torch.randn(2, 16, 100)
    made = scheduler(temperature=0.5).step(logits, 5, sample)
    assert not isinstance(dict.__getitem__(made, "pred_logits"), torch.Tensor)
    assert made["prev_sample"] is made.prev_sample is made[0]
    assert not isinstance(dict.__getitem__(made, "pred_logits"), torch.Tensor)
    torch.testing.assert_close(made.pred_logits, logits / 0.5)
    assert made.pred_logits is made["pred_logits"] is made[3] is made.to_tuple()[3]
    assert dict(made.items()).keys() == set(made.keys())
    plain = scheduler(temperature=1.0).step(logits, 5, sample)
    assert plain.pred_logits is logits


# In the pipelines.


def test_a_stock_pipeline_runs_two_canvases(pipe):
    made = ask(pipe)
    assert made.sequences.shape == (1, 2 * CANVAS)
    assert torch.equal(made.sequences, ask(pipe).sequences)
    assert not torch.equal(made.sequences, ask(pipe, generator=generator(1)).sequences)
    texts = ask(pipe, output_type="text", prompt=["w3 w4", "w5 w6"]).texts
    assert len(texts) == 2 and all(len(text.split()) == 2 * CANVAS for text in texts)


@pytest.mark.parametrize("kappa", RULES)
def test_every_rule_runs_in_the_stock_pipeline(pipe, kappa):
    pipe.scheduler = scheduler(kappa=kappa, temperature=1.0)
    assert ask(pipe, confidence_threshold=None).sequences.shape == (1, 2 * CANVAS)


def test_a_pipeline_with_it_is_saved_and_loaded(pipe, tmp_path):
    pipe.scheduler = scheduler(kappa="cap:.05", temperature=1.0, top_p=0.9)
    first = ask(pipe).sequences
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["scheduler"] == ["psidiff.integrations.diffusers", "PsiScheduler"]
    # diffusers looks for this model's class in its own pipeline's folder: it has to be given
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "model")
    loaded = DiffusionGemmaPipeline.from_pretrained(tmp_path, model=model)
    loaded.set_progress_bar_config(disable=True)
    assert isinstance(loaded.scheduler, PsiScheduler)
    assert torch.equal(ask(loaded).sequences, first)


def test_a_callback_can_pin_tokens(pipe):
    pinned = torch.full((1, CANVAS), -1)
    pinned[0, 2] = 7

    def pin(pipe, step, index, tensors):
        return {"canvas": torch.where(pinned < 0, tensors["canvas"], pinned)}

    made = ask(pipe, callback_on_step_end=pin, confidence_threshold=None).sequences
    assert made[0, 2] == made[0, CANVAS + 2] == 7


def test_predictor_corrector_keeps_the_number_of_forward_passes(pipe):
    pipe.scheduler = scheduler(corrector_steps=1, corrector_k=2, temperature=1.0)
    passes = []
    handle = pipe.model.register_forward_hook(lambda *_: passes.append(1))
    ask(pipe, gen_length=CANVAS, num_inference_steps=7, confidence_threshold=None)
    handle.remove()
    assert len(passes) == 7


class Toy(torch.nn.Module):
    """A masked LM that looks at nothing: logits by position."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, vocab_size=32):
        super().__init__()
        self.vocab_size, self.passes = vocab_size, 0

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        self.passes += 1
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        place = torch.arange(input_ids.shape[1]) % (self.vocab_size - 2)
        logits.scatter_(-1, place.expand(input_ids.shape)[..., None], 4.0)
        return type("Out", (), {"logits": logits})()


def fill(scheduler, model=None, **options):
    pipe = LLaDA2Pipeline(model or Toy(), scheduler)
    pipe.set_progress_bar_config(disable=True)
    usual = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]),
        "use_chat_template": False,
        "gen_length": 24,
        "block_length": 8,
        "num_inference_steps": 8,
        "mask_token_id": 31,
        "eos_token_id": None,
        "output_type": "seq",
        "temperature": 1.0,
        "generator": generator(0),
    }
    return pipe(**{**usual, **options})


@pytest.mark.parametrize("kappa", RULES)
def test_the_stock_llada2_pipeline_leaves_no_mask(kappa):
    posterior = "marginal" if kappa == "cap:.01" else "plugin"
    made = fill(scheduler(kappa=kappa, posterior=posterior)).sequences
    assert made.shape == (2, 24)
    assert not (made == 31).any()


def test_it_masks_again_where_the_stock_pipeline_would_be_done():
    """All steps of the plan are taken, also those that begin without a mask."""
    masks = []

    def watch(pipe, step, index, tensors):
        masks.append(int((tensors["block_x"][:, -8:] == 31).sum()))
        return {}

    model = Toy()
    made = fill(
        scheduler(kappa="constant:.2@0-.9"),
        model,
        gen_length=60,
        num_inference_steps=60,
        block_length=64,
        callback_on_step_end=watch,
    )
    assert not (made.sequences == 31).any()
    assert model.passes == 60
    assert any(after > before for before, after in pairwise(masks))


def test_without_a_corrector_it_stops_when_all_is_unmasked():
    model, one = Toy(), torch.tensor([[5, 6, 7, 8]])
    options = {"input_ids": one, "gen_length": 20, "block_length": 4}
    fill(scheduler(kappa="ancestral"), model, num_inference_steps=20, **options)
    assert 5 < model.passes < 5 * 20


def test_an_end_of_text_ends_only_what_cannot_change():
    model = Toy()
    ends = {"eos_token_id": 6, "temperature": 0.0, "gen_length": 60}
    early = fill(scheduler(kappa="ancestral"), model, **ends).sequences
    assert (early[:, 2] == 6).all()  # position 6, after a prompt of 4
    assert (early[:, 8:] == 31).all()  # no block after the one that ended
    late = fill(scheduler(kappa="cap:.2"), **ends).sequences
    assert (late[:, 2] == 6).all()


def test_the_recorder_hears_what_the_scheduler_did(pipe, tmp_path):
    recorder = Recorder(about={"model": "tiny"})
    pipe.scheduler = scheduler(kappa="constant:.5", temperature=1.0)
    made = ask(pipe, callback_on_step_end=recorder, confidence_threshold=None).sequences
    trace = recorder.trace
    assert len(trace) == 8 and trace.shape == (1, 2 * CANVAS)
    assert torch.equal(trace.tokens[-1].long(), made)
    assert [round(step.t, 3) for step in trace.steps] == [1.0, 0.75, 0.5, 0.25] * 2
    assert set(torch.stack(trace.routes).flatten().tolist()) == {0, 1, 2}
    trace.save(tmp_path / "trace.npz")
    assert torch.equal(Trace.load(tmp_path / "trace.npz").tokens[3], trace.tokens[3])


def test_the_recorder_hears_schedulers_of_diffusers_too(pipe):
    recorder = Recorder()
    pipe.scheduler = DiscreteDDIMScheduler()
    made = ask(pipe, callback_on_step_end=recorder, confidence_threshold=None).sequences
    assert torch.equal(recorder.trace.tokens[-1].long(), made)
    recorder = Recorder()
    made = fill(scheduler(kappa="cap:.1"), callback_on_step_end=recorder).sequences
    assert torch.equal(recorder.trace.tokens[-1][:, 4:28].long(), made)


# The law of a step.


def drawn(made, logits, index, z, draws, **options):
    """How often each token follows, (L, K), by repeating the step."""
    repeated = made.step(
        logits.expand(draws, -1, -1),
        index,
        z.expand(draws, -1),
        generator=generator(1),
        **options,
    ).prev_sample
    return torch.stack([torch.bincount(c, minlength=logits.shape[-1]) for c in repeated.T])


def dense(prior, z, x, step):
    return psi(prior, z, x, step.alpha_s, step.alpha_t, step.kappa).probs(prior, z, x)[0]


PRIORS = [Uniform(12), Masked(12, 11)]


def row(prior, length=6):
    z = torch.randint(0, 11, (1, length))
    if prior.mask_id is not None:
        z[0, ::2] = prior.mask_id
    return z, torch.randn(1, length, 12, dtype=torch.float64)


def one_hot_where_certain(prior, z, x):
    return torch.where(
        (prior.probs(like=x)[z] == 0)[..., None], F.one_hot(z, prior.vocab_size).to(x), x
    )


@pytest.mark.parametrize("prior", PRIORS, ids=["uniform", "masked"])
@pytest.mark.parametrize(
    ("kappa", "shaped"),
    [
        ("ancestral", False),
        ("cap:.1", False),
        ("cap:.1", True),
        ("constant:.3", True),
        ("loop:.02", False),
    ],
)
def test_a_step_has_the_law_of_the_dense_posterior(prior, kappa, shaped):
    z, logits = row(prior)
    shaping = {"temperature": 0.7, "top_k": 5} if shaped else {"temperature": 1.0}
    made = scheduler(kappa=kappa, **shaping)
    rows = prior.without_mask(logits) / shaping["temperature"]
    if shaped:
        rows = rows.masked_fill(rows < rows.topk(5).values[..., -1:], -torch.inf)
    x = one_hot_where_certain(prior, z, rows.softmax(-1))
    for index in (0, 3, 6, 7):
        counts = drawn(made, logits, index, z, 20_000, mask_token_id=prior.mask_id)
        probs = dense(prior, z, x, made.plan_for(prior)[index])
        assert max(map(chi_square, counts, probs)) < 9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("posterior", ["plugin", "marginal"])
def test_a_step_on_a_gpu_has_the_law_of_the_dense_posterior(posterior):
    prior = Uniform(12)
    z, logits = row(prior)
    made = scheduler(kappa="cap:.1", posterior=posterior, predicts="plain", temperature=1.0)
    made.set_timesteps(8, device="cuda")
    for index in (0, 5):
        at = made.plan_for(prior)[index]
        x = to_leave_one_out(prior, z, logits, at.alpha_t).softmax(-1)
        counts = drawn(made, logits.float().cuda(), index, z.cuda(), 20_000)
        assert counts.is_cuda
        assert max(map(chi_square, counts.cpu(), dense(prior, z, x, at))) < 9


@pytest.mark.parametrize("posterior", ["plugin", "marginal"])
@pytest.mark.parametrize("shaping", [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}])
@pytest.mark.parametrize("mask", [None, 49])
def test_rows_read_at_once_give_the_tokens_of_rows_that_the_coins_ask_for(
    mask, shaping, posterior
):
    config = {"temperature": 1.0, "kappa": "cap:.1", "predicts": "plain", **shaping}
    made = scheduler(posterior=posterior, **config)
    z, logits = torch.randint(0, 50, (4, 16)), 3 * torch.randn(4, 16, 50)
    for index in (0, 4, 7):
        out = made.step(logits, index, z, mask_token_id=mask, generator=generator(index))
        kept = made.settings.shaping(None, None, None)
        batch, prior, _ = made.steps._batch(logits, index, z, kept, mask, generator(index))
        wanted = "plain" if posterior == "marginal" else "loo"
        shift = made.settings.shift(prior, z, made.taken.alpha_t, wanted)
        step = sample_x0_first if posterior == "marginal" else psi_step
        want = step(batch, PrecomputedLogits(prior, logits, shift))
        assert torch.equal(out.prev_sample, want.z) and torch.equal(out.route, want.route)
        z = out.prev_sample


@pytest.mark.parametrize("kappa", ["ancestral", "constant:.3"])
def test_marginal_is_the_mean_of_posteriors_over_x_0(kappa):
    prior = Uniform(12)
    z, logits = row(prior)
    made = scheduler(kappa=kappa, posterior="marginal", temperature=1.0)
    x, every = logits.softmax(-1), torch.eye(12, dtype=torch.float64)
    for index in (0, 4, 7):
        at = made.plan_for(prior)[index]
        each = [dense(prior, z, every[j].expand_as(x), at) for j in range(12)]
        probs = sum(x[0, :, j, None] * each[j] for j in range(12))
        assert max(map(chi_square, drawn(made, logits, index, z, 20_000), probs)) < 9


def test_marginal_and_ancestral_is_the_scheduler_of_diffusers():
    prior = Uniform(12)
    z, logits = row(prior)
    ours = scheduler(kappa="ancestral", posterior="marginal")
    theirs = DiscreteDDIMScheduler(num_inference_steps=8)
    for temperature in (0.0, 0.6):
        for index in (0, 5):
            counts = [
                drawn(each, logits, index, z, 20_000, temperature=temperature)
                for each in (ours, theirs)
            ]
            both = counts[0] + counts[1]
            for one, all_ in zip(counts[0], both, strict=True):
                assert chi_square(one, all_.double()) < 9


def test_plain_logits_become_what_the_posterior_expects():
    """With the conversion, plugging in and drawing first are one law."""
    prior = Uniform(12)
    z, logits = row(prior)
    for posterior, predicts in (("plugin", "plain"), ("marginal", None)):
        made = scheduler(
            kappa="cap:.1", posterior=posterior, predicts=predicts, temperature=1.0
        )
        for index in (2, 6):
            at = made.plan_for(prior)[index]
            x = to_leave_one_out(prior, z, logits, at.alpha_t).softmax(-1)
            counts = drawn(made, logits, index, z, 20_000)
            assert max(map(chi_square, counts, dense(prior, z, x, at))) < 9


class Widest(TorchDispatchMode):
    """The largest float tensor that any operation makes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                fresh = each.untyped_storage().data_ptr() not in self.known
                self.most = max(self.most, each.numel() if fresh else 0)
        return made

    def __init__(self, *known):
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}


@pytest.mark.parametrize("posterior", ["plugin", "marginal"])
def test_a_step_at_262144_tokens_makes_nothing_as_wide_as_the_posterior(posterior):
    K, length = 262_144, 16
    logits = torch.randn(1, length, K, dtype=torch.bfloat16)
    z = torch.randint(0, K, (1, length))
    logits[0, torch.arange(0, length, 2), z[0, ::2]] = 40.0  # every second token is right
    made = scheduler(kappa="cap:.3", posterior=posterior, predicts="plain", temperature=1.0)
    with Widest(logits) as widest:
        out = made.step(logits, 6, z, generator=generator(0))
    assert widest.most <= 2**20 < logits.numel()
    assert out.pred_logits is logits
    assert (out.route == 2).any()  # renoised: a mass of .3/K on each token


def test_renoising_is_exact_at_262144_tokens():
    """A right token is renoised with chance sigma, though each token's share of it is 1e-6."""
    K, length, sigma = 262_144, 8, 0.3
    z = torch.randint(0, K, (1, length))
    logits = torch.zeros(1, length, K, dtype=torch.bfloat16).scatter(-1, z[..., None], 40.0)
    made = scheduler(kappa=f"cap:{sigma}", temperature=1.0)
    routes = [made.step(logits, 4, z, generator=generator(i)).route for i in range(40)]
    share = (torch.stack(routes) == 2).double().mean().item()
    assert abs(share - sigma) < 5 * (sigma * (1 - sigma) / (40 * length)) ** 0.5


# What the config owns, and what it says of mistakes.


def test_the_config_s_temperature_and_top_p_come_before_the_pipeline_s():
    sample, logits = torch.randint(0, 100, (2, 16)), torch.randn(2, 16, 100)

    def tokens(made, **options):
        return made.step(logits, 5, sample, generator=generator(0), **options)

    owned = scheduler(temperature=0.5, top_p=0.8)
    first, second = tokens(owned, temperature=0.0), tokens(owned, temperature=2.0, top_p=0.1)
    assert torch.equal(first.prev_sample, second.prev_sample)
    assert torch.equal(first.pred_logits, second.pred_logits)
    left = tokens(scheduler(), temperature=0.5, top_p=0.8)
    assert torch.equal(left.prev_sample, first.prev_sample)
    greedy = tokens(scheduler(), temperature=0.0)
    assert torch.equal(greedy.pred_logits, logits)
    assert torch.equal(
        greedy.sampled_tokens[greedy.route == 1], logits.argmax(-1)[greedy.route == 1]
    )
    assert torch.equal(
        tokens(scheduler(), sampling_method="greedy").prev_sample, greedy.prev_sample
    )


def test_what_is_reported_is_what_was_drawn_from():
    sample, logits = torch.randint(0, 100, (2, 16)), torch.randn(2, 16, 100)
    made = scheduler(temperature=0.5, top_k=4).step(logits, 5, sample, generator=generator(0))
    kept = made.pred_logits.isfinite()
    assert (kept.sum(-1) == 4).all()
    assert torch.equal(made.pred_logits[kept], (logits / 0.5)[kept])
    probs = made.pred_logits.softmax(-1).gather(-1, made.sampled_tokens[..., None])[..., 0]
    torch.testing.assert_close(made.sampled_probs, probs)
    assert torch.equal(made.sampled_tokens[made.route == 1], made.prev_sample[made.route == 1])
    still = made.route != 1
    assert torch.equal(made.sampled_tokens[still], logits.argmax(-1)[still])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_config(preset, tmp_path):
    scheduler(preset=preset).save_pretrained(tmp_path)
    made = PsiScheduler.from_pretrained(tmp_path)
    named = PRESETS[preset]
    assert made.settings.shaping(None, None, None).drawing == named.chain()
    plan = made.plan_for(Masked(5, 4))
    assert len(plan) == 8 and plan[-1].greedy == (named.last == "greedy")


WORDS = "constant:.9@.1-.8 steps=5 schedule=cosine:1e-05 top_p=.9 last=greedy temperature=.7"


@pytest.mark.parametrize("rule", ["", " grid=alpha", " constant-released:.9@.1-.8"])
def test_a_sampler_in_words_is_a_config(rule, tmp_path):
    words = WORDS.replace("constant:.9@.1-.8", "") + rule if "con" in rule else WORDS + rule
    PsiScheduler(sampler=words).save_pretrained(tmp_path)
    made, said = PsiScheduler.from_pretrained(tmp_path), Sampler.parse(words)
    assert made.settings.shaping(None, None, None).drawing == said.chain()
    plan, steps = made.plan_for(Uniform(5)), replace(said, steps=4).plan(LogLinear())
    assert len(plan) == made.num_inference_steps == 5 and plan[-1].greedy
    if rule:
        assert plan == steps
    for step in plan[:-1]:
        assert step.alpha_t == pytest.approx(Cosine(eps=1e-5).alpha(step.t))
        assert step.kappa == (0.9 if 0.1 <= step.t <= 0.8 else 1)
    made.set_timesteps(7)
    assert len(made.timesteps) == 7


def test_a_sampler_s_grid_of_times_is_the_scheduler_s():
    for config in ({"sampler": "cap:.1 grid=1,.5,.2"}, {"kappa": "cap:.1", "grid": "1,.5,.2"}):
        made = PsiScheduler(**config)
        assert [step.t for step in made.plan_for(Uniform(5))] == [1, 0.5, 0.2]
        with pytest.raises(ValueError, match="the grid has 3 times, but there are 4 steps"):
            made.set_timesteps(4)


def test_a_mask_may_follow_remdm_where_other_priors_may_not():
    made = PsiScheduler(512, preset="remdm-cap")
    assert min(step.kappa for step in made.plan_for(Masked(5, 4))) < 0
    assert min(step.kappa for step in made.plan_for(Uniform(5))) == 0


@pytest.mark.parametrize("kappa", RULES)
def test_indices_and_times_name_the_same_steps(kappa):
    made, timed = scheduler(kappa=kappa), scheduler(kappa=kappa, timestep_type="continuous")
    assert made.timesteps.tolist() == list(range(8))
    times = timed.timesteps
    assert times.is_floating_point() and bool((times[:-1] > times[1:]).all())
    sample, logits = torch.randint(0, 100, (1, 16)), torch.randn(1, 16, 100)
    by_index, by_time = sample, sample
    for i, t in enumerate(times):
        by_index = made.step(logits, i, by_index, generator=generator(i)).prev_sample
        by_time = timed.step(logits, t, by_time, generator=generator(i)).prev_sample
    assert torch.equal(by_index, by_time)


def test_other_times_can_be_set():
    made = scheduler(kappa="ancestral")
    made.set_timesteps(timesteps=[1.0, 0.5, 0.2])
    levels = [(s.alpha_t, s.alpha_s) for s in made.plan_for(Uniform(4))]
    assert levels == [(0.0, 0.5), (0.5, 0.8), (0.8, 1.0)]
    made.step(torch.randn(1, 4, 9), 0.5, torch.zeros(1, 4, dtype=torch.long))
    assert made.taken.alpha_t == 0.5


def test_a_confidence_rule_remembers_until_step_0():
    sample, logits = torch.full((1, 64), 99), torch.randn(1, 64, 100)
    made = scheduler(kappa="confidence:20")
    z = made.step(logits, 0, sample, mask_token_id=99, generator=generator(0)).prev_sample
    remembered = made.steps.confidence.isfinite()
    assert torch.equal(remembered, z != 99) and remembered.any()
    made.step(logits, 0, sample, mask_token_id=99, generator=generator(1))
    assert not torch.equal(made.steps.confidence.isfinite(), remembered)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"kappa": "cup:1"}, "'cup:1' is no kappa rule"),
        ({"preset": "paper"}, "'paper' is no preset"),
        ({"posterior": "mean"}, "posterior must be 'plugin' or 'marginal', got 'mean'"),
        ({"predicts": "x"}, "predicts must be 'loo', 'plain' or None, got 'x'"),
        ({"schedule": "sine"}, "'sine' is not one of loglinear, cosine"),
        ({"eps": 2.0}, r"eps must be in \[0, 1\), got 2"),
        ({"last": "first"}, "last must be 'sample' or 'greedy', got 'first'"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"prior": {"name": "uniform"}}, "needs the option vocab_size"),
        ({"timestep_type": "both"}, "timestep_type must be 'discrete' or 'continuous'"),
        ({"predictor": "confident", "kappa": "cap:.1"}, "'confident' renoises by itself"),
        ({"predictor": "confident:commit"}, "a scheduler cannot: leave commit out"),
        ({"sampler": "cap:.1 guidance=2"}, "takes no guidance: the pipeline guides"),
        ({"sampler": "cap:.1 corrector=1x2"}, "give corrector_steps and corrector_k"),
        ({"kappa": "left-to-right"}, "a scheduler denoises: it takes no left-to-right"),
        ({"corrector_selection": "surest"}, "corrector_selection must be 'random'"),
        ({"corrector_selection": "lowest_maxprob", "corrector_doubt": True}, "goes with"),
        (
            {"corrector_selection": "lowest_maxprob", "corrector_selection_tau": 0.0},
            "corrector_selection_tau must be above 0",
        ),
    ],
)
def test_a_wrong_config_is_one_sentence(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        scheduler(**config)


def test_a_prior_that_is_no_dict_is_one_sentence():
    with pytest.raises(ValueError, match='prior must be a dict with a "name"'):
        KINDS.from_dict("uniform")


@pytest.mark.parametrize(
    ("timestep", "sentence"),
    [
        (8, r"timestep must be in \[0, 8\), got 8"),
        (-1, r"timestep must be in \[0, 8\)"),
        (0.3, "t = 0.3 is no time of this plan, the nearest is 0.25"),
        (float("nan"), "no time of this plan"),
        (True, "timestep must be an index or a time"),
        (torch.tensor([1, 2]), "timestep must be an index or a time"),
    ],
)
def test_a_wrong_timestep_is_one_sentence(timestep, sentence):
    with pytest.raises(ValueError, match=sentence):
        scheduler().step(torch.randn(1, 4, 9), timestep, torch.zeros(1, 4, dtype=torch.long))


def test_logits_of_another_shape_are_one_sentence():
    with pytest.raises(ValueError, match="model_output must have shape"):
        scheduler().step(torch.randn(1, 5, 9), 0, torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="the pipeline masks with token 3"):
        made = scheduler(prior={"name": "masked", "vocab_size": 9, "mask_id": 8})
        made.step(torch.randn(1, 4, 9), 0, torch.zeros(1, 4, dtype=torch.long), mask_token_id=3)


def test_psidiff_alone_does_not_import_diffusers():
    code = "import sys, psidiff, psidiff.cli.main; psidiff.load; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    names = Counter(name.split(".")[0].strip("[]' ") for name in loaded.split(","))
    assert names["torch"] and not names["diffusers"] and not names["transformers"]


def test_verify_shows_the_correction_rate_beside_diffusers_own():

    prior = Uniform(JOINT.num_tokens)
    rates = {}
    for name, walk in (
        ("theirs", verify_schedulers.ddim_walk),
        ("ancestral", verify_schedulers.psi_walk(prior, kappa="ancestral")),
        ("cap", verify_schedulers.psi_walk(prior, kappa="cap:.05")),
    ):
        function, plan = walk(8)
        rates[name] = revision_rates(JOINT, prior, plan, function, 400)[1]
    assert rates["ancestral"] == pytest.approx(rates["theirs"], abs=0.01)
    assert rates["cap"] > rates["theirs"] + 0.02


def test_the_table_of_verify_has_a_row_for_each_scheduler(monkeypatch):
    found = [
        CheckResult("Uniform", name, "cap:.05", 0.001, 0.01, (0.1, 0.05, 0.02, 0.01), 0.1, rate)
        for name, rate in (("DiscreteDDIM", 0.103), ("Psi plugin", 0.159))
    ]
    monkeypatch.setattr(verify_schedulers, "scheduler_findings", lambda: iter(found))
    console = Console(width=100)
    with console.capture() as shown:
        assert _schedulers(console) == found
    assert "DiscreteDDIM, uniform" in shown.get() and ".103" in shown.get()
    assert "Psi plugin, uniform" in shown.get() and ".159" in shown.get()
    monkeypatch.setattr("psidiff.cli.verify.find_spec", lambda name: None)
    with console.capture() as shown:
        assert _schedulers(console) == []
    assert "diffusers is not installed" in shown.get()


@pytest.mark.slow
def test_verify_passes_on_the_scheduler():
    findings = list(verify_schedulers.scheduler_findings())
    assert [f.predictor for f in findings] == [
        "DiscreteDDIM",
        "Psi plugin",
        "Psi marginal",
        "Psi plugin",
    ]
    assert all(finding.keeps_marginals and finding.converges for finding in findings)
    assert findings[1].revised_if_wrong > 1.3 * findings[0].revised_if_wrong
