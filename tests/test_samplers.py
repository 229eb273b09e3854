"""The confident decoder's scores and promises, presets, and the words for all of them."""

import math
from dataclasses import replace

import pytest
import torch
from toys import IDS, JOINT, PRIORS, generator

from psidiff.data.toy import Chain
from psidiff.process import Cosine, LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.sampling import (
    PRESETS,
    Cap,
    Confident,
    Constant,
    Corrector,
    Guidance,
    Interval,
    Ramp,
    Rescale,
    RescaleReleased,
    Sampler,
    Step,
    Trace,
    parse_corrector,
    parse_guidance,
    parse_kappa,
    parse_predictor,
    plan,
    preset,
    sample,
)

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
each_score = pytest.mark.parametrize("by", ["probability", "margin", "entropy"])

ROWS = torch.tensor(  # every score orders these positions in its own way
    [
        [0.30, 0.30, 0.30, 0.10],
        [0.50, 0.49, 0.01, 0.00],
        [0.46, 0.18, 0.18, 0.18],
        [0.52, 0.24, 0.24, 0.00],
        [0.53, 0.40, 0.06, 0.01],
    ],
    dtype=torch.float64,
)
ORDERS = {
    "probability": [4, 3, 1, 2, 0],
    "margin": [2, 3, 4, 1, 0],
    "entropy": [1, 4, 3, 2, 0],
}
THRESHOLDS = {  # each between the second and the third of its order
    "probability": 0.51,
    "margin": 0.2,
    "entropy": 0.95,
}
FOUR = [
    Masked(5, 4),
    Uniform(4),
    Mixed(5, 4),
    Unigram([1.0, 2.0, 3.0, 4.0]),
]
each_of_four = pytest.mark.parametrize("prior", FOUR, ids=lambda p: type(p).__name__)


def says(rows, prior):
    """A denoiser that gives position l the row l, whatever it sees."""
    log_x = torch.nn.functional.pad(rows, (0, prior.vocab_size - rows.shape[1])).log()
    return lambda z, alpha, labels=None: log_x.expand(len(z), *log_x.shape)


def watched(denoiser, prior, steps, shape, **options):
    trace = Trace()
    made = sample(denoiser, prior, steps, shape, generator(), on_step=trace, **options)
    return made, trace


def survivors(prior, by, alpha_s, **options):
    """Which of the five positions one step from pure noise keeps."""
    predictor = Confident(argmax=True, by=by, **options)
    _, trace = watched(
        says(ROWS, prior), prior, [Step(1.0, 0.0, alpha_s)], (1, 5), predictor=predictor
    )
    return set((trace.routes[0][0] == 1).nonzero()[:, 0].tolist())


def taken_back(trace, prior):
    """How often a position that held a token holds the mask again."""
    pairs = zip(trace.tokens, trace.tokens[1:], strict=False)
    return sum(((a != prior.mask_id) & (b == prior.mask_id)).sum().item() for a, b in pairs)


def test_the_three_scores_are_what_their_names_say():
    first, second = ROWS.sort(-1, descending=True).values[:, :2].unbind(-1)
    scores = {
        "probability": first,
        "margin": first - second,
        "entropy": -torch.special.entr(ROWS).sum(-1),
    }
    for by, score in scores.items():
        assert score.argsort(descending=True).tolist() == ORDERS[by]
    assert len({tuple(order) for order in ORDERS.values()}) == 3


@each_of_four
@each_score
@pytest.mark.parametrize("count", range(6))
def test_the_positions_with_the_best_score_stay(prior, by, count):
    assert survivors(prior, by, count / 5) == set(ORDERS[by][:count])


@each_of_four
@each_score
def test_a_threshold_keeps_exactly_those_good_enough(prior, by):
    for alpha_s in (0.0, 0.2, 0.9):  # the level does not matter before the end
        assert survivors(prior, by, alpha_s, threshold=THRESHOLDS[by]) == set(ORDERS[by][:2])
    assert survivors(prior, by, 1.0, threshold=THRESHOLDS[by]) == set(range(5))


@each_of_four
@each_score
def test_where_none_is_good_enough_one_more_stays(prior, by):
    hopeless = Confident(argmax=True, by=by, threshold=0.0 if by == "entropy" else 1.0)
    steps = plan(8, LogLinear(), Constant(1.0))
    made, trace = watched(says(ROWS, prior), prior, steps, (3, 5), predictor=hopeless)
    for count, route in zip((1, 2, 3, 4, 5, 5, 5, 5, 5), trace.routes, strict=True):
        renoised = (route == 2).nonzero()[:, 1].view(3, -1)
        assert (renoised == torch.tensor(sorted(ORDERS[by][count:]))).all()
    assert (made.tokens == ROWS.argmax(-1)).all()


@each_of_four
def test_a_threshold_that_is_never_met_ends_with_everything_decided(prior):
    steps = plan(2, LogLinear(), Constant(1.0))
    made, trace = watched(
        says(ROWS, prior), prior, steps, (4, 5), predictor=Confident(threshold=1.0)
    )
    assert [(route == 2).sum(-1).unique().tolist() for route in trace.routes] == [[4], [3], [0]]
    assert made.tokens.max() < 4


def test_a_threshold_that_is_soon_met_saves_forward_passes():
    prior, sure = Masked(5, 4), torch.tensor([[0.97, 0.01, 0.01, 0.01]]).double()
    steps = plan(10, LogLinear(), Constant(1.0))
    for by, threshold in (("probability", 0.9), ("margin", 0.9), ("entropy", 0.2)):
        predictor = Confident(argmax=True, by=by, threshold=threshold)
        made = sample(says(sure.expand(6, 4), prior), prior, steps, (3, 6), predictor=predictor)
        assert made.nfe == 1 and made.head_rows == 18 and (made.tokens == 0).all()


def test_the_score_is_of_x_theta_as_it_is_drawn_from():
    """Truncation to one token makes every position sure of it."""
    prior = Masked(5, 4)
    steps = [Step(1.0, 0.0, 0.5)]
    for by, threshold in (("probability", 1.0), ("margin", 1.0), ("entropy", 0.0)):
        predictor = Confident(by=by, threshold=threshold)
        made = sample(
            says(ROWS, prior), prior, steps, (2, 5), generator(), predictor=predictor, top_k=1
        )
        assert (made.tokens[:, 1:] == ROWS.argmax(-1)[1:]).all()


@each_of_four
def test_argmax_takes_the_most_probable_token(prior):
    steps = plan(6, LogLinear(), Constant(1.0))
    rows = ROWS[1:]  # the first has a tie
    for predictor in (Confident(argmax=True), Confident(argmax=True, gumbel=2.0, by="margin")):
        made, trace = watched(says(rows, prior), prior, steps, (20, 4), predictor=predictor)
        assert (made.tokens == rows.argmax(-1)).all()
        for tokens, route in zip(trace.tokens, trace.routes, strict=True):
            assert (tokens == rows.argmax(-1))[route == 1].all()
    sampled = sample(
        says(rows, prior), prior, steps, (20, 4), generator(), predictor="confident"
    )
    assert not (sampled.tokens == rows.argmax(-1)).all()


SETTINGS = [
    Confident(),
    Confident(by="margin"),
    Confident(by="entropy", gumbel=0.5),
    Confident(gumbel=1.0, take_back=True),
    Confident(by="margin", gumbel=1.0, take_back=True),
    Confident(threshold=0.6),
    Confident(by="margin", threshold=0.4, gumbel=1.0),
    Confident(by="entropy", threshold=0.5, take_back=True),
    Confident(commit=True),
    Confident(by="margin", threshold=0.4, gumbel=1.0, commit=True),
]
each_setting = pytest.mark.parametrize("predictor", SETTINGS, ids=str)


@each_prior
@each_setting
def test_given_tokens_never_change_and_the_share_alpha_s_of_the_others_stays(prior, predictor):
    chain = Chain.random(num_tokens=3, length=12)
    given = torch.full((8, 12), -1)
    given[:, [0, 5]] = torch.tensor([1, 2])
    steps = plan(10, LogLinear(), Constant(1.0))
    made, trace = watched(
        chain.denoiser(prior), prior, steps, (8, 12), predictor=predictor, given=given
    )
    assert made.tokens.max() < 3
    for step, tokens, route in zip(steps, trace.tokens, trace.routes, strict=True):
        assert (tokens[:, [0, 5]] == torch.tensor([1, 2])).all()
        assert (route[:, [0, 5]] == 0).all()
        if predictor.threshold is None:
            assert ((route == 2).sum(-1) == 10 - int(step.alpha_s * 10 + 0.5)).all()


@each_prior
@each_setting
def test_tokens_do_not_depend_on_the_batch(prior, predictor):
    denoiser = Chain.random(num_tokens=3, length=6).denoiser(prior)
    steps = plan(7, LogLinear(), Constant(1.0))

    def run(first, count, **more):
        return sample(
            denoiser,
            prior,
            steps,
            (count, 6),
            generator(4),
            predictor=predictor,
            first_index=first,
            **more,
        ).tokens

    whole = run(0, 7)
    assert (torch.cat([run(i, min(3, 7 - i)) for i in (0, 3, 6)]) == whole).all()
    assert (run(0, 7, micro_batch=2) == whole).all()


def test_a_committed_token_is_never_taken_back():
    prior = PRIORS[0]
    denoiser = Chain.random(num_tokens=3, length=12).denoiser(prior)
    for predictor in SETTINGS:
        if predictor.take_back:
            continue
        steps = plan(10, LogLinear(), Constant(1.0))
        _, trace = watched(denoiser, prior, steps, (40, 12), predictor=predictor)
        for before, after in zip(trace.tokens, trace.tokens[1:], strict=False):
            assert ((before == after) | (before == prior.mask_id)).all()
    back = (Step(1.0, 0.0, 0.75), Step(0.5, 0.25, 0.25))  # nor by a plan that goes back
    _, trace = watched(denoiser, prior, back, (40, 12), predictor="confident")
    assert (trace.tokens[0] == trace.tokens[1]).all()


def test_with_gumbel_noise_committed_tokens_are_taken_back_on_request():
    prior, steps = PRIORS[0], plan(10, LogLinear(), Constant(1.0))
    denoiser = Chain.random(num_tokens=3, length=12).denoiser(prior)
    for by in ORDERS:
        predictor = Confident(gumbel=1.0, by=by, take_back=True)
        made, trace = watched(denoiser, prior, steps, (40, 12), predictor=predictor)
        assert taken_back(trace, prior) > 40 and made.tokens.max() < 3


def improving(z, alpha, labels=None):
    """Position 0 is fairly sure at once; with it known the others are surer than it was."""
    unknown = torch.tensor([[0.7, 0.2, 0.1, 0], [0.5, 0.3, 0.2, 0], [0.4, 0.3, 0.3, 0]])
    known = torch.tensor([[0.7, 0.2, 0.1, 0], [0.95, 0.04, 0.01, 0], [0.9, 0.06, 0.04, 0]])
    seen = (z[:, :1, None] != 3).expand(len(z), 3, 4)
    return torch.where(seen, known.double(), unknown.double()).log()


@each_score
def test_a_committed_token_competes_with_the_score_it_was_predicted_with(by):
    prior, steps = Masked(4, 3), [Step(1.0, 0.0, 1 / 3), Step(0.6, 1 / 3, 2 / 3)]
    kept = {False: [[0, 3, 3], [0, 0, 3]], True: [[0, 3, 3], [3, 0, 0]]}
    for take_back, tokens in kept.items():
        predictor = Confident(argmax=True, by=by, take_back=take_back)
        _, trace = watched(improving, prior, steps, (1, 3), predictor=predictor)
        assert [z[0].tolist() for z in trace.tokens] == tokens


@each_score
def test_a_threshold_takes_back_what_was_not_good_enough(by):
    """At first nobody passes and position 0 is let in; then two pass and it is not needed."""
    prior, limit = Masked(4, 3), {"probability": 0.85, "margin": 0.8, "entropy": 0.45}[by]
    steps = [Step(1.0, 0.0, 0.3), Step(0.6, 0.3, 0.6), Step(0.3, 0.6, 1.0)]
    kept = {
        False: [[0, 3, 3], [0, 0, 0], [0, 0, 0]],
        True: [[0, 3, 3], [3, 0, 0], [0, 0, 0]],
    }
    for take_back, tokens in kept.items():
        predictor = Confident(argmax=True, by=by, threshold=limit, take_back=take_back)
        _, trace = watched(improving, prior, steps, (1, 3), predictor=predictor)
        assert [z[0].tolist() for z in trace.tokens] == tokens


@pytest.mark.parametrize("prior", PRIORS[1:], ids=IDS[1:])
def test_where_every_token_can_be_noise_there_is_nothing_to_take_back(prior):
    denoiser = Chain.random(num_tokens=3, length=8).denoiser(prior)
    steps = plan(9, LogLinear(), Constant(1.0))
    for settings in ({}, {"gumbel": 1.0, "by": "margin"}, {"threshold": 0.6}):
        kept, back = (
            sample(
                denoiser,
                prior,
                steps,
                (10, 8),
                generator(),
                predictor=Confident(**settings, take_back=take_back),
            )
            for take_back in (False, True)
        )
        assert (kept.tokens == back.tokens).all()


@each_prior
@pytest.mark.parametrize("threshold", (None, 0.6))
def test_what_is_committed_is_told_clean_among_noise_and_stays(prior, threshold):
    exact, told = Chain.random(num_tokens=3, length=12).denoiser(prior), []

    def denoiser(z, alpha, labels=None):
        told.append(alpha.expand(*z.shape, 1)[..., 0])
        return exact(z, alpha)

    given = torch.full((8, 12), -1)
    given[:, [0, 5]] = torch.tensor([1, 2])
    steps = plan(10, LogLinear(), Constant(1.0))
    predictor = Confident(threshold=threshold, commit=True)
    _, trace = watched(denoiser, prior, steps, (8, 12), predictor=predictor, given=given)
    known = given >= 0
    for alpha, before, after, route in zip(
        told, [trace.tokens[0], *trace.tokens], trace.tokens, trace.routes, strict=False
    ):
        asked = alpha if len(alpha) == 8 else None  # finished sequences are not asked again
        if asked is not None:
            assert (asked == torch.where(known, 1.0, steps[0].alpha_t).to(asked)).all()
        assert (before == after)[known].all()
        known = known | (route == 1)
        assert (route == 2).eq(~known).all()
    assert known.all()


def test_committed_decoding_with_uniform_noise_is_that_with_masks():
    """With exact denoisers: what is noise says nothing, be it a mask or any token."""
    chain, steps = (
        Chain.random(num_tokens=3, length=12),
        plan(12, LogLinear(1e-6), Constant(1.0)),
    )
    given = torch.full((20, 12), -1)
    given[:, [2, 7]] = torch.randint(3, (20, 2), generator=generator())
    tokens = [
        sample(
            chain.denoiser(prior),
            prior,
            steps,
            (20, 12),
            generator(),
            given=given,
            predictor=Confident(argmax=True, commit=True),
        ).tokens
        for prior in (Masked(4, 3), Uniform(3))
    ]
    assert (tokens[0] == tokens[1]).all()
    assert len(tokens[0].unique(dim=0)) > 4


@pytest.mark.parametrize(
    "make, words",
    (
        (lambda: Confident(commit=True, take_back=True), "cannot be taken back"),
        (
            lambda: sample(
                JOINT.denoiser(Uniform(3)),
                Uniform(3),
                plan(4, LogLinear(), Constant(1.0)),
                (2, 3),
                predictor=Confident(commit=True),
                corrector=Corrector(1, 2),
            ),
            "a corrector would redraw",
        ),
    ),
)
def test_what_contradicts_a_commitment_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@each_prior
def test_the_word_confident_is_the_default_decoder(prior):
    steps = plan(9, LogLinear(), Constant(1.0))
    made = [
        sample(JOINT.denoiser(prior), prior, steps, (20, 3), generator(), predictor=each).tokens
        for each in ("confident", Confident(), parse_predictor("confident"))
    ]
    assert (made[0] == made[1]).all() and (made[0] == made[2]).all()


def test_a_corrector_may_follow_a_threshold():
    prior, steps = Uniform(4), plan(6, LogLinear(), Constant(1.0))
    options = {"predictor": Confident(by="margin", threshold=0.9), "corrector": Corrector(1, 2)}
    made = sample(says(ROWS, prior), prior, steps, (4, 5), generator(), **options)
    assert made.tokens.shape == (4, 5)


@pytest.mark.parametrize("name", PRESETS)
@each_prior
def test_every_preset_samples_from_every_prior(name, prior):
    chosen = preset(name)
    steps = replace(chosen, steps=5).plan(LogLinear(), prior)
    made = sample(
        JOINT.denoiser(prior),
        prior,
        steps,
        (20, 3),
        generator(),
        **chosen.options(),
    )
    assert made.tokens.max() < 3 and chosen == Sampler.parse(f"preset={name}")


def test_presets_hold_what_was_published():
    uniform = Uniform(4)
    assert preset("ancestral").rule(uniform) == Constant(1.0)
    text, images = preset("paper-text"), preset("paper-images")
    assert (text.rule(uniform), text.top_p, text.nucleus) == (
        RescaleReleased(0.05),
        0.9,
        "keep",
    )
    assert (text.schedule, text.last) == (None, "sample")
    assert images.rule(uniform) == Constant(0.95, t_on=0.5, t_off=0.1)
    assert (images.schedule, images.top_p, images.last) == (Cosine(), None, "greedy")
    for name, kappa in (("cap", "cap:.008"), ("rescale", "rescale:.015"), ("loop", "loop:.02")):
        remdm = preset(f"remdm-{name}")
        assert (remdm.top_p, remdm.nucleus) == (0.9, "drop")
        assert remdm.last == "greedy" and remdm.rule(uniform) == parse_kappa(kappa)


def test_remdm_presets_are_exact_for_masks_and_clipped_elsewhere():
    sigmas = {
        "remdm-cap": lambda s, t: min(0.008, 1, (1 - s) / t),
        "remdm-rescale": lambda s, t: 0.015 * min(1, (1 - s) / t),
    }
    for name, sigma in sigmas.items():
        exact = plan(200, LogLinear(), preset(name).rule(PRIORS[0]))[:-1]
        for step in exact:
            kappa = 1 - sigma(step.alpha_s, step.alpha_t) / (1 - step.alpha_s)
            assert math.isclose(step.kappa, kappa, abs_tol=1e-9)
        for prior in PRIORS[1:]:
            clipped = plan(200, LogLinear(), preset(name).rule(prior))[:-1]
            assert [s.kappa for s in clipped] == [max(s.kappa, 0.0) for s in exact]
        assert (min(s.kappa for s in exact) < 0) == (name == "remdm-cap")
    loop = plan(100, LogLinear(), preset("remdm-loop").rule(PRIORS[0]))
    plateau = [step.kappa for step in loop if step.alpha_t == step.alpha_s == 0.9]
    assert len(plateau) >= 48 and all(math.isclose(k, 1 - 0.02 / 0.1) for k in plateau)
    for rule, word in (
        (Cap(0.1, clipped=False), "cap:.1,clipped=no"),
        (Rescale(0.1, False), "rescale:.1,clipped=no"),
    ):
        assert Sampler.parse(word).rule(PRIORS[0]) == rule
        assert Sampler.parse(word).rule(PRIORS[1]).clipped


WORDS = {
    "markov": "markov",
    " maximal ": "maximal",
    "confident": Confident(),
    "confident:probability": Confident(),
    "confident:margin": Confident(by="margin"),
    "confident:threshold=.9": Confident(threshold=0.9),
    "confident:argmax,commit": Confident(argmax=True, commit=True),
    "confident:entropy,threshold=.3,argmax,gumbel=1,take-back": Confident(
        gumbel=1.0, argmax=True, by="entropy", threshold=0.3, take_back=True
    ),
    "confident:take-back, gumbel=5e-1": Confident(gumbel=0.5, take_back=True),
}
GUIDANCE = {
    "2": Guidance(2.0),
    "-.5": Guidance(-0.5),
    "ramp:3": Guidance(Ramp(3.0)),
    "ramp:3^2": Guidance(Ramp(3.0, power=2.0)),
    "2@.1-.6": Guidance(Interval(2.0, t_on=0.6, t_off=0.1)),
    "1.5@0-1": Guidance(Interval(1.5)),
}
CORRECTORS = {
    "2x12": Corrector(2, 12),
    "1x1": Corrector(),
    "2x12:random": Corrector(2, 12),
    "2x12:uncertain": Corrector(2, 12, "uncertain"),
}


@pytest.mark.parametrize("text", WORDS)
def test_words_for_predictors(text):
    assert parse_predictor(text) == WORDS[text]


@pytest.mark.parametrize("text", GUIDANCE)
def test_words_for_guidance(text):
    assert parse_guidance(text) == GUIDANCE[text]
    on_posteriors = Guidance(GUIDANCE[text].weight, "posterior")
    assert parse_guidance(text, on="posterior") == on_posteriors


@pytest.mark.parametrize("text", CORRECTORS)
def test_words_for_correctors(text):
    assert parse_corrector(text) == CORRECTORS[text]


PREDICTORS_ARE = (
    "is no predictor; these are: markov, maximal, confident, confident:margin, "
    "confident:entropy,threshold=.3, confident:probability,gumbel=1,argmax,take-back, "
    "confident:argmax,commit"
)
GUIDANCE_IS = "is no guidance; these are: 2, 2@.1-.6, ramp:3, ramp:3^2"
CORRECTORS_ARE = "is no corrector; these are: 2x12 (sweeps x size), 2x12:uncertain"
IN_ALL = "docs/samplers.md has all of them"
SOME_ARE = "some are: ancestral, paper-text, paper-images, remdm-cap"
MISTAKES = [
    *(
        (parse_predictor, text, f"{text!r} {PREDICTORS_ARE}")
        for text in (
            "euler",
            "",
            "markov:margin",
            "confident:",
            "confident:best",
            "confident:margin,entropy",
            "confident:gumbel=1,gumbel=2",
            "confident:threshold",
        )
    ),
    (
        parse_predictor,
        "confident,margin",
        "'confident,margin' " + PREDICTORS_ARE.replace(";", "; the nearest is confident;", 1),
    ),
    (parse_predictor, "confident:threshold=-1", "threshold must be in [0, 1], got -1"),
    (parse_predictor, "confident:threshold=1.5", "threshold must be in [0, 1], got 1.5"),
    *(
        (parse_guidance, text, f"{text!r} {GUIDANCE_IS}")
        for text in ("strong", "", "ramp", "ramp:3@.1-.6", "2@.5", "2^2", "x:2")
    ),
    (
        parse_guidance,
        "2@.6-.1",
        "need 0 <= t_off <= t_on <= 1, got t_off=0.6, t_on=0.1",
    ),
    *(
        (parse_corrector, text, f"{text!r} {CORRECTORS_ARE}")
        for text in ("2", "", "2x", "2x1.5", "2x12:best", "-1x2")
    ),
    (parse_corrector, "0x3", "sweeps must be an integer of at least 1, got 0"),
    (
        preset,
        "remdm-lop",
        f"'remdm-lop' is no preset; the nearest is remdm-loop; {IN_ALL}",
    ),
    (preset, "xyz", f"'xyz' is no preset; {SOME_ARE}; {IN_ALL}"),
    (
        lambda by: Confident(by=by),
        "best",
        "by must be 'probability', 'margin' or 'entropy', got 'best'",
    ),
    (lambda x: Confident(threshold=x), -0.1, "threshold must be in [0, 1], got -0.1"),
    (lambda x: Confident(by="margin", threshold=x), 2.0, "threshold must be in [0, 1], got 2"),
    (
        lambda x: Confident(by="entropy", threshold=x),
        -1.0,
        "an entropy threshold must be >= 0, got -1",
    ),
    (lambda x: Confident(threshold=x), math.nan, "threshold must be in [0, 1], got nan"),
]


@pytest.mark.parametrize(("make", "value", "sentence"), MISTAKES)
def test_a_wrong_word_is_one_sentence_that_shows_the_right_ones(make, value, sentence):
    with pytest.raises(ValueError) as caught:
        make(value)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 250
    assert said == sentence if sentence else repr(value) in said
