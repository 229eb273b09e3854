"""What the two laptop recipes gave, judged: digits by a classifier, words by the lexicon.

python benchmarks/laptop.py [--digits NAME] [--shakespeare NAME]   (shipped, or run folders)

Digits: a support vector machine trained on the real training digits; the share of samples it
reads as their label. Shakespeare: of the words of three letters or more, the share that occurs
in the corpus; the held-out text by the training part's lexicon is printed beside it.
"""

from __future__ import annotations

import argparse
import lzma
import math
import re
from importlib.resources import files

import torch
from sklearn.svm import SVC

import psidiff
from psidiff.data.images import digits

RULES = ("ancestral", "cap:0.01", "cap:0.02", "constant:.5@.1-.6")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]{3,}", text.lower())


def share(hits: int, count: int) -> str:
    """A share and its standard error."""
    p = hits / count
    return f"{p:.3f} ± {math.sqrt(p * (1 - p) / count):.3f}"


def judge_digits(name: str, count: int, steps: int) -> None:
    tokens, labels, *_ = digits("train").rows(torch.arange(1500))
    judge = SVC(gamma=0.001).fit(tokens.numpy(), labels.numpy())
    real, truth, *_ = digits("valid").rows(torch.arange(297))
    right = int((judge.predict(real.numpy()) == truth.numpy()).sum())
    print(f"digits: real, held out: {share(right, 297)}")
    model = psidiff.load(name)
    wanted = torch.arange(count) % 10
    for rule in RULES:
        made = model.sample(count, steps, rule, labels=wanted, batch_size=100)
        right = int((judge.predict(made.tokens.cpu().numpy()) == wanted.numpy()).sum())
        print(f"digits: {steps} steps, {rule}: {share(right, count)}", flush=True)


def judge_words(name: str, count: int, steps: int) -> None:
    packed = files("psidiff.data").joinpath("files", "shakespeare.txt.xz").read_bytes()
    text = lzma.decompress(packed).decode()
    cut = len(text) - len(text) // 20
    lexicon = set(words(text[:cut]))
    held = words(text[cut:])
    print(f"shakespeare: real, held out: {share(sum(w in lexicon for w in held), len(held))}")
    model = psidiff.load(name)
    psi = "constant:0@.05-.6"
    for rule, top_p in (("ancestral", None), ("ancestral", 0.9), ("cap:0.01", 0.9), (psi, 0.9)):
        made = model.sample(count, steps, rule, top_p=top_p, batch_size=16)
        found = words(" ".join(t.partition(" ")[2].rpartition(" ")[0] for t in made.text))
        hits = sum(word in lexicon for word in found)
        print(
            f"shakespeare: {steps} steps, {rule}, p = {top_p or 1}: {share(hits, len(found))}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digits", default="digits")
    parser.add_argument("--shakespeare", default="shakespeare")
    parser.add_argument("--only", choices=("digits", "shakespeare"))
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    if options.only != "shakespeare":
        judge_digits(options.digits, options.count, steps=64)
    if options.only != "digits":
        judge_words(options.shakespeare, options.count // 4, steps=128)


if __name__ == "__main__":
    main()
