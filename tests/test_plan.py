"""Kappa rules and plans."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psidiff.process import Cosine, LogLinear
from psidiff.sampling import (
    DFM,
    Cap,
    Confidence,
    Constant,
    ForwardBackward,
    Loop,
    Rescale,
    RescaleReleased,
    Step,
    parse_kappa,
    plan,
)

NUMERIC = [
    Constant(0.95, t_on=0.5, t_off=0.1),
    Cap(0.01),
    Rescale(0.05),
    RescaleReleased(0.05),
    Loop(0.02),
    ForwardBackward(),
    DFM(),
]


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_rules_stay_in_the_unit_interval(t, alpha_t, rise):
    alpha_s = alpha_t + rise * (1 - alpha_t)
    for rule in NUMERIC:
        assert 0 <= rule(t, min(alpha_s, 1.0), alpha_t) <= 1


@pytest.mark.parametrize("rule", NUMERIC, ids=str)
def test_rules_are_one_where_nothing_is_left_to_renoise(rule):
    if not isinstance(rule, (Constant, Loop)):
        assert rule(0.3, 1.0, 0.7) == 1


def test_the_paper_s_rules():
    assert Cap(0.01)(0.5, 0.6, 0.5) == pytest.approx(1 - 0.01 / 0.4)
    assert Rescale(0.05)(0.5, 0.6, 0.5) == pytest.approx(1 - 0.05 * 0.8 / 0.4)
    assert RescaleReleased(0.05)(0.5, 0.6, 0.5) == pytest.approx(1 - 0.05**2 / 0.4)
    assert Constant(0.95, 0.5, 0.1)(0.5, 0.6, 0.5) == 0.95
    assert Constant(0.95, 0.5, 0.1)(0.51, 0.6, 0.5) == 1
    assert ForwardBackward()(0.5, 0.51, 0.5) == pytest.approx(1 - 0.02 / 0.49)
    assert DFM()(0.5, 0.501, 0.5) == pytest.approx(1 - 10 * 0.5**0.5 * 0.002 / 0.499)


def test_a_linear_plan_has_n_gaps_and_a_last_step():
    steps = plan(8, LogLinear(), Constant(1.0))
    assert len(steps) == 9 and steps[0].t == 1 and steps[-1].t == pytest.approx(1e-5)
    assert all(a.alpha_s == b.alpha_t for a, b in itertools.pairwise(steps))
    assert steps[-1].alpha_s == 1 and steps[-1].kappa == 1 and not steps[-1].greedy
    assert plan(8, Cosine(), Constant(1.0), last="greedy")[-1].greedy


def test_any_grid_makes_a_plan():
    steps = plan(None, LogLinear(), Constant(0.5), grid=[0.9, 0.5, 0.5, 0.2])
    assert [s.t for s in steps] == [0.9, 0.5, 0.5, 0.2]
    assert steps[1].alpha_t == steps[1].alpha_s  # a corrector alone
    assert plan(3, LogLinear(), Constant(0.5), grid=(0.9, 0.5, 0.5, 0.2)) == steps


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()], ids=str)
def test_loop_is_piecewise_linear_in_alpha_without_duplicated_joints(schedule):
    rule = Loop(0.02)
    steps = plan(1000, schedule, rule)
    assert steps[0].alpha_t == pytest.approx(schedule.alpha(1.0))
    for s in steps[:-1]:
        if s.t > 0.55:
            start = schedule.alpha(1.0)
            assert s.alpha_t == pytest.approx(start + (0.9 - start) * (1 - s.t) / 0.45)
            assert s.kappa == 1
        elif s.t > 0.05:
            assert s.alpha_t == 0.9 and s.kappa == pytest.approx(1 - 0.02 / 0.1)
        else:
            assert s.alpha_t == pytest.approx(1 - s.t * 0.1 / 0.05) and s.kappa == 1
    idle = [s for s in steps if s.alpha_t == s.alpha_s and s.kappa == 1]
    assert not idle and steps[-1].alpha_t > 0.9999


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ancestral", Constant(1.0)),
        ("constant:.95@.1-.5", Constant(0.95, t_on=0.5, t_off=0.1)),
        ("constant:0", Constant(0.0)),
        ("cap:.01", Cap(0.01)),
        ("cap:1e-3", Cap(0.001)),
        ("rescale:.05", Rescale(0.05)),
        ("rescale-released:.05", RescaleReleased(0.05)),
        ("loop:.02", Loop(0.02)),
        ("confidence:.05", Confidence(0.05)),
        ("constant:.9@1e-3-5e-1", Constant(0.9, t_on=0.5, t_off=0.001)),
        ("fb", ForwardBackward()),
        ("dfm", DFM()),
    ],
)
def test_words_become_rules(text, rule):
    assert parse_kappa(text) == rule


@pytest.mark.parametrize(
    "text", ["", "cap", "cap:", "cap:x", "max-capped-1e-3", "cap:.1@.1-.5", "constant:.9@.5"]
)
def test_words_that_are_no_rule_are_named(text):
    with pytest.raises(ValueError, match="is no kappa rule"):
        parse_kappa(text)


def test_a_step_is_frozen_and_rises():
    step = Step(0.5, 0.4, 0.6)
    assert step.kappa == 1.0
    with pytest.raises(ValueError, match="alpha_s must not be below alpha_t"):
        Step(0.5, 0.6, 0.4)
