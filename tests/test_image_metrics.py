"""Image metrics are their formulas, whatever the chunks, and are named after what they saw."""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import linalg, stats
from torch import nn
from torch.nn import functional as F

from psidiff.data.sudoku import Sudoku, SudokuGrids
from psidiff.evaluation import image_metrics as metrics
from psidiff.evaluation import inception, precision_recall, text_metrics
from psidiff.evaluation.feature_statistics import KEEP, FeatureStatistics, row_keys
from psidiff.evaluation.image_metrics import (
    InceptionScore,
    frechet_distance,
    frechet_error,
    image_batches,
    image_metrics,
    image_statistics,
    kernel_distance,
    subset_pairs,
)
from psidiff.evaluation.inception import (
    Classifier,
    FeatureExtractor,
    Inception,
    InceptionV3,
    resize,
)
from psidiff.evaluation.metric_result import wilson
from psidiff.evaluation.puzzle_metrics import puzzle_metrics
from psidiff.evaluation.text_metrics import ngram_entropy
from psidiff.files import load_tensors, save_tensors

D = 6


def rows(n, d=D, seed=0, shift=0.0):
    """Features with unequal variances and correlations."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.eye(d) + torch.randn(d, d, generator=torch.Generator().manual_seed(9)) / d
    return (torch.randn(n, d, generator=g) + shift) @ mixing / torch.arange(1, d + 1).sqrt()


def statistics(features, chunk=None, seed=0):
    held = FeatureStatistics("toy", seed=seed)
    for part in features.split(chunk or len(features)):
        held.add(part)
    return held


def pixels(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 1, 2, 3), generator=g, dtype=torch.uint8)


def pixel_features(images):
    """Six pixels as features; the first three of them as a classifier."""
    features = images.flatten(1).float() / 64
    return features, features[:, :3].softmax(-1)


TOY = Classifier(pixel_features, "toy")


def frechet_of(x, y):
    """Of float64 features, by numpy and scipy."""
    C_x, C_y = np.cov(x.T), np.cov(y.T)
    apart = ((x.mean(0) - y.mean(0)) ** 2).sum()
    return apart + np.trace(C_x + C_y - 2 * linalg.sqrtm(C_x @ C_y).real)


def scores_of(p):
    """The Inception Scores of ten parts of probabilities, by scipy."""
    part = metrics._parts(0, 0, len(p)).numpy()
    parts = [p[part == s] for s in range(10)]
    return [
        math.exp(np.mean(stats.entropy(some, some.mean(0)[None], axis=1))) for some in parts
    ]


def precision_of(x, y, k=3):
    """The share of rows x within the distance of a row of y to its k-th nearest other."""
    among = np.sqrt(((y[:, None] - y) ** 2).sum(-1))
    radii = np.sort(among, 1)[:, k]  # the nearest is the row itself
    return (np.sqrt(((x[:, None] - y) ** 2).sum(-1)) <= radii).any(1).mean()


@pytest.mark.parametrize("slice_size", [7, 1000])
def test_precision_and_recall_are_those_of_all_distances(monkeypatch, slice_size):
    monkeypatch.setattr(precision_recall, "SLICE", slice_size)
    x, y = rows(60, shift=50.0), rows(60, seed=1, shift=50.2)
    x[:9], y[20:30] = y[:9], y[31]  # copies: a ball of ten equal rows has the radius 0
    x[10:13] = y[31]
    found = precision_recall.precision_recall(statistics(x), statistics(y), {"a": 1})
    x, y = (each.double().numpy() for each in (x, y))
    values = [precision_of(x, y), precision_of(y, x)]
    assert [each.value for each in found] == values and 0 < min(values) < max(values) < 1
    assert [each.name for each in found] == ["precision", "recall"]
    low, high = wilson(round(60 * values[0]), 60)
    assert found[0].stderr == pytest.approx((high - low) / 3.92)
    assert found[0].protocol["neighbours"] == 3 and found[0].protocol["a"] == 1
    few = precision_recall.precision_recall(statistics(rows(12)), statistics(rows(60)), {})
    assert few[0].protocol["rows"] == 12, "as many of each"


def test_fid_and_inception_score_are_those_of_float64():
    mixing = torch.randn(48, 24, generator=torch.Generator().manual_seed(3))

    def network(images):
        features = ((images.float().flatten(1) / 255 - 0.5) @ mixing).relu_()
        return features, (features[:, :20] / 2).softmax(-1)

    stand_in = Inception(network, "inception", True, torch.device("cpu"))
    g = torch.Generator().manual_seed(5)
    made, real = (
        torch.randint(low, 256, (n, 3, 4, 4), generator=g, dtype=torch.uint8)
        for n, low in ((300, 0), (400, 40))
    )
    found = {m.name: m for m in image_metrics(made.split(64), real.split(100), stand_in)}
    (x, p), (y, _) = (
        [each.double().numpy() for each in network(side)] for side in (made, real)
    )
    assert found["FID"].value == pytest.approx(frechet_of(x, y), rel=1e-6)
    assert found["Inception Score"].value == pytest.approx(np.mean(scores_of(p)), rel=1e-6)
    assert list(found) == ["FID", "KID", "Inception Score", "precision", "recall"]


def test_the_frechet_distance_is_that_of_a_matrix_square_root():
    x, y = rows(300).double().numpy(), rows(200, seed=1, shift=0.3).double().numpy()
    C_x, C_y = np.cov(x.T), np.cov(y.T)
    by_hand = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(
        C_x + C_y - 2 * linalg.sqrtm(C_x @ C_y).real
    )
    ours = frechet_distance(statistics(rows(300), 77), statistics(rows(200, D, 1, 0.3), 13))
    assert ours == pytest.approx(by_hand, rel=1e-6)


def test_the_kernel_distance_is_the_unbiased_mean_over_pairs():
    x, y = rows(7).double().numpy(), rows(5, seed=1).double().numpy()

    def k(a, b):
        return (a @ b / D + 1) ** 3

    among_x = np.mean([k(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j])
    among_y = np.mean([k(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j])
    across = np.mean([k(a, b) for a in x for b in y])
    ours = kernel_distance(torch.from_numpy(x), torch.from_numpy(y))
    assert ours == pytest.approx(among_x + among_y - 2 * across, abs=1e-12)


def test_image_metrics_agree_with_numpy():
    made, real = pixels(83), pixels(61, seed=1)
    frechet, kernel, score, precision, recall = image_metrics(
        made.split(20), real.split(7), TOY
    )
    x, p = (part.double().numpy() for part in pixel_features(made))
    y = pixel_features(real)[0].double().numpy()
    assert frechet.value == pytest.approx(frechet_of(x, y), rel=1e-6)

    x, y = (  # the order in which the sample holds all of them
        x[row_keys(1, 0, 83).argsort().numpy()],
        y[row_keys(0, 0, 61).argsort().numpy()],
    )
    values = []
    for i, j in subset_pairs((83, 61), 30, seed=0):
        a, b = x[i], y[j]
        K_a, K_b, K = ((u @ v.T / D + 1) ** 3 for u, v in ((a, a), (b, b), (a, b)))
        within = (K_a.sum() - np.trace(K_a) + K_b.sum() - np.trace(K_b)) / (30 * 29)
        values.append(within - 2 * K.mean())
    assert kernel.value == pytest.approx(np.mean(values), rel=1e-6)
    s = np.var(values, ddof=1) / (1 / 30 - 1 / 83 + 1 / 30 - 1 / 61)  # the variance per row
    overlapping = s * (1 / 83 + 1 / 61) + np.var(values, ddof=1) / 100
    assert kernel.stderr == pytest.approx(math.sqrt(overlapping), rel=1e-6)
    assert kernel.protocol["subsets"] == len(values) and kernel.protocol["size"] == 30

    near = (precision_of(x[:61], y), precision_of(y, x[:61]))  # 61 of each, in that order
    assert (precision.value, recall.value) == near and 0 < min(near) <= max(near) < 1
    assert precision.protocol["rows"] == 61 and precision.stderr > 0

    scores = scores_of(p)
    assert score.value == pytest.approx(np.mean(scores), rel=1e-6)
    assert score.stderr == pytest.approx(stats.sem(scores), rel=1e-6)


def test_tokens_are_counted_block_by_block(monkeypatch):
    tokens = torch.randint(7, (23, 50), generator=torch.Generator().manual_seed(0)) ** 3
    whole = [ngram_entropy(tokens, n) for n in (1, 2)]
    for few in (1, 20, 400):
        monkeypatch.setattr(text_metrics, "_MANY", few)
        assert [ngram_entropy(tokens, n) for n in (1, 2)] == whole


def test_neither_chunks_nor_the_order_of_merges_matter():
    x = rows(1000, shift=100.0)  # far from 0, where sums of squares would cancel
    whole, chunked = statistics(x), statistics(x, 17)
    shards = [FeatureStatistics("toy") for _ in range(3)]
    bounds = [0, 300, 310, 1000]
    for shard, start, end in zip(shards, bounds, bounds[1:], strict=False):
        shard.add(x[start:end], first=start)
    merged = FeatureStatistics("toy")
    for shard in (shards[2], shards[0], FeatureStatistics("toy"), shards[1]):
        merged.merge(shard)
    exact = np.cov(x.double().numpy().T)
    for held in (whole, chunked, merged):
        assert held.count == 1000
        np.testing.assert_allclose(held.mean, x.double().mean(0), rtol=1e-13)
        np.testing.assert_allclose(held.covariance, exact, rtol=1e-11, atol=1e-12)
        assert torch.equal(held.reservoir, whole.reservoir)


def test_the_sample_holds_every_row_with_the_same_chance():
    numbers = torch.arange(25_000.0)[:, None]
    sample = statistics(numbers, 999).reservoir[:, 0]
    assert len(sample.unique()) == len(sample) == KEEP
    in_each = torch.histc(sample, 10, 0, 25_000)  # 1000 expected of 2500, sd 24.5
    assert (in_each - 1000).abs().max() < 5.5 * math.sqrt(2500 * 0.4 * 0.6)
    other = statistics(numbers, 999, seed=1).reservoir[:, 0]
    shared = len(np.intersect1d(sample, other))  # 4000 expected, sd 38
    assert abs(shared - 4000) < 5.5 * 38
    assert torch.equal(statistics(numbers[:50]).reservoir.sort(0).values, numbers[:50])


def test_of_ten_images_in_a_row_each_goes_to_another_part():
    parts = metrics._parts(0, 0, 1000)
    assert torch.equal(parts.view(-1, 10).sort(1).values, torch.arange(10).expand(100, 10))
    assert torch.equal(
        torch.cat([metrics._parts(0, i, 7) for i in range(0, 994, 7)]), parts[:994]
    )
    assert len(parts.view(-1, 10)[:, 0].unique()) == 10


def test_a_score_is_the_number_of_classes_at_most_and_one_at_least():
    sure, unsure = InceptionScore(), InceptionScore()
    sure.add(torch.eye(4).repeat(100, 1).repeat_interleave(10, 0))
    unsure.add(torch.full((40, 4), 0.25))
    assert np.mean(unsure.values) == pytest.approx(1.0)
    assert sure.values == pytest.approx([4.0] * 10)


@pytest.mark.parametrize("n", [10, 100, 400])
def test_the_distance_of_a_set_to_itself_is_nothing(n):
    held = statistics(rows(n, d=128, shift=3.0), 64)  # with fewer rows than dimensions too
    assert frechet_distance(held, held) < 1e-6 * held.covariance.trace()
    other = statistics(rows(250, d=128, seed=1))
    there, back = frechet_distance(held, other), frechet_distance(other, held)
    assert there == pytest.approx(back, rel=1e-9) and there > 0


def test_a_generator_that_makes_one_image_only_gets_a_number():
    held, real = statistics(torch.ones(50, D)), statistics(rows(200))
    by_hand = (1 - real.mean).square().sum() + real.covariance.trace()
    assert frechet_distance(held, real) == pytest.approx(by_hand.item(), rel=1e-9)
    assert frechet_error(held, real) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_error_of_the_frechet_distance_is_its_spread_over_draws(shift):
    real = statistics(rows(3000, seed=10_000))
    draws = [statistics(rows(300, seed=i, shift=shift)) for i in range(300)]
    spread = np.std([frechet_distance(a, real) for a in draws])
    error = np.mean([frechet_error(a, real) for a in draws])
    # near zero distance the second order counts: up to sqrt(2) too large, never too small
    assert 0.78 < error / spread < (1.6 if shift == 0 else 1.25)


def test_the_error_of_the_kernel_distance_is_its_spread_over_draws(monkeypatch):
    monkeypatch.setattr(metrics, "SUBSETS", 40)
    found = []
    for i in range(200):
        made = statistics(rows(80, 4, i, shift=0.5), seed=i)
        real = statistics(rows(200, 4, 10_000 + i), seed=i + 1)
        found.append(metrics._kernel(made, real, TOY, seed=i))
    spread = np.std([m.value for m in found])
    assert 0.7 < np.mean([m.stderr for m in found]) / spread < 1.5


def test_statistics_come_back_from_a_file(tmp_path):
    real = image_statistics(pixels(50).split(20), TOY, "fifty pixels", seed=3)
    real.save(tmp_path / "real.safetensors")
    back = FeatureStatistics.load(tmp_path / "real.safetensors")
    assert (back.features, back.source, back.count, back.seed) == ("toy", "fifty pixels", 50, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["real.safetensors"]
    made = pixels(40, seed=1)
    assert image_metrics([made], back, TOY) == image_metrics([made], real, TOY)
    assert image_metrics([made], back, TOY)[0].protocol["source"] == "fifty pixels"
    for held in (back, real):
        held.add(rows(30))
    assert torch.equal(back.reservoir, real.reservoir) and torch.equal(
        back.scatter, real.scatter
    )


def test_what_is_no_file_of_statistics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no statistics at"):
        FeatureStatistics.load(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="text is damaged"):
        FeatureStatistics.load(tmp_path / "text")
    image_statistics(pixels(50).split(20), TOY, "").save(tmp_path / "real")
    held = bytearray((tmp_path / "real").read_bytes())
    for place in range(0, len(held), len(held) // 20):
        held[place] ^= 1
        (tmp_path / "odd").write_bytes(held)
        held[place] ^= 1
        with pytest.raises(ValueError, match="odd"):
            FeatureStatistics.load(tmp_path / "odd")
    whole, about = load_tensors(tmp_path / "real")
    for name in whole:
        parts = {**whole, name: torch.zeros(3, 2, 1)}
        save_tensors(tmp_path / "odd", parts, about)
        with pytest.raises(ValueError, match=r"odd is damaged"):
            FeatureStatistics.load(tmp_path / "odd")
    save_tensors(tmp_path / "odd", whole, {**about, "count": "many"})
    with pytest.raises(ValueError, match="odd"):
        FeatureStatistics.load(tmp_path / "odd")


def test_bad_features_are_refused_in_one_sentence():
    real = pixels(20)
    for value in (math.nan, math.inf):
        broken = Classifier(lambda x, v=value: torch.full((len(x), 3), v), "broken")
        with pytest.raises(ValueError, match=r"20 of 20 images have features \(broken\)"):
            image_metrics([real], [real], broken)
    short = Classifier(lambda x: torch.zeros(1, 3), "short")
    with pytest.raises(ValueError, match="a row for each of 20 images"):
        image_metrics([real], [real], short)
    unnormalised = Classifier(lambda x: (torch.rand(len(x), 3), torch.ones(len(x), 3)), "u")
    with pytest.raises(ValueError, match="sum to 1"):
        image_metrics([real], [real], unnormalised)


def test_what_is_not_comparable_is_refused():
    real = image_statistics([pixels(20)], TOY)
    with pytest.raises(ValueError, match="'other' cannot be compared with features 'toy'"):
        image_metrics([pixels(20)], real, Classifier(pixel_features, "other"))
    halved = Classifier(lambda x: pixel_features(x)[0][:, :3], "toy")
    with pytest.raises(ValueError, match="3 dimensions, got 6"):
        image_metrics([pixels(20)], real, halved)
    with pytest.raises(ValueError, match="generated images must be at least 10, got 0"):
        image_metrics([], real, TOY)
    with pytest.raises(ValueError, match=r"must be uint8 .* got torch.float32"):
        image_metrics([pixels(20).float()], real, TOY)


def test_only_the_network_of_fid_makes_a_fid():
    plain = image_metrics([pixels(40)], [pixels(40, 1)], TOY)
    assert [m.name for m in plain] == [
        "Fréchet distance (features: toy)",
        "kernel distance (features: toy)",
        "classifier score (features: toy)",
        "precision (features: toy)",
        "recall (features: toy)",
    ]
    cpu = torch.device("cpu")
    for is_inception in (True, False):
        network = Inception(lambda x: (x.flatten(1) / 64, None), "file", is_inception, cpu)
        assert isinstance(network, FeatureExtractor)
        found = [m.name for m in image_metrics([pixels(40)], [pixels(40, 1)], network)]
        plain = ["Fréchet distance (features: file)", "kernel distance (features: file)"]
        assert found[:2] == (["FID", "KID"] if is_inception else plain)
        assert found[2:] == (
            ["precision", "recall"]
            if is_inception
            else ["precision (features: file)", "recall (features: file)"]
        )


def test_samples_become_batches():
    grey, colour = np.zeros((5, 4), np.uint8), np.zeros((5, 4, 3), np.uint8)
    colour[..., 2] = 9
    assert [tuple(b.shape) for b in image_batches([grey] * 5, 2)] == [
        (2, 1, 5, 4),
        (2, 1, 5, 4),
        (1, 1, 5, 4),
    ]
    (batch,) = image_batches([colour] * 2)
    assert tuple(batch.shape) == (2, 3, 5, 4) and bool((batch[:, 2] == 9).all())


def test_resizing_reads_output_pixel_i_at_i_times_size_over_299():
    images = torch.randint(256, (2, 3, 5, 7), dtype=torch.uint8)

    def line(values, i, size):  # values (..., size), as TensorFlow 1 reads them
        at = i * size / 299
        low = int(at)
        high, weight = min(low + 1, size - 1), at - low
        return (1 - weight) * values[..., low] + weight * values[..., high]

    x = images.double().numpy()
    by_hand = np.stack([line(x, j, 7) for j in range(299)], -1).swapaxes(-1, -2)
    by_hand = np.stack([line(by_hand, i, 5) for i in range(299)], -1).swapaxes(-1, -2)
    ours = resize(images)
    np.testing.assert_allclose(ours.numpy(), by_hand, atol=1e-2)
    assert torch.allclose(ours[..., 0, 0], images[..., 0, 0].float(), atol=1e-4)
    halves = F.interpolate(images.float(), (299, 299), mode="bilinear")  # pixel centres
    assert (ours - halves).abs().max() > 10
    same = torch.randint(256, (1, 3, 299, 299), dtype=torch.uint8)
    assert torch.allclose(resize(same), same.float(), atol=0.05)


class Script(nn.Module):
    """A network with the options of the popular TorchScript file."""

    def forward(
        self, img: torch.Tensor, return_features: bool = False, no_output_bias: bool = False
    ) -> torch.Tensor:
        assert img.dtype == torch.uint8 and img.shape[1] == 3
        features = img.float().mean((2, 3)).repeat(1, 683)[:, :2048]
        if return_features:
            return features
        logits = features[:, :1008] / 255
        return (logits if no_output_bias else logits + 100 * logits).softmax(-1)


class BareScript(nn.Module):
    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return img.float().mean((2, 3)).repeat(1, 683)[:, :2048]


def test_published_files_are_known_by_all_digits_of_their_hash():
    assert len(bytes.fromhex(inception._STATE)) == len(bytes.fromhex(inception._SCRIPT)) == 32


def publish(monkeypatch, path, name="_SCRIPT"):
    monkeypatch.setattr(inception, name, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_published_torchscript_file_gives_features_and_probabilities(tmp_path, monkeypatch):
    images = pixels(4)
    torch.jit.script(Script()).save(tmp_path / "full.pt")
    with pytest.raises(ValueError, match="TorchScript, a program: only the published one is"):
        Inception.from_file(tmp_path / "full.pt", device="cpu")
    publish(monkeypatch, tmp_path / "full.pt")
    network = Inception.from_file(tmp_path / "full.pt", device="cpu")
    features, probabilities = network(images)
    grey = images.expand(-1, 3, -1, -1)
    assert torch.equal(features, Script()(grey, return_features=True))
    assert torch.equal(probabilities, Script()(grey, no_output_bias=True))
    assert features.shape == (4, 2048) and probabilities.shape == (4, 1008)
    assert network.is_inception and network.name == "inception-2015-12-05"
    torch.jit.script(BareScript()).save(tmp_path / "bare.pt")
    publish(monkeypatch, tmp_path / "bare.pt")
    features, none = Inception.from_file(tmp_path / "bare.pt", device="cpu")(images)
    assert features.shape == (4, 2048) and none is None


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return InceptionV3().eval()


def test_a_state_dict_makes_the_round_trip(network, tmp_path, monkeypatch):
    path = tmp_path / "weights.pth"
    old = {k: v for k, v in network.state_dict().items() if "num_batches" not in k}
    torch.save(old, path)
    loaded = Inception.from_file(path, device="cpu")
    images = torch.randint(256, (2, 1, 32, 32), dtype=torch.uint8)
    features, probabilities = loaded(images)
    assert features.shape == (2, 2048) and probabilities.shape == (2, 1008)
    with torch.no_grad():
        x, p = network(images.expand(-1, 3, -1, -1))
    assert torch.equal(features, x) and torch.equal(probabilities, p)
    assert probabilities.sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert not loaded.is_inception
    assert loaded.name.startswith("weights.pth ")
    torch.save(network.state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"from before torch 1\.6"):
        Inception.from_file(path, device="cpu")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(inception, "_STATE", digest[:8] + "0" * 56)  # a file made to begin so
    with pytest.raises(ValueError, match=r"from before torch 1\.6"):
        Inception.from_file(path, device="cpu")
    publish(monkeypatch, path, "_STATE")
    published = Inception.from_file(path, device="cpu")
    assert published.is_inception and published.name == "inception-2015-12-05"


def test_the_network_has_the_names_and_sizes_of_the_published_one(network):
    sizes = {k: tuple(v.shape) for k, v in network.state_dict().items()}
    assert sum(p.numel() for p in network.parameters()) == 23_834_568 + 8 * 2049  # 1008 classes
    assert len(sizes) == 94 * 6 + 2
    expected = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_var": (192,),
        "Mixed_5b.branch1x1.conv.weight": (64, 192, 1, 1),
        "Mixed_5d.branch5x5_2.conv.weight": (64, 48, 5, 5),
        "Mixed_6a.branch3x3.conv.weight": (384, 288, 3, 3),
        "Mixed_6a.branch3x3dbl_3.bn.weight": (96,),
        "Mixed_6b.branch7x7_2.conv.weight": (128, 128, 1, 7),
        "Mixed_6e.branch7x7dbl_5.conv.weight": (192, 192, 1, 7),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch_pool.conv.weight": (192, 1280, 1, 1),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
        "fc.weight": (1008, 2048),
    }
    assert expected.items() <= sizes.items()


def test_its_averages_leave_out_the_rim_and_its_last_pool_takes_the_maximum(network):
    seen = {}
    for name in ("Mixed_5b", "Mixed_6b", "Mixed_7b", "Mixed_7c"):
        block = network.get_submodule(name)
        hook = block.branch_pool.register_forward_hook(
            lambda _, given, out, name=name: seen.__setitem__(name, given[0])
        )
        x = torch.randn(1, block.branch_pool.conv.in_channels, 4, 4)
        with torch.no_grad():
            block(x)
        hook.remove()
        corner = x[0, :, :2, :2].flatten(1)
        by_hand = corner.amax(1) if name == "Mixed_7c" else corner.mean(1)
        assert torch.allclose(seen[name][0, :, 0, 0], by_hand, atol=1e-6)


def test_a_file_that_is_neither_is_refused_in_one_sentence(network, tmp_path):
    path = tmp_path / "file.pth"
    with pytest.raises(ValueError, match="no Inception network at"):
        Inception.from_file(path)
    path.write_text("hello")
    with pytest.raises(
        ValueError, match="neither the published TorchScript file nor a state dict"
    ):
        Inception.from_file(path)
    torch.save([1, 2], path)
    with pytest.raises(
        ValueError, match="neither the published TorchScript file nor a state dict"
    ):
        Inception.from_file(path)
    torch.save(network.state_dict() | {"fc.weight": torch.zeros(1000, 2048)}, path)
    with pytest.raises(ValueError, match=r"fc.weight is \(1000, 2048\) in it"):
        Inception.from_file(path)
    torch.save(network.state_dict() | {"AuxLogits.fc.bias": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"AuxLogits.fc.bias is \(3,\) in it, None"):
        Inception.from_file(path)


STREAM = """
import sys
from pathlib import Path
import torch
from psidiff.evaluation import precision_recall
from psidiff.evaluation.image_metrics import image_metrics
from psidiff.evaluation.inception import Inception

sys.path.insert(0, sys.argv[1])
from test_image_metrics import made_features

def resident(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1024

torch.set_num_threads(1)
precision_recall.MOST = 1000  # its memory does not depend on them
network = Inception(made_features, "inception", True, torch.device("cpu"))
sides = [
    [torch.full((500, 1, 1, 1), i, dtype=torch.uint8) for i in range(first, first + 100)]
    for first in (0, 100)
]
before = resident("VmRSS")
found = {m.name: m.value for m in image_metrics(*sides, network)}
print(found["FID"], found["Inception Score"], resident("VmHWM"), before)
"""


def made_features(images):
    """2,048 features of batch i: half of them 0, unlike for the real ones from 100 on."""
    number = int(images[0, 0, 0, 0])
    x = torch.randn(len(images), 2048, generator=torch.Generator().manual_seed(number))
    x = x.relu_() * (1.25 if number >= 100 else 1) + number // 100 / 8
    return x, x[:, :1008].softmax(-1)


def moments(first):
    """Mean and covariance (float64) of the features of 100 batches, and the probabilities."""
    total, square, probabilities = np.zeros(2048), np.zeros((2048, 2048)), []
    for number in range(first, first + 100):
        x, p = made_features(torch.full((500, 1, 1, 1), number, dtype=torch.uint8))
        x = x.double().numpy()
        total += x.sum(0)
        square += x.T @ x
        probabilities.append(p.numpy())
    mean = total / 50_000
    return mean, (square - 50_000 * np.outer(mean, mean)) / 49_999, probabilities


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_50000_features_of_2048_dimensions_stream_in_less_than_a_gigabyte():
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", STREAM, folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    fid, score, peak, before = map(float, done.stdout.split())
    assert peak < 1000, f"{peak:.0f} MiB in all, {before:.0f} before"
    (m, C, p), (n, D, _) = moments(0), moments(100)
    values, vectors = np.linalg.eigh(C)
    root = vectors * np.sqrt(values) @ vectors.T
    shared = np.sqrt(np.linalg.eigvalsh(root @ D @ root)).sum()  # tr (C D)^(1/2)
    by_hand = ((m - n) ** 2).sum() + np.trace(C) + np.trace(D) - 2 * shared
    assert fid == pytest.approx(by_hand, rel=1e-6)
    assert score == pytest.approx(np.mean(scores_of(np.concatenate(p).astype(float))), rel=1e-6)


def grids(n, seed=0):
    return SudokuGrids(n, seed, symmetries=False).grids.long()


def test_a_sudoku_is_solved_if_it_is_valid_and_keeps_its_clues(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path))
    right = grids(1)[0]
    clues = right.where(torch.arange(81) % 3 == 0, -1)
    other = 8 - right  # valid, but of other clues
    broken = right.clone()
    broken[[1, 2]] = broken[[2, 1]]  # keeps the clues
    tokens = torch.stack([right, right, other, broken])
    solved, is_valid, kept, distinct = puzzle_metrics(Sudoku(), tokens, clues)
    assert [m.name for m in (solved, is_valid, kept, distinct)] == [
        "solved",
        "valid",
        "clues kept",
        "distinct solutions",
    ]
    assert [m.value for m in (solved, is_valid, kept, distinct)] == [0.5, 0.75, 0.75, 1]
    assert distinct.stderr is None
    each = torch.stack([clues, clues, other, clues])
    assert puzzle_metrics(Sudoku(), tokens, each)[0].value == 0.75
    assert [m.value for m in puzzle_metrics(Sudoku(), tokens)] == [0.75, 2]
    assert puzzle_metrics(Sudoku(), torch.full((3, 81), 9), clues)[3].value == 0


@pytest.mark.parametrize(("k", "n"), [(0, 5), (8, 10), (100, 100), (37, 1000)])
def test_the_interval_is_wilsons(k, n):
    exact = stats.binomtest(k, n).proportion_ci(0.95, method="wilson")
    assert wilson(k, n) == pytest.approx((exact.low, exact.high), abs=3e-5)
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_all_right_is_not_quite_sure(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path))
    (is_valid, distinct) = puzzle_metrics(Sudoku(), grids(50))
    assert is_valid.value == 1 and distinct.value == 50
    low, high = is_valid.protocol["interval"]
    assert (low, high) == pytest.approx((50 / (50 + 1.96**2), 1.0))
    assert is_valid.stderr == pytest.approx((high - low) / 3.92)


def test_clues_must_fit():
    tokens = torch.zeros(2, 81, dtype=torch.long)
    with pytest.raises(ValueError, match=r"clues must have shape \(2, 81\), got \(3, 81\)"):
        puzzle_metrics(Sudoku(), tokens, torch.zeros(3, 81, dtype=torch.long))
    with pytest.raises(ValueError, match="tokens from 0 to 8"):
        puzzle_metrics(Sudoku(), tokens, torch.full((81,), 9))
    with pytest.raises(ValueError, match="no puzzles"):
        puzzle_metrics(Sudoku(), torch.zeros(0, 81, dtype=torch.long))
