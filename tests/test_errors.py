"""Every mistake a user can make is one sentence that names the value."""

import jaxtyping
import numpy as np
import pytest
import torch
from toys import generator

from psidiff import wrap
from psidiff.duality import diffusion_transform, gamma_at, relax_dense, relax_sparse
from psidiff.models import Transformer, UNet
from psidiff.process import (
    Cosine,
    LogLinear,
    Masked,
    Mixed,
    Uniform,
    Unigram,
    corrupt,
    marginal,
    nelbo,
    posterior,
    psi,
)
from psidiff.sampling import (
    Cap,
    Confidence,
    Confident,
    Constant,
    Corrector,
    Guidance,
    Loop,
    Nucleus,
    Sampler,
    Step,
    Temperature,
    TopK,
    parse_guidance,
    parse_kappa,
    plan,
    sample,
)
from psidiff.training import Curriculum, NextToken, RelaxedNelbo
from psidiff.types import as_device, check_float64, check_integers


@pytest.fixture(autouse=True)
def no_type_checks():
    """A user has none either: what they meet is our own sentence."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


Z = torch.zeros(2, 3, dtype=torch.int64)
X = torch.full((2, 3, 4), 0.25)
PLAN = plan(4, LogLinear(), Constant(1.0))
GAMMA = torch.zeros(2)


def flat(z, alpha, labels=None):
    return torch.zeros(*z.shape, 4).log_softmax(-1)


LABELLED = wrap(Transformer(4, 16, 1, 2, 16, num_classes=3), Uniform(4), LogLinear()).denoiser


def run(**options):
    arguments = {"denoiser": flat, "prior": Uniform(4), "steps": PLAN, "shape": (2, 3)}
    return sample(**{**arguments, **options})


MISTAKES = {
    "labels are floats": (lambda: run(labels=[0.5, 1.0]), "labels .* integers, got dtype"),
    "first_index": (lambda: run(first_index="a"), "first_index .* a"),
    "device": (lambda: run(device="nope"), "device .* 'nope'"),
    "kappa above 1": (lambda: psi(Uniform(4), Z, X, 0.5, 0.3, 1.5), "kappa .* 1.5"),
    "kappa below 0": (
        lambda: psi(Uniform(4), Z, X, 0.5, 0.3, torch.full((2, 3), -0.1)),
        "-0.1",
    ),
    "kappa is nan": (lambda: psi(Uniform(4), Z, X, 0.5, 0.3, float("nan")), "nan"),
    "kappa's shape": (lambda: psi(Uniform(4), Z, X, 0.5, 0.3, torch.ones(3, 2)), r"\(2, 3\)"),
    "kappa of a step": (lambda: run(steps=[Step(0.5, 0.3, 0.5, 1.5)]), "kappa .* 1.5"),
    "kappa of a memory": (
        lambda: run(steps=[Step(0.5, 0.3, 0.5, lambda m: torch.full((2, 3), 1.5))]),
        "memory .* 1.5",
    ),
    "kappa is a tensor": (lambda: Step(0.5, 0.3, 0.5, torch.ones(2, 3)), "one number"),
    "levels rise": (lambda: posterior(Uniform(4), Z, X, 0.3, 0.5), "alpha_s .* 0.3 < 0.5"),
    "levels rise somewhere": (
        lambda: posterior(Uniform(4), Z, X, torch.tensor([0.6, 0.3])[:, None, None], 0.5),
        "0.3 < 0.5",
    ),
    "a step rises": (lambda: Step(0.5, 0.6, 0.4), "0.4 < 0.6"),
    "level above 1": (lambda: marginal(Uniform(4), X, 1.1), "alpha .* 1.1"),
    "level below 0": (lambda: corrupt(Uniform(4), Z, -0.1), "alpha .* -0.1"),
    "level too long": (
        lambda: corrupt(Uniform(4), Z, torch.full((5, 1), 0.5)),
        r"broadcast to \(B, L, 1\) = \(2, 3, 1\), got shape \(5, 1\)",
    ),
    "slope's shape": (
        lambda: nelbo(Uniform(4), Z, Z, X.log(), 0.5, torch.full((2, 3), -1.0)),
        r"dalpha must broadcast",
    ),
    "level's shape": (lambda: corrupt(Uniform(4), Z, torch.full((2, 3), 0.5)), r"\(B, L, 1\)"),
    "token too large": (lambda: psi(Uniform(4), Z + 4, X, 0.5, 0.3, 1.0), r"\[0, 4\), got 4"),
    "token below 0": (lambda: corrupt(Uniform(4), Z - 1, 0.5), r"\[0, 4\), got -1"),
    "clean token too large": (
        lambda: nelbo(Uniform(4), Z, Z + 9, X.log(), 0.5, -1.0),
        r"x must .* \[0, 4\), got 9",
    ),
    "wrong width": (lambda: nelbo(Uniform(5), Z, Z, X.log(), 0.5, -1.0), r"\(2, 3, 5\)"),
    "tokens in a list": (
        lambda: corrupt(Uniform(4), [[1, 2]], 0.5),
        r"tokens must be a tensor, got \[\[1, 2\]\]",
    ),
    "x in a list": (lambda: psi(Uniform(4), Z, [1.0], 0.5, 0.3, 1.0), "x must be a tensor"),
    "shape is a number": (lambda: Uniform(4).sample(5), "shape must be a tuple .* got 5"),
    "shape is a word": (lambda: Uniform(4).sample("ab"), "shape must be a tuple .* 'ab'"),
    "shape of halves": (lambda: Uniform(4).sample((2.5,)), "size in shape .* got 2.5"),
    "given too large": (lambda: run(given=Z + 7), r"given .* \[0, 4\), got 7"),
    "given below -1": (lambda: run(given=Z - 2), r"given .* got -2"),
    "given's shape": (lambda: run(given=Z[:1]), r"given .* \(2, 3\), got \(1, 3\)"),
    "given a mask": (lambda: run(prior=Masked(4, 3), given=Z + 3), "mask id 3"),
    "mask id missing": (lambda: Masked(4), "mask_id is missing"),
    "mask id outside": (lambda: Masked(4, 4), r"mask_id .* \[0, 4\), got 4"),
    "mask id negative": (lambda: Mixed(4, -1), "mask_id .* -1"),
    "mixed share": (lambda: Mixed(4, 3, uniform=1.5), "uniform .* 1.5"),
    "one token": (lambda: Uniform(1), "at least 2, got 1"),
    "one token to transform": (lambda: diffusion_transform(GAMMA, 1), "at least 2, got 1"),
    "one token to invert": (lambda: gamma_at(0.5, 1), "at least 2, got 1"),
    "one token to relax": (lambda: relax_dense(Z, GAMMA, 1, 0.1), "at least 2, got 1"),
    "one count": (lambda: Unigram([3.0]), "at least 2, got 1"),
    "half a token": (lambda: Uniform(2.5), "integer .* 2.5"),
    "negative count": (lambda: Unigram([1.0, -2.0]), "counts .* -2"),
    "no counts": (lambda: Unigram([0.0, 0.0]), "all be 0"),
    "counts are a word": (lambda: Unigram("abc"), "counts must be .* numbers, got 'abc'"),
    "counts are one": (lambda: Unigram(7), "counts must be .* numbers, got 7"),
    "eps": (lambda: LogLinear(1.5), "eps .* 1.5"),
    "cosine eps": (lambda: Cosine(-0.1), "eps .* -0.1"),
    "top_p zero": (lambda: run(top_p=0.0), r"top_p .* \(0, 1\], got 0"),
    "top_p above 1": (lambda: Nucleus(flat, 1.2), "top_p .* 1.2"),
    "min_p": (lambda: run(min_p=1.5), "min_p .* 1.5"),
    "top_k zero": (lambda: TopK(flat, 0), "top_k .* 0"),
    "temperature zero": (lambda: Temperature(flat, 0.0), "temperature .* 0;"),
    "temperature is a word": (
        lambda: run(temperature="a"),
        "temperature .* number, got 'a'",
    ),
    "temperature is None": (lambda: run(temperature=None), "temperature .* None"),
    "top_p is a word": (lambda: run(top_p="a"), "top_p .* one number, got 'a'"),
    "top_p is many": (lambda: run(top_p=torch.ones(9, 9)), r"top_p .* got tensor\(.*\[...\]"),
    "min_p is a word": (lambda: run(min_p="a"), "min_p .* one number, got 'a'"),
    "top_k is a word": (lambda: run(top_k="a"), "top_k .* integer .* a"),
    "nucleus": (lambda: run(top_p=0.5, nucleus="cut"), "'keep' or 'drop', got 'cut'"),
    "predictor": (lambda: run(predictor="euler"), "predictor .* 'euler'"),
    "head": (lambda: run(head="eager"), "'eager'"),
    "micro_batch": (lambda: run(micro_batch=0), "micro_batch .* 0"),
    "shape": (lambda: run(shape=(2, 3, 4)), r"\(2, 3, 4\)"),
    "no samples": (lambda: run(shape=(0, 3)), "num_samples .* 0"),
    "no plan": (lambda: run(steps=10), "plan"),
    "empty plan": (lambda: run(steps=[]), "plan"),
    "labels' shape": (lambda: run(labels=[1, 2, 3]), r"labels .* \(2,\), got \(3,\)"),
    "guidance without labels": (lambda: run(guidance=Guidance(2.0)), "labels"),
    "guidance is a number": (lambda: run(guidance=2.0, labels=[0, 1]), "Guidance.*2.0"),
    "guidance is a word": (lambda: Guidance("a"), "weight of guidance .* number, got 'a'"),
    "guidance on what": (lambda: Guidance(2.0, on="z"), "'z'"),
    "guided posteriors": (
        lambda: run(guidance=Guidance(2.0, "posterior"), labels=[0, 1], predictor="maximal"),
        "'maximal'",
    ),
    "confident with kappa": (
        lambda: run(steps=plan(4, LogLinear(), Cap(0.1)), predictor="confident"),
        "kappa = 1",
    ),
    "confident noise": (lambda: Confident(gumbel=-1.0), "-1"),
    "corrector on masks": (lambda: run(prior=Masked(4, 3), corrector=Corrector()), "Masked"),
    "corrector's size": (lambda: Corrector(size=0), "0"),
    "corrector's choice": (lambda: Corrector(select="best"), "'best'"),
    "corrector is a number": (lambda: run(corrector=2), "Corrector.*2"),
    "generator is a seed": (lambda: run(generator=0), "torch.Generator .* 0"),
    "denoiser's width": (lambda: run(prior=Uniform(5)), "4 tokens, the prior of 5"),
    "denoiser's length": (
        lambda: run(denoiser=lambda z, a, labels=None: torch.zeros(2, 4, 4)),
        r"\(2, 3\) and answered with \(2, 4, 4\)",
    ),
    "denoiser is nan": (
        lambda: run(denoiser=lambda z, a, labels=None: torch.full((*z.shape, 4), torch.nan)),
        "NaN",
    ),
    "no rule": (lambda: parse_kappa("max-capped-1e-3"), "max-capped-1e-3"),
    "rule is None": (lambda: parse_kappa(None), "None"),
    "eta": (lambda: parse_kappa("cap:1.5"), "eta .* 1.5"),
    "confidence's eta": (lambda: Confidence(-1.0), "eta .* -1"),
    "window": (lambda: Constant(0.9, t_on=0.1, t_off=0.5), "t_off=0.5, t_on=0.1"),
    "loop": (lambda: Loop(0.02, alpha_on=1.5), "alpha_on=1.5"),
    "loop below the start": (
        lambda: plan(4, LogLinear(0.95), Loop(0.02)),
        r"alpha\(1\) = 0.95, got 0.9",
    ),
    "loop on a grid": (
        lambda: plan(None, LogLinear(), Loop(0.02), grid=[1, 0.5]),
        "own levels",
    ),
    "no steps": (lambda: plan(0, LogLinear(), Constant(1.0)), "num_steps .* 0"),
    "steps and grid": (
        lambda: plan(7, LogLinear(), Constant(1.0), grid=[1, 0.5]),
        "1 gaps and a last step, but num_steps is 7",
    ),
    "rising grid": (
        lambda: plan(None, LogLinear(), Constant(1.0), grid=[0.1, 0.5]),
        "0.1, 0.5",
    ),
    "grid's name": (lambda: plan(4, LogLinear(), Constant(1.0), grid="cosine"), "'cosine'"),
    "last": (lambda: plan(4, LogLinear(), Constant(1.0), last="none"), "'none'"),
    "kappa is a word": (lambda: plan(4, LogLinear(), "cap:.01"), "parse_kappa"),
    "schedule is a word": (lambda: plan(3, "loglinear", Cap(0.1)), "schedule .* 'loglinear'"),
    "schedule is a class": (
        lambda: plan(3, LogLinear, Cap(0.1)),
        "schedule .*class",
    ),
    "nothing to wrap": (lambda: wrap(None, Uniform(4), LogLinear()), "callable .* None"),
    "a class to wrap": (lambda: wrap(dict, Uniform(4), LogLinear()), "callable .* 'dict'"),
    "a class of priors": (
        lambda: wrap(flat, Uniform, LogLinear()),
        r"prior .* Uniform\(K\), got",
    ),
    "a class of schedules": (
        lambda: wrap(flat, Uniform(4), LogLinear),
        r"schedule .* LogLinear\(\), got",
    ),
    "a wrapped network's width": (
        lambda: wrap(flat, Uniform(5), LogLinear()).sample(2, 4, length=3),
        "4 tokens, the prior of 5",
    ),
    "a wrapped network's silence": (
        lambda: wrap(lambda z, a: None, Uniform(5), LogLinear()).sample(2, 4, length=3),
        "answered with NoneType",
    ),
    "no such label": (
        lambda: run(denoiser=Nucleus(LABELLED, 0.9), labels=[0, 7]),
        "labels must be classes from 0 to 2, got 7",
    ),
    "a label below 0": (lambda: run(denoiser=LABELLED, labels=[0, -1]), "got -1"),
    "first_index of a model": (
        lambda: wrap(flat, Uniform(4), LogLinear()).sample(2, 1, length=3, first_index="a"),
        "first_index .* a",
    ),
    "device is a list": (lambda: as_device([]), r"device .* \[\]"),
    "labels are halves": (lambda: check_integers("labels", GAMMA), "labels .* torch.float32"),
    "method": (lambda: diffusion_transform(GAMMA, 5, "exact"), "'exact'"),
    "gamma infinite": (lambda: diffusion_transform(GAMMA + torch.inf, 5), "inf"),
    "gamma range": (
        lambda: diffusion_transform(GAMMA, 5, "polynomial", gamma_range=(1.0, -1.0)),
        r"\(1.0, -1.0\)",
    ),
    "x of another width": (
        lambda: marginal(Uniform(5), torch.ones(2, 3, 1), 0.5),
        r"\(2, 3, 5\)",
    ),
    "half a sweep": (lambda: Corrector(1.5, 2), "sweeps .* 1.5"),
    "half a corrected token": (lambda: Corrector(1, 2.5), "size .* 2.5"),
    "no end of remasking": (lambda: Confidence(float("inf")), "finite, got inf"),
    "a word for a number of samples": (
        lambda: wrap(flat, Uniform(4), LogLinear()).sample("2"),
        "got '2'",
    ),
    "gamma of alpha 1": (lambda: gamma_at(1.0, 5), r"\(0, 1\) .* 1"),
    "gamma's shape": (
        lambda: relax_sparse(Z, torch.zeros(3), 5, 2, 0.1),
        r"\(2,\), got \(3,\)",
    ),
    "gamma is nan": (lambda: relax_sparse(Z, GAMMA + torch.nan, 5, 2, 0.1), "nan"),
    "top_k of the curriculum": (lambda: relax_sparse(Z, GAMMA, 5, 5, 0.1), "top_k .* 5"),
    "temperature of the curriculum": (lambda: relax_sparse(Z, GAMMA, 5, 2, 0.0), "temperature"),
    "top_k of a relaxed loss": (lambda: RelaxedNelbo(5, 5), "top_k .* vocab_size = 5, got 5"),
    "top_k zero of a relaxed loss": (lambda: RelaxedNelbo(5, 0), "top_k .* 0"),
    "temperature of a relaxed loss": (lambda: RelaxedNelbo(5, temperature=0.0), "above 0"),
    "levels of a relaxed loss": (
        lambda: RelaxedNelbo(5, alpha_range=(0.1, 0.9)),
        r"alpha_range must fall, .* \[0.1, 0.9\]",
    ),
    "final temperature": (
        lambda: Curriculum.relaxed(RelaxedNelbo(5), NextToken(0), 9, 0.0),
        "final_temperature must be above 0, got 0",
    ),
    "no heads": (lambda: Transformer(4, num_heads=0), "num_heads .* got 0"),
    "no width": (lambda: Transformer(4, hidden_size=0), "hidden_size .* got 0"),
    "no blocks": (lambda: Transformer(4, num_blocks=0), "num_blocks .* got 0"),
    "too narrow a U-Net": (lambda: UNet(width=3), "width .* at least 4, got 3"),
    "a U-Net of no scale": (lambda: UNet(width_mult=()), "width_mult .* got none"),
    "float64 on mps": (lambda: check_float64("mps"), "float64 does not exist on device mps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_numpy_numbers_are_numbers():
    assert Uniform(np.int64(5)) == Uniform(5) and Masked(5, np.int64(4)) == Masked(5, 4)
    assert len(plan(np.int64(4), LogLinear(), Constant(1.0))) == 5
    step = Step(np.float64(0.5), np.float64(0.3), 0.5, torch.tensor(0.5))
    assert sample(flat, Uniform(4), [step], (2, 3), generator()).tokens.shape == (2, 3)
    assert psi(Uniform(4), Z.int(), X, np.float64(0.5), 0, 1).keep.shape == (2, 3)
    given = np.array([[1, -1, -1], [-1, 2, -1]])
    assert run(given=given, labels=np.array([0, 1])).tokens[0, 0] == 1


def test_levels_of_mixed_kinds_keep_their_digits():
    x, tensor = X.double(), torch.full((2, 3, 1), 0.3, dtype=torch.float64)
    for prior in (Uniform(4), Unigram([1.0, 2.0, 3.0, 4.0])):
        want = posterior(prior, Z, x, 0.7, 0.3).keep
        for s, t in ((0.7, tensor), (tensor + 0.4, 0.3)):
            torch.testing.assert_close(
                posterior(prior, Z, x, s, t).keep, want, atol=1e-15, rtol=0
            )
        for noise in (1e-3, 1e-6):
            by_float = nelbo(prior, Z, Z, x.log(), 1 - noise, -1.0)
            level = torch.full((2, 3, 1), 1 - noise, dtype=torch.float64)
            by_tensor = nelbo(prior, Z, Z, x.log(), level, -1.0)
            torch.testing.assert_close(by_float, by_tensor, atol=0, rtol=1e-12)
            rough = nelbo(prior, Z, Z, x.log().float(), level, -1.0)
            torch.testing.assert_close(rough.double(), by_tensor, atol=0, rtol=1e-5)


def test_every_level_that_broadcasts_is_one():
    x, by_position = X.double(), torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64)
    whole = by_position.expand(2, 3)[..., None]
    for prior in (Uniform(4), Unigram([1.0, 2.0, 3.0, 4.0]), Masked(4, 3)):
        for level in (by_position[:, None], by_position[None, :, None]):
            assert torch.equal(
                corrupt(prior, Z, level, generator()), corrupt(prior, Z, whole, generator())
            )
            assert torch.equal(marginal(prior, x, level), marginal(prior, x, whole))
            keep = posterior(prior, Z, x, 0.7, level).keep
            assert torch.equal(keep, posterior(prior, Z, x, 0.7, whole).keep)
            loss = nelbo(prior, Z, Z, x.log(), level, -level)
            assert torch.equal(loss, nelbo(prior, Z, Z, x.log(), whole, -whole))
            answer = LABELLED(Z, level.float())
            assert torch.equal(answer, LABELLED(Z, whole.float()))


def test_the_loss_vanishes_where_there_is_no_signal():
    for prior in (Uniform(4), Unigram([1.0, 2.0, 3.0, 4.0]), Mixed(4, 3), Masked(4, 3)):
        log_x = torch.tensor([0.2, 0.3, 0.5, 0.0]).log().expand(2, 3, 4)
        if prior.mask_id is None:
            log_x = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(2, 3, 4)
        for alpha in (0.0, 1e-12, 1e-6):
            loss = nelbo(prior, Z, Z, log_x.double(), alpha, -1.0)
            assert (loss.abs() < 1e-3).all() and (loss > -1e-12).all()
            assert (nelbo(prior, Z, Z, log_x, alpha, -1.0) > -1e-6).all()


def test_a_float_and_a_tensor_have_the_same_gamma():
    alpha = torch.tensor([1 - 1e-9], dtype=torch.float64)
    assert gamma_at(1 - 1e-9, 27) == pytest.approx(gamma_at(alpha, 27).item(), abs=1e-6)


def test_a_denoiser_never_hears_of_level_zero():
    heard = []

    def denoiser(z, alpha, labels=None):
        heard.append(alpha)
        return flat(z, alpha)

    run(denoiser=denoiser, steps=plan(4, LogLinear(0.0), Constant(1.0)), head="dense")
    assert min(heard) > 0


def test_given_levels_have_the_dtype_of_networks():
    def denoiser(z, alpha, labels=None):
        assert alpha.dtype == torch.get_default_dtype()
        return flat(z, alpha)

    run(denoiser=denoiser, given=Z - 1 + torch.eye(2, 3).long())


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_temperature_near_zero_leaves_the_most_probable_tokens(temperature, dtype):
    logits = torch.tensor([[30.0, 40.0, -torch.inf, 40.0], [-1e4, -1e5, -2e4, -torch.inf]])
    made = Temperature(None, temperature).rows(logits.to(dtype)).softmax(-1)
    assert made.tolist() == [[0, 0.5, 0, 0.5], [1, 0, 0, 0]]

    def sure(z, alpha, labels=None):
        return torch.tensor([0.2, 0.5, 0.3, 0.0]).log().expand(*z.shape, 4)

    options = {"denoiser": sure, "prior": Masked(5, 4), "temperature": temperature}
    with pytest.raises(ValueError, match="speaks of 4 tokens"):
        run(**options)
    assert bool((run(**options | {"prior": Uniform(4)}, steps=PLAN[-1:]).tokens < 4).all())
    drawn = run(**options | {"prior": Masked(4, 3)}).tokens
    assert drawn.tolist() == [[1] * 3] * 2


@pytest.mark.parametrize("temperature", [1e21, 1e300, 1.7e308])
def test_a_temperature_without_end_leaves_all_tokens_that_are_possible(temperature):
    logits = torch.tensor([[30.0, 40.0, -torch.inf, -1e4]])
    made = Temperature(None, temperature).rows(logits).softmax(-1)
    torch.testing.assert_close(made, torch.tensor([[1, 1, 0, 1]]) / 3)


@pytest.mark.parametrize("weight", ["9e999", "1e308", "-1e300", "ramp:1e308", "1e308@.1-.6"])
@pytest.mark.parametrize("on", ["", ",posterior"])
def test_a_weight_of_guidance_that_leaves_no_logits_is_named(weight, on):
    with pytest.raises(ValueError, match="guidance has the weight"):
        parse_guidance(weight + on).at(0.3)


@pytest.mark.parametrize("words", ["steps=", "top_k=", "corrector=2x"])
def test_a_number_of_thousands_of_digits_is_a_mistake_in_words(words):
    with pytest.raises(ValueError, match=words.partition("=")[0]) as caught:
        Sampler.parse(f"cap:.01 {words}{'9' * 5000}")
    assert "digits" not in str(caught.value)
