"""Text: detokenizers, tokenizers, corpora, the store and the rows made of it."""

import base64
import gzip
import io
import json
import lzma
import os
import pickle
import re
import sys
import tarfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import generator

from psidiff.data import token_store, tokenization
from psidiff.data.codec import Codec, codec_from
from psidiff.data.detokenizers import DETOKENIZERS
from psidiff.data.infill import encode_prompt, encode_template
from psidiff.data.sequence_datasets import Packed, Padded
from psidiff.data.text_sources import documents, find
from psidiff.data.token_store import TokenStore, tokenize
from psidiff.data.tokenizer_json import is_quick
from psidiff.data.tokenizers import Bytes, Characters, Subwords, _call_library
from psidiff.files import read_object, write_object
from psidiff.types import Dataset

GOLDEN = {
    "wikitext": (
        " = = Early life = = \n The band 's 1 @,@ 200 @-@ seat hall ( built 1 @.@ 5 km away ) "
        'was " sold out " ; N people came .',
        " == Early life ==\nThe band's 1,200-seat hall (built 1.5 km away) "
        'was "sold out"; 1 people came .',
    ),
    "ptb": (
        "the company 's shares fell $ N to # N in N N trading and <unk> did n't respond \n "
        "and\\/or",
        "the company's shares fell $1 to #1 in 1 1 trading and ? didn't respond\nand/or",
    ),
    "lm1b": (
        '" I do n\'t know , " he said ( laughing ) . It cost $ 5 : see http : / / a . '
        "Really ? Yes !",
        '"I do n\'t know," he said (laughing) . It cost $5: see http://a . Really? Yes!',
    ),
    "lambada": (" “hello,” she said . ", '\n"hello," she said .'),
    "scientific": (
        'we use @xmath0 ( see fig . 1 ) , and the " best " method .',
        'we use @xmath0 (see fig. 1), and the "best" method.',
    ),
}
TEXTS = ["the cat sat on the mat\nand the dog sat too", "a dog", "", "naïve 漢字 🙂 the cat"]
BPE = Subwords.train_bpe(TEXTS * 3, vocab_size=290)
CODECS = [Characters.of("".join(TEXTS)), Characters.text8(), Bytes(), BPE]
NAMES = ["characters", "text8", "bytes", "subwords"]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=NAMES)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Nothing is read from or written to the user's own folders."""
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    if "PSIDIFF_DATA" not in os.environ:
        monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "data"))


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"title": "t", field: x}) + "\n" for x in texts))
    return str(path)


def store_of(*documents):
    ends = np.cumsum([len(d) for d in documents])
    return TokenStore(np.concatenate(documents).astype(np.uint16), ends)


def published(name):
    path = Path(os.environ["PSIDIFF_DATA"]) / "tokenizers" / name
    if not path.exists():
        pytest.skip(f"PSIDIFF_DATA has no tokenizers/{name}")
    return path


# Detokenizers


@pytest.mark.parametrize("name", GOLDEN)
def test_detokenizers_give_the_strings_of_the_published_evaluations(name):
    given, wanted = GOLDEN[name]
    assert DETOKENIZERS[name](given) == wanted


# Tokenizers


@each_codec
def test_a_codec_is_made_again_from_its_description(codec):
    described = json.loads(json.dumps(codec.describe()))
    assert codec_from(described) == codec
    assert isinstance(codec, Codec) and codec.kind == "text"


@each_codec
def test_text_is_the_same_after_encoding_and_decoding(codec):
    for text in TEXTS:
        tokens = codec.encode(text)
        assert tokens.dtype == np.int32
        folded = re.sub("[^a-z]+", " ", text.lower())
        shown = codec.decode(torch.tensor(tokens))
        assert shown == (folded if codec == Characters.text8() else text)


@each_codec
def test_many_texts_are_encoded_as_one_by_one(codec):
    for one, many in zip(map(codec.encode, TEXTS), codec.encode_all(TEXTS), strict=True):
        assert np.array_equal(one, many)


@each_codec
def test_an_id_after_the_last_token_is_shown_as_a_blank(codec):
    a, b = codec.encode("a")[0], codec.encode("b")[0] if codec != CODECS[0] else 0
    shown = codec.decode(torch.tensor([a, codec.vocab_size, b]))
    assert shown.startswith("a_") and len(shown) == 3


@each_codec
def test_codecs_travel_to_other_processes(codec):
    codec.encode("a dog")  # what is made on the way does not travel
    copy = pickle.loads(pickle.dumps(codec))
    assert copy == codec and np.array_equal(copy.encode("a dog"), codec.encode("a dog"))


def test_folded_text_has_27_characters_and_no_two_spaces():
    codec = Characters.text8()
    tokens = codec.encode('He said:\n\n"No -- 42!" É.')
    assert codec.vocab_size == 27
    assert codec.decode(torch.tensor(tokens)) == "he said no "


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match="'ß' is not in the alphabet"):
        Characters("abc").encode("abßc")
    with pytest.raises(ValueError, match="'é' is not in the alphabet"):
        Characters("abz").encode("é")


def test_an_alphabet_has_each_character_once():
    with pytest.raises(ValueError, match="each character once, 'a'"):
        Characters("aba")
    with pytest.raises(ValueError, match="two characters"):
        Characters("a")
    with pytest.raises(ValueError, match="fold needs the alphabet"):
        Characters("abc", fold=True)


def test_documents_of_characters_end_as_lines_or_else_words_do():
    assert Characters.of("ab\n c").separator_id == 0
    assert Characters.text8().separator_id == 0
    assert Characters("ab").separator_id is None


def test_bytes_show_what_is_no_utf8_and_drop_the_separator():
    assert Bytes().decode(torch.tensor([104, 256, 105, 255])) == "hi\ufffd"


def test_bpe_is_the_same_each_time_it_is_trained():
    again = Subwords.train_bpe(iter(TEXTS * 3), vocab_size=290)
    assert again.json == BPE.json and again.vocab_size == 290


def test_bpe_has_a_separator_that_opens_and_closes():
    codec = Subwords.train_bpe(TEXTS, vocab_size=270, separator="<end>")
    end = codec.separator_id
    assert codec_from(codec.describe()).separator_id == end == codec.bos_id == codec.eos_id
    assert codec.pad_id is None and codec.mask_id is None
    assert codec.decode(torch.tensor([end])) == "<end>"


def test_bpe_needs_room_for_all_bytes():
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 257"):
        Subwords.train_bpe(TEXTS, vocab_size=256)


def test_a_tokenizer_is_read_from_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE.json)
    assert Subwords.from_file(tmp_path / "tokenizer.json").encode("a cat").tolist() == (
        BPE.encode("a cat").tolist()
    )
    with pytest.raises(ValueError, match=r"there is no file .*none\.json"):
        Subwords.from_file(tmp_path / "none.json")


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the JSON of a tokenizer"):
        _ = Subwords("{}").vocab_size
    with pytest.raises(ValueError, match=r"neither encoder\.json nor vocab\.json"):
        Subwords.gpt2(tmp_path)
    with pytest.raises(ValueError, match="no token '<x>'"):
        Subwords(BPE.json, "<x>")


def tokenizer_json(**parts):
    """The JSON of a tokenizer of two words, with other parts."""
    words = {"a": 0, "b": 1, "<eos>": 2}
    empty = (
        "truncation",
        "padding",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
    )
    held = {"version": "1.0", "added_tokens": [], **dict.fromkeys(empty)}
    held["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    return json.dumps(held | parts)


def added(**parts):
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": 3, "content": "x", **dict.fromkeys(flags, False), **parts}


def replaces(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def unigram(vocab, unknown=0):
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab}


HOSTILE_TOKENIZERS = {
    "a number of 4e9": {"model": {"type": "WordLevel", "vocab": {"a": 4 * 10**9}}},
    "two words of one number": {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}
    },
    "no words": {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}},
    "words that are none": {"model": {"type": "WordLevel", "vocab": [], "unk_token": []}},
    "no unknown": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}},
    "another model": {"model": {"type": "Word\x1b[31m", "vocab": {"a": 0}}},
    "an added number of 1e9": {"added_tokens": [added(id=10**9)]},
    "added twice": {"added_tokens": [added(), added(content="y")]},
    "nothing added": {"added_tokens": [added(content="")]},
    "scores": {"model": unigram([["a", -1e308], ["b", 1e308]])},
    "an unknown beyond": {"model": unigram([["a", 0.0]], 7)},
    "chance": {"model": {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}, "merges": []}},
    "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "q"]]}},
    "growth": {
        "normalizer": {"type": "Sequence", "normalizers": [replaces("a", "a" * 100)] * 5}
    },
    "growth of nothing": {"normalizer": replaces("", "aaaa")},
    "growth where decoded": {
        "decoder": {"type": "Sequence", "decoders": [replaces("e", "e" * 9)] * 5}
    },
    "growth by a pattern": {"normalizer": replaces(".", "a" * 100, "Regex")},
    "a slow pattern": {"normalizer": replaces("(a|a|aa)+$c", "x", "Regex")},
    "a slow pattern where decoded": {"decoder": replaces("(.|.|..)+\0", "", "Regex")},
    "a slow split": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "a*a*a*a*c"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "nests": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence"}]}},
    "strips": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
    "cuts nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "long words": {
        "model": {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**12,
        }
    },
    "a table of nothing": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAA"}
    },
    "a table that grows": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(bytes(4) + b"a" * 999 + b"\0").decode(),
        }
    },
    "padding": {"padding": {"strategy": {"Fixed": 10**12}, "pad_id": 0}},
    "nobody's part": {"decoder": {"type": "Python", "code": "import os"}},
}


@pytest.mark.parametrize("kind", HOSTILE_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_before_it_runs(kind, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(**HOSTILE_TOKENIZERS[kind]))
    with pytest.raises(ValueError, match=r"tokenizer\.json") as found:
        _ = Subwords.from_file(tmp_path / "tokenizer.json").vocab_size
        raise ValueError("it was made")
    assert len(str(found.value)) < 400 and "\x1b" not in str(found.value)


def test_a_name_with_two_values_is_refused_in_a_tokenizer():
    plain = tokenizer_json()
    bad = json.dumps(replaces("", "aaaa"))
    for text in ('{"normalizer": ' + bad + ", " + plain[1:], "[" * 5000, plain + " " * 2**26):
        with pytest.raises(ValueError, match=r"JSON of (a|the) tokenizer"):
            Subwords(text)


def test_what_the_library_fails_at_is_said_in_a_sentence():
    codec = Subwords(tokenizer_json(model=unigram([["b", 0.0]], None)))
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: "):
        codec.encode("a")
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: "):
        BPE.encode("\ud800")

    class PanicException(BaseException):
        pass

    def panics(*values):
        raise PanicException("index out of bounds")

    with pytest.raises(ValueError, match="the tokenizer cannot decode: index out of bounds"):
        _call_library("decode", panics)
    with pytest.raises(KeyboardInterrupt):
        _call_library("decode", interrupt)


def interrupt():
    raise KeyboardInterrupt


def test_parts_of_published_tokenizers_pass():
    llama = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaces(" ", "▁")],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replaces("▁", " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3},
            "merges": ["▁ a"],
        },
    }
    codec = Subwords(tokenizer_json(**llama))
    assert codec.encode("a a").tolist() == [3, 3]
    assert codec.decode(torch.tensor([3, 3])) == "a a"
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    t5 = {
        "normalizer": replaces(" {2,}", "▁", "Regex"),
        "pre_tokenizer": meta,
        "decoder": meta,
        "model": unigram([["<unk>", 0.0], ["▁a", -1.5], ["a", -2.0]]),
    }
    assert Subwords(tokenizer_json(**t5)).encode("a a").tolist() == [1, 1]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pattern",
    [
        *(GPT2, LLAMA3, LLAMA3.replace("{1,3}", ""), GPT4O, r"[\s\S]", "[^a-z]+", " {2,}"),
        *(r"\s?\p{L}+", "[0-9][0-9][0-9]", "[一-龥ࠀ-一가-퟿]+", "[\r\n]", r"\s?[!-/:-~]+"),
        *(r" ?[^(\s|[.,!?…。，、।۔،])]+", r"<\|endoftext\|>|[\p{L}]+|[\p{N}]", "▁"),
    ],
)
def test_patterns_of_published_tokenizers_are_quick(pattern):
    assert is_quick(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(a|aa)+c", "a*a*b", "a+b", ".*.*", "(?=a*)b", r"(a)\1*c", r"\s*[\r\n]+"),
        *("a?a?a?a?a+", "(" * 500, "[" * 500, "a{9999}", "", "a+?b", "x" * 2000, None, 3),
        *("(?i:a+b)", r"\s+$", "[a", "\\"),
    ],
)
def test_patterns_that_nobody_knows_to_be_quick_are_refused(pattern):
    assert not is_quick(pattern)


def test_pipes_are_no_tokenizers(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="no regular file"):
        Subwords.from_file(tmp_path / "tokenizer.json")


def test_the_hub_says_in_a_sentence_that_it_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    for reason in (r"http://127\.0\.0\.1:9 cannot be reached", "HF_HUB_OFFLINE is set"):
        with pytest.raises(ValueError, match=f"cannot be had from the hub, .*: {reason}"):
            Subwords.from_hub("nobody/nothing")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert time.monotonic() - begun < 8, "it does not try again and again"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        Subwords.from_hub("nobody/nothing")


def test_gpt2_is_built_from_either_pair_of_files(tmp_path):
    """A vocabulary of the same form, small: bytes, one merge, the separator."""
    model = json.loads(BPE.json)["model"]
    words = {w: i for i, w in enumerate(w for w in model["vocab"] if w != "<|endoftext|>")}
    words["<|endoftext|>"] = len(words)
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
    for vocabulary, merged in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / vocabulary
        folder.mkdir()
        (folder / vocabulary).write_text(json.dumps(words))
        (folder / merged).write_text(merges)
        codec = Subwords.gpt2(folder, pad=True)
        assert codec.separator_id == codec.bos_id == codec.eos_id == len(words) - 1
        assert codec.pad_id == len(words) == codec.vocab_size - 1
        assert [w for w in codec.encode("the cat 🙂")] == [
            words[w] for w in (BPE._tokenizer.id_to_token(i) for i in BPE.encode("the cat 🙂"))
        ]


def test_gpt2_has_its_published_ids():
    folder = published("gpt2")
    codec = Subwords.gpt2(folder)
    assert codec.vocab_size == 50_257
    assert codec.encode("Hello world").tolist() == [15496, 995]
    assert codec.separator_id == codec.bos_id == codec.eos_id == 50_256
    assert codec.pad_id is None
    shown = codec.decode(torch.tensor([15496, 995, 50_256, 50_257]))
    assert shown == "Hello world<|endoftext|>_"
    padded = Subwords.gpt2(folder, pad=True)
    assert padded.vocab_size == 50_258 and padded.pad_id == 50_257
    assert padded.decode(torch.tensor([15496, 50_257])) == "Hello"


def test_bert_has_its_published_ids():
    codec = Subwords.wordpiece(published("bert_base_uncased") / "vocab.txt")
    assert codec.vocab_size == 30_522
    assert codec.encode("hello world").tolist() == [7592, 2088]
    assert codec.encode("Héllo WORLD").tolist() == [7592, 2088]
    assert len(codec.encode("中国")) == 2
    assert (codec.bos_id, codec.eos_id, codec.separator_id) == (101, 102, 102)
    assert (codec.pad_id, codec.mask_id) == (0, 103)
    shown = codec.decode(torch.tensor([101, 7592, 103, 30_522, 2088, 102, 0]))
    assert shown == "hello _ _ world [SEP]"


# Corpora


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwö\n".encode())
    assert list(documents(str(tmp_path / "a.txt"))) == ["one\r\ntwö\n"]


def test_compressed_files_are_read_as_they_are(tmp_path):
    line = json.dumps({"body": "hello"}).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"hello"))
    assert list(documents(str(tmp_path / "a.jsonl.gz"), field="body")) == ["hello"]
    assert list(documents(str(tmp_path / "a.txt.xz"))) == ["hello"]


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_text("third")
    (tmp_path / "notes.md").write_text("not text of the corpus")
    jsonl(tmp_path / "a.jsonl", ["first", "second"])
    assert list(documents(str(tmp_path))) == ["first", "second", "third"]


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.xz"])
def test_a_member_of_an_archive_is_a_file(tmp_path, kind):
    path = tmp_path / f"books.{kind}"
    with tarfile.open(path, f"w:{kind[4:]}") as archive:
        for name, content in (("./a.txt", b"one"), ("in/b.txt.gz", gzip.compress(b"two"))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    assert list(documents(f"{path}/a.txt")) == ["one"]
    assert list(documents(f"{path}/in/b.txt.gz")) == ["two"]
    with pytest.raises(ValueError, match=r"has no file c\.txt, but a\.txt, in/b\.txt\.gz"):
        list(documents(f"{path}/c.txt"))
    with pytest.raises(ValueError, match="is an archive: name a file in it"):
        documents(str(path))


def test_data_is_found_below_the_folder_of_psidiff_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("found")
    assert find("corpus.txt") == tmp_path / "corpus.txt"
    assert list(documents("corpus.txt")) == ["found"]
    with pytest.raises(ValueError) as error:
        find("none.txt")
    assert str(Path("none.txt").absolute()) in str(error.value)
    assert str(tmp_path / "none.txt") in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 of .*bad\.jsonl is not JSON"),
        (
            '{"text": "a"}\n\n{"title": "b"}',
            "line 3 .*no field 'text', but title",
        ),
        ("[1, 2]", r"line 1 .* must be an object with a field 'text', got \[1, 2\]"),
        ('{"text": 5}', "line 1 .* must have text in 'text', got 5"),
        ("", "has no documents"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(documents(str(tmp_path / "bad.jsonl")))


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match="is of no known kind"):
        documents(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match=r"has no \.txt, \.jsonl or \.parquet file"):
        documents(str(tmp_path))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8 at byte 3"):
        list(documents(str(tmp_path / "latin.txt")))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"hello" * 99)[:-9])
    with pytest.raises(ValueError, match=r"cut\.txt\.gz is damaged"):
        list(documents(str(tmp_path / "cut.txt.gz")))
    with pytest.raises(ValueError, match="has no splits"):
        documents(str(tmp_path / "latin.txt"), split="test")


def test_the_datasets_library_is_asked_for_name_config_and_split(monkeypatch):
    asked = []

    class Loaded(list):
        _fingerprint = "1"

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return Loaded({"text": text} for text in TEXTS)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(documents("datasets:owner/name/small", split="test")) == TEXTS
    assert list(documents("datasets:name")) == TEXTS
    assert asked == [("owner/name", "small", "test"), ("name", None, "train")]
    assert len(tokenize("datasets:name", Bytes())) == len(TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="datasets:name needs: pip install datasets"):
        documents("datasets:name")


# The store


class Counting(Characters):
    """Characters that count how often they encode."""

    calls = 0

    def encode_all(self, texts):
        Counting.calls += 1
        return super().encode_all(texts)


def whole(store):
    return store.tokens.tolist(), store.ends.tolist()


@each_codec
def test_a_store_holds_each_document(tmp_path, codec):
    store = tokenize(jsonl(tmp_path / "a.jsonl", TEXTS), codec)
    assert len(store) == len(TEXTS)
    starts = store.starts(np.arange(len(TEXTS)))
    for text, start, end in zip(TEXTS, starts, store.ends, strict=True):
        assert np.array_equal(store.tokens[start:end], codec.encode(text))
    assert store.tokens.dtype == (np.uint8 if codec.vocab_size <= 256 else np.uint16)
    assert isinstance(store.tokens, np.memmap)


@pytest.mark.parametrize("detokenizer", [None, "lm1b"])
@each_codec
def test_a_document_in_pieces_is_the_document(tmp_path, monkeypatch, codec, detokenizer):
    line = 'the cat , " the dog " and\nthe dog ( sat ) \n\nthe cat\n'
    texts = [line * 40, "a dog", line * 20]
    codec = Characters.of(line) if codec == CODECS[0] else codec
    source = jsonl(tmp_path / "a.jsonl", texts)
    options = {"detokenizer": detokenizer, "workers": 1}
    one = tokenize(source, codec, cache=tmp_path / "one", **options)
    monkeypatch.setattr(tokenization, "CHUNK", 100)
    assert len(list(tokenization._jobs(texts, detokenizer))) > 10
    many = tokenize(source, codec, cache=tmp_path / "many", **options)
    assert whole(one) == whole(many) and len(one) == 3


def test_the_store_is_the_same_whatever_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization, "CHUNK", 100)
    monkeypatch.setattr(tokenization, "SMALL", 2)
    source = jsonl(
        tmp_path / "a.jsonl", [f"the dog {i} , \nsaid the cat" * i for i in range(30)]
    )
    seen = []
    one, two = (
        tokenize(
            source,
            BPE,
            detokenizer="lm1b",
            cache=tmp_path / str(workers),
            workers=workers,
            on_progress=lambda documents, tokens: seen.append((documents, tokens)),
        )
        for workers in (1, 2)
    )
    assert whole(one) == whole(two)
    assert seen[-1] == (30, len(one.tokens)) == seen[len(seen) // 2 - 1]


def test_a_corpus_is_encoded_once(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["abc", "cab"])
    copy = jsonl(tmp_path / "copy.jsonl", ["abc", "cab"])
    Counting.calls = 0
    first = tokenize(source, Counting("abc"))
    assert whole(tokenize(source, Counting("abc"))) == whole(first)
    assert whole(tokenize(copy, Counting("abc"))) == whole(first)
    assert Counting.calls == 1


def test_another_tokenizer_detokenizer_field_or_content_makes_another_store(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a ? b", "other": "b"}\n')
    Counting.calls = 0
    alphabet = " ?ab"
    made = [
        tokenize(str(path), Counting(alphabet)),
        tokenize(str(path), Counting(alphabet[::-1])),
        tokenize(str(path), Counting(alphabet), detokenizer="lm1b"),
        tokenize(str(path), Counting(alphabet), field="other"),
    ]
    path.write_text('{"text": "b ? a", "other": "b"}\n')  # as long, and at almost the same time
    made.append(tokenize(str(path), Counting(alphabet)))
    assert Counting.calls == 5
    assert len({tuple(store.tokens.tolist()) for store in made}) == 5


def test_a_file_is_hashed_once_while_its_size_and_times_stay(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    long_ago = time.time_ns() - 10**10
    os.utime(path, ns=(long_ago, long_ago))
    monkeypatch.setattr(token_store, "_SETTLED", 0)
    tokenize(str(path), Bytes())
    monkeypatch.setattr(token_store.hashlib, "file_digest", None)
    assert tokenize(str(path), Bytes()).tokens.tolist() == [97, 98, 99]
    time.sleep(0.05)  # more than a tick of the kernel's clock
    path.write_text("cab")
    os.utime(path, ns=(long_ago, long_ago))  # as tools that copy files do
    with pytest.raises(TypeError):
        tokenize(str(path), Bytes())


def test_a_half_written_store_is_never_used(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["abc", "cab", "xyz"])
    cache = tmp_path / "cache" / "tokens"
    with pytest.raises(ValueError, match="'x' is not in the alphabet"):
        tokenize(source, Characters("abc"))
    assert list(cache.iterdir()) == []
    codec = Characters("abcxyz")
    store = tokenize(source, codec)
    content = whole(store)
    (folder,) = cache.iterdir()
    for damage in ("tokens.bin", "ends.npy", "about.json"):
        good = (folder / damage).read_bytes()
        (folder / damage).unlink()
        (folder / damage).write_bytes(good[:-1])
        assert whole(tokenize(source, codec)) == content
    for damage in ("tokens.bin", "ends.npy"):  # a bit of the last number
        changed = bytearray((folder / damage).read_bytes())
        changed[-1] ^= 1
        (folder / damage).write_bytes(changed)
        with pytest.warns(UserWarning, match=f"{folder} is damaged: it is made again"):
            assert whole(tokenize(source, codec)) == content
    (folder / "ends.npy").unlink()
    assert whole(tokenize(source, codec)) == content
    assert list(cache.iterdir()) == [folder]


def test_a_store_without_checksums_is_taken_as_it_is_and_gets_them(tmp_path):
    source, codec = jsonl(tmp_path / "a.jsonl", ["abc", "cab"]), Counting("abc")
    content = whole(tokenize(source, codec))
    (about,) = (tmp_path / "cache" / "tokens").glob("*/about.json")
    held = read_object(about)
    assert held.pop("crc32")
    write_object(about, held)
    Counting.calls = 0
    with pytest.warns(UserWarning, match="of an earlier version, without checksums"):
        assert whole(tokenize(source, codec)) == content
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(tokenize(source, codec)) == content
    assert read_object(about)["crc32"] and Counting.calls == 0


def test_what_cannot_be_tokenized_is_said(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(ValueError, match="all documents are empty"):
        tokenize(source, Bytes())
    with pytest.raises(ValueError, match="detokenizer 'wt' is not one of wikitext, ptb"):
        tokenize(source, Bytes(), detokenizer="wt")
    with pytest.raises(ValueError, match="workers must be an integer of at least 1"):
        tokenize(source, Bytes(), workers=0)


# Rows


def test_packed_blocks_are_those_of_group_texts():
    store = store_of([1, 2, 3], [4, 5], [6, 7, 8, 9])
    packed = Packed(store, 6, bos_id=100, eos_id=101)
    assert isinstance(packed, Dataset) and len(packed) == 2
    rows = packed.rows(torch.arange(2))
    assert rows.tokens.tolist() == [[100, 1, 2, 3, 4, 101], [100, 5, 6, 7, 8, 101]]
    assert rows.tokens.dtype == torch.int64 and rows.labels is None and rows.real is None


@pytest.mark.parametrize("separator", [None, 0])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_blocks_are_the_corpus_in_order(separator, length):
    parts = [[1, 2, 3], [], [4, 5], [6], [], [7, 8, 9, 10], []]
    line = [t for part in parts for t in part + [separator] * (separator is not None)]
    packed = Packed(store_of(*map(np.array, parts)), length, separator_id=separator)
    count = len(line) // length
    assert len(packed) == count and packed.num_tokens == len(line)
    rows = packed.rows(torch.arange(count)).tokens
    assert rows.flatten().tolist() == line[: count * length]
    order = torch.randperm(count)
    assert torch.equal(packed.rows(order).tokens, rows[order])


def test_crops_start_anywhere_and_are_the_generator_s():
    store = store_of(np.arange(10), np.arange(10, 17))
    packed = Packed(store, 4, separator_id=99, crops=True)
    rows = packed.rows(torch.zeros(400, dtype=torch.long), generator(1)).tokens
    line = torch.tensor([*range(10), 99, *range(10, 17), 99]).unfold(0, 4, 1)
    assert {tuple(r) for r in rows.tolist()} == {tuple(r) for r in line.tolist()}
    again = packed.rows(torch.zeros(400, dtype=torch.long), generator(1)).tokens
    assert torch.equal(rows, again)


def test_a_padded_row_is_one_document():
    padded = Padded(store_of([1, 2], [3, 4, 5, 6, 7], []), 5, bos_id=100, eos_id=101, pad_id=0)
    assert isinstance(padded, Dataset) and len(padded) == 3
    tokens, labels, real, _ = padded.rows(torch.tensor([2, 0, 1]))
    assert tokens.tolist() == [
        [100, 101, 0, 0, 0],
        [100, 1, 2, 101, 0],
        [100, 3, 4, 5, 101],
    ]
    assert real.sum(1).tolist() == [2, 4, 5] and labels is None
    assert torch.equal(real, torch.arange(5) < real.sum(1, keepdim=True))


def test_a_padded_row_needs_no_marks_at_its_ends():
    padded = Padded(store_of([1, 2], [3, 4, 5, 6]), 3, bos_id=None, eos_id=None, pad_id=9)
    tokens, _, real, _ = padded.rows(torch.arange(2))
    assert tokens.tolist() == [[1, 2, 9], [3, 4, 5]]
    assert real.tolist() == [[True, True, False], [True] * 3]


def test_rows_that_cannot_be_are_refused():
    store = store_of([1, 2, 3])
    with pytest.raises(ValueError, match="has 4 tokens, but one block of length 8 needs 6"):
        Packed(store, 8, separator_id=0, bos_id=1, eos_id=2)
    with pytest.raises(ValueError, match="length must be an integer of at least 3"):
        Packed(store, 2, bos_id=1, eos_id=2)
    with pytest.raises(ValueError, match="pad_id is missing"):
        Padded(store, 8, bos_id=1, eos_id=2, pad_id=None)


def test_a_space_before_a_blank_is_the_blank_s_where_tokens_bring_it():
    codec = Subwords.train_bpe(["the king and the queen and the king"] * 20, 300)
    assert codec.leading_spaces and not Characters("ab").leading_spaces
    row = encode_template(codec, "the king {{2}} the {{1}}")
    want = [*codec.encode("the king"), -1, -1, *codec.encode(" the"), -1]
    assert row.tolist() == want
    begun = codec.encode("the king").tolist()
    assert encode_prompt(codec, "the king ", length=9).tolist() == begun + [-1] * (
        9 - len(begun)
    )
    letters = Characters("ab ")
    assert encode_template(letters, "a {{1}}").tolist() == [*letters.encode("a "), -1]
