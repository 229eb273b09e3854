"""Whole sequences and their likelihood; the questions of lm-evaluation-harness."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from toys import IDS, JOINT, PRIORS, generator

from psidiff.data.tokenizers import Bytes, Characters, Subwords
from psidiff.data.toy import Chain
from psidiff.evaluation.sequence_nll import (
    autoregressive_nll,
    estimate_mean,
    is_greedy_in_one_pass,
    sequence_nelbo,
)
from psidiff.integrations import lm_eval
from psidiff.integrations.lm_eval import PsidiffLM
from psidiff.integrations.lm_eval_runner import local_tasks, run_harness
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Masked, Uniform, marginal, nelbo

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
of_the_harness = pytest.mark.usefixtures("installed")
SCHEDULE = LogLinear(1e-6)
ARC = [
    ("Question: Which gas do plants take in?", ["carbon dioxide", "iron", "salt", "light"], 0),
    ("Question: What melts?", ["a stone", "ice", "a song", "the wind"], 1),
    ("Question: Where do fish live?", ["in trees", "in fire", "in water", "in books"], 2),
]
PIQA = [
    ("To cool tea,", "wait a while. ", "put it into the oven. ", 0),
    ("dresser", "sing to it", "pull the drawer", 1),
]


@pytest.fixture
def installed():
    pytest.importorskip("lm_eval")


def network(vocab_size, seed=0, **options):
    """A transformer of random weights, none of them 0."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_blocks": 1,
        "num_heads": 2,
        "cond_dim": 8,
        "dropout": 0.0,
        **options,
    }
    made = Transformer(**options).eval().requires_grad_(False)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made, options


def byte_model(length=128, prior=None, **options):
    prior = prior or Uniform(257)
    net, options = network(prior.vocab_size, **options)
    config = {"network": "transformer", "options": options, "length": length, "name": "bytes"}
    return Model(
        Parameterized(net, prior).eval(),
        prior,
        LogLinear(),
        Bytes(),
        ModelConfig.from_dict(config),
    )


def causal_model(length=128):
    net, options = network(258, causal=True, time_conditioning=False)
    config = {"network": "transformer", "options": options, "length": length, "bos_id": 257}
    return Model(net, None, LogLinear(), Bytes(), ModelConfig.from_dict(config))


def asks(*pairs, doc=None, doc_id=0):
    """Requests as the harness makes them: the choices of one question."""
    from lm_eval.api.instance import Instance

    about = ("task", doc_id, 1)
    return [Instance("", doc or {}, pair, i, about) for i, pair in enumerate(pairs)]


def bounds(*args, **options):
    return [estimate_mean(draws) for draws in sequence_nelbo(*args, **options)]


def by_quadrature(prior, x):
    """The bound, summed over all z_t and integrated over t."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    t, weights = torch.tensor((nodes + 1) / 2), torch.tensor(weights / 2)
    K, L = prior.vocab_size, len(x)
    states = torch.cartesian_prod(*[torch.arange(K)] * L)
    clean = torch.nn.functional.one_hot(x, K).double()[None]
    denoiser, total = JOINT.denoiser(prior), 0.0
    for time, weight in zip(t, weights, strict=True):
        alpha = 1 - time.item() ** 2
        q = marginal(prior, clean, alpha)[0].gather(-1, states.T).prod(0)
        log_x = denoiser(states, alpha)
        loss = nelbo(prior, states, x.expand_as(states), log_x, alpha, -2 * time.item())
        total += weight * torch.where(q > 0, q * loss.sum(-1), 0).sum()
    return total.item()


@each_prior
def test_the_bound_of_a_perfect_denoiser_is_minus_log_p(prior):
    numbers = [3, 11, 26]
    rows = [JOINT.sequences[i] for i in numbers]
    found = bounds(JOINT.denoiser(prior), prior, SCHEDULE, rows, draws=4096, batch_size=2048)
    exact = -JOINT.weights[numbers].log()
    assert by_quadrature(prior, rows[0]) == pytest.approx(exact[0].item(), abs=1e-5)
    for (nats, error), each in zip(found, exact.tolist(), strict=True):
        assert 0 < error < 0.3 and abs(nats - each) < 5 * error


@each_prior
def test_given_tokens_make_the_bound_one_of_the_conditional(prior):
    """-log p(x_2 | x_0, x_1) and -log p(x_1, x_2 | x_0)"""
    p = JOINT.weights.view(3, 3, 3)
    rows = [torch.tensor([1, 0, 2])] * 2
    scored = [torch.tensor([False, False, True]), torch.tensor([False, True, True])]
    options = {"draws": 8192, "batch_size": 2048, "scored": scored}
    found = bounds(JOINT.denoiser(prior), prior, SCHEDULE, rows, **options)
    for (nats, error), known in zip(found, (p[1, 0].sum(), p[1].sum()), strict=True):
        exact = -(p[1, 0, 2] / known).log().item()
        assert 0 < error < 0.15 and abs(nats - exact) < 5 * error


@pytest.mark.parametrize("prior", [Uniform(8), Masked(9, 8)], ids=["uniform", "masked"])
def test_common_random_numbers_shrink_the_error_of_a_difference(prior):
    chain = Chain.random(8, 24, seed=1)
    x = chain.sample(1, generator(3))[0]
    y = torch.cat((x[:-1], (x[-1:] + 1) % 8))
    true = (chain.log_prob(y[None]) - chain.log_prob(x[None])).item()
    options = {"draws": 2048, "batch_size": 4096}
    denoiser = chain.denoiser(prior)
    a, b = sequence_nelbo(denoiser, prior, SCHEDULE, [x, y], groups=["q", "q"], **options)
    c, d = sequence_nelbo(denoiser, prior, SCHEDULE, [x, y], groups=["q", "r"], **options)
    together, apart = estimate_mean(a - b), estimate_mean(c - d)
    assert together.stderr < apart.stderr / 3
    assert abs(together.mean - true) < 5 * together.stderr
    assert abs(apart.mean - true) < 5 * apart.stderr


def test_the_claimed_error_is_the_spread_of_repeated_estimates():
    prior, chain = Masked(9, 8), Chain.random(8, 12, seed=1)
    x = chain.sample(1, generator(4))[0]
    options = {"draws": 32, "batch_size": 6400, "groups": list(range(200))}
    found = bounds(chain.denoiser(prior), prior, SCHEDULE, [x] * 200, **options)
    nats, errors = torch.tensor(found).unbind(-1)
    assert nats.std() / errors.square().mean().sqrt() == pytest.approx(1, abs=0.25)
    exact = -chain.log_prob(x[None]).item()
    assert abs(nats.mean() - exact) < 5 * nats.std() / 200**0.5


@pytest.mark.parametrize("suffix", [False, True], ids=["whole", "suffix"])
@pytest.mark.parametrize("masked", [False, True], ids=["uniform", "masked"])
def test_order_batches_and_company_do_not_change_the_bound(masked, suffix):
    model = byte_model(prior=Masked(258, 257) if masked else None)
    known = (model.denoiser, model.prior, model.schedule)
    lengths = (5, 9, 9, 3, 17)
    rows = [torch.randint(256, (n,), generator=generator(n)) for n in lengths]
    scored = [torch.arange(n) > 1 for n in lengths] if suffix else [None] * 5
    groups = ["a", "a", "b", "b", "c"]

    def draws(numbers, batch_size):
        marks = [scored[i] for i in numbers] if suffix else None
        return sequence_nelbo(
            *known,
            [rows[i] for i in numbers],
            draws=6,
            groups=[groups[i] for i in numbers],
            scored=marks,
            batch_size=batch_size,
        )

    alone = [draws([i], 1)[0] for i in range(5)]
    for numbers, size in (([0, 1, 2, 3, 4], 64), ([4, 2, 0, 1, 3], 7), ([3, 1], 5)):
        for i, values in zip(numbers, draws(numbers, size), strict=True):
            torch.testing.assert_close(values, alone[i], rtol=1e-4, atol=1e-4)


def test_a_denoiser_that_knows_no_padding_gets_rows_of_one_length():
    prior, met = Uniform(4), []

    def denoiser(z, alpha, labels=None):
        met.append(tuple(z.shape))
        return torch.zeros(*z.shape, 4).log_softmax(-1)

    rows = [torch.tensor([0, 1]), torch.tensor([2, 3, 1]), torch.tensor([1, 1]), torch.ones(0)]
    rows[3] = rows[3].long()
    found = bounds(denoiser, prior, SCHEDULE, rows, draws=4, batch_size=8)
    assert met == [(8, 2), (4, 3)]
    assert found[3] == (0.0, 0.0)  # nothing is not a surprise
    with pytest.raises(ValueError, match="draws must be even"):
        bounds(denoiser, prior, SCHEDULE, rows, draws=3)
    with pytest.raises(ValueError, match="2 groups for 4 rows"):
        bounds(denoiser, prior, SCHEDULE, rows, groups=[1, 2])


def test_a_causal_network_is_scored_exactly():
    model = causal_model()
    rows = [torch.tensor([4, 9, 7]), torch.tensor([4, 2])]
    found = autoregressive_nll(model.denoiser, 257, rows)
    for row, (nats, *_) in zip(rows, found, strict=True):
        total = 0.0
        for place, token in enumerate(row):
            seen = torch.cat((torch.tensor([257]), row[:place]))[None]
            total -= model.denoiser(seen)[0, -1].log_softmax(-1)[token].item()
        assert nats == pytest.approx(total, rel=1e-5)
    second = [torch.arange(len(row)) > 0 for row in rows]
    likeliest = model.denoiser(torch.tensor([[257, 4]]))[0, -1].argmax()
    rows[1] = torch.stack((torch.tensor(4), likeliest))
    assert [f.is_greedy for f in autoregressive_nll(model.denoiser, 257, rows, scored=second)][
        1
    ]


def says_a(z, alpha, labels=None):
    """A denoiser that is nearly sure of the letter a."""
    logits = torch.zeros(*z.shape, 257)
    logits[..., ord("a")] = 9
    return logits.log_softmax(-1)


def test_greedy_is_the_argmax_of_one_pass_from_noise():
    prior = Uniform(257)
    rows = [torch.tensor(list(text)) for text in (b"xaa", b"xab", b"aaa")]
    scored = [torch.tensor([False, True, True])] * 3
    assert is_greedy_in_one_pass(says_a, prior, SCHEDULE, rows, scored) == [True, False, True]


@of_the_harness
def test_the_harness_is_told_what_is_greedy():
    model = Model(says_a, Uniform(257), LogLinear(), Bytes())
    found = PsidiffLM(model, num_samples=2).loglikelihood(
        asks(("x", "aa"), ("x", "ab"), ("", "a"))
    )
    assert [greedy for _, greedy in found] == [True, False, True]


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """ARC-easy and PIQA, three and two questions of them, in their own formats."""
    for folder in ("mcq", "piqa"):
        (tmp_path / folder).mkdir()
    arc = [{"query": q, "choices": c, "gold": g} for q, c, g in ARC]
    piqa = [{"goal": q, "sol1": a, "sol2": b} for q, a, b, _ in PIQA]
    for name, records in (("mcq/arc_easy.jsonl", arc), ("piqa/valid.jsonl", piqa)):
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "piqa/valid-labels.lst").write_text("".join(f"{g}\n" for *_, g in PIQA))
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return local_tasks(tmp_path / "tasks")


@of_the_harness
def test_the_harness_runs_offline_on_local_files(tasks):
    lm = PsidiffLM(byte_model(), num_samples=16)
    found = run_harness(lm, ["arc_easy", "piqa"], include_path=tasks)
    assert found["tasks"]["arc_easy"]["questions"] == 3
    for task in found["tasks"].values():
        assert 0 <= task["acc"]["value"] <= 1 and task["acc"]["error"] >= 0
    assert found["protocol"]["num_samples"] == 16 and found["protocol"]["likelihood"] == "full"
    assert found["draws"]["requests"] == len(lm.errors) == 3 * 4 + 2 * 2
    assert found["draws"]["questions"] == 5 and found["draws"]["mean_error"] > 0

    right = 0.0
    for query, choices, gold in ARC:
        doc = {"text": f"{query}\nAnswer:", "choices": choices, "gold": gold}
        answers = lm.loglikelihood(asks(*((doc["text"], f" {c}") for c in choices), doc=doc))
        right += max(range(4), key=lambda i: answers[i][0]) == gold
    assert found["tasks"]["arc_easy"]["acc"]["value"] == pytest.approx(right / 3)
    with pytest.raises(ValueError, match="there is no task 'mmlu'"):
        run_harness(lm, ["mmlu"], include_path=tasks)


def test_every_file_of_questions_is_asked_in_the_words_of_the_harness(tasks, tmp_path):
    (tmp_path / "mcq/hellaswag_val_full.txt").write_text("Roof: A man\n2\na\nb\nc\nd\n")
    (tmp_path / "piqa/valid-labels.lst").unlink()
    (tmp_path / "mcq/piqa.jsonl").write_text(
        '{"query": "Question: dresser\\n", "choices": ["x", "y"], "gold": 1}\n'
    )
    (tmp_path / "mcq/openbook_qa.jsonl").write_text(
        '{"query": "Predators eat", "choices": ["x", "y"], "gold": 1}\n'
    )
    folder = Path(local_tasks(tmp_path / "more"))
    words = {
        "arc_easy": "Question: Which gas do plants take in?\nAnswer:",
        "piqa": "Question: dresser\nAnswer:",
        "openbookqa": "Predators eat",
        "hellaswag": "Roof: A man",
    }
    assert {path.stem for path in folder.glob("*.yaml")} == set(words)
    for name, text in words.items():
        first = (folder / f"{name}.jsonl").read_text().splitlines()[0]
        assert json.loads(first)["text"] == text
    first = (Path(tasks) / "piqa.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["text"] == "Question: To cool tea,\nAnswer:"


@of_the_harness
def test_answers_do_not_depend_on_the_order_of_the_questions():
    requests = [
        request
        for number, (query, choices, _) in enumerate(ARC)
        for request in asks(*((query, f" {c}") for c in choices), doc_id=number)
    ]
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    for options in ({}, {"likelihood": "suffix"}, {"reduction": "mean"}):
        lm = PsidiffLM(byte_model(), num_samples=8, **options)
        once = lm.loglikelihood(requests)
        again = lm.loglikelihood([requests[i] for i in order])
        other = PsidiffLM(byte_model(), num_samples=8, batch_size=3, **options)
        alone = [other.loglikelihood([request])[0] for request in requests]
        for i, found in zip(order, again, strict=True):
            assert found[0] == pytest.approx(once[i][0], rel=1e-4)
            assert alone[i][0] == pytest.approx(once[i][0], rel=1e-4)
            assert found[1] == once[i][1] == alone[i][1]
        assert len(lm.margins) == 6 and lm.errors[:12] != lm.errors[12:]


@of_the_harness
@pytest.mark.parametrize("framed", [False, True], ids=["bare", "framed"])
def test_full_scores_all_tokens_with_their_frame_and_suffix_the_continuation(framed):
    (pair,) = asks(("ab", "cde"))
    model = byte_model(prior=Uniform(300))
    if framed:
        model.codec = Subwords.train_bpe(["x"], 257)  # bytes, and one token for bos and eos
    for likelihood, tokens in (("full", 5 + 2 * framed), ("suffix", 3)):
        total, mean = (
            PsidiffLM(model, num_samples=8, likelihood=likelihood, reduction=how)
            for how in ("sum", "mean")
        )
        ((sum_, _),), ((mean_, _),) = (lm.loglikelihood([pair]) for lm in (total, mean))
        assert sum_ == pytest.approx(tokens * mean_, rel=1e-6)


@of_the_harness
def test_a_request_longer_than_the_model_is_an_error():
    lm = PsidiffLM(byte_model(length=8), num_samples=2)
    with pytest.raises(ValueError, match="has 9 tokens, more than the 8 of the model"):
        lm.loglikelihood(asks(("abcde", "fghi")))
    with pytest.raises(ValueError, match="no tokens of its own"):
        lm.loglikelihood(asks(("abcde", "")))
    assert lm.errors == []


@of_the_harness
def test_an_autoregressive_model_is_exact_and_gives_conditionals():
    lm = PsidiffLM(causal_model())
    assert lm.likelihood == "suffix" and lm.protocol["is_greedy"] == "exact"
    (both, _), (first, _) = (lm.loglikelihood(asks(p))[0] for p in (("", "abcd"), ("", "ab")))
    ((second, _),) = lm.loglikelihood(asks(("ab", "cd")))
    assert second == pytest.approx(both - first, rel=1e-5)
    ((rolling),) = lm.loglikelihood_rolling(asks(("abcd",)))
    assert rolling == pytest.approx(both, rel=1e-5)
    assert lm.errors == [0.0] * 4


@of_the_harness
def test_a_rolling_likelihood_is_the_sum_over_pieces():
    requests = asks(("abcdefghij",), ("abcd",), ("efgh",), ("ij",))
    whole, *parts = PsidiffLM(causal_model(length=4)).loglikelihood_rolling(requests)
    assert whole == pytest.approx(math.fsum(parts), rel=1e-5)
    lm = PsidiffLM(byte_model(length=4), num_samples=512)
    whole, *parts = lm.loglikelihood_rolling(requests)
    assert abs(whole - math.fsum(parts)) < 5 * math.hypot(*lm.errors)
    assert lm.loglikelihood_rolling(asks(("",))) == [0.0]


@of_the_harness
@pytest.mark.parametrize("make", [byte_model, causal_model])
def test_generation_stops_where_it_is_told_to(make):
    lm = PsidiffLM(make(length=24), num_steps=4)
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    free, same = lm.generate_until(asks(*[("ab", options)] * 2))
    assert free and free != same
    stop = free[len(free) // 2]
    (cut,) = lm.generate_until(asks(("ab", options | {"until": [stop, "never there"]})))
    assert cut == free[: free.index(stop)]
    long = {"until": None, "max_gen_toks": 40}  # longer than the model: in windows
    once, twice = lm.generate_until(asks(*[("ab", long)] * 2))
    if make is causal_model:  # the noise of diffusion is chance, whatever x_theta
        assert once == twice


@of_the_harness
def test_generation_follows_its_prompt():
    model = Model(says_a, Uniform(257), LogLinear(), Bytes(), ModelConfig(length=16))
    lm = PsidiffLM(model, num_steps=8, kappa="ancestral")
    assert lm.generate_until(asks(("xyz", {"max_gen_toks": 5}), ("", {"max_gen_toks": 3}))) == [
        "aaaaa",
        "aaa",
    ]


def test_generation_after_a_space_keeps_its_first_token(monkeypatch):
    monkeypatch.setattr(lm_eval, "INSTALLED", True)  # none of it runs here
    codec = Subwords.train_bpe(["the king and the queen and the king"] * 20, 300)
    front = len(codec.encode("the queen and"))
    king, the = (int(i) for i in codec.encode(" king the"))

    def says_king(z, alpha, labels=None):
        logits = torch.zeros(*z.shape, codec.vocab_size)
        logits[..., the] = 30
        logits[:, front, king] = 60
        return logits.log_softmax(-1)

    prior = Uniform(codec.vocab_size)
    model = Model(says_king, prior, LogLinear(), codec, ModelConfig(length=16))
    lm = PsidiffLM(model, num_steps=4, kappa="ancestral")
    lm.cache_hook = SimpleNamespace(add_partial=lambda *_: None)
    contexts = ["the queen and ", "the queen and"]
    options = {"max_gen_toks": 3}
    asked = [SimpleNamespace(args=(context, options)) for context in contexts]
    assert lm.generate_until(asked) == ["king the the", " king the the"]


@of_the_harness
def test_the_harness_finds_us_by_name(tmp_path):
    from lm_eval.api.registry import get_model

    made = byte_model()
    made.config.predicts = "loo"
    made.save(tmp_path / "model")
    words = f"pretrained={tmp_path / 'model'},num_samples=4,likelihood=suffix"
    more = {"batch_size": "auto", "max_batch_size": None, "device": "cpu"}
    lm = get_model("psidiff").create_from_arg_string(words, more)
    assert isinstance(lm, PsidiffLM) and lm.likelihood == "suffix" and lm.num_samples == 4
    assert lm.device == torch.device("cpu")
    again = PsidiffLM(made, num_samples=4, likelihood="suffix")
    pair = asks(("ab", "cd"))
    assert lm.loglikelihood(pair) == again.loglikelihood(pair)


@of_the_harness
def test_tasks_whose_data_cannot_be_had_are_one_sentence_without_retries(
    tmp_path, monkeypatch, capfd
):
    from lm_eval import tasks

    class Far(tasks.TaskManager):
        """The harness's own tasks are thousands; this one is like them."""

        def __init__(self, include_path, include_defaults):
            assert include_path is None and include_defaults
            super().__init__(include_path=str(tmp_path), include_defaults=False)

    (tmp_path / "far.yaml").write_text(
        "{task: far, dataset_path: owner/nothing, output_type: multiple_choice, "
        "test_split: test, doc_to_text: a, doc_to_target: b, doc_to_choice: c}"
    )
    monkeypatch.setattr(tasks, "TaskManager", Far)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"data of far .*127.0.0.1:9 cannot be reached$"):
        run_harness(byte_model(), ["far"], num_samples=2)
    assert "Retr" not in "".join(capfd.readouterr()) and not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot be fetched: HF_HUB_OFFLINE is set"):
        run_harness(byte_model(), ["far"], num_samples=2)


@of_the_harness
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, monkeypatch):
    model = byte_model()
    with pytest.raises(ValueError, match="likelihood must be 'full' or 'suffix', got 'half'"):
        PsidiffLM(model, likelihood="half")
    with pytest.raises(ValueError, match="reduction must be 'sum' or 'mean'"):
        PsidiffLM(model, reduction="max")
    with pytest.raises(ValueError, match="num_samples must be even, got 7"):
        PsidiffLM(model, num_samples=7)
    with pytest.raises(ValueError, match="no codec of text"):
        PsidiffLM("digits", device="cpu")
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="no file of a known task"):
        local_tasks(tmp_path / "tasks")
    letters = Model(says_a, Uniform(3), LogLinear(), Characters("abc"))
    with pytest.raises(ValueError, match="'d' is not in the alphabet"):
        PsidiffLM(letters).loglikelihood(asks(("abc", "d")))
    monkeypatch.setattr(lm_eval, "INSTALLED", False)
    with pytest.raises(ValueError, match=r"pip install 'psidiff\[harness\]'"):
        PsidiffLM(model)
