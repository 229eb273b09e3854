"""The paper's samplers in words: recipes, presets, and the plan of every row of its tables.

The formulas stand here once more, from the paper and from what its released code does.
"""

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psidiff.experiment.recipe_files import read_recipe
from psidiff.model import load
from psidiff.process import Cosine, LogLinear, Masked, Uniform
from psidiff.request import build_request, recommended_sampler
from psidiff.sampler_presets import PAPER_ROWS, PRESET_WORDS
from psidiff.sampling import PRESETS, Cap, Loop, Sampler, parse_kappa, plan

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
UNIFORM, MASKED = Uniform(5), Masked(5, 4)


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [("cifar10-duo", "paper-images"), ("cifar10-mdlm", "paper-images-masked")],
)
def test_the_recipes_of_images_recommend_what_the_paper_recommends(recipe, preset):
    words = {"paper-images": ".95@.1-.5", "paper-images-masked": ".99@.1-1"}[preset]
    paper = Sampler.parse(f"constant:{words} schedule=cosine last=greedy")
    assert Sampler.parse(read_recipe(recipe).eval.kappa) == paper == PRESETS[preset]


def test_loop_takes_its_plateau_as_an_interval():
    assert parse_kappa("loop:.01@.05-.55") == Loop(0.01, t_on=0.55, t_off=0.05)
    assert parse_kappa("loop:.01,alpha_on=.8@.1-.6") == Loop(0.01, 0.6, 0.1, 0.8)


@pytest.mark.parametrize(
    ("options", "clipped"),
    [
        ({"sampler": "preset=remdm-cap cap:.005"}, False),
        ({"sampler": "cap:.005 preset=remdm-cap"}, False),
        ({"kappa": "cap:.005", "preset": "remdm-cap"}, False),
        ({"kappa": "cap:.005", "sampler": "preset=remdm-cap"}, False),
        ({"sampler": "cap:.005", "preset": "remdm-cap"}, False),
        ({"sampler": "preset=remdm-cap cap:.005,clipped=yes"}, True),
        ({"sampler": "preset=paper-text cap:.005"}, True),
    ],
)
def test_a_rule_in_words_keeps_what_its_preset_says_of_clipping(options, clipped):
    sampler = Sampler.of({**options, "steps": 256})
    assert sampler.kappa == Cap(0.005, clipped=clipped)
    assert (min(step.kappa for step in sampler.plan(LogLinear(), MASKED)) < 0) != clipped


LEVELS = {  # alpha of t, its inverse, and the inverse that leaves eps out
    "loglinear": (
        lambda t: 1 - 0.999 * t,
        lambda alpha: (1 - alpha) / 0.999,
        lambda alpha: 1 - alpha,
    ),
    "loglinear:0": (lambda t: 1 - t, lambda alpha: 1 - alpha, lambda alpha: 1 - alpha),
    "cosine": (
        lambda t: 1 - math.cos(math.pi / 2 * (1 - 0.999 * t)),
        lambda alpha: (1 - 2 / math.pi * math.acos(1 - alpha)) / 0.999,
        lambda alpha: 1 - 2 / math.pi * math.acos(1 - alpha),
    ),
}


def numbers(text):
    return [float(each) for each in re.findall(r"[=:@-](\.?\d[\d.]*)", text)]


def expected(rule, level, n):
    """t, alpha and kappa of the n + 1 steps, from the paper's formulas."""
    alpha_of, _, whole = LEVELS[level]
    name, parameters = rule.split(":")[0], numbers(rule)
    times = [1 - (1 - 1e-5) * i / n for i in range(n + 1)]
    if name == "loop":  # alpha piecewise linear: to .9 at .55, still until .05, to 1 at 0
        start = alpha_of(1)
        alphas = [
            start + (0.9 - start) * (1 - t) / 0.45 if t > 0.55 else max(0.9, 1 - 2 * t)
            for t in times
        ]
        kappas = [1 - parameters[0] / 0.1 if 0.05 < t <= 0.55 else 1 for t in times]
        return times, alphas, kappas
    if name == "loop-released":  # t piecewise linear, parts by shares of the n + 1 points
        high, middle = round(0.45 * (n + 1)), round(0.5 * (n + 1))
        low, on = n + 1 - high - middle, whole(0.9)
        times = [1 + (on - 1) * i / (high - 1) for i in range(high)] + [on] * middle
        times += [on + (1e-5 - on) * i / max(low - 1, 1) for i in range(low)]
        alphas = [alpha_of(t) for t in times]
        kappa = 1 - parameters[0] / (1 - alpha_of(on))
        kappas = [kappa if high <= i < high + middle - 1 else 1 for i in range(n + 1)]
        return times, alphas, kappas
    alphas = [alpha_of(t) for t in times]
    if name == "constant-released":
        kappa, t_off, t_on = parameters
        first = round(round((1 - t_on) * (n + 1), 6))
        after = first + round(round((t_on - t_off) * (n + 1), 6))
        return times, alphas, [kappa if first <= i < after else 1 for i in range(n + 1)]
    if name == "constant":
        kappa, t_off, t_on = parameters
        return times, alphas, [kappa if t_off <= t <= t_on else 1 for t in times]
    kappas = []
    for t, s in pairwise(alphas):
        largest = min(1, (1 - s) / t) if t else 1
        sigma = {
            "ancestral": 0,
            "cap": min(parameters[0], largest) if parameters else 0,
            "rescale": parameters[0] * largest if parameters else 0,
            "rescale-released": parameters[0] * min(parameters[0], largest)
            if parameters
            else 0,
        }[name]
        kappa = 1 - sigma / (1 - s)
        kappas.append(kappa if "clipped=no" in rule else max(kappa, 0))
    return times, alphas, [*kappas, 1]


SETTINGS = sorted({row.sampler for row in PAPER_ROWS})


@pytest.mark.parametrize("n", [32, 100])
def test_every_row_of_the_paper_has_the_plan_of_its_formulas(n):
    rules = set()
    for words in SETTINGS:
        sampler = Sampler.parse(f"{words} steps={n}")
        said = str(sampler).split()
        level = next(w.removeprefix("schedule=") for w in said if w.startswith("schedule="))
        rules.add(said[0].split(":")[0])
        steps = sampler.plan(Cosine(eps=0.1), MASKED)  # the model's own counts for nothing
        wanted = zip(*expected(said[0], level, n), strict=True)
        for step, (t, alpha, kappa) in zip(steps, wanted, strict=True):
            got = (step.t, step.alpha_t, step.kappa)
            assert got == pytest.approx((t, alpha, kappa), abs=1e-9), (words, step)
        assert steps[-1].greedy == ("last=greedy" in said) and steps[-1].alpha_s == 1
    assert rules == {
        *("ancestral", "cap", "rescale", "rescale-released", "loop", "loop-released"),
        "constant-released",
    }


@pytest.mark.parametrize("rule", ["constant:.95@.1-.5", "constant:.99@.1-1", "loop:.02"])
@pytest.mark.parametrize("level", LEVELS)
def test_rules_of_the_paper_s_own_words_follow_its_formulas(rule, level):
    steps = Sampler.parse(f"{rule} steps=100 schedule={level}").plan(LogLinear(), UNIFORM)
    for got, wanted in zip(
        zip(*((s.t, s.alpha_t, s.kappa) for s in steps), strict=True),
        expected(rule, level, 100),
        strict=True,
    ):
        assert got == pytest.approx(tuple(wanted), abs=1e-9)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("cap:.05", "kappa_cap_T8_loglinear"),
        ("rescale:.05", "kappa_rescale_T8_loglinear"),
        ("rescale-released:.05", "kappa_rescale_T8_as_coded"),
        ("loop-released:.02", "loop_T8_loglinear"),
        ("loop-released:.02,t_on=.55,t_off=.05,alpha_on=.9", "loop_T8_loglinear"),
        ("loop-released:.02@.05-.55", "loop_T8_loglinear"),
        ("constant-released:.95@.1-.5", "kappa_constant_window_T8"),
    ],
)
def test_words_give_the_golden_plans(words, name):
    steps = Sampler.parse(f"{words} steps=8 schedule=loglinear").plan(Cosine(), UNIFORM)
    want = GOLDEN[name]["value"]
    assert [s.kappa for s in steps] == pytest.approx(want["kappa"], abs=1e-9)
    if "alpha" in want:
        assert [s.t for s in steps] == pytest.approx(want["t"], abs=1e-9)
        assert [s.alpha_t for s in steps] == pytest.approx(want["alpha"], abs=1e-9)


def test_the_tables_have_their_rows():
    assert Counter(row.table for row in PAPER_ROWS) == {
        "cifar10-d3pm-ancestral-fid": 12,  # of samplers: training makes no other one
        "cifar10-d3pm-ancestral-fid-all": 8,
        "cifar10-d3pm-remdm-fid": 24 + 2,
        "cifar10-d3pm-psi-constant-kappa-fid": 56,
        "cifar10-d3pm-psi-constant-kappa-inception-score": 56,
        "cifar10-d3pm-psi-remdm-equivalent": 6,
        "openwebtext-ancestral-sampling": 16,
        "openwebtext-remdm-non-distilled": 6 + 12 + 18 + 12,
        "openwebtext-remdm-distilled": 6 + 12 + 12 + 12,
    }
    assert len({(row.table, row.model, row.sampler) for row in PAPER_ROWS}) == len(PAPER_ROWS)
    used = {re.search(r"preset=(\S+)", row.sampler)[1] for row in PAPER_ROWS}
    others = {"ancestral", "paper-text", "paper-images", "paper-images-masked"}
    assert used | others | {f"remdm-{rule}" for rule in ("cap", "rescale", "loop")} == set(
        PRESET_WORDS
    )
    assert all(preset.about for preset in PRESET_WORDS.values())


@pytest.mark.parametrize("level", ["loglinear", "cosine"])
def test_grids_in_words_are_even_in_what_they_name(level):
    alpha_of = LEVELS[level][0]
    plans = {
        grid: Sampler.parse(f"cap:.1 steps={n} grid={grid} schedule={level}").plan(Cosine())
        for grid, n in {"linear": 50, "alpha": 50, "quadratic": 50, "1,.5,.2": 3}.items()
    }
    for steps in plans.values():
        assert [s.alpha_t for s in steps] == pytest.approx([alpha_of(s.t) for s in steps])
    for grid, of in (("linear", float), ("alpha", alpha_of), ("quadratic", math.sqrt)):
        times = [s.t for s in plans[grid]]
        assert len(times) == 51 and times[0] == 1 and times[-1] == pytest.approx(1e-5)
        gaps = [of(t) - of(s) for t, s in pairwise(times)]
        assert gaps == pytest.approx([gaps[0]] * 50)
    assert [s.t for s in plans["1,.5,.2"]] == [1, 0.5, 0.2]
    words = f"cap:.1 steps=1 grid=quadratic schedule={level}"
    assert [s.t for s in Sampler.parse(words).plan(Cosine())] == pytest.approx([1, 1e-5])


def test_loop_may_be_linear_in_the_schedule_s_time():
    words = "loop:.02,linear=t@.1-.6 steps=50 schedule=cosine"
    alpha_of, time_of, _ = LEVELS["cosine"]
    on = time_of(0.9)
    for step in Sampler.parse(words).plan(LogLinear())[:-1]:
        t = 1 + (on - 1) * (1 - step.t) / 0.4 if step.t > 0.6 else min(on, on * step.t / 0.1)
        assert step.alpha_t == pytest.approx(alpha_of(t), abs=1e-9)
        assert step.kappa == pytest.approx(1 - 0.02 / 0.1 if 0.1 < step.t <= 0.6 else 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.floats(0.2, 0.95), st.floats(0.05, 0.19), st.floats(0.3, 0.99))
def test_released_rules_have_a_plan_for_any_number_of_steps(n, t_on, t_off, alpha_on):
    for words in (
        f"loop-released:.02,alpha_on={alpha_on}@{t_off}-{t_on}",
        f"constant-released:.5@{t_off}-{t_on}",
    ):
        steps = plan(n, Cosine(), parse_kappa(words))
        assert len(steps) == n + 1 and steps[0].t == 1 and steps[-1].alpha_s == 1
        assert all(0 <= step.kappa <= 1 for step in steps)


RELEASED = "constant-released:.9@.1-.8 steps=5 schedule=cosine:1e-05 top_p=.9 last=greedy"
CONSTANT = "constant:.9@.1-.8 steps=5 schedule=cosine:1e-05 grid=alpha top_p=.9 last=greedy"


@pytest.mark.parametrize("words", [RELEASED, CONSTANT])
def test_the_same_words_are_taken_by_a_card_and_a_request(words, tmp_path):
    model, eps = load("digits", "cpu"), Cosine(eps=1e-5)
    asked = build_request(model, 1, sampler=words)
    model.config.kappa = words
    model.save(tmp_path / "made")
    model = load(tmp_path / "made", "cpu")
    assert recommended_sampler(model) == Sampler.parse(words)
    assert asked.steps == build_request(model, 1).steps == Sampler.parse(words).plan(eps)


def lines(path):
    return [json.loads(line) for line in path.open()]


def test_the_same_words_are_taken_by_sample(psidiff, tmp_path):
    ask, typed = ("sample", "digits", "-n", 1, "--seed", 3, "--out"), CONSTANT.split()
    psidiff(*ask, "words.jsonl", "--sampler", CONSTANT)
    flags = [flag for word in typed[1:] for flag in f"--{word.replace('_', '-')}".split("=")]
    psidiff(*ask, "flags.jsonl", "--kappa", typed[0], *flags)
    made = [lines(tmp_path / f"{name}.jsonl")[0]["tokens"] for name in ("words", "flags")]
    assert made[0] == made[1]


def test_the_same_words_are_taken_by_compare_with_their_steps(psidiff, tmp_path):
    words, grid = "constant:.9@.1-.8 steps=5 grid=alpha", "cap:.1 grid=1,.5,.2"
    ask = ("compare", "toy-uniform", "--kappa", "ancestral", "--steps", "2,4", "--samples", 4)
    psidiff(*ask, "--sampler", words, "--sampler", grid, "--out", "c")
    (path,) = (tmp_path / "c").glob("cells-*.jsonl")
    said = {record["sampler"]: record["cell"]["steps"] for record in lines(path)}
    assert said == {
        "ancestral steps=2": 2,
        "ancestral steps=4": 4,
        words: 5,
        grid: 3,
    }


def test_the_same_words_are_taken_by_evaluate(psidiff, tmp_path):
    words = "constant:.9@.1-.8 steps=3 schedule=cosine grid=alpha"
    ask = ("evaluate", "digits", "--sequences", 2, "--out", "n.jsonl", "--psi")
    psidiff(*ask, words)
    protocol = lines(tmp_path / "n.jsonl")[0]["protocol"]
    assert (protocol["kappa"], protocol["steps"]) == (words, 3)
    plan = Sampler.parse(words).plan(LogLinear())
    assert protocol["alphas"] == [plan[0].alpha_t, plan[-1].alpha_t]
    done = psidiff(*ask, "cap:.1 top_p=.9", check=False)
    assert done.returncode == 2 and "leave top_p out" in done.stderr
