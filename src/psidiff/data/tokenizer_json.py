"""What a tokenizer.json may ask of the library that runs it.

The library trusts such a file: it aborts without memory where replacements multiply a text,
panics on numbers that do not fit, and its regular expressions may take forever. So the file is
looked at first. What published tokenizers have passes: BPE with GPT-2's or Llama's splits,
WordPiece, Unigram, SentencePiece's replacements, bytes as a fallback.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterator
from typing import Any

from ..checksums import in_short
from ..limits import check_limit, parse_json

_SIZE = 2**26  # characters of the whole file; Gemma's has 33 million
_WORD = 2048  # characters of a token
_ADDED = 20_000  # tokens beside the model's
_PARTS = 100  # normalizers and the like
_SHORT = 1000  # characters of a text in one, and items of a list
_GROWTH = 10  # times as long as it was may replacements make a text
_NFKC = 64  # bytes that SentencePiece's table may put in the place of a character

_KINDS = {
    "model": {"BPE", "WordPiece", "WordLevel", "Unigram"},
    "normalizer": {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    },
    "pre_tokenizer": {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"),
        "WhitespaceSplit",
    },
    "post_processor": {
        *("BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing")
    },
    "decoder": {
        *("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace"),
        *("Sequence", "Strip", "WordPiece"),
    },
}
_INSIDE = ("normalizers", "pretokenizers", "processors", "decoders")  # of a Sequence


def check_tokenizer(text: Any) -> None:
    """Raise ValueError where the JSON of a tokenizer is none that is run here."""
    if not isinstance(text, str) or len(text) > _SIZE:
        raise _no(f"it is no text of at most {_SIZE:,} characters")
    held = parse_json(text, "the JSON of the tokenizer", _without_doubles)
    if not isinstance(held, dict) or not isinstance(held.get("model"), dict):
        raise _no("it has no model")
    _check_model(held["model"])
    _check_added(held.get("added_tokens") or [])
    for place in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        parts = list(_flat(held.get(place), place))
        for part in parts:
            _check_part(part, place)
        if math.prod(map(_growth, parts)) > _GROWTH:
            raise _no(f"its {place} makes a text more than {_GROWTH} times as long")
    for place in ("truncation", "padding"):
        _check_values(held.get(place), place)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of two values of one name the library might take the other."""
    held = dict(pairs)
    if len(held) != len(pairs):
        raise _no("a name in it has two values")
    return held


def _no(why: str) -> ValueError:
    return ValueError(f"this is not the JSON of a tokenizer that is run here: {why}")


# Tokens


def _check_model(model: dict[str, Any]) -> None:
    kind = _kind_of_model(model)
    words = model.get("vocab")
    if kind == "Unigram":
        words = _unigram(words)
    if not isinstance(words, dict) or not words:
        raise _no("its vocabulary is none")
    _check_ids(words.values())
    if any(len(word) > _WORD for word in words):
        raise _no(f"it has a token of more than {_WORD:,} characters")
    unknown, longest = model.get("unk_token"), model.get("max_input_chars_per_word", 100)
    if kind in ("WordPiece", "WordLevel") and not (
        isinstance(unknown, str) and unknown in words
    ):
        raise _no("its unknown token is not in its vocabulary")
    if model.get("dropout") not in (None, 0):
        raise _no("it leaves merges out by chance (dropout)")
    rest = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    _check_values(rest, "model")
    if type(longest) is not int or not 0 < longest <= _SHORT:
        raise _no(f"max_input_chars_per_word is not in [1, {_SHORT}]")


def _kind_of_model(model: dict[str, Any]) -> str:
    """Old files do not say it: then it shows by what only one kind has."""
    kind = model.get("type", "BPE" if "merges" in model else None)
    if not isinstance(kind, str) or kind not in _KINDS["model"]:
        raise _no(f"its model is {in_short(kind)}")
    return kind


def _unigram(pairs: Any) -> dict[str, int]:
    """Tokens with their numbers; scores are logarithms of probabilities, or near to that."""
    if not isinstance(pairs, list):
        raise _no("its vocabulary is none")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _no("its vocabulary has no pairs of a token and a score")
        if not isinstance(pair[1], (int, float)) or not abs(pair[1]) < 1e6:
            raise _no(f"a token has the score {in_short(pair[1])}")
    return {pair[0]: number for number, pair in enumerate(pairs)}


def _check_ids(ids: Any) -> None:
    ids = list(ids)
    if not all(type(each) is int and each >= 0 for each in ids) or len(set(ids)) != len(ids):
        raise _no("its tokens have no numbers of their own")
    most = max(ids, default=0)
    check_limit("tokens", most + 1, "the tokenizer", f"has the token number {most:,}")


def _check_added(added: Any) -> None:
    if not isinstance(added, list) or not all(isinstance(each, dict) for each in added):
        raise _no("its added tokens are none")
    _check_ids(each.get("id") for each in added)
    names = [each.get("content") for each in added]
    if not all(isinstance(name, str) and 0 < len(name) <= _WORD for name in names):
        raise _no("an added token is no text")
    if len(names) > _ADDED or sum(map(len, names)) > 2**20:
        raise _no(f"it adds more than {_ADDED:,} tokens, or longer ones than published ones")


# Normalizers and what else stands around the model


def _flat(part: Any, place: str) -> Iterator[dict[str, Any]]:
    """The parts of a place, those of sequences one after another."""
    waiting, count = [part] if part is not None else [], 0
    while waiting:
        here = waiting.pop()
        count += 1
        kind = here.get("type") if isinstance(here, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS[place] or count > _PARTS:
            raise _no(f"its {place} has a part that is {in_short(kind)}, or too many")
        if kind == "Sequence":
            found = next((here[name] for name in _INSIDE if name in here), None)
            waiting += found if isinstance(found, list) else [None]
        else:
            yield here


def _check_part(part: dict[str, Any], place: str) -> None:
    rest = dict(part)
    if part["type"] == "Precompiled":
        _check_table(rest.pop("precompiled_charsmap", None))
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and not is_quick(pattern.get("Regex", "a")):
        raise _no(f"its {place} has the pattern {in_short(pattern['Regex'])}, perhaps slow")
    if part["type"] == "Strip" and not all(
        part.get(side) in range(2) for side in ("start", "stop") if side in part
    ):
        raise _no(f"its {place} strips more than a character")
    if part["type"] == "FixedLength" and part.get("length", 5) not in range(1, _SHORT):
        raise _no(f"its {place} cuts in pieces of {in_short(part['length'])}")
    _check_values(rest, place)


def _check_values(value: Any, place: str) -> None:
    """Short texts, short lists and small numbers, as deep as they go."""
    if isinstance(value, (dict, list)):
        fits = len(value) <= _SHORT
        for inner in value.values() if isinstance(value, dict) else value:
            _check_values(inner, place)
    elif isinstance(value, str):
        fits = len(value) <= _SHORT
    else:
        fits = value is None or abs(value) <= 2**20
    if not fits:
        raise _no(f"its {place} has {in_short(value, 60)}")


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a text may become."""
    if part["type"] != "Replace":
        return 1.0
    pattern, content = part.get("pattern"), part.get("content")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(content, str) or found == "":
        raise _no("it replaces what is nothing, or by what is no text")
    return max(
        1.0, len(content.encode()) / len(found.encode() if isinstance(found, str) else "a")
    )


def _check_table(packed: Any) -> None:
    """SentencePiece's table: the length of a trie, the trie, and what it puts in, ended by
    zeros. Nothing that it puts in is long."""
    try:
        raw = base64.b64decode(packed, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise _no("its precompiled_charsmap is no base64") from None
    trie = int.from_bytes(raw[:4], "little")
    if len(raw) > 2**21 or trie % 4 or 4 + trie > len(raw):
        raise _no("its precompiled_charsmap is none")
    if any(len(word) > _NFKC for word in raw[4 + trie :].split(b"\0")):
        raise _no(f"its precompiled_charsmap puts in more than {_NFKC} bytes for a character")


# Regular expressions

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUBLISHED = {  # branches of published patterns that the rule below does not see to be quick
    _CONTRACTIONS,
    r"\s+(?!\S)",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
}
_ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w\s]|\[\^?(?:\\.|[^\[\]\\])+\]|[^\\\[\](){}|?*+^$]"
)
_TIMES = re.compile(r"\?|\{\d\}|\{\d?,\d\}")
_MANY = re.compile(r"[+*]|\{\d,\}")


def is_quick(pattern: Any) -> bool:
    """Whether a pattern takes a time that grows with the text: it is a choice of branches, each
    published, or single characters of which only the last may come any number of times."""
    if not isinstance(pattern, str) or len(pattern) > _SHORT:
        return False
    branches = _branches(pattern)
    rest = [branch for branch in branches if not _is_plain(branch)]
    looks_back = any(branch.startswith(r"\s") for branch in rest)  # over a run of spaces
    return _PUBLISHED.issuperset(rest) and (not looks_back or r"\s+" in branches)


def _branches(pattern: str) -> list[str]:
    """What stands between the bars that are outside of brackets."""
    branches, depth, inside, place = [""], 0, 0, 0
    while place < len(pattern):
        here = pattern[place : place + (2 if pattern[place] == "\\" else 1)]
        place += len(here)
        if here == "[":
            inside += 1
        elif here == "]":
            inside -= inside > 0
        elif not inside:
            depth += (here == "(") - (here == ")")
        if here == "|" and not inside and not depth:
            branches.append("")
        else:
            branches[-1] += here
    return branches


def _is_plain(branch: str) -> bool:
    place = choices = 0
    while found := _ATOM.match(branch, place):
        place = found.end()
        if many := _MANY.match(branch, place):
            return many.end() == len(branch) and choices <= 2
        if times := _TIMES.match(branch, place):
            place, choices = times.end(), choices + 1
    return 0 < place == len(branch) and choices <= 2
