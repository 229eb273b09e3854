"""Judges of text, and statistics of text that need none."""

import json
import math
import shutil
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

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
from psidiff.experiment.report import page
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer
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


@torch.no_grad()
def by_the_facts(tokenizer, network, texts, max_length, context):
    """The released rule, as a batch of padded rows: (nats, tokens, texts that were read)."""
    tokenizer.pad_token = tokenizer.eos_token
    read = tokenizer(
        texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt"
    )
    ids, seen, end = read["input_ids"], read["attention_mask"], tokenizer.eos_token_id
    size = min(8, len(texts))
    total, count = 0.0, 0
    for first in range(0, len(texts) - size + 1, size):
        for begin in range(0, ids.shape[1], context):
            place = (slice(first, first + size), slice(begin, begin + context))
            logits = network(ids[place], attention_mask=seen[place]).logits.double()
            for row, guesses in zip(ids[place].tolist(), logits.log_softmax(-1), strict=True):
                first_end = row.index(end) if end in row else None
                for i in range(1, len(row)):
                    if row[i] != end or i == first_end:
                        total, count = total - guesses[i - 1, row[i]].item(), count + 1
    return total, count, len(texts) // size * size


END = "<|endoftext|>"
LONG = " ".join(TEXTS * 3)  # more than the 24 tokens that the judge reads at once
RELEASED = {
    "no ends": (TEXTS * 2)[:9],
    "ends before, between and after": [END + t + END + TEXTS[1] + END for t in TEXTS],
    "one that only padding ends": [*TEXTS, END, "", END + "a dog" + END * 3],
    "longer than the context": [LONG, END + LONG, LONG[:60] + END + LONG, "mat", *TEXTS] * 2,
}


@pytest.mark.parametrize("max_length", [None, 12, 60])
@pytest.mark.parametrize("texts", RELEASED.values(), ids=RELEASED)
def test_the_released_protocol_is_a_transcription_of_what_is_known_of_it(
    folder, parts, texts, max_length
):
    judge = CausalLM(folder, "cpu", batch_size=3)
    nll, perplexity = generative_perplexity(judge, texts, "released", max_length)
    nats, tokens, kept = by_the_facts(*parts, texts, max_length or 24, 24)
    assert nll.value == pytest.approx(nats / tokens, abs=1e-5)
    assert perplexity.value == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert perplexity.stderr == pytest.approx(perplexity.value * nll.stderr)
    found = nll.protocol
    assert (found["tokens"], found["texts"], found["left_out"]) == (
        (tokens, kept, len(texts) - kept)
    )
    assert found["convention"] == "released" and found["start"] is None
    assert found["max_length"] == (max_length or 24) and found["context"] == 24
    cut = [len(parts[0](text)["input_ids"]) > (max_length or 24) for text in texts[:kept]]
    assert found["cut"] == sum(cut)


def test_our_own_judge_has_the_released_protocol_too():
    """Of its own ids; a codec without an end of text pads with nothing."""
    model = own()
    texts = ["abcde abc", "a", "bad cab" * 4]
    nll, _ = generative_perplexity(PsidiffScoringLM(model), texts, "released", 20)
    nats, count = 0.0, 0
    for text in texts:
        ids = LETTERS.encode(text).tolist()[:20]
        for piece in (ids[:12], ids[12:]):
            with torch.no_grad():
                for place in range(1, len(piece)):
                    logits = model.denoiser(torch.tensor([piece[:place]]))[0, -1, :6]
                    nats -= logits.log_softmax(-1)[piece[place]].item()
                    count += 1
    assert nll.protocol["tokens"] == count
    assert nll.value == pytest.approx(nats / count, abs=1e-5)


# The same from the command line


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A random model of text with ends of text in the middle of its samples, and samples."""
    path = tmp_path_factory.mktemp("writers")
    codec = Subwords.train_bpe(TEXTS * 3, vocab_size=270)
    torch.manual_seed(2)
    options = {"hidden_size": 16, "num_blocks": 1, "num_heads": 2, "dropout": 0.0}
    options["vocab_size"] = codec.vocab_size
    network, prior = Transformer(**options), Uniform(codec.vocab_size)
    config = ModelConfig(length=30, name="writer", network="transformer", options=options)
    denoiser = Parameterized(network, prior)
    Model(denoiser, prior, LogLinear(), codec, config).save(path / "writer")
    ids = codec.encode(" ".join(TEXTS * 2)).tolist()
    ends = codec.separator_id
    rows = [ids[i : i + 30] for i in range(9)]
    rows[0][10], rows[3][0], rows[4][29] = ends, ends, ends
    rows[5][7:20] = codec.encode(" , the mat . don 't").tolist()[:13]
    rows[5] = (rows[5] * 2)[:30]
    lines = [json.dumps({"tokens": row}) + "\n" for row in rows]
    (path / "samples.jsonl").write_text("".join(lines))
    return path / "writer", path / "samples.jsonl", codec, rows


def lines_of(path):
    return {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_samples_are_judged_as_released_from_the_command_line(
    folder, parts, writer, psidiff, tmp_path
):
    model, samples, codec, rows = writer
    ask = ("evaluate", model, "--samples", samples, "--judge", folder, "--device", "cpu")
    said = psidiff(*ask, "--protocol", "released", "--out", "n.jsonl").stdout
    found = lines_of(tmp_path / "n.jsonl")
    texts = ["".join(codec.pieces(torch.tensor(row))) for row in rows]
    texts = [text.replace("¶", END) for text in texts]
    texts[5] = texts[5].replace(" ,", ",").replace(" .", ".")
    nats, tokens, _ = by_the_facts(*parts, texts, 30, 24)
    ppl, nll = found["generative perplexity"], found["generative NLL"]
    assert ppl["value"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert nll["value"] == pytest.approx(nats / tokens, abs=1e-5)
    assert ppl["error"] == pytest.approx(ppl["value"] * nll["error"]) and nll["error"] > 0
    assert ppl["protocol"]["left_out"] == 1 and ppl["protocol"]["max_length"] == 30
    assert "generative perplexity" in said and "generative NLL" in said
    entropies = [entropy(Counter(row)) for row in rows]
    assert found["entropy-sample"]["value"] == pytest.approx(np.mean(entropies))


def test_judge_and_entropy_read_the_same_tokens_also_after_an_end_of_text(
    folder, writer, psidiff, tmp_path
):
    model, samples, codec, rows = writer
    ask = ("evaluate", model, "--samples", samples, "--judge", folder, "--device", "cpu")
    said = psidiff(*ask, "--out", "n.jsonl").stdout
    found = lines_of(tmp_path / "n.jsonl")
    judge = CausalLM(folder, "cpu")
    texts = [codec.decode(torch.tensor(row)) for row in rows]
    assert sum(END in text for text in texts) == 3
    nll, perplexity = generative_perplexity(judge, texts)
    assert found["generative NLL"]["value"] == pytest.approx(nll.value)
    assert found["generative NLL"]["protocol"]["tokens"] == nll.protocol["tokens"]
    assert found["generative perplexity"]["value"] == pytest.approx(perplexity.value)
    assert found["entropy-sample"]["protocol"]["length"] == 30
    assert "generative perplexity" in said
    psidiff(*ask, "--metrics", "distinct-1", "--out", "few.jsonl")
    few = lines_of(tmp_path / "few.jsonl")
    assert list(few) == ["generative NLL", "generative perplexity", "distinct-1"]


def test_a_comparison_in_the_released_protocol_chooses_its_rows_as_the_paper(
    folder, writer, psidiff, tmp_path, monkeypatch
):
    monkeypatch.setattr(page, "draw", lambda *_: [])  # figures of single models take long
    model = writer[0]
    shutil.copytree(model, tmp_path / "other")
    grid = ("--steps", "2,3", "--samples", 8, "--device", "cpu", "--out", "c")
    ask = ("compare", model, "other", "--judge", folder, "--protocol", "released", *grid)
    rules = ("ancestral", "constant:0", "cap:.3")
    said = psidiff(*ask, "--kappa", ",".join(rules), "--choose", "paper").stdout
    records = [json.loads(line) for line in (tmp_path / "c/cells-0.jsonl").open()]
    assert len(records) == 12
    rows = {}
    for record in records:
        measures = {each["name"]: each for each in record["measures"]}
        ppl, nll = measures["generative perplexity"], measures["generative NLL"]
        assert record["quality"] == ppl["name"] and record["better"] == "low"
        assert ppl["value"] == pytest.approx(math.exp(nll["value"]))
        assert ppl["error"] == pytest.approx(ppl["value"] * nll["error"])
        assert ppl["protocol"]["convention"] == "released"
        cell = record["cell"]
        row = rows.setdefault(cell["model"], {}).setdefault(cell["kappa"], [])
        row.append((measures["entropy-sample"]["value"], nll["value"]))
    for name, ours in rows.items():
        usual, keys = np.array(ours["ancestral"]), {}
        for rule in rules[1:]:
            apart = np.abs(np.array(ours[rule]) - usual).mean(0)[0].round(2)
            keys[apart, np.mean(ours[rule], 0)[1]] = rule
        assert f"{name}: {keys[min(keys)]} (its entropy is" in said.replace("\n", " ")
    assert "generative perplexity (entropy-sample) by steps" in " ".join(said.split())
    assert (tmp_path / "c/quality-all.png").exists()
    again = psidiff(*ask, "--kappa", "ancestral,cap:.3", "--choose", "paper").stdout
    assert "other: cap:.3 (its entropy is" in again and "[1/" not in again
    said = psidiff(*ask[:-1], "d", "--kappa", "fb", "--choose", "paper", check=False).stderr
    assert "name ancestral in --kappa" in said
    said = psidiff(*ask[:5], *grid, "--kappa", "fb", check=False).stderr
    assert "was begun with protocol = released" in said


def test_text_of_the_released_protocol_has_special_tokens_and_no_space_before_a_stop():
    transformers = pytest.importorskip("transformers")
    codec = Subwords.train_bpe([*TEXTS, "it 's , as we 've said ! don 't ? ' no . '"], 300)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=codec._tokenizer)
    ids = codec.encode(f"it 's , as we 've{END} said ! do n't ? ' no . '" + END)
    text = codec.decode_as_released(torch.tensor(ids))
    assert text == f"it's, as we've{END} said! don't?'no. '{END}"
    assert text == fast.clean_up_tokenization(fast.decode(ids, skip_special_tokens=False))
    assert LETTERS.decode_as_released(torch.tensor([0, 1])) == "ab"


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
    with torch.no_grad():
        ids = torch.tensor([tokenizer(TEXTS[1])["input_ids"]])
        states = network(ids, output_hidden_states=True).hidden_states[-1]
    assert found.shape == (5, 16)
    assert np.allclose(found[1], states[0, -1].numpy(), atol=1e-4)
    assert CausalLM(folder, "cpu").features(["", LONG]).shape == (2, 16)


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
        if not name.startswith("mauve"):
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
        if name == "mauve-text":  # of a package that is not here
            continue
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
    with pytest.raises(ValueError, match="the judge fixed has no released protocol"):
        generative_perplexity(Fixed([]), ["abc"], protocol="released")
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
    with pytest.raises(ValueError, match=r"not a metric; the nearest are mauve, mauve-t"):
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


def test_mauve_of_the_package_asks_it_with_the_features_of_the_judge(
    folder, writer, psidiff, tmp_path, monkeypatch
):
    model, samples, codec, rows = writer
    asked = {}

    def compute_mauve(**given):
        asked.update(given)
        return SimpleNamespace(mauve=0.75)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    (tmp_path / "real.txt").write_text(LONG * 20)
    ask = ("evaluate", model, "--samples", samples, "--judge", folder, "--device", "cpu")
    ask = (*ask, "--reference", "real.txt", "--metrics", "mauve-text")
    psidiff(*ask, "--out", "n.jsonl")
    found = lines_of(tmp_path / "n.jsonl")["mauve-text"]
    assert found["value"] == 0.75 and found["error"] is None and not found["exact"]
    assert found["protocol"]["features"] == "tiny-gpt2"
    texts = [codec.decode(torch.tensor(row)) for row in rows]
    assert np.allclose(asked["q_features"], CausalLM(folder, "cpu").features(texts))
    assert asked["p_features"].shape[1] == 16 and asked["verbose"] is False
    without = [word for word in ask if word not in ("--judge", folder)]
    assert "takes its features from --judge" in psidiff(*without, check=False).stderr
    monkeypatch.setitem(sys.modules, "mauve", None)
    said = psidiff(*ask, check=False).stderr
    assert "the metric mauve-text needs: pip install 'psidiff[judge,mauve]'" in said
    assert said.strip().count("\n") == 0


def test_mauve_without_scikit_learn_is_one_sentence(monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr("psidiff.registry.import_module", none)
    with pytest.raises(ValueError, match="MAUVE needs scikit-learn"):
        mauve(np.eye(4), np.eye(4))
