"""A sampler on one line, as `compare` and the benchmarks take it."""

import pytest
import torch

from psidiff.cli.samplers import parse_sampler
from psidiff.model import load
from psidiff.request import request_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ancestral", {"kappa": "ancestral"}),
        ("preset=remdm-cap", {"kappa": "auto", "preset": "remdm-cap"}),
        (
            "constant:0@.05-.6 temperature=.1 last=greedy",
            {"kappa": "constant:0@.05-.6", "temperature": 0.1, "last": "greedy"},
        ),
        (
            "predictor=confident:margin,gumbel=1 top-k=3",
            {"kappa": "auto", "predictor": "confident:margin,gumbel=1", "top_k": 3},
        ),
    ],
)
def test_a_rule_and_settings_are_read_from_one_line(text, said):
    assert parse_sampler(text) == said
    request_of(load("digits", "cpu"), 1, 4, **said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a sampler is a rule such as cap:.02"),
        ("ancestral cap:.1", "says kappa twice"),
        ("last=greedy last=sample", "says last twice"),
        ("speed=3", "a sampler has no 'speed'; it may have predictor"),
        ("temperature=warm", "temperature of a sampler must be a number, got 'warm'"),
    ],
)
def test_what_is_no_sampler_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        parse_sampler(text)


def test_samplers_in_words_sample_as_their_settings_do():
    model = load("digits", "cpu")
    said = parse_sampler("cap:.1 corrector=1x4 last=greedy")
    told = model.sample(2, 4, **said, split=False).tokens
    plain = model.sample(2, 4, "cap:.1", corrector="1x4", last="greedy", split=False).tokens
    assert torch.equal(told, plain)
