"""The straightforward way is the same mathematics, and every row of the GPU bench runs."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from dense_reference import top_p_by_sort
from toys import generator

from psidiff.process import Uniform, nelbo, psi

SCRIPTS = Path(__file__).parents[1] / "benchmarks"
K = 23


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def plain():
    return importlib.import_module("straightforward")


def log_x_theta():
    logits = 2 * torch.randn(3, 7, K, generator=generator(0), dtype=torch.float64)
    return logits.log_softmax(-1)


def tokens(seed):
    return torch.randint(K, (3, 7), generator=generator(seed))


def levels(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def test_its_posterior_is_the_psi_posterior(plain):
    x, z = log_x_theta().exp(), tokens(1)
    alpha_s, alpha_t = levels(0.2, 0.6, 1.0), levels(0.1, 0.5, 0.9)
    for kappa in (1.0, 0.7, 0.0):
        law = psi(Uniform(K), z, x, alpha_s, alpha_t, kappa).probs(Uniform(K), z, x)
        mine = plain.psi_posterior(x, z, alpha_s, alpha_t, kappa)
        torch.testing.assert_close(mine, law, rtol=0, atol=1e-12)
    one = plain.posterior(x, z, alpha_s, alpha_t)
    law = psi(Uniform(K), z, x, alpha_s, alpha_t, 1.0).probs(Uniform(K), z, x)
    torch.testing.assert_close(one, law, rtol=0, atol=1e-12)


def test_its_race_draws_from_the_posterior(plain):
    torch.manual_seed(0)
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    drawn = plain.draw(probs.expand(40_000, 4))
    share = torch.bincount(drawn, minlength=4) / 40_000
    assert (share - probs).abs().max() < 5.5 * (0.25 / 40_000) ** 0.5


def test_its_nucleus_is_top_p_by_sort(plain):
    log_x = log_x_theta()
    for p in (0.3, 0.9):
        want = top_p_by_sort(log_x, p).log_softmax(-1)
        torch.testing.assert_close(plain.nucleus(log_x.clone(), p), want)


def test_its_loss_is_the_nelbo(plain):
    alpha, dalpha = levels(0.05, 0.5, 0.95), levels(-0.3, -1.0, -2.0)
    x, z = tokens(2), torch.where(tokens(3) < K // 2, tokens(2), tokens(4))
    assert (z == x).any() and (z != x).any()
    want = nelbo(Uniform(K), z, x, log_x_theta(), alpha, dalpha)
    mine = plain.usdm_loss(log_x_theta(), z, x, alpha[..., 0], dalpha[..., 0])
    torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["exact", "dense"])
def test_its_tokens_are_clean_as_often_as_the_level_says(plain, name):
    torch.manual_seed(0)
    x = torch.randint(K, (64, 512))
    noised = getattr(plain, name)(x, K)
    chance = noised.alpha + (1 - noised.alpha) / K
    miss = (noised.z == x).double().mean() - chance.mean()
    assert abs(miss) < 5.5 * (0.25 / x.numel()) ** 0.5 + 1e-3  # the polynomial's own error


def test_its_sparse_tokens_are_distinct_and_weigh_at_most_one(plain):
    torch.manual_seed(0)
    x = torch.randint(K, (16, 64))
    noised = plain.sparse(x, K)
    first, second = noised.read.ids.unbind(-1)
    assert (first != second).all() and noised.read.ids.max() < K
    total = noised.read.weights.sum(-1)
    assert (total <= 1 + 1e-5).all() and total.median() > 0.9
    kept = (noised.read.ids == x[..., None]).any(-1)
    assert torch.equal(noised.z[kept], x[kept]) and 0 < kept.double().mean() < 1


SOME = ("ceilings", "psi_top_p", "train_sparse", "train_dense", "end_to_end_16")


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_rows_run_and_are_measured_once(tmp_path, capsys, which):
    gpu = importlib.import_module("gpu")
    names = list(gpu.rows_of(gpu.TINY)) if which == "all" else SOME
    out = tmp_path / "gpu.jsonl"
    arguments = ["--tiny", "--device", "cpu", "--out", str(out), "--rows", ",".join(names)]
    assert gpu.main(arguments) == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["row"] for line in lines} == set(names)
    assert all(line["ms"] >= 0 for line in lines)
    assert gpu.main(arguments) == 0
    assert len(out.read_text().splitlines()) == len(lines)
    printed = capsys.readouterr().out
    assert printed.count("measured before") == len(lines)
    assert gpu.main(["--table", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert all(f"| {name} |" in table for name in names if name.startswith(("psi", "train")))


def test_a_profile_says_where_our_time_goes_and_records_nothing(tmp_path, capsys):
    gpu, out = importlib.import_module("gpu"), tmp_path / "gpu.jsonl"
    rows = {"sums": {"ours": lambda bench: torch.ones(9).cumsum(0)}}
    gpu.profile(gpu.Bench("cpu", gpu.TINY), rows, out)
    printed = capsys.readouterr().out
    assert printed.startswith("sums\n") and "aten::cumsum" in printed
    assert "aten::cumsum" in out.with_suffix(".profile.txt").read_text() and not out.exists()


def test_a_row_that_fails_does_not_end_the_run(tmp_path, capsys):
    gpu = importlib.import_module("gpu")
    bench = gpu.Bench("cpu", gpu.TINY)

    def fails(bench):
        raise ValueError("no such luck\nand more")

    works = {"ours": lambda bench: {"ms": 1.0, "gib": 0.0, "batch": 1}}
    out = tmp_path / "gpu.jsonl"
    assert gpu.measure(bench, {"bad": {"ours": fails}, "good": works}, out, again=False) == 1
    printed = capsys.readouterr().out
    assert "bad, ours: ValueError: no such luck\n" in printed and "good, ours: 1 ms" in printed
    assert "Traceback" in out.with_suffix(".log").read_text()
    assert json.loads(out.read_text())["row"] == "good"


def test_another_machine_or_size_is_measured_too_and_has_a_table_of_its_own(
    tmp_path, capsys, monkeypatch
):
    gpu = importlib.import_module("gpu")
    rows = {"psi": {"ours": lambda bench: {"ms": 1.0, "gib": 0.0, "batch": 1}}}
    out = tmp_path / "gpu.jsonl"
    tiny, true = gpu.Bench("cpu", gpu.TINY), gpu.Bench("cpu", gpu.Sizes())
    for bench in (tiny, true, true, tiny):
        assert gpu.measure(bench, rows, out, again=False) == 0
    about = gpu.about
    monkeypatch.setattr(gpu, "about", lambda bench: about(bench) | {"gpu": "H200"})
    gpu.measure(true, rows, out, again=False)
    assert capsys.readouterr().out.count("measured before") == 2
    monkeypatch.undo()
    gpu.measure(tiny, rows, out, again=True)
    kinds = [(r["gpu"], r["tiny"]) for r in map(json.loads, out.read_text().splitlines())]
    assert kinds == [("CPU", True), ("CPU", False), ("H200", False), ("CPU", True)]
    assert gpu.main(["--table", "--out", str(out)]) == 0
    table = capsys.readouterr().out.partition("CPU, torch")[2]
    assert table.count("| psi |") == 3  # the newest last
    assert 0 < table.index("H200, torch") < table.index("CPU, tiny sizes, torch")


def test_reproduced_means_time_and_memory_within_a_fifth():
    table = importlib.import_module("gpu_table")
    assert table.reproduced("psi", {"ms": 100.0, "gib": 20.0})
    assert not table.reproduced("psi", {"ms": 100.9, "gib": 20.0})
    assert not table.reproduced("psi", {"ms": 84.0, "gib": 17.8})


def test_what_rows_before_left_in_memory_is_not_in_the_table():
    table = importlib.import_module("gpu_table")
    one = {"gpu": "G", "tiny": False, "torch": "2", "date": "2026-11-16", "batch": 8, "ms": 1.0}

    def row(name, way, peak, before, **more):
        return one | {"row": name, "way": way, "gib": peak, "before_gib": before, **more}

    billion = 2**30  # so that a byte a parameter is a GiB
    said = table.table(
        [
            row("psi", "straightforward", 22.0, 4.0),
            row("psi", "ours", 3.0, 2.0, bytes=2 * billion),
            row("ancestral", "straightforward", 18.5, 5.5),
            row("ancestral", "ours", 4.5, 3.5, bytes=2 * billion),
            row("end_to_end_64", "ours", 5.0, 4.0, at_once=4, bytes=2 * billion * 1025 * 2),
            row("train_sparse", "ours", 18.0, 5.0, bytes=36 * billion),
            row("train_dense", "straightforward", 83.0, 17.0),
            row("unet_sample", "straightforward", 7.0, 5.0),
        ]
    )
    cells = {line.split(" | ")[0][2:]: line.split(" | ") for line in said.splitlines()}
    assert cells["psi"][1] == "1 ms, 22 GiB" and cells["psi"][4] == "1 ms, 3 GiB"
    assert cells["ancestral"][1] == "1 ms, 17 GiB" and cells["ancestral"][4] == "1 ms, 3 GiB"
    assert cells["end_to_end_64"][4] == "1 ms, 3 GiB"
    assert cells["train_sparse"][4] == "1 ms, 17 GiB"
    assert (
        cells["train_dense"][1] == "1 ms, 82 GiB" and cells["train_dense"][4] == "1 ms, 17 GiB"
    )
    assert cells["unet_sample"][1] == "1 ms, 7 GiB", "without ours nobody knows its weights"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "psy", "--device", "cpu"], "there is no row 'psy'"),
        (["--table", "--out", "nothing.jsonl"], "nothing.jsonl is not there"),
        (["--device", "cpu", "--end-batch", "0"], "--end-batch must be at least 1, got 0"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_sentence(arguments, words, capsys):
    gpu = importlib.import_module("gpu")
    with pytest.raises(SystemExit) as end:
        gpu.main(arguments)
    assert end.value.code == 2 and words in capsys.readouterr().err
