"""The paper's figures that are mathematics: each script runs, and its numbers are right."""

import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def numbers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "paper"))

    def run(script, *arguments, named=None):
        importlib.import_module(script).main([*arguments, "--out", str(tmp_path)])
        lines = (tmp_path / f"{named or script}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def test_the_profiles_are_those_of_the_plans(numbers, tmp_path):
    found = numbers("profiles", "--steps", "16", "--rules", "ancestral", "constant:.5@.2-.6")
    assert set(found[0]["kappa"]) == {1.0} and found[0]["t"][0] == 1
    inside = [k for t, k in zip(found[1]["t"], found[1]["kappa"], strict=True) if 0.2 < t < 0.6]
    assert inside and set(inside) == {0.5}
    assert (tmp_path / "profiles.png").stat().st_size > 10_000


def test_the_polynomial_of_degree_nine_beats_the_others_by_orders_of_magnitude(numbers):
    nine, five, sigmoid = numbers("transform_fits", "--points", "2001")
    assert nine["largest error"] < 5e-5 and nine["series from quadrature"] < 1e-13
    assert 100 * nine["largest error"] < five["largest error"] < sigmoid["largest error"]


def test_dense_and_sparse_weights_have_one_law(numbers):
    arguments = ("--draws", "2000", "--vocab-sizes", "300")
    found = numbers("top_weights", *arguments, named="top_weights_300")
    assert len(found) == 20
    apart = [each for each in found if each["distance"] > each["distance by chance, 1 in 1000"]]
    assert not apart


def test_order_statistics_have_the_laws_of_the_propositions(numbers):
    *ranks, together = numbers("order_statistics", "--draws", "20000", "--vocab-size", "1000")
    for rank in ranks:
        assert rank["distance from uniform"] < rank["distance by chance, 1 in 1000"]
        gap = rank["mean"] - rank["mean by sorting"]
        assert abs(gap) < 5 * rank["its standard error"]
    assert together["largest correlation"] < together["by chance"]


def test_each_phase_of_training_is_measured_by_itself(numbers):
    found = numbers("training_efficiency", "--device", "cpu", "--tiny")
    assert next(each["phase"] for each in found) == "dense curriculum" and len(found) == 5
    assert all(each["samples a second"] > 0 for each in found)


@pytest.mark.slow
def test_every_table_and_figure_of_the_paper_is_made_on_stand_ins(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS / "paper"))
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    reproduce = importlib.import_module("reproduce")
    assert reproduce.main(["--small", "--quick", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert page.count("<section>") == len(reproduce.EXPERIMENTS) >= 24
    assert page.count("<table>") >= 18 and "ended with" not in page
    for each in reproduce.EXPERIMENTS:
        assert each.commands or each.same_as or "drawing" in each.shows


def test_a_name_that_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS / "paper"))
    reproduce = importlib.import_module("reproduce")
    with pytest.raises(SystemExit):
        reproduce.main(["tab:zero-shot-results"])
    assert "say --set duo++=..." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        reproduce.main(["tab:nothing"])
    assert "--list names them" in capsys.readouterr().err


def test_a_long_command_keeps_its_first_and_last_samplers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "paper"))
    reproduce = importlib.import_module("reproduce")
    command = "psidiff compare x --sampler 'a' --sampler 'b' --sampler 'c' --samples 4"
    short = "psidiff compare x --sampler 'a' --sampler 'c' --samples 4"
    assert reproduce._few(command, 2) == short and reproduce._few(command, 3) == command
