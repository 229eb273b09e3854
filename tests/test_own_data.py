"""A user's own data through every verb: pictures in folders, token ids in an .npy file."""

import json

import numpy as np
import pytest

from psidiff.data.images import write_png
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe import ImageData, TokenData

REST = """
model: {kind: transformer, hidden_size: 16, num_blocks: 1, num_heads: 2}
train: {steps: 2, batch_size: 4, log_every: 1, warmup: 1}
eval: {sequences: 4, samples: 2, steps: 2}
tracker: none
"""


@pytest.fixture
def pictures(tmp_path):
    """Two classes of pictures 4 x 4, ten of each."""
    rng = np.random.default_rng(0)
    for name in ("digits/bar", "digits/ring"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(10):
            picture = rng.integers(0, 256, (4, 4), dtype=np.uint8)
            write_png(picture, tmp_path / name / f"{i}.png")
    return tmp_path / "digits"


def test_tokens_in_an_array_are_trained_on_sampled_evaluated_and_go_on(psidiff, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 9, (40, 6), dtype=np.uint8)
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.yaml").write_text(f"data: {{kind: tokens, path: a.npy}}\n{REST}")
    psidiff("train", "a.yaml", "--out", "run", "--device", "cpu")
    psidiff("train", "a.yaml", "--out", "run", "--device", "cpu", "--resume", "train.steps=3")
    made = psidiff("sample", "run", "-n", 2, "--steps", 2, "--json").stdout.splitlines()
    ids = [json.loads(line)["tokens"] for line in made]
    assert np.shape(ids) == (2, 6) and np.max(ids) < 9
    assert "tokens 24" in psidiff("evaluate", "run").stdout
    assert "tokens 240" in psidiff("evaluate", "run", "--data", "a.npy").stdout
    psidiff("sample", "run", "-n", 4, "--steps", 2, "--out", "some.jsonl")
    assert "divergence-2" in psidiff("evaluate", "run", "--samples", "some.jsonl").stdout
    cells = (
        "--steps",
        "2",
        "--samples",
        4,
        "--kappa",
        "ancestral",
        "--metrics",
        "repetition-4",
    )
    assert "divergence-2" in psidiff("compare", "run", *cells, "--out", "cells").stdout
    assert "repetition-4" in (tmp_path / "cells/report.md").read_text(encoding="utf-8")
    np.save(tmp_path / "a.npy", tokens[::-1])
    refused = psidiff("train", "a.yaml", "--out", "run", "--resume", check=False)
    assert "the data of the recipe have changed" in refused.stderr


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 2)), r"token ids, whole numbers of shape \(N, L\), got float64"),
        (np.zeros(4, int), r"shape \(4,\)"),
        (np.array([[1, -1]]), "must be at least 0, got -1"),
        (np.array([[0, 1]]), "1 row: some to learn from"),
        (np.array([[0, 5], [1, 2]]), "must be at least 0 and below 5, got 5"),
    ],
)
def test_an_array_that_holds_no_sequences_is_refused_in_a_sentence(array, words, tmp_path):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=words):
        corpus(TokenData(str(tmp_path / "a.npy"), vocab_size=5 if array.max() > 1 else None))


@pytest.mark.parametrize("most", [10**12, 2**63 + 5])
def test_token_ids_beyond_the_bound_are_refused_and_never_wrap_around(most, tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [0, most]], np.uint64))
    with pytest.raises(ValueError, match=f"token id {most:,}.*PSIDIFF_LIMITS=tokens="):
        corpus(TokenData(str(tmp_path / "a.npy")))


def test_pictures_of_one_s_own_are_what_a_model_is_evaluated_on(psidiff, tmp_path, pictures):
    pytest.importorskip("PIL.Image")
    (tmp_path / "a.yaml").write_text(
        f"data: {{kind: images, path: ./digits, levels: 8}}\n{REST}"
    )
    psidiff("train", "a.yaml", "--out", "run", "--device", "cpu")
    assert "sequences 20" in psidiff("evaluate", "run", "--data", "./digits").stdout
    assert "sequences 10" in psidiff("evaluate", "run", "--data", "digits/bar").stdout
    (tmp_path / "five").mkdir()
    write_png(np.zeros((5, 5), np.uint8), tmp_path / "five" / "1.png")
    refused = psidiff("evaluate", "run", "--data", "five", check=False)
    assert (
        refused.returncode == 2
        and "(1, 5, 5), and this model makes (1, 4, 4)" in refused.stderr
    )


def test_too_few_pictures_to_compare_are_said_before_anything_is_sampled(
    psidiff, tmp_path, pictures
):
    pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    data = "path: ./digits, levels: 8, valid_share: 0.5, labels: false"
    (tmp_path / "a.yaml").write_text(f"data: {{kind: images, {data}}}\n{REST}")
    psidiff("train", "a.yaml", "--out", "run", "--device", "cpu")
    grid = ("compare", "run", "--steps", 2, "--kappa", "ancestral", "--samples")
    refused = psidiff(*grid, 8, "--out", "few", check=False)
    assert refused.returncode == 2 and "needs 10 samples (--samples)" in refused.stderr
    assert "[1/1]" not in refused.stdout + refused.stderr
    assert "Fréchet" in psidiff(*grid, 10, "--out", "enough").stdout
    (tmp_path / "b.yaml").write_text(
        f"data: {{kind: images, path: ./digits, levels: 8}}\n{REST}"
    )
    psidiff("train", "b.yaml", "--out", "labelled", "--device", "cpu")
    grid = ("compare", "labelled", *grid[2:])
    assert "agreement" in psidiff(*grid, 10, "--out", "two").stdout, "of 2 real images"


def test_a_folder_called_digits_is_named_by_its_path(tmp_path, pictures, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"a folder of yours is \./digits"):
        corpus(ImageData("digits"))
    assert len(corpus(ImageData("./digits")).train) == 18


def test_a_codec_says_how_many_ids_there_are_and_how_long_the_sequences(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12).reshape(4, 3))
    path = str(tmp_path / "a.npy")
    made = corpus(TokenData(path, codec="pixels:1,height=1,width=3,levels=16"))
    assert made.vocab_size == 16 and made.codec.length == 3
    with pytest.raises(ValueError, match="has sequences of 3 tokens, and those of"):
        corpus(TokenData(path, codec="pixels:1,height=2,width=3,levels=16"))
    with pytest.raises(ValueError, match="must be at least 0 and below 9, got 11"):
        corpus(TokenData(path, codec="sudoku"))
    with pytest.raises(ValueError, match="vocab_size is that of the codec"):
        TokenData(path, vocab_size=9, codec="sudoku")
    with pytest.raises(
        ValueError, match="'words' is no codec; the nearest is subwords; these are: characters"
    ):
        corpus(TokenData(path, codec="words"))
