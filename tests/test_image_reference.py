"""Images are judged against a training set, whoever made them; statistics are kept."""

import json
import os
import threading
import time

import numpy as np
import pytest
import torch

from psidiff.data.images import digits, write_png
from psidiff.evaluation import statistics_cache
from psidiff.evaluation.feature_statistics import FeatureStatistics
from psidiff.evaluation.image_metrics import image_metrics
from psidiff.evaluation.inception import PIXELS, Classifier, Inception
from psidiff.evaluation.metrics import SampleSet
from psidiff.evaluation.statistics_cache import cached_statistics
from psidiff.experiment import image_evaluator
from psidiff.experiment.image_evaluator import ImageEvaluator
from psidiff.experiment.image_sets import read_reference
from psidiff.experiment.judges import Judges
from psidiff.experiment.sample_evaluators import build_evaluator
from psidiff.locks import Lock
from psidiff.model import load

SEEN = []  # how many images the features below were asked for


def halves(images):
    SEEN.append(len(images))
    x = images.flatten(2).double()
    return torch.cat((x[..., : x.shape[-1] // 2].mean(-1), x.mean(-1), x.std(-1)), 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "data"))
    SEEN.clear()


def random_pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def as_pictures(folder, pixels):
    for number, image in enumerate(pixels):
        folder.mkdir(parents=True, exist_ok=True)
        shown = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        write_png(shown, folder / f"{number:03}.png")


def values(lines):
    return {line["name"]: line["value"] for line in map(json.loads, lines)}


# What is compared with


def test_real_images_are_named_with_split_number_and_mirrors(tmp_path):
    train, test = random_pixels(40, 2, 2, 3), random_pixels(6, 2, 2, 3, seed=1)
    np.savez(tmp_path / "set.npz", train_images=train, test_images=test)
    name, train = str(tmp_path / "set.npz"), train.transpose(0, 3, 1, 2)
    whole = read_reference(name)
    assert np.array_equal(whole.pixels, train) and whole.complete
    assert whole.source == f"{name} (train)"
    held = read_reference(f"{name}:test")
    assert np.array_equal(held.pixels, test.transpose(0, 3, 1, 2)) and not held.complete
    some = read_reference(f"{name}:train,4")
    assert np.array_equal(some.pixels, train[::10]) and not some.complete
    assert some.source == f"{name} (train, 4 of 40)"
    flipped = read_reference(f"{name}:flip")
    same = (flipped.pixels == train).all((1, 2, 3))
    mirrored = (flipped.pixels == train[..., ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all() and 8 < mirrored.sum() < 32 and flipped.complete
    assert np.array_equal(flipped.pixels, read_reference(f"{name}:flip").pixels)
    for words, said in (
        ("train,test", "says one thing twice"),
        ("41", "has 40 images"),
        ("0", "has 40 images"),
    ):
        with pytest.raises(ValueError, match=said):
            read_reference(f"{name}:{words}")
    with pytest.raises(ValueError, match="there is no "):
        read_reference("nowhere:test")


def test_the_array_of_an_npz_without_names_is_its_images(tmp_path):
    pixels = random_pixels(5, 4, 4, 3)
    np.savez(tmp_path / "plain.npz", pixels)
    found = read_reference(str(tmp_path / "plain.npz"))
    assert np.array_equal(found.pixels, pixels.transpose(0, 3, 1, 2))


def test_a_model_is_held_against_its_training_set():
    model = load("digits", device="cpu")
    evaluator = build_evaluator("digits", model)
    train = (digits("train").pixels.double() * 255 / 16).round().byte()
    assert torch.equal(torch.from_numpy(evaluator.reference_images.pixels), train)
    made = model.sample(20, num_steps=2)
    found = {m.name: m for m in evaluator.evaluate(made)}
    distance = found["Fréchet distance (features: pixels)"]
    assert distance.protocol["reference"] == 1500
    assert distance.protocol["source"] == "its own training set"
    assert evaluator.quality == "label agreement" and len(evaluator.real.images) == 297
    named = build_evaluator("digits", model, "digits", Judges(features=PIXELS))
    assert (named.quality, named.better) == (distance.name, "low")
    again = {m.name: m for m in named.evaluate(made)}
    assert again[distance.name].value == distance.value and "label agreement" in again
    assert again[distance.name].protocol["source"] == "digits (train)"


def test_a_checkpoint_of_which_nobody_knows_the_data_is_judged(psidiff, tmp_path):
    model = load("digits", device="cpu")
    model.config.name = model.config.recipe = None
    model.save(tmp_path / "stranger")
    psidiff("sample", "stranger", "-n", 12, "--steps", 2, "--out", "few")
    said = psidiff("evaluate", "stranger", "--samples", "few", check=False).stderr
    assert "nobody knows what it was trained on; --reference names real images" in said
    few = ("evaluate", "stranger", "--samples", "few", "--reference", "digits")
    assert "source digits (train)" in " ".join(psidiff(*few).stdout.split())
    cells = ("compare", "stranger", "--steps", 2, "--kappa", "ancestral", "--samples", 12)
    psidiff(*cells, "--reference", "digits")
    (record,) = map(json.loads, (tmp_path / "out/compare/cells-0.jsonl").open())
    assert record["quality"] == "label agreement"
    as_pictures(tmp_path / "colour", random_pixels(12, 3, 8, 8))
    few = ("evaluate", "stranger", "--samples", "few", "--reference", "colour")
    assert "= (3, 8, 8), and this model makes (1, 8, 8)" in psidiff(*few, check=False).stderr


# Samples from anywhere


def test_images_of_anybody_are_judged_without_a_model(psidiff, tmp_path):
    pytest.importorskip("PIL.Image")
    made, real = random_pixels(30, 3, 4, 4), random_pixels(50, 3, 4, 4, seed=1) // 2
    as_pictures(tmp_path / "made", made)
    np.savez(tmp_path / "made.npz", made.transpose(0, 2, 3, 1))
    as_pictures(tmp_path / "real", real)
    sides = torch.from_numpy(made), torch.from_numpy(real)
    by_hand = {m.name: m.value for m in image_metrics([sides[0]], [sides[1]], PIXELS)}
    for name in ("made", "made.npz"):
        ask = ("evaluate", "--samples", name, "--reference", "real", "--out", f"{name}.jsonl")
        psidiff(*ask)
        assert values((tmp_path / f"{name}.jsonl").open()) == pytest.approx(by_hand)
    code = "def shade(images):\n    return [image.mean() for image in images]\n"
    (tmp_path / "shade.py").write_text(code)
    psidiff(*ask[:5], "--metrics", "shade.py:shade", "--out", "shade.jsonl")
    assert values((tmp_path / "shade.jsonl").open()) == {"shade": pytest.approx(made.mean())}


def test_samples_of_each_class_in_turn_are_held_against_their_labels(psidiff, tmp_path):
    psidiff(*("sample", "digits", "-n", 25, "--steps", 2, "--label", "each", "--out", "few"))
    labels = np.concatenate([np.load(p)["labels"] for p in (tmp_path / "few").glob("s*.npz")])
    assert labels.tolist() == [i % 10 for i in range(25)]
    psidiff("evaluate", "digits", "--samples", "few", "--out", "few.jsonl")
    assert values((tmp_path / "few.jsonl").open())["label agreement"] > 0.3


def test_shards_are_judged_by_their_images_without_the_model(psidiff, tmp_path):
    psidiff("sample", "digits", "-n", 12, "--steps", 2, "--shard-size", 5, "--out", "few")
    psidiff("evaluate", "digits", "--samples", "few", "--out", "with.jsonl")
    psidiff("evaluate", "--samples", "few", "--reference", "digits", "--out", "without.jsonl")
    known, found = (values((tmp_path / f"{n}.jsonl").open()) for n in ("with", "without"))
    assert found == {name: known[name] for name in found} and len(found) == 4
    pytest.importorskip("PIL.Image")
    images = np.concatenate(
        [np.load(p)["images"] for p in sorted((tmp_path / "few").glob("s*.npz"))]
    )
    as_pictures(tmp_path / "pictures", images[:, None])
    psidiff("evaluate", "digits", "--samples", "pictures", "--out", "pictures.jsonl")
    assert values((tmp_path / "pictures.jsonl").open()) == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a model to measure; or name images by --samples"),
        (("--samples", "few.npz"), "real ones to compare them with by --reference"),
        (("--samples", "few.npz", "--reference", "nowhere"), "there is no "),
        (("--samples", "none", "--reference", "few.npz"), "there are no samples at none"),
        (("--samples", "few.npz", "--reference", "odd.npz"), "and few.npz has (3, 4, 4)"),
        (("--samples", "few.npz", "--reference", "few.npz"), "needs 10 samples"),
        (
            ("--samples", "few.npz", "--judge", "x", "--reference", "y"),
            "--judge is for models of",
        ),
        (("--samples", "a.jsonl", "--reference", "few.npz"), "name the model that made them"),
        (("--harness", "piqa"), "name a model: --data and --harness measure one"),
        (
            ("--samples", "few.npz", "--reference", "few.npz", "--protocol", "paper"),
            "--features names the file of the Inception network",
        ),
        (
            ("--samples", "few.npz", "--reference", "few.npz", "--protocol", "mine"),
            "protocol must be 'exact', 'paper' or 'released', got 'mine'",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(arguments, said, psidiff, tmp_path):
    np.savez(tmp_path / "few.npz", random_pixels(4, 3, 4, 4))
    np.savez(tmp_path / "odd.npz", random_pixels(40, 3, 4, 5))
    (tmp_path / "a.jsonl").write_text("")
    done = psidiff("evaluate", *arguments, check=False)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_the_published_protocols_are_kept_to(tmp_path, monkeypatch):
    monkeypatch.setattr(image_evaluator, "PUBLISHED_SAMPLES", 20)
    np.savez(tmp_path / "set.npz", random_pixels(40, 4, 4, 3))
    np.savez(tmp_path / "made.npz", random_pixels(20, 4, 4, 3, seed=1))
    stand_in = Inception(
        lambda x: (halves(x), None), "inception", True, torch.device("cpu"), "1"
    )

    def judged(word, protocol, features=stand_in, made="made.npz"):
        evaluator = ImageEvaluator(SampleSet(None), None, read_reference(word), features)
        return evaluator.evaluate_files(tmp_path / made, (), protocol)

    word = str(tmp_path / "set.npz")
    exact, paper, released = (judged(word, each) for each in ("exact", "paper", "released"))
    assert [m.value for m in exact] == [m.value for m in paper]
    assert paper[0].name == "FID" and paper[0].protocol["protocol"] == "paper"
    assert "protocol" not in exact[0].protocol
    assert "mirrored at random" in released[0].protocol["source"]
    assert released[0].value == judged(f"{word}:flip", "exact")[0].value != paper[0].value
    with pytest.raises(ValueError, match=r"of 20 samples, got 40"):
        judged(word, "paper", made="set.npz")
    with pytest.raises(ValueError, match=r"a whole training set, which .* is not"):
        judged(f"{word}:30", "paper")
    with pytest.raises(ValueError, match="--features names the file"):
        judged(word, "released", PIXELS)


# Statistics that are kept


def test_statistics_are_kept_by_what_images_and_features_are(tmp_path):
    pixels = random_pixels(250, 1, 4, 4)
    kept = Classifier(halves, "halves", fingerprint="1")
    first = cached_statistics(pixels, kept, "one name")
    assert SEEN == [100, 100, 50]
    again = cached_statistics(pixels.copy(), kept, "another name")
    assert SEEN == [100, 100, 50] and again.source == "another name"
    assert torch.equal(first.scatter, again.scatter) and first.count == again.count == 250
    assert torch.equal(first.reservoir, again.reservoir)
    for other, features in (
        (pixels[1:], kept),
        (pixels.reshape(250, 1, 2, 8), kept),
        (pixels, Classifier(halves, "halves", fingerprint="2")),
        (pixels, Classifier(halves, "other", fingerprint="1")),
        (pixels, Classifier(halves, "halves")),  # of which nobody knows what it is
    ):
        SEEN.clear()
        cached_statistics(other, features)
        assert sum(SEEN) == len(other)
    (path, *_) = sorted(
        (tmp_path / "cache/features").iterdir(), key=lambda p: p.stat().st_mtime
    )
    assert path.suffix == ".safetensors"


def test_a_damaged_file_of_statistics_is_made_again(tmp_path):
    pixels, kept = random_pixels(20, 1, 4, 4), Classifier(halves, "halves", "1")
    first = cached_statistics(pixels, kept)
    (path,) = (tmp_path / "cache/features").iterdir()
    held = bytearray(path.read_bytes())
    held[-9] ^= 1
    path.write_bytes(held)
    SEEN.clear()
    again = cached_statistics(pixels, kept)
    assert SEEN == [20] and torch.equal(first.scatter, again.scatter)
    assert FeatureStatistics.load(path).count == 20


def test_the_least_recently_used_statistics_go(tmp_path, monkeypatch):
    kept = Classifier(halves, "halves", "1")
    sets = [random_pixels(20, 1, 4, 4, seed=seed) for seed in range(4)]
    folder = tmp_path / "cache/features"
    cached_statistics(sets[0], kept)
    (first,) = folder.iterdir()
    monkeypatch.setattr(statistics_cache, "_MOST", int(2.5 * first.stat().st_size))
    cached_statistics(sets[1], kept)
    (second,) = set(folder.iterdir()) - {first}
    time.sleep(0.02)
    cached_statistics(sets[0], kept)  # used again
    time.sleep(0.02)
    old, new = (folder / f".x.{n}-0123abcd.part" for n in (1, 2))
    for part in (old, new):  # of a process that was killed, and of one that is at work
        part.write_text("")
    os.utime(old, (1, 1))
    cached_statistics(sets[2], kept)
    assert new.exists() and not old.exists()
    new.unlink()
    assert first.exists() and not second.exists() and len(list(folder.iterdir())) == 2


def test_a_second_process_waits_for_the_first(tmp_path):
    pixels, kept = random_pixels(20, 1, 4, 4), Classifier(halves, "halves", "1")
    first = cached_statistics(pixels, kept)
    (path,) = (tmp_path / "cache/features").iterdir()
    aside = path.rename(tmp_path / "aside")
    SEEN.clear()
    found = []
    with Lock(path.with_suffix(".lock"), "computing"):
        waiting = threading.Thread(target=lambda: found.append(cached_statistics(pixels, kept)))
        waiting.start()
        time.sleep(0.3)
        assert not found and not SEEN
        aside.rename(path)
    waiting.join(10)
    assert not SEEN and torch.equal(found[0].mean, first.mean)


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "file"))
    assert (
        cached_statistics(random_pixels(20, 1, 4, 4), Classifier(halves, "h", "1")).count == 20
    )


def test_a_comparison_looks_at_the_real_images_once(psidiff, tmp_path):
    code = ("SEEN = []", "def shade(images):", "    SEEN.append(len(images))")
    code += ("    return images.flatten(1).double()[:, ::9]",)
    (tmp_path / "looks.py").write_text("\n".join(code))
    ask = ("compare", "digits", "--steps", "1,2,3,4", "--kappa", "ancestral,cap:.1,fb")
    psidiff(*ask, "--samples", 10, "--features", "looks.py:shade")
    from psidiff.registry import import_file

    seen = import_file(tmp_path / "looks.py").SEEN
    assert sum(seen) == 1500 + 12 * 10
    lines = (tmp_path / "out/compare/cells-0.jsonl").open()
    records = [json.loads(line) for line in lines]
    assert len(records) == 12
    for record in records:
        assert record["quality"] == "Fréchet distance (features: looks.py:shade)"
        named = {measure["name"]: measure["protocol"] for measure in record["measures"]}
        assert named[record["quality"]]["source"] == "its own training set"
        assert "label agreement" in named
