"""The data sets of the paper, read from what people have on disk: Parquet, JSON lines, text,
archives; and the numbers that come of them."""

import io
import json
import lzma
import math
import random
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from psidiff.data.hub import hub_data
from psidiff.data.parquet import count_parquet_rows, parquet_rows
from psidiff.data.published import CORPORA as CORPUS
from psidiff.data.text_sources import documents, resolve
from psidiff.data.token_store import tokenize
from psidiff.data.tokenizers import Bytes
from psidiff.evaluation.multiple_choice import TASKS
from psidiff.evaluation.zero_shot import SUITE
from psidiff.experiment.evaluate import Asked, dataset_of, of_data
from psidiff.integrations.lm_eval_runner import _check_data, local_tasks, run_harness
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Transformer
from psidiff.process import LogLinear

KINDS = ("parquet", "jsonl")
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty folder of data, a cache, and no network."""
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(path, rows, **options):
    """Rows as Parquet or as JSON lines, by the end of the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def causal_model(length=32):
    torch.manual_seed(0)
    options = {"vocab_size": 258, "hidden_size": 16, "num_blocks": 1, "num_heads": 2}
    options |= {"cond_dim": 8, "dropout": 0.0, "causal": True, "time_conditioning": False}
    net = Transformer(**options).eval().requires_grad_(False)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    config = {"network": "transformer", "options": options, "length": length, "bos_id": 257}
    return Model(net, None, LogLinear(), Bytes(), ModelConfig.from_dict(config))


# The zero-shot suite

PAPER = "we see ( fig . 1 ) , and it works .\nso the method is good ."
CORPORA = {  # name: where the Hub has it, its rows, and their text as people write
    "ptb": (
        "ptb-text-only/ptb_text_only/penn_treebank/validation/0000",
        [
            {"sentence": "the firm 's N cars"},
            {"sentence": "<unk> did n't move very far at all"},
        ],
        "the firm's 1 cars? didn't move very far at all",
    ),
    "wikitext2": (
        "Salesforce/wikitext/wikitext-2-raw-v1/validation-00000-of-00001",
        [{"text": ""}, {"text": " = Title = \n"}, {"text": " A 1 @,@ 200 m hall , in it . \n"}],
        " = Title =\n A 1,200 m hall, in it.\n",
    ),
    "lm1b": (
        "lm1b/plain_text/test/0000",
        [{"text": "Is it so ? Yes , they said ."}, {"text": "It cost $ 5 in all , he says"}],
        "Is it so? Yes, they said.It cost $5 in all, he says",
    ),
    "lambada": (
        "EleutherAI/lambada_openai/default/test/0000",
        [{"text": "“Yes,” she said to him . "}, {"text": "He left the house in the morning"}],
        '\n"Yes," she said to him .\nHe left the house in the morning',
    ),
    "ag_news": (
        "fancyzhx/ag_news/data/test-00000-of-00001",
        [{"text": "Up, up He said no", "label": 2}, {"text": "Rain is on its way", "label": 0}],
        "Up, up He said noRain is on its way",
    ),
    "pubmed": (
        "armanc/scientific_papers/pubmed/validation/0000",
        [{"article": PAPER, "abstract": "no", "section_names": "a\nb"}],
        "we see (fig. 1), and it works .\nso the method is good.",
    ),
    "arxiv": (
        "armanc/scientific_papers/arxiv/validation/0000",
        [{"article": PAPER.replace("we", "they"), "abstract": "no", "section_names": "a"}],
        "they see (fig. 1), and it works .\nso the method is good.",
    ),
}


def exact_perplexity(model, text, length):
    """exp of the mean of -log p of all tokens, block by block, one prefix at a time."""
    ids = list(text.encode())
    nats = count = 0
    for first in range(0, len(ids) - length + 1, length):
        block = [model.config.bos_id, *ids[first : first + length]]
        for place in range(1, len(block)):
            logits = model.denoiser(torch.tensor([block[:place]]))[0, -1]
            nats -= logits.double().log_softmax(-1)[block[place]].item()
            count += 1
    return math.exp(nats / count)


@each_kind
@pytest.mark.parametrize("place", ["own", "hub"])
def test_seven_zero_shot_sets_give_the_perplexity_of_a_direct_computation(root, kind, place):
    model, asked = causal_model(length=12), Asked(sequences=0)
    for name, (where, rows, text) in CORPORA.items():
        split = SUITE[name].data.split
        path = where if place == "hub" else f"{name}/{split}"
        write(root / f"{path}.{kind}", rows)
        assert "".join(SUITE[name].texts()) == text
        data = dataset_of("model", model, name, False)
        found = {
            each.name: each
            for each in of_data(model, name, data, asked, lambda what: nullcontext())
        }
        wanted = exact_perplexity(model, text, 12)
        assert found["perplexity"].value == pytest.approx(wanted, rel=1e-4), name
        assert found["perplexity"].protocol["data"] == name


# Multiple choice


def labelled(*texts):
    return {"text": list(texts), "label": list("ABCD")[: len(texts)]}


MATH = "a ) 38 , b ) 1 , 200 km , c ) 30 , d ) data inadequate , e ) none of these"
PIQA = {"goal": "a", "sol1": "b", "sol2": "c"}
HELLA = {"ind": 1, "activity_label": "Roof", "ctx_a": "A man [header] sits.", "ctx_b": "he"}
QUESTIONS = {  # name: where the Hub has it, its rows, and their (context, continuation) pairs
    "arc_easy": (
        "allenai/ai2_arc/ARC-Easy/test-00000-of-00001",
        [
            {
                "id": "1",
                "question": "What melts?",
                "choices": labelled("a stone", "ice"),
                "answerKey": "B",
            },
            {
                "id": "2",
                "question": "Who flies?",
                "choices": {"text": ["a bird", "a pig"], "label": ["1", "2"]},
                "answerKey": "1",
            },
        ],
        [
            [
                ("Question: What melts?\nAnswer:", " a stone"),
                ("Question: What melts?\nAnswer:", " ice"),
            ],
            [
                ("Question: Who flies?\nAnswer:", " a bird"),
                ("Question: Who flies?\nAnswer:", " a pig"),
            ],
        ],
        [1, 0],
    ),
    "arc_challenge": (
        "allenai/ai2_arc/ARC-Challenge/test-00000-of-00001",
        [
            {
                "id": "3",
                "question": "Why?",
                "choices": labelled("so", "no", "it is"),
                "answerKey": "C",
            }
        ],
        [[("Question: Why?\nAnswer:", f" {each}") for each in ("so", "no", "it is")]],
        [2],
    ),
    "openbookqa": (
        "allenai/openbookqa/main/test-00000-of-00001",
        [
            {
                "id": "4",
                "question_stem": "Predators eat",
                "choices": labelled("x", "prey"),
                "answerKey": "B",
            }
        ],
        [[("Predators eat", " x"), ("Predators eat", " prey")]],
        [1],
    ),
    "piqa": (
        "baber/piqa/data/validation-00000-of-00001",
        [{"goal": "dresser", "sol1": "sing to it", "sol2": "pull the drawer", "label": 1}],
        [
            [
                ("Question: dresser\nAnswer:", " sing to it"),
                ("Question: dresser\nAnswer:", " pull the drawer"),
            ]
        ],
        [1],
    ),
    "hellaswag": (
        "Rowan/hellaswag/data/validation-00000-of-00001",
        [{**HELLA, "endings": ["is up [title] There.", "falls"], "label": "0"}],
        [[("Roof: A man sits. He", " is up. There."), ("Roof: A man sits. He", " falls")]],
        [0],
    ),
    "winogrande": (
        "allenai/winogrande/winogrande_xl/validation-00000-of-00001",
        [
            {
                "sentence": "Sarah met Maria so _ was glad.",
                "option1": "Sarah",
                "option2": "Maria",
                "answer": "2",
            }
        ],
        [
            [
                ("Sarah met Maria so Sarah", " was glad."),
                ("Sarah met Maria so Maria", " was glad."),
            ]
        ],
        [1],
    ),
    "mathqa": (
        "regisss/math_qa/data/test-00000-of-00001",
        [
            {
                "Problem": "how far ?",
                "Rationale": "r",
                "options": MATH,
                "correct": "d",
                "category": "g",
            }
        ],
        [
            [
                ("Question: how far ?\nAnswer:", f" {each}")
                for each in ("38", "1", "30", "data inadequate", "none of these")
            ]
        ],
        [3],
    ),
}


def put(root, kind, place):
    for name, (where, rows, *_) in QUESTIONS.items():
        path = where if place == "hub" else f"{name}/{TASKS[name].data.split}"
        write(root / f"{path}.{kind}", rows, row_group_size=1)


@each_kind
@pytest.mark.parametrize("place", ["own", "hub"])
def test_seven_tasks_are_asked_in_the_words_of_the_harness(root, kind, place):
    put(root, kind, place)
    assert set(QUESTIONS) == set(TASKS)
    for name, (_, _, pairs, golds) in QUESTIONS.items():
        found = list(TASKS[name].questions())
        assert [each.pairs() for each in found] == pairs
        assert [each.gold for each in found] == golds


def log_likelihood(model, context, continuation):
    """log p(continuation | context), one prefix at a time."""
    front, ids = len(context.encode()), [257, *f"{context}{continuation}".encode()]
    total = 0.0
    for place in range(front + 1, len(ids)):
        logits = model.denoiser(torch.tensor([ids[:place]]))[0, -1]
        total += logits.double().log_softmax(-1)[ids[place]].item()
    return total


@each_kind
def test_seven_tasks_give_the_accuracy_of_direct_log_likelihoods(root, kind, tmp_path):
    """The harness's numbers are those of its words and of the model, whoever multiplies."""
    pytest.importorskip("lm_eval")
    model = causal_model(length=96)
    put(root, kind, "own")
    found = run_harness(model, list(TASKS), include_path=local_tasks(tmp_path / "tasks"))
    for name, (_, _, pairs, golds) in QUESTIONS.items():
        scores = [[log_likelihood(model, *pair) for pair in each] for each in pairs]
        right = [
            each.index(max(each)) == gold for each, gold in zip(scores, golds, strict=True)
        ]
        assert found["tasks"][name]["questions"] == len(golds)
        assert found["tasks"][name]["acc"]["value"] == pytest.approx(sum(right) / len(right))


def test_the_words_are_those_that_the_harness_makes_of_the_same_rows():
    tasks = Path(pytest.importorskip("lm_eval").__file__).parent / "tasks"

    def own(file):
        spec = spec_from_file_location(Path(file).stem, tasks / file)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def ours(name):
        row = QUESTIONS[name][1][0]
        return row, TASKS[name].question(row, "here")

    row, question = ours("mathqa")
    assert list(question.answers) == own("mathqa/utils.py").doc_to_choice(row)
    row, question = ours("hellaswag")
    made = own("hellaswag/utils.py").process_docs(SimpleNamespace(map=lambda each: each(row)))
    assert (*question.contexts, list(question.answers)) == (made["query"], made["choices"])
    row, question = ours("winogrande")
    words = own("winogrande/preprocess_winogrande.py")
    assert list(question.contexts) == words.doc_to_choice(row)
    assert (*question.answers, question.gold) == (
        words.doc_to_target(row),
        words.doc_to_text(row),
    )


def test_what_is_wrong_with_a_question_is_said_with_its_place(root):
    path = write(root / "winogrande/validation.jsonl", [{"sentence": "no blank"}])
    cases = [
        ("winogrande", {"sentence": "no blank"}, "row has no blank _ in its sentence"),
        ("winogrande", {"sentence": "a _", "option1": "b"}, "row has no field 'option2', but"),
        (
            "piqa",
            {"goal": "a", "sol1": "b", "sol2": "c", "label": -1},
            "2 answers is right, got -1",
        ),
        ("piqa", {"goal": "a", "sol1": "b", "sol2": "c"}, "2 answers is right, got None"),
        (
            "hellaswag",
            {**HELLA, "endings": "a"},
            "no list in 'endings'; its columns are ind, act",
        ),
        ("arc_easy", {"question": "a", "choices": ["b"]}, "no choices with text and label"),
        ("arc_easy", {"query": "a", "choices": [1, 2], "gold": 0}, "all of them text"),
        ("mathqa", [], r"row must be an object, got \[\]"),
    ]
    for name, row, words in cases:
        with pytest.raises(ValueError, match=words):
            TASKS[name].question(row, "row")
    with pytest.raises(ValueError, match=f"line 1 of {path} has no blank"):
        local_tasks(root / "tasks")
    write(root / "piqa/valid.jsonl", [PIQA] * 2)
    (root / "piqa/valid-labels.lst").write_text("0\n1\n1\n")
    with pytest.raises(ValueError, match="has 2 questions, and 3 labels"):
        list(TASKS["piqa"].questions())
    with pytest.raises(ValueError, match=r"mathqa is not here: .* Problem, options and"):
        list(TASKS["mathqa"].questions())


def test_the_task_that_is_not_here_is_the_one_that_is_named(root):
    write(root / "piqa/validation.jsonl", QUESTIONS["piqa"][1])

    def fails(tasks):
        raise OSError("no network")

    words = r"data of mathqa are not in PSIDIFF_DATA \(put the Parquet .*: no network"
    with pytest.raises(ValueError, match=words):
        _check_data(SimpleNamespace(load=fails), ["piqa", "mathqa"], None)


def test_tasks_are_read_as_their_authors_published_them(root):
    choices = [{"text": "a stone", "label": "A"}, {"text": "ice", "label": "B"}]
    stem = {"question": {"stem": "What melts?", "choices": choices}, "answerKey": "B"}
    write(root / "arc_easy/ARC-Easy-Test.jsonl", [stem])
    write(root / "openbookqa/test.jsonl", [stem])
    with zipfile.ZipFile(root / "MathQA.zip", "w") as archive:
        archive.writestr("test.json", json.dumps(QUESTIONS["mathqa"][1]))
    row = {**QUESTIONS["winogrande"][1][0], "qID": "1"}
    write(root / "winogrande_1.1/dev.jsonl", [row])
    for name in ("arc_easy", "mathqa", "winogrande"):
        (first, *_) = TASKS[name].questions()
        assert first.pairs() == QUESTIONS[name][2][0]
    (only,) = TASKS["openbookqa"].questions()
    assert only.pairs() == [("What melts?", " a stone"), ("What melts?", " ice")]
    assert only.gold == 1


# Sources


def texts(source, **options):
    return list(documents(str(source), **options))


def test_parquet_is_read_by_row_groups_and_columns(root):
    rows = [{"id": i, "body": f"number {i} é"} for i in range(2500)]
    path = write(root / "a.parquet", rows, row_group_size=700)
    assert texts(path, field="body") == [row["body"] for row in rows]
    assert count_parquet_rows(path) == 2500
    assert next(parquet_rows(path, ["id"])) == {"id": 0}
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text', but id, body"):
        texts(path)
    with pytest.raises(ValueError, match=r"row 1 of .*parquet must have text in 'id', got 0"):
        texts(path, field="id")


def test_a_damaged_or_hostile_parquet_file_is_one_sentence(root, monkeypatch):
    path = write(root / "a.parquet", [{"text": "x" * 1000}] * 5000)
    whole = path.read_bytes()
    for data in (whole[:-100], whole[:4] + bytes(200) + whole[204:], b"PAR1" * 9, b""):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.parquet") as found:
            texts(path)
        assert len(str(found.value)) < 700
    path.write_bytes(whole)
    monkeypatch.setattr("psidiff.limits._ALWAYS", 2**20)  # 5 MB of text out of a few kB
    with pytest.raises(ValueError, match="PSIDIFF_LIMITS=ratio="):
        texts(path)


@pytest.mark.parametrize("inside", [False, True], ids=["text", "lists"])
def test_one_text_that_many_rows_share_does_not_fill_memory(root, inside):
    """Two terabytes, in a file of two kilobytes."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 200_000), ["x" * 10_000_000])
    if inside:
        column = arrow.ListArray.from_arrays(arrow.array(range(0, 200_001, 10)), column)
    table = arrow.table({"text": column})
    parquet.write_table(table, root / "a.parquet", dictionary_pagesize_limit=2**30)
    with pytest.raises(ValueError, match=r"a\.parquet unpacks to over .* PSIDIFF_LIMITS=ratio"):
        list(parquet_rows(root / "a.parquet"))


def test_flipped_bytes_of_parquet_are_sentences_or_other_rows(root):
    rows = [{"text": f"hello {i} " * 9, "choices": {"text": ["a", "b"]}} for i in range(99)]
    path = write(root / "a.parquet", rows, row_group_size=40)
    whole, generator = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        data[generator.randrange(len(data))] = generator.choice((0, 0x7F, 0x80, 0xFF))
        path.write_bytes(data)
        try:
            assert len(list(islice(parquet_rows(path), 1000))) <= 1000
        except ValueError as error:
            assert "a.parquet" in str(error)
            refused += 1
    assert 0 < refused < 200


def test_parquet_needs_a_package_that_runs_nothing(root, monkeypatch):
    (root / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"Parquet files need: pip install 'psidiff\[data\]'"):
        texts(root / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(__version__="14.0.0"))
    with pytest.raises(ValueError, match=r"pyarrow 14\.0\.0 may run code in a file"):
        texts(root / "a.parquet")


@each_kind
def test_a_data_set_of_the_hub_is_read_from_its_files_where_they_are_here(root, kind):
    for place in ("openwebtext", "Skylion007/openwebtext"):
        for number in (1, 0):
            rows = [{"text": f"document {number}{i}"} for i in range(2)]
            write(root / f"{place}/plain_text/train-0000{number}-of-00002.{kind}", rows)
        found = texts("datasets:Skylion007/openwebtext")
        assert found == [f"document {n}{i}" for n in (0, 1) for i in range(2)]
        one = tokenize("datasets:Skylion007/openwebtext", Bytes())
        assert one.key == tokenize(str(root / place), Bytes()).key and len(one) == 4


def test_files_that_are_missing_or_too_many_are_named(root):
    row = [{"text": "a"}]
    write(root / "few/train-00001-of-00003.jsonl", row)  # shards are Parquet's
    assert texts(root / "few", split="train") == ["a"]
    write(root / "owt/train-00001-of-00003.parquet", row)
    with pytest.raises(ValueError, match=r"lacks 2 of the 3 files .* train-00000-of-00003"):
        texts("datasets:owt")
    write(root / "part/plain_text/partial-train/0000.parquet", row)
    with pytest.raises(ValueError, match="has only the first part of it"):
        texts("datasets:part")
    for config in ("a", "b"):
        write(root / f"two/{config}/test/0000.parquet", [{"text": config}])
    with pytest.raises(ValueError, match=r"has several data sets \(a, b\): name the folder"):
        texts("datasets:owner/two", split="test")
    assert texts("datasets:owner/two/b", split="test") == ["b"]
    with pytest.raises(ValueError, match=r"no file of c whose name says that it is of test"):
        texts("datasets:owner/two/c", split="test")


def test_one_billion_words_is_read_as_it_was_published(root):
    folder = root / "1-billion-word-language-modeling-benchmark-r13output"
    for name, lines in (
        ("training-monolingual.tokenized.shuffled/news.en-00001-of-00100", "b .\n c .\n"),
        ("heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050", "e ? no\n"),
        ("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050", "d .\n"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(lines)
    assert texts("datasets:lm1b") == ["b .", "c ."]
    assert texts("datasets:lm1b", split="test") == ["d .", "e ? no"]
    assert list(SUITE["lm1b"].texts()) == ["d .", "e? no"]


def test_openwebtext_is_read_as_it_was_published(root):
    for number, archived in ((1, ["d"]), (0, ["c  \n\n\n\nb\n", " a "])):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for order, text in enumerate(archived):  # not in the order of their names
                info = tarfile.TarInfo(f"000{9 - order}-abc.txt")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
        path = root / f"openwebtext/urlsf_subset0{number}-7_data.xz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(data.getvalue()))
    assert texts("datasets:Skylion007/openwebtext") == ["a", "c  \n\nb", "d"]
    assert CORPUS["openwebtext"].local() == resolve("openwebtext", None)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"urlsf_subset00-7_data\.xz is damaged"):
        texts("openwebtext")


def test_papers_are_read_as_they_were_published(root):
    lines = json.dumps({"article_text": PAPER.split("\n"), "abstract_text": []}) + "\n"
    with zipfile.ZipFile(root / "pubmed-dataset.zip", "w") as archive:
        archive.writestr("pubmed-dataset/val.txt", lines * 2)
    assert list(SUITE["pubmed"].texts()) == [CORPORA["pubmed"][2]] * 2
    write(root / "arxiv-dataset/val.txt", [{"article_id": "1"}])
    with pytest.raises(ValueError, match="has no list of text in article_text"):
        list(SUITE["arxiv"].texts())


def test_a_member_of_a_zip_archive_is_a_file(root):
    with zipfile.ZipFile(root / "text8.zip", "w") as archive:
        archive.writestr("text8", " anarchism originated")
        archive.writestr("a.parquet", "PAR1")
    assert texts("text8.zip/text8") == [" anarchism originated"]
    with pytest.raises(ValueError, match=r"has no file b\.txt, but text8, a\.parquet"):
        texts("text8.zip/b.txt")
    with pytest.raises(ValueError, match="is Parquet inside an archive: unpack the archive"):
        texts("text8.zip/a.parquet")


def test_a_data_set_that_was_a_script_is_read_as_the_hub_converted_it(monkeypatch):
    asked = []

    class Loaded(list):
        _fingerprint = "1"

    def load_dataset(name, config=None, *, split, revision=None, data_files=None):
        asked.append((name, config, split, revision, data_files))
        if data_files is None and revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found lm1b.py")
        return Loaded([{"text": "a"}])

    library = SimpleNamespace(load_dataset=load_dataset, __version__="4.1.0")
    monkeypatch.setitem(sys.modules, "datasets", library)
    found = hub_data("datasets:owner/name/small", "test")
    assert found.rows == [{"text": "a"}] and found.revision == "refs/convert/parquet"
    files = {"test": "small/test/*.parquet"}
    assert asked[1:] == [("owner/name", None, "test", "refs/convert/parquet", files)]
    assert resolve("datasets:name@abc", None).revision == "abc"
    assert asked[2] == ("name", None, "train", "abc", None)
    assert texts("datasets:name") == ["a"] and asked[-1][4] == {"train": "*/train/*.parquet"}
    library.__version__ = "3.6.0"
    with pytest.raises(ValueError, match=r"datasets>=4' \(version 3\.6\.0 may run"):
        hub_data("datasets:name", None)
