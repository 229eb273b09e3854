"""What diffusers' discrete schedulers promise, asserted of each of them and of ours alike.

What does not apply, and why: README.md beside this file.
"""

import copy
import inspect
import json
import pickle

import pytest
import torch
from toys import generator

pytest.importorskip("diffusers", "0.39", reason="the promises are of diffusers 0.39 and later")

from diffusers import (
    BlockRefinementScheduler,
    DiscreteDDIMScheduler,
    EntropyBoundScheduler,
)

from psidiff.integrations.diffusers import PsiScheduler

CLASSES = (DiscreteDDIMScheduler, EntropyBoundScheduler, BlockRefinementScheduler, PsiScheduler)
WITH_MASKS = (BlockRefinementScheduler, PsiScheduler)
every = pytest.mark.parametrize("kind", CLASSES)
with_masks = pytest.mark.parametrize("kind", WITH_MASKS)
K, N = 30, 6


def asked(kind, **options):
    """Those of the options that this scheduler's step has, as pipelines choose them."""
    known = inspect.signature(kind.step).parameters
    usual = {"temperature": 1.0, "mask_token_id": None, "generator": generator(0)}
    return {name: value for name, value in {**usual, **options}.items() if name in known}


def made(kind, **config):
    scheduler = kind(num_inference_steps=N, **config)
    scheduler.set_timesteps(N)
    return scheduler


def rows(batch=3, length=5):
    g = generator(1)
    return torch.randn(batch, length, K, generator=g), torch.randint(K, (batch, length))


@every
def test_a_config_is_json_with_every_argument_and_comes_back(kind, tmp_path):
    first = made(kind)
    first.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "scheduler_config.json").read_text())
    arguments = set(inspect.signature(kind.__init__).parameters) - {"self"}
    assert written["_class_name"] == kind.__name__ and arguments <= written.keys()
    again = kind.from_pretrained(tmp_path)
    assert {name: again.config[name] for name in arguments} == {
        name: first.config[name] for name in arguments
    }


@every
def test_arguments_are_named_and_have_defaults(kind):
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    assert all(each.default is not each.empty for each in parameters)
    json.dumps({each.name: each.default for each in parameters})


@every
def test_an_option_comes_before_the_config(kind):
    again = kind.from_config(made(kind).config, num_inference_steps=9)
    assert again.config.num_inference_steps == again.num_inference_steps == 9


@every
def test_what_a_config_does_not_know_is_given_back(kind):
    config = {**made(kind).config, "colour": "green"}
    scheduler, unused = kind.from_config(config, return_unused_kwargs=True)
    assert isinstance(scheduler, kind) and unused["colour"] == "green"


@every
def test_a_class_is_compatible_with_itself(kind):
    assert kind in made(kind).compatibles and kind.order == 1


@every
def test_steps_are_counted_and_none_is_refused(kind):
    scheduler = made(kind)
    scheduler.set_timesteps(11, device="cpu")
    assert scheduler.num_inference_steps == len(scheduler.timesteps) == 11
    assert scheduler.timesteps.device.type == "cpu"
    for count in (0, -1):
        with pytest.raises(ValueError, match="num_inference_steps"):
            scheduler.set_timesteps(count)


@every
@pytest.mark.parametrize("index", [0, 3, N - 1])
def test_a_step_has_the_shapes_and_kinds_of_its_sample(kind, index):
    logits, sample = rows()
    out = made(kind).step(logits, index, sample, **asked(kind))
    assert out.prev_sample.shape == sample.shape and out.prev_sample.dtype == torch.int64
    assert bool(((out.prev_sample >= 0) & (out.prev_sample < K)).all())
    assert out.sampled_tokens.shape == out.sampled_probs.shape == sample.shape
    assert bool(((out.sampled_probs >= 0) & (out.sampled_probs <= 1 + 1e-6)).all())
    assert out.pred_logits.shape == logits.shape
    assert out["prev_sample"] is out[0] is out.to_tuple()[0]


@every
def test_a_tuple_begins_as_the_output_does(kind):
    logits, sample = rows()
    out = made(kind).step(logits, 2, sample, **asked(kind))
    values = made(kind).step(logits, 2, sample, return_dict=False, **asked(kind))
    assert isinstance(values, tuple) and torch.equal(values[0], out.prev_sample)


@every
def test_a_generator_repeats_a_step_and_the_sample_is_left_alone(kind):
    logits, sample = rows()
    kept = logits.clone(), sample.clone()
    first, second = (made(kind).step(logits, 2, sample, **asked(kind)) for _ in range(2))
    assert torch.equal(first.prev_sample, second.prev_sample)
    assert torch.equal(logits, kept[0]) and torch.equal(sample, kept[1])


@pytest.mark.parametrize("kind", [DiscreteDDIMScheduler, PsiScheduler])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_last_step_commits_what_was_predicted(kind, temperature):
    logits, sample = rows()
    out = made(kind).step(logits, N - 1, sample, **asked(kind, temperature=temperature))
    assert torch.equal(out.prev_sample, out.sampled_tokens)
    if not temperature:
        assert torch.equal(out.prev_sample, logits.argmax(-1))


@pytest.mark.parametrize(
    "kind", [DiscreteDDIMScheduler, BlockRefinementScheduler, PsiScheduler]
)
def test_a_temperature_below_0_is_refused(kind):
    logits, sample = rows()
    with pytest.raises(ValueError, match="temperature"):
        made(kind).step(logits, 2, sample, **asked(kind, temperature=-1.0))


@every
def test_logits_of_low_precision_are_taken(kind):
    logits, sample = rows()
    for dtype in (torch.bfloat16, torch.float16):
        out = made(kind).step(logits.to(dtype), 2, sample, **asked(kind))
        assert out.prev_sample.dtype == torch.int64 and out.pred_logits.dtype == dtype


@every
def test_a_scheduler_and_its_output_are_copied_and_pickled(kind):
    logits, sample = rows()
    out = made(kind).step(logits, 2, sample, **asked(kind))
    again = pickle.loads(pickle.dumps(out))
    assert torch.equal(again.prev_sample, out.prev_sample)
    assert torch.equal(again.pred_logits, out.pred_logits)
    twin = copy.deepcopy(made(kind))
    assert dict(twin.config) == dict(made(kind).config)
    assert torch.equal(twin.step(logits, 2, sample, **asked(kind)).prev_sample, out.prev_sample)


@with_masks
def test_masks_are_filled_until_none_is_left_and_a_prompt_stays(kind):
    logits, _ = rows()
    sample = torch.full((3, 5), K - 1)
    sample[:, :2] = 4
    logits[..., K - 1] = -torch.inf
    prompt, scheduler = torch.tensor([True, True, False, False, False]), made(kind)
    scheduler.set_timesteps(N, block_length=5)
    for index in range(N):
        out = scheduler.step(
            logits,
            index,
            sample,
            **asked(kind, mask_token_id=K - 1, prompt_mask=prompt, generator=generator(index)),
        )
        changed = out.transfer_index | out.editing_transfer_index
        assert not (out.transfer_index & out.editing_transfer_index).any()
        assert not (out.transfer_index & (sample != K - 1)).any()
        sample = torch.where(changed, out.prev_sample, sample)  # as the pipeline applies it
    assert not (sample == K - 1).any() and bool((sample[:, :2] == 4).all())


@with_masks
def test_noise_is_added_in_two_views_that_complement_each_other(kind):
    tokens, real = torch.randint(0, K - 1, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    real[1, 9:] = 0
    noisy, noisy_rev, masked, masked_rev = made(kind).add_noise(
        tokens,
        real,
        prompt_length=3,
        block_length=4,
        mask_token_id=K - 1,
        generator=generator(0),
    )
    assert torch.equal(masked ^ masked_rev, (real == 1) & (torch.arange(12) >= 3))
    assert torch.equal(noisy == K - 1, masked) and torch.equal(noisy_rev == K - 1, masked_rev)


@with_masks
def test_an_end_of_text_is_checked_by_the_class_itself(kind):
    tokens = torch.tensor([[1, 2, 9], [1, K - 1, 9]])
    found = kind.check_eos_finished(
        cur_x=tokens,
        sampled_tokens=tokens,
        final_transfer=torch.ones_like(tokens, dtype=torch.bool),
        finished=torch.zeros(2, dtype=torch.bool),
        eos_token_id=9,
        mask_token_id=K - 1,
        prompt_length=1,
    )
    assert found.tolist() == [True, False]
    assert isinstance(inspect.getattr_static(kind, "check_eos_finished"), staticmethod)
