"""A package that is missing is said before any work begins, not after it."""

import sys

import pytest

from psidiff.evaluation import metrics_named
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe import TextData


def no_work(*args, **kwargs):
    raise AssertionError("work began")


@pytest.fixture
def missing(monkeypatch):
    """A function that makes a package as if it were not installed."""

    def hide(package):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_compare_asks_for_what_draws_its_figures_before_it_measures(
    psidiff, missing, monkeypatch
):
    missing("matplotlib")
    monkeypatch.setattr("psidiff.cli.compare.fill_grid", no_work)
    done = psidiff("compare", "digits", "--steps", "2", "--samples", "2", check=False)
    assert "pip install 'psidiff[compare]'" in done.stderr


@pytest.mark.parametrize("verb", ["compare", "evaluate"])
def test_a_metric_asks_for_its_package_before_samples_are_made_or_read(
    psidiff, missing, monkeypatch, verb
):
    missing("sklearn")
    monkeypatch.setattr("psidiff.model.Model.sample", no_work)
    monkeypatch.setattr("psidiff.cli.evaluate.load", no_work)
    options = {"compare": ["--steps", "2"], "evaluate": ["--samples", "somewhere"]}[verb]
    done = psidiff(verb, "shakespeare", *options, "--metrics", "mauve", check=False)
    assert "MAUVE needs scikit-learn" in done.stderr
    with pytest.raises(ValueError, match="MAUVE needs scikit-learn"):
        metrics_named("mauve")
    assert metrics_named("lexicon")


def test_the_harness_is_asked_for_before_samples_are_measured(psidiff, monkeypatch):
    monkeypatch.setattr("psidiff.integrations.lm_eval_runner.INSTALLED", False)
    monkeypatch.setattr("psidiff.cli.evaluate.load", no_work)
    done = psidiff(
        "evaluate", "shakespeare", "--samples", "some", "--harness", "piqa", check=False
    )
    assert "pip install 'psidiff[harness]'" in done.stderr


def test_held_out_text_of_datasets_asks_for_it_before_the_corpus_is_tokenized(
    missing, monkeypatch
):
    missing("datasets")
    monkeypatch.setattr("psidiff.experiment.datasets.tokenize", no_work)
    data = TextData("shakespeare", 16, valid="datasets:some/text", tokenizer="bytes")
    with pytest.raises(ValueError, match="datasets:some/text needs: pip install datasets"):
        corpus(data)
