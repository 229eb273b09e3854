"""A sampler as a value: read from words, printed as words, checked in one place."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import PRIORS

from psidiff.model import load
from psidiff.process import Cosine, LogLinear, Masked, Uniform
from psidiff.request import build_request
from psidiff.sampling import (
    KAPPAS,
    LEFT_TO_RIGHT,
    OPTIONS,
    PRESETS,
    Cap,
    Confident,
    Constant,
    Corrector,
    Guidance,
    Loop,
    Sampler,
    Trace,
    format_options,
    parse_options,
    plan,
)
from psidiff.serve.request_parsing import field_of
from psidiff.serve.schemas import SamplingBody

unit = st.floats(0, 1)
numbers = st.floats(1e-3, 1e3)
windows = st.tuples(unit, unit).map(sorted)
plateaus = st.tuples(st.floats(0.01, 0.49), st.floats(0.5, 0.99))
rules = st.one_of(
    st.sampled_from(["ancestral", "fb", "dfm"]),
    st.builds("{}:{!r}".format, st.sampled_from(["cap", "rescale"]), unit),
    st.builds("rescale-released:{!r}".format, unit),
    st.builds("confidence:{!r}".format, unit),
    st.builds("cap:eta={!r},clipped=no".format, unit),
    st.builds("rescale:eta={!r},clipped=no".format, unit),
    st.builds("loop:{!r},alpha_on=0.8,linear=t".format, unit),
    st.builds(lambda e, w: f"loop:{e!r}@{w[0]!r}-{w[1]!r}", unit, plateaus),
    st.builds(
        lambda e, w: f"loop-released:{e!r},alpha_on=.7@{w[0]!r}-{w[1]!r}", unit, plateaus
    ),
    st.builds(lambda k, w: f"constant:{k!r}@{w[0]!r}-{w[1]!r}", unit, windows),
    st.builds(lambda k, w: f"constant-released:{k!r}@{w[0]!r}-{w[1]!r}", unit, windows),
)
DECODERS = ("confident:entropy,threshold=.3,argmax", "confident:gumbel=.5,take-back")
settings_of = {
    "steps": st.integers(1, 999),
    "schedule": st.one_of(
        st.sampled_from(["cosine", "loglinear"]),
        st.builds(
            "{}:{!r}".format, st.sampled_from(["cosine", "loglinear"]), st.floats(0, 0.99)
        ),
    ),
    "grid": st.one_of(
        st.sampled_from(["linear", "alpha", "quadratic"]),
        st.lists(unit, min_size=1, max_size=4).map(
            lambda times: ",".join(map(repr, sorted(times, reverse=True)))
        ),
    ),
    "predictor": st.sampled_from(["markov", "maximal"]),
    "corrector": st.sampled_from(["2x12", "1x3:uncertain"]),
    "guidance": st.sampled_from(["2", "-.5", "ramp:3^2", "2@.1-.6", "0"]),
    "temperature": numbers,
    "top_k": st.integers(1, 999),
    "top_p": st.floats(1e-3, 1),
    "min_p": unit,
    "nucleus": st.sampled_from(["keep", "drop"]),
    "last": st.sampled_from(["sample", "greedy"]),
    "head": st.sampled_from(["lazy", "dense"]),
    "micro_batch": st.integers(1, 99),
}


@settings(max_examples=200, deadline=None)
@given(rules, st.fixed_dictionaries({}, optional=settings_of))
def test_a_sampler_prints_as_the_words_that_it_is_read_from(rule, said):
    if said.get("grid", "linear") not in ("linear", "alpha", "quadratic"):
        said.pop("steps", None)
    words = " ".join([rule, *(f"{name}={value}" for name, value in said.items())])
    sampler = Sampler.parse(words)
    assert Sampler.parse(str(sampler)) == sampler
    assert str(Sampler.parse(str(sampler))) == str(sampler)
    known = parse_options(words)
    assert parse_options(format_options(known)) == known


def test_every_setting_has_words():
    assert settings_of.keys() == OPTIONS.keys() - {"kappa", "processor"}  # a file's own
    assert list(OPTIONS) != [] and set(OPTIONS) == set(Sampler.__dataclass_fields__)


@pytest.mark.parametrize("words", DECODERS)
def test_confident_decoding_comes_with_the_ancestral_rule(words):
    recommended = Sampler.parse("cap:.1 steps=9")
    sampler = Sampler.parse(f"predictor={words}", recommended)
    assert sampler.kappa == Constant(1.0) and sampler.steps == 9 and sampler.confident
    assert Sampler.parse(str(sampler)) == sampler


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_samplers_with_names(name):
    assert Sampler.parse(f"preset={name}") == PRESETS[name]
    assert Sampler.parse(str(PRESETS[name])) == PRESETS[name]
    changed = Sampler.parse(f"preset={name} top_p=.5 kappa=cap:.2", Sampler(steps=7))
    cap = Cap(0.2, clipped=getattr(PRESETS[name].kappa, "clipped", True))
    assert changed == replace(PRESETS[name], kappa=cap, top_p=0.5, steps=7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ancestral", {"kappa": Constant(1.0)}),
        ("auto", {"kappa": "auto"}),
        ("preset=remdm-cap", {"preset": "remdm-cap"}),
        (
            "constant:0@.05-.6 temperature=.1 last=greedy",
            {"kappa": Constant(0.0, 0.6, 0.05), "temperature": 0.1, "last": "greedy"},
        ),
        (
            "predictor=confident:margin,gumbel=1 top-k=3",
            {"predictor": Confident(by="margin", gumbel=1.0), "top_k": 3},
        ),
        ("loop:.02,t_on=.6", {"kappa": Loop(0.02, t_on=0.6)}),
        ("left-to-right top_p=.9", {"kappa": LEFT_TO_RIGHT, "top_p": 0.9}),
    ],
)
def test_a_rule_and_settings_are_read_from_one_line(text, said):
    assert parse_options(text) == said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a sampler is a rule such as cap:.02"),
        ("ancestral cap:.1", "says kappa twice"),
        ("last=greedy last=sample", "says last twice"),
        ("speed=3", "a sampler has no 'speed'; it may have kappa"),
        ("temperature=warm", "temperature must be a number above 0, got 'warm'"),
        ("temperature=nan", "temperature must be a number above 0, got 'nan'"),
        ("top_k=1.5", "top_k must be a whole number of at least 1, got '1.5'"),
        ("grid=1,x", "grid must be linear, alpha, quadratic, or falling times, got '1,x'"),
        ("grid=1,.5,.1 steps=9", "the grid has 3 times, but num_steps is 9"),
        ("top_p=2", r"top_p must be in \(0, 1\], got 2"),
        ("last=best", "last must be 'sample' or 'greedy'"),
        ("head=none", "head must be 'lazy' or 'dense'"),
        ("cap:.1,clipped=maybe", "is no kappa rule"),
        ("cap:.1,eta=.2", "is no kappa rule"),
        ("cap:.1 predictor=confident", "renoises by itself: leave kappa and preset out"),
        ("guidance=2,posterior predictor=maximal", "needs predictor='markov', got 'maximal'"),
        ("predictor=confident:commit corrector=1x2", "would redraw what 'confident:commit'"),
        ("left-to-right last=greedy", "left to right: it takes no last"),
        ("rules.py:Pulse", "imports rules.py only when you name it"),
        ("shedule=cosine", "a sampler has no 'shedule'; the nearest is schedule; it may have"),
        ("schedule=cosin", "'cosin' is no schedule; the nearest is cosine; these are: loglin"),
        ("grid=qadratic", "got 'qadratic'; the nearest is quadratic"),
        ("lop:.1", "'lop:.1' is no kappa rule; the nearest is loop; these are: ancestral"),
        ("loop:.1,alphaon=.9", ": loop has no 'alphaon'; the nearest is alpha_on; these are"),
        ("loop:.1,linear=time", "linear must be 'alpha' or 't', got 'time'"),
        ("loop:.1@.5-.1", "Loop needs 0 < t_off < t_on < 1"),
        ("loop:.1,t-on=.6@.1-.5", "it says its interval twice"),
        ("cap:.1@.1-.5", "'cap:.1@.1-.5' is no kappa rule: cap holds at all times"),
        ("preset=paper-image", "is no preset; the nearest is paper-images; docs/samplers.md"),
    ],
)
def test_what_is_no_sampler_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        Sampler.parse(text)


@pytest.mark.parametrize("rule", ["loop:.1", "loop-released:.1", "constant-released:.9"])
def test_a_rule_with_levels_of_its_own_takes_no_other_grid(rule):
    for grid in ("alpha", "quadratic", "1,.5"):
        with pytest.raises(ValueError, match="sets its own levels and takes no other grid"):
            Sampler.parse(f"{rule} grid={grid}").plan(LogLinear())


def test_a_sampler_makes_its_plan_and_knows_what_it_keeps():
    uniform, masked = Uniform(5), Masked(5, 4)
    sampler = Sampler.parse("cap:.008,clipped=no steps=64 schedule=cosine last=greedy")
    expected = plan(64, Cosine(), Cap(0.008), last="greedy")
    assert sampler.plan(LogLinear(), uniform) == expected
    assert min(s.kappa for s in sampler.plan(LogLinear(), masked)) < 0
    assert sampler.keeps_marginals
    for words in ("top_p=.9", "confidence:.1", "predictor=confident", "guidance=2"):
        assert not Sampler.parse(words).keeps_marginals
    assert Sampler.parse("confidence:.1").remembers and not sampler.remembers


def test_what_a_sampler_asks_of_a_model_is_said_before_it_runs():
    for prior in PRIORS:
        Sampler().check(prior, labelled=False)
    wrong = (
        (Sampler(guidance=Guidance(2.0)), Uniform(5), "guidance needs labels"),
        (Sampler(corrector=Corrector()), Masked(5, 4), "Masked has none on some"),
        (Sampler(LEFT_TO_RIGHT), Uniform(5), "is for autoregressive models"),
        (Sampler(), None, "left to right: it takes no kappa"),
    )
    for sampler, prior, words in wrong:
        with pytest.raises(ValueError, match=words):
            sampler.check(prior, labelled=False)


def test_samplers_in_words_sample_as_their_settings_do():
    model = load("digits", "cpu")
    words = "cap:.1 steps=4 corrector=1x4 last=greedy"
    plain = model.sample(2, 4, "cap:.1", corrector="1x4", last="greedy", split=False).tokens
    for sampler in (words, Sampler.parse(words)):
        assert torch.equal(model.sample(2, sampler=sampler, split=False).tokens, plain)
    request = build_request(model, 2, sampler=words, kappa="ancestral", num_steps=3)
    assert str(request.sampler) == "ancestral steps=3 corrector=1x4 last=greedy"
    with pytest.raises(ValueError, match="a sampler or a preset, not both"):
        build_request(model, 2, sampler=Sampler(), preset="ancestral")


def test_a_trace_carries_the_sampler_in_words_and_old_traces_still_read(tmp_path):
    model = load("digits", "cpu")
    made = model.sample(1, 2, "cap:.1", top_p=0.9, record=True, split=False)
    made.trace.save(tmp_path / "t")
    words = Trace.load(tmp_path / "t").about["sampler"]
    assert json.loads(json.dumps(words)) == "cap:.1 steps=2 top_p=.9"
    assert Sampler.parse(words) == Sampler(Cap(0.1), 2, top_p=0.9)
    made.trace.about["sampler"] = "cap:0.1, 2 steps, top-p 0.9"  # as it was written before
    made.trace.save(tmp_path / "old")
    assert Trace.load(tmp_path / "old").about["sampler"].startswith("cap:0.1, 2 steps")


def test_a_body_has_a_field_for_every_setting_that_a_client_decides():
    ours = {"head", "micro_batch"}  # the server's own affair
    for name in OPTIONS.keys() - ours:
        assert field_of(name) in SamplingBody.model_fields
    assert not any(field_of(name) in SamplingBody.model_fields for name in ours)


def test_every_rule_that_an_error_shows_is_one():
    with pytest.raises(ValueError) as said:
        KAPPAS.parse("nothing")
    for word in str(said.value).split("these are: ")[1].split(", "):
        assert Sampler.parse(word)
