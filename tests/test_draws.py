"""Random numbers from counters, races, truncation: the row operations."""

import math

import pytest
import torch
from dense_reference import top_p_by_sort
from scipy import stats
from toys import chi_square, generator

from psidiff.kernels import fused_sampling
from psidiff.kernels.counter_rng import (
    CounterRNG,
    Purpose,
    blocked_race,
    exponential,
    race,
    split,
    uniform,
)
from psidiff.kernels.truncation import min_p, top_k, top_p
from psidiff.process import categorical
from psidiff.sampling.filters import SequenceFilters, chain


def test_every_number_is_a_function_of_where_it_is_used():
    static = CounterRNG(7, (6, 5)).bits(3, Purpose.COIN)
    part = CounterRNG(7, (2, 5), first_index=4).bits(3, Purpose.COIN)
    assert (static[4:] == part).all()
    assert (CounterRNG(7, (6, 3)).bits(3, Purpose.COIN) == static[:, :3]).all()
    others = [
        CounterRNG(8, (6, 5)).bits(3, Purpose.COIN),
        CounterRNG(7, (6, 5)).bits(4, Purpose.COIN),
        CounterRNG(7, (6, 5)).bits(3, Purpose.DRAW),
    ]
    everything = torch.stack([static, *others]).flatten()
    assert len(everything.unique()) == everything.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform_and_uncorrelated(dtype):
    stream = CounterRNG(1, (400, 500))
    u = stream.uniform(0, Purpose.COIN, dtype).double()
    assert u.min() > 0 and u.max() < 1
    assert stats.kstest(u.flatten(), "uniform").pvalue > 1e-4
    for shifted in (
        CounterRNG(1, (400, 500)).uniform(1, Purpose.COIN, dtype),
        stream.uniform(0, Purpose.DRAW, dtype),
        u.roll(1, 0),
        u.roll(1, 1),
    ):
        correlation = torch.corrcoef(torch.stack([u.flatten(), shifted.double().flatten()]))
        assert abs(correlation[0, 1]) < 5 / math.sqrt(u.numel())


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_kernel_that_draws_one_token_in_ten_wrongly_is_not_used(top_p, monkeypatch):
    def kernel(logits, z, bits, top_p, keep_crossing):
        x_z, drawn = fused_sampling.plain(logits, z, bits, top_p, keep_crossing)
        return x_z, torch.where(bits % 10 == 0, (drawn + 1) % logits.shape[-1], drawn)

    monkeypatch.setattr(fused_sampling, "available", lambda logits: True)
    monkeypatch.setattr(fused_sampling, "by_kernel", kernel)
    logits, z = torch.randn(40, 50, generator=generator(0)), torch.arange(40)
    bits = torch.arange(40)
    want = fused_sampling.plain(logits, z, bits, top_p, True)
    with pytest.warns(UserWarning, match="is not used: it is wrong here"):
        got = fused_sampling.draw(logits, z, bits, top_p)
    assert all(map(torch.equal, got, want))


def test_a_kernel_that_is_right_is_compared_once_for_each_kind_of_rows(monkeypatch):
    shapes = []

    def kernel(logits, z, bits, top_p, keep_crossing):
        shapes.append(tuple(logits.shape))
        return fused_sampling.plain(logits, z, bits, top_p, keep_crossing)

    monkeypatch.setattr(fused_sampling, "available", lambda logits: True)
    monkeypatch.setattr(fused_sampling, "by_kernel", kernel)
    bits = torch.arange(3)
    for width in (50, 50, 60):
        fused_sampling.draw(torch.randn(3, width), bits, bits, None)
    fused_sampling.draw(torch.randn(3, 60), bits, bits, 0.7)
    fused_sampling.draw(torch.randn(3, 60), bits, bits, 0.6)
    assert shapes == [
        (128, 50),
        (3, 50),
        (3, 50),
        (128, 60),
        (3, 60),
        (128, 60),
        (3, 60),
        (3, 60),
    ]


def test_each_bit_is_fair():
    bits = CounterRNG(2, (300, 300)).bits(0, Purpose.DRAW).flatten()
    for i in range(64):
        ones = ((bits >> i) & 1).sum().item()
        assert abs(ones - bits.numel() / 2) < 5 * math.sqrt(bits.numel()) / 2


def test_float32_exponentials_resolve_what_decides_a_race():
    """The smallest of many is far below the 2^-24 of ordinary float32 uniforms."""
    smallest = exponential(
        CounterRNG(3, (1000, 1000)).bits(0, Purpose.DRAW), torch.float32
    ).min()
    assert 0 < smallest < 2e-5
    words = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1])
    u = uniform(words, torch.float32)
    assert (
        (u > 0).all() and (u < 1).all() and exponential(words, torch.float32).isfinite().all()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [2, 7, 30, 97])
@pytest.mark.parametrize("method", [race, blocked_race])
def test_a_race_has_the_law_of_its_weights(dtype, width, method):
    n = 60_000
    weights = torch.rand(width, generator=generator(width), dtype=dtype) ** 4
    weights[0] = 0
    bits = CounterRNG(width, (1, n)).bits(0, Purpose.DRAW)[0]
    counts = torch.bincount(method(weights.expand(n, width), bits), minlength=width)
    assert counts[0] == 0 and chi_square(counts, weights.double()) < 6


def test_categorical_draws_from_each_row():
    probs = torch.tensor([[[1.0, 0, 0], [0, 0, 1.0]], [[0, 1.0, 0], [0.5, 0.5, 0]]])
    draws = categorical(probs.repeat(1, 1, 1), generator())
    assert draws.shape == (2, 2) and draws[0].tolist() == [0, 2] and draws[1, 0] == 1


def rare_outcomes(draw, total=10_000_000, rare=600, p=1e-7):
    """5 common outcomes and `rare` ones of probability p: the p-value of their counts."""
    common = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]) * (1 - rare * p)
    probs = torch.cat([common, torch.full((rare,), p)])
    counts = torch.zeros(len(probs), dtype=torch.int64)
    chunk = 100_000
    for i in range(total // chunk):
        counts += torch.bincount(draw(probs.expand(chunk, -1), i), minlength=len(probs))
    pooled = torch.cat([counts[:5], counts[5:].sum()[None]])
    expected = torch.cat([probs[:5].double(), probs[5:].double().sum()[None]])
    return stats.chisquare(pooled.numpy(), (expected / expected.sum() * total).numpy()).pvalue


@pytest.mark.slow
def test_float32_draws_give_rare_tokens_their_due():
    def ours(probs, i):
        return categorical(probs[None].contiguous(), generator(i))[0]

    assert rare_outcomes(ours) > 1e-3


@pytest.mark.slow
def test_the_same_test_catches_truncated_gumbels():
    def truncated(probs, i):
        u = torch.rand(probs.shape, generator=generator(i)).clamp_(min=2.0**-24)
        return (probs.log() - u.log_().neg_().log_()).argmax(-1)

    assert rare_outcomes(truncated) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keep_crossing", [True, False])
@pytest.mark.parametrize("scale", [0.1, 1, 3, 10])
@pytest.mark.parametrize("static", [False, True])
def test_top_p_by_bisection_is_top_p_by_sort(dtype, keep_crossing, scale, static):
    logits = scale * torch.randn(50, 1009, generator=generator(), dtype=dtype)
    for p in (0.05, 0.5, 0.9, 0.99):
        fast = top_p(logits, p, keep_crossing, static)
        slow = top_p_by_sort(logits.double(), p, keep_crossing)
        different = (fast.isneginf() != slow.isneginf()).sum().item()
        assert different <= (0 if dtype == torch.float64 else 2)  # float32 sums at the edge


def test_top_p_keeps_ties_and_always_the_first():
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.97, 0.01, 0.01, 0.01]]).log()
    assert (top_p(logits, 0.5) > -torch.inf).tolist() == [
        [True] * 4,
        [True, False, False, False],
    ]
    dropped = (top_p(logits, 0.5, keep_crossing=False) > -torch.inf).tolist()
    assert dropped == [[True, False, False, False]] * 2
    flat = torch.zeros(2, 10)
    assert (top_p(flat, 0.1) == 0).all()


def test_truncation_respects_what_is_impossible():
    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log()
    for cut in (top_p(logits, 0.99), min_p(logits, 0.0), top_k(logits, 4)):
        assert cut[0, 3] == -torch.inf and (cut[0, :3] > -torch.inf).all()
    assert (min_p(logits, 0.5)[0] > -torch.inf).tolist() == [True, True, False, False]
    assert (top_k(logits, 1)[0] > -torch.inf).tolist() == [True, False, False, False]
    assert split(torch.zeros(2, dtype=torch.int64), 3).shape == (2, 3)


@pytest.mark.parametrize(
    "asked",
    [(1.0, None, None, None), (0.7, None, 0.8, None), (1.0, 5, 0.8, 0.1), (0.5, 4, None, 0.05)],
)
def test_a_row_that_is_filtered_and_drawn_is_the_chain_and_then_a_draw(asked):
    """Temperature, top-k, top-p, min-p: with a nucleus at the end, and with others."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, 40, generator=g)
    z = torch.randint(40, (50,), generator=g)
    bits = torch.randint(-(2**63), 2**63 - 1, (50,), generator=g)
    _, top_k, top_p, min_p = asked
    filters = chain(*asked, "keep")
    values = torch.tensor(filters.values).expand(len(logits), -1)
    each = SequenceFilters(values, top_k or 0, top_p is not None, min_p is not None)
    got = each.process_and_sample(logits, z, bits)
    want = fused_sampling.plain(filters(logits), z, bits, None)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_rows_with_filters_of_their_own_are_cut_as_alone(dtype):
    """Whatever others ask for: more of top-k, a nucleus, or nothing at all."""
    g = torch.Generator().manual_seed(0)
    asked = [
        (temperature, top_k, top_p, min_p)
        for temperature in (1.0, 0.7)
        for top_k in (None, 1, 3, 40, 99)
        for top_p in (None, 1.0, 0.8, 0.01)
        for min_p in (None, 0.0, 0.2)
    ]
    count = len(asked)
    logits = 2 * torch.randn(count, 40, generator=g, dtype=dtype)
    logits[:, 5] = -120  # a weight that underflows
    z = torch.randint(40, (count,), generator=g)
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g)
    chains = [chain(*each) for each in asked]
    values = torch.tensor([each.values for each in chains], dtype=dtype)
    got = SequenceFilters(values, 128, True, True).process_and_sample(logits, z, bits)
    rows = torch.cat([each(row[None]) for each, row in zip(chains, logits, strict=True)])
    assert all(map(torch.equal, got, fused_sampling.plain(rows, z, bits, None)))


def test_what_is_no_number_of_a_row_has_no_values():
    for options in ({"nucleus": "drop", "top_p": 0.9}, {"processor": torch.neg}):
        assert chain(**options).values is None
    assert chain(temperature=1e-30).values is None
    assert chain(nucleus="drop", temperature=2.0).values == (2.0, 0.0, 1.0, -math.inf)


@pytest.mark.parametrize("keep", (True, False), ids=("keep", "drop"))
def test_a_nucleus_of_each_row_is_that_of_a_number_and_of_mass_1_nothing_is_cut(keep):
    logits = 3 * torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = -200.0
    p = torch.tensor([0.3, 0.9, 1.0]).repeat(20)[:, None]
    cut = top_p(logits, p, keep, static=True)
    for i, each in enumerate((0.3, 0.9)):
        assert torch.equal(cut[i::3], top_p(logits[i::3], each, keep, static=True))
    assert torch.equal(cut[2::3], logits[2::3])
