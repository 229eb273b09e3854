"""Judges of text, and statistics of text that need none."""

import json
import math
import shutil
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from toys import generator

from psidiff.data.characters import Characters
from psidiff.data.codec import same_codec
from psidiff.data.tokenizers import Subwords
from psidiff.data.toy import Chain
from psidiff.evaluation import scoring_lm
from psidiff.evaluation.metric_result import UNKNOWN, KnownDistribution, wilson
from psidiff.evaluation.metrics import METRICS, Metric, SampleSet, metrics_named
from psidiff.evaluation.scoring_lm import (
    CausalLM,
    PsidiffScoringLM,
    ScoringLM,
    TextScore,
    generative_perplexity,
)
from psidiff.evaluation.text_metrics import (
    Lexicon,
    distinct_ngrams,
    divergence,
    divergence_area,
    mauve,
    ngram_entropy,
    repetition,
    sample_entropy,
)
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Transformer
from psidiff.process import LogLinear, Uniform

TEXTS = ["the cat sat on the mat", "a dog", "and the dog sat on the cat too", "mat", "the the"]
LETTERS = Characters("abcde ")


# Judges of the transformers library


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random GPT-2 of 24 positions with a BPE of its own."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("judges") / "tiny-gpt2"
    bpe = Subwords.train_bpe(TEXTS * 3, vocab_size=270)
    end = "<|endoftext|>"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=end, eos_token=end
    )
    fast.save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=bpe.vocab_size,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=bpe.separator_id,
        eos_token_id=bpe.separator_id,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture
def parts(folder):
    """The tokenizer and the network, for a straightforward loop."""
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    return transformers.AutoTokenizer.from_pretrained(folder), network


@torch.no_grad()
def loop(network, ids):
    """-log p of every token after the first, one at a time."""
    return [
        -network(torch.tensor([ids[:place]])).logits[0, -1].log_softmax(-1)[ids[place]].item()
        for place in range(1, len(ids))
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_judge_sums_log_p_of_its_own_tokens_after_the_opening_one(folder, parts, batch_size):
    tokenizer, network = parts
    scored = CausalLM(folder, "cpu", batch_size=batch_size).score(TEXTS)
    for text, found in zip(TEXTS, scored, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert found.tokens == len(ids) and not found.cut
        assert found.nats == pytest.approx(
            sum(loop(network, [tokenizer.bos_token_id, *ids])), abs=1e-4
        )


def test_perplexity_pools_the_tokens_of_all_texts(folder):
    judge = CausalLM(folder, "cpu")
    assert isinstance(judge, ScoringLM)
    scored = judge.score(TEXTS)
    nll, perplexity = generative_perplexity(judge, TEXTS)
    nats, tokens = (
        np.array(column, dtype=float) for column in list(zip(*scored, strict=True))[:2]
    )
    assert nll.value == pytest.approx(nats.sum() / tokens.sum())
    assert perplexity.value == pytest.approx(math.exp(nll.value))
    assert perplexity.stderr == pytest.approx(perplexity.value * nll.stderr)
    assert nll.protocol == {
        "judge": "tiny-gpt2",
        "max_length": 24,
        "dtype": "float32",
        "start": "<|endoftext|>",
        "texts": 5,
        "left_out": 0,
        "tokens": int(tokens.sum()),
        "cut": 0,
    }


def test_the_error_of_a_ratio_is_the_spread_over_repeated_draws():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 40, (2000, 50)).astype(float)
    nats = 2 * counts + counts**0.5 * draw.normal(size=counts.shape)
    judges = [
        Fixed([TextScore(*each) for each in zip(*row, strict=True)])
        for row in zip(nats, counts, strict=True)
    ]
    found = [generative_perplexity(judge, [""] * 50)[0] for judge in judges]
    spread = np.std([each.value for each in found])
    assert np.mean([each.stderr for each in found]) == pytest.approx(spread, rel=0.06)


class Fixed:
    """A judge that says what it was told."""

    name, protocol = "fixed", {}

    def __init__(self, scored):
        self.scored = scored

    def score(self, texts):
        return self.scored


def test_a_judge_is_loaded_once_and_only_when_asked(folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    loads = []
    whole = transformers.AutoModelForCausalLM.from_pretrained

    def counted(*args, **kwargs):
        loads.append(args)
        return whole(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", counted)
    judge = CausalLM(folder, "cpu")
    assert judge.name == "tiny-gpt2" and not loads
    generative_perplexity(judge, ["the cat"] * 256)
    judge.score(["a dog"])
    assert len(loads) == 1


def test_longer_texts_are_cut_and_counted(folder, parts):
    tokenizer, network = parts
    long = " ".join(TEXTS * 4)
    ids = tokenizer(long)["input_ids"]
    for judge, limit in (
        (CausalLM(folder, "cpu"), 24),
        (CausalLM(folder, "cpu", max_length=9), 9),
    ):
        found = judge.score([long, "a dog"])
        assert [each.cut for each in found] == [True, False]
        assert found[0].tokens == limit
        expected = sum(loop(network, [tokenizer.bos_token_id, *ids[:limit]]))
        assert found[0].nats == pytest.approx(expected, abs=1e-4)
        measure = generative_perplexity(judge, [long, "a dog", long])[0]
        assert measure.protocol["cut"] == 2 and measure.protocol["max_length"] == limit


def test_an_empty_text_has_no_tokens(folder):
    assert CausalLM(folder, "cpu", batch_size=1).score(["", "a dog"])[0] == TextScore(0.0, 0)


def released_reference(tokenizer, network, texts, max_length):
    """The published rule, straightforwardly: all targets that are no end, and the first end."""
    end, total, count = tokenizer.eos_token_id, 0.0, 0
    rows = [tokenizer(text)["input_ids"][:max_length] for text in texts]
    longest = max(map(len, rows))
    for row in rows[: len(rows) // 8 * 8]:
        padded, nats = row + [end] * (longest - len(row)), loop(network, [*row, end])
        first = padded.index(end) if end in padded else -1
        for place in range(1, longest):
            if padded[place] != end or place == first:
                total, count = total + nats[place - 1], count + 1
    return total / count, count


@pytest.mark.parametrize("opening", ["<|endoftext|>", ""])
def test_the_released_protocol_is_the_published_rule(folder, parts, opening):
    texts = [opening + text for text in (TEXTS * 2)[:10]]
    texts[2] += "<|endoftext|>a dog"
    judge = CausalLM(folder, "cpu", max_length=12)
    found = generative_perplexity(judge, texts, protocol="released")[0]
    value, count = released_reference(*parts, texts, 12)
    assert found.value == pytest.approx(value, abs=1e-4)
    assert found.protocol["tokens"] == count
    assert found.protocol["texts"] == 8 and found.protocol["left_out"] == 2
    assert found.protocol["convention"] == "released"


def test_a_gguf_file_is_named_inside_its_folder(folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    asked = []
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        whole = kind.from_pretrained

        def plain(place, gguf_file=None, trust_remote_code=None, whole=whole):
            assert trust_remote_code is False
            asked.append((place, gguf_file))
            return whole(folder)

        monkeypatch.setattr(kind, "from_pretrained", plain)
    monkeypatch.setattr(scoring_lm, "unreachable_reason", lambda: None)
    CausalLM("owner/name/small.gguf", "cpu").score(["a dog"])
    CausalLM("small.gguf", "cpu").score(["a dog"])
    assert asked == [("owner/name", "small.gguf")] * 2 + [(".", "small.gguf")] * 2


def test_features_are_the_last_states_whatever_the_batch(folder, parts):
    tokenizer, network = parts
    found = CausalLM(folder, "cpu", batch_size=3).features(TEXTS)
    ids = [tokenizer.bos_token_id, *tokenizer(TEXTS[1])["input_ids"]]
    with torch.no_grad():
        states = network(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    assert found.shape == (5, 16)
    assert np.allclose(found[1], states[0, -1].numpy(), atol=1e-4)


# Our own models as judges


def own(length=12, codec=LETTERS, prior=None):
    options = {
        "vocab_size": 7,
        "hidden_size": 16,
        "num_blocks": 1,
        "num_heads": 2,
        "dropout": 0.0,
    }
    network = Transformer(**options, causal=True).eval()
    with torch.no_grad():
        network.output_layer.linear.weight.normal_(std=0.5)
    return Model(network, prior, LogLinear(), codec, ModelConfig(length=length, bos_id=6))


@torch.no_grad()
def own_loop(model, ids):
    total = 0.0
    for place, token in enumerate(ids):
        logits = model.denoiser(torch.tensor([[6, *ids[:place]]]))[0, -1]
        total -= logits[:6].log_softmax(-1)[token].item()
    return total


def test_our_own_judge_sums_log_p_as_it_would_sample():
    model = own()
    texts = ["abcde abc", "", "a", "bad cab", "a" * 20]
    scored = PsidiffScoringLM(model, batch_size=2).score(texts)
    for text, found in zip(texts, scored, strict=True):
        ids = LETTERS.encode(text).tolist()[:12]
        assert found == TextScore(
            pytest.approx(own_loop(model, ids), abs=1e-4), len(ids), len(text) > 12
        )
    tokens = torch.randint(6, (4, 12), generator=generator())
    direct = PsidiffScoringLM(model).score_tokens(tokens)
    decoded = PsidiffScoringLM(model).score([LETTERS.decode(row) for row in tokens])
    assert [each.nats for each in direct] == pytest.approx([each.nats for each in decoded])


def test_codecs_agree_where_they_describe_the_same():
    assert same_codec(LETTERS, Characters("abcde "))
    assert not same_codec(LETTERS, Characters("abcd e"))
    assert not same_codec(LETTERS, None) and not same_codec(None, None)


# The known truth as a judge


def test_exact_samples_have_no_excess():
    chain = Chain.random(num_tokens=6, length=16)
    truth = KnownDistribution(chain.log_prob, chain.entropy(), "chain", chain.length)
    excess = truth.excess(chain.sample(4000, generator()))
    assert abs(excess.value) < 5 * excess.stderr < 0.05
    noise = truth.excess(torch.randint(6, (100, 16), generator=generator()))
    assert noise.value > 0.5 and excess.protocol["truth"] == "chain"


def test_the_samples_of_an_own_model_have_no_excess_over_its_measured_entropy():
    model = own()
    judge = PsidiffScoringLM(model)
    truth = judge.ground_truth(model.sample(400, seed=0).tokens)
    excess = truth.excess(model.sample(400, seed=1).tokens)
    alone = KnownDistribution(judge.log_prob, truth.entropy.value, "own").excess(
        model.sample(400, seed=1).tokens
    )
    assert abs(excess.value) < 5 * excess.stderr
    assert excess.stderr == pytest.approx(math.hypot(alone.stderr, truth.entropy.stderr / 12))
    assert (
        truth.excess(torch.randint(6, (200, 12), generator=generator())).value
        > 5 * excess.stderr
    )


# Statistics by brute force


def counted(rows, n):
    return Counter(tuple(row[i : i + n]) for row in rows for i in range(len(row) - n + 1))


def entropy(counts):
    total = sum(counts.values())
    return -sum(c / total * math.log(c / total) for c in counts.values())


def js(p, q):
    sizes, kinds = (sum(p.values()), sum(q.values())), set(p) | set(q)
    mixed = {g: p[g] / sizes[0] / 2 + q[g] / sizes[1] / 2 for g in kinds}
    return entropy(mixed) - (entropy(p) + entropy(q)) / 2


def by_leaving_out(statistic, rows):
    values = [statistic(rows[:i] + rows[i + 1 :]) for i in range(len(rows))]
    return math.sqrt((len(rows) - 1) * np.var(values))


TOKENS = torch.randint(4, (9, 14), generator=generator(1))
REFERENCE = torch.randint(5, (6, 20), generator=generator(2))
BRUTE = {
    **{f"entropy-{n}": lambda rows, n=n: entropy(counted(rows, n)) for n in (1, 4)},
    **{
        f"distinct-{n}": lambda rows, n=n: len(counted(rows, n)) / counted(rows, n).total()
        for n in (1, 2, 4)
    },
    **{
        f"divergence-{n}": lambda rows, n=n: js(
            counted(rows, n), counted(REFERENCE.tolist(), n)
        )
        for n in (1, 2, 3, 4)
    },
}


@pytest.mark.parametrize("name", BRUTE)
def test_a_statistic_of_ngrams_and_its_jackknife_are_those_of_brute_force(name):
    found = METRICS[name](SampleSet(TOKENS, []), SampleSet(REFERENCE, []))
    assert found.value == pytest.approx(BRUTE[name](TOKENS.tolist()))
    assert found.stderr == pytest.approx(by_leaving_out(BRUTE[name], TOKENS.tolist()))
    assert "jackknife" in found.protocol["error"]


def test_entropy_within_a_sample_and_repetition_are_means_over_samples():
    rows = TOKENS.tolist()
    within = sample_entropy(TOKENS)
    assert within.value == pytest.approx(np.mean([entropy(counted([row], 1)) for row in rows]))
    seen_before = []
    for row in rows:
        grams = list(pairwise(row))
        seen_before.append(np.mean([g in grams[:i] for i, g in enumerate(grams)]))
    repeated = repetition(TOKENS, n=2)
    assert repeated.value == pytest.approx(np.mean(seen_before))
    assert repeated.stderr == pytest.approx(np.std(seen_before, ddof=1) / 3)
    assert repetition(torch.zeros(2, 10, dtype=torch.long)).value == pytest.approx(6 / 7)


def test_large_vocabularies_do_not_overflow():
    tokens = torch.randint(2**31 - 2, (3, 9), generator=generator())
    assert distinct_ngrams(tokens, 4).value == 1
    assert ngram_entropy(tokens, 4).value == pytest.approx(math.log(18))


def test_divergence_is_zero_for_the_same_and_log_two_for_disjoint_text():
    assert divergence(TOKENS, TOKENS).value == pytest.approx(0, abs=1e-12)
    assert divergence(TOKENS, TOKENS + 10).value == pytest.approx(math.log(2))


def test_nobody_knows_the_error_of_one_sample():
    one = SampleSet(TOKENS[:1], ["the cat sat on the mat"])
    for name, metric in METRICS.items():
        if name != "mauve":
            found = metric(one, SampleSet(REFERENCE, ["the cat"]))
            assert found.stderr == UNKNOWN, name
            assert "± unknown" in str(found) and found.to_dict()["exact"] is False
    chain = Chain.random(num_tokens=5, length=6)
    truth = KnownDistribution(chain.log_prob, chain.entropy(), "the chain")
    assert truth.excess(chain.sample(1, generator())).stderr == UNKNOWN


@pytest.mark.parametrize("samples, value", [(["xyz qqq"] * 8, 0.0), (["the cat"] * 8, 1.0)])
def test_a_share_of_none_or_all_has_the_error_of_its_wilson_interval(samples, value):
    found = Lexicon.of("the cat").share(samples, windows=False)
    low, high = wilson(round(8 * value), 8)
    assert found.value == value and found.protocol["interval"] == [low, high]
    assert found.stderr == pytest.approx((high - low) / 3.92)
    assert "Wilson" in found.protocol["error"]
    fresh = repetition(torch.arange(60).view(6, 10))
    assert fresh.value == 0 and fresh.stderr == pytest.approx(wilson(0, 6)[1] / 3.92)


def test_the_lexicon_knows_words_of_three_letters_or_more():
    lexicon = Lexicon.of("The naïve cat's hat, an ox.")
    assert lexicon.words == {"the", "naïve", "cat", "hat"}
    share = lexicon.share(["THE cat is xyz", "hat an hats"], windows=False)
    assert share.value == 3 / 5 and share.protocol["words"] == 5
    assert lexicon.share(["ab the cat xyz th", "x naïve zzz y"]).value == 3 / 5
    assert share.protocol["lexicon"] == "4 words of the reference"
    low, high = share.protocol["interval"]
    assert low == max(0.0, share.value - 1.96 * share.stderr) and share.value < high <= 1
    assert lexicon.share(["the cat", "cat xyz"], windows=False).protocol["interval"][1] == 1


# MAUVE


def test_mauve_is_one_for_the_same_and_zero_for_disjoint_features():
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(100, 4))
    same = mauve(rows, rows, "normal")
    assert same.value == pytest.approx(1, abs=1e-3) and same.name == "MAUVE (features: normal)"
    assert same.protocol["clusters"] == 10
    away = np.r_["1", draw.normal(size=(100, 2)) * 0.01, np.full((100, 2), 9.0)]
    assert mauve(away, -away).value < 0.01
    near, far = (mauve(rows, draw.normal(size=(100, 4)) + by) for by in (0, 1))
    assert far.value + 2 * far.stderr < near.value - 2 * near.stderr


def test_the_divergence_curve_treats_both_sides_alike():
    p, q = np.array([5, 3, 2, 0]), np.array([1, 3, 2, 4])
    area = divergence_area(p, q)
    assert 0 < area < 1 and area == pytest.approx(divergence_area(q, p))
    assert divergence_area(p, p) == pytest.approx(1)
    assert divergence_area(p, q, 10) < area
    # disjoint: the curve is ((1 - w)^c, w^c), the area c B(c + 1, c)
    exact = 5 * math.gamma(6) * math.gamma(5) / math.gamma(11)
    assert divergence_area(np.array([1, 0]), np.array([0, 1])) == pytest.approx(exact, rel=0.1)


def test_every_metric_of_the_table_measures_text():
    pytest.importorskip("sklearn")
    codec = Characters("abcde ")
    rows = torch.randint(6, (40, 60), generator=generator(3))
    texts = SampleSet(rows, [codec.decode(row) for row in rows])
    for name, metric in METRICS.items():
        found = metric(texts, texts)
        assert found.name == name
        assert math.isfinite(found.value) and found.stderr is not None, name
        assert found.protocol["samples"] == 40, name


# Mistakes


def test_a_missing_judge_is_one_sentence(tmp_path, monkeypatch):
    with (
        pytest.raises(ValueError, match=r"pip install 'psidiff\[judge\]'"),
        monkeypatch.context() as m,
    ):
        m.setitem(sys.modules, "transformers", None)
        CausalLM("gpt2-large").score(["a dog"])
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"the judge \S*nothing cannot be loaded") as caught:
        (tmp_path / "nothing").mkdir()
        CausalLM(tmp_path / "nothing").score(["a dog"])
    assert "\n" not in str(caught.value)


def test_code_beside_a_judge_is_not_run_whatever_is_answered(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    named = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": named}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be loaded"):
        CausalLM(tmp_path, "cpu").ready()
    assert not (tmp_path / "ran").exists()


def test_the_tokenizer_beside_a_judge_is_looked_at_before_it_runs(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "judge")
    path = tmp_path / "judge/tokenizer.json"
    held = json.loads(path.read_text())
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}
    held["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 9}
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="makes a text more than 10 times as long"):
        CausalLM(tmp_path / "judge", "cpu").ready()


def test_a_judge_that_the_hub_cannot_send_is_one_sentence_without_retries(monkeypatch, capfd):
    pytest.importorskip("transformers")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no judge owner/none here or in the Hub's cache") as e:
        CausalLM("owner/none").ready()
    assert "127.0.0.1:9 cannot be reached" in str(e.value) and "\n" not in str(e.value)
    assert "Retr" not in "".join(capfd.readouterr())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="and HF_HUB_OFFLINE is set"):
        CausalLM("owner/none").ready()


def test_a_judge_says_what_it_cannot_do(folder):
    judge = CausalLM(folder, "cpu")
    with pytest.raises(ValueError, match="there are no texts for the judge tiny-gpt2"):
        generative_perplexity(judge, [])
    with pytest.raises(ValueError, match="generative NLL needs samples"):
        generative_perplexity(judge, ["", ""])
    with pytest.raises(ValueError, match="at most the 24 positions of tiny-gpt2, got 25"):
        CausalLM(folder, "cpu", max_length=25).score(["a dog"])
    with pytest.raises(ValueError, match="dtype must be float32"):
        CausalLM(folder, dtype="int64")
    with pytest.raises(ValueError, match="protocol must be"):
        generative_perplexity(judge, ["a dog"], protocol="paper")


def test_our_own_judge_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="only an autoregressive model can judge"):
        PsidiffScoringLM(own(prior=Uniform(7)))
    with pytest.raises(ValueError, match="use score_tokens"):
        PsidiffScoringLM(own(codec=None)).score(["abc"])
    with pytest.raises(ValueError, match=r"ids in \[0, 6\), got 6"):
        PsidiffScoringLM(own()).score_tokens(torch.full((1, 3), 6))
    with pytest.raises(ValueError, match="sequences of 12 tokens at most, got 13"):
        PsidiffScoringLM(own()).log_prob(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="needs a CausalLM"):
        generative_perplexity(PsidiffScoringLM(own()), ["abc"], protocol="released")
    with pytest.raises(ValueError, match="that of 3 tokens, got 14"):
        KnownDistribution(lambda tokens: tokens, 1.0, "chain", 3).excess(TOKENS)


def test_a_metric_of_one_s_own_returns_a_value_for_each_sample_or_one_for_all(tmp_path):
    (tmp_path / "own_metrics.py").write_text(
        "from psidiff.evaluation.metrics import Metric\n"
        "def length(texts):\n    return [len(text) for text in texts]\n"
        "def kinds(tokens, reference):\n    return tokens.max() / reference.max()\n"
        "named = Metric('characters', length, 'high', 'letters')\n"
    )
    path = tmp_path / "own_metrics.py"
    length, kinds, named = metrics_named(
        ", ".join(f"{path}:{n}" for n in ["length", "kinds", "named"])
    )
    made = SampleSet(torch.tensor([[1, 2], [3, 4]]), ["a", "abc"])
    found = length(made)
    assert (found.name, found.value, found.stderr) == ("length", 2.0, 1.0)
    assert kinds(made, made).value == 1 and kinds(made, made).stderr == UNKNOWN
    assert named(made).name == "characters" and named(made).unit == "letters"
    with pytest.raises(ValueError, match="defines no"):
        metrics_named(f"{path}:absent")


@pytest.mark.parametrize("name", METRICS)
def test_no_samples_are_one_sentence(name):
    none = SampleSet(TOKENS[:0], [])
    with pytest.raises(ValueError, match="there are no samples to measure"):
        METRICS[name](none, SampleSet(REFERENCE, ["some words here"] * 3))


def test_metrics_say_what_they_need():
    with pytest.raises(
        ValueError, match="'distinct-3' is not a metric; the nearest are distinct"
    ):
        metrics_named("distinct-3")
    with pytest.raises(ValueError, match=r"not a metric; the nearest is mauve, or FILE\.py"):
        metrics_named("lexicon,mauvve")
    with pytest.raises(ValueError, match="'foo' is not a metric; it must be one of entr"):
        metrics_named("foo")
    with pytest.raises(ValueError, match="lexicon is a metric of texts, and these samples"):
        METRICS["lexicon"](SampleSet(TOKENS), SampleSet(REFERENCE))
    with pytest.raises(ValueError, match=r"of tokens or texts or images.*arguments are board"):
        Metric("mine", lambda board: 1.0)
    with pytest.raises(ValueError, match="compares with a reference"):
        METRICS["divergence-4"](SampleSet(TOKENS, []))
    with pytest.raises(ValueError, match="sequences of 14 tokens have no 20-grams"):
        distinct_ngrams(TOKENS, 20)
    with pytest.raises(ValueError, match="lexicon's text has no word"):
        Lexicon.of("a bc 12345")
    with pytest.raises(ValueError, match="two texts or more"):
        mauve(np.zeros((1, 2)), np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"one width d, got shapes \(3, 2\) and \(3, 4\)"):
        mauve(np.zeros((3, 2)), np.zeros((3, 4)))


def test_of_samples_without_a_word_nobody_knows_the_share():
    share = Lexicon.of("word").share(["a b c"])
    assert math.isnan(share.value) and share.stderr == UNKNOWN and share.protocol["words"] == 0
    assert share.to_dict()["value"] is None


def test_mauve_without_scikit_learn_is_one_sentence(monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr("psidiff.registry.import_module", none)
    with pytest.raises(ValueError, match="MAUVE needs scikit-learn"):
        mauve(np.eye(4), np.eye(4))
