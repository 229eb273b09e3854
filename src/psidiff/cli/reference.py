"""The real data that a model is held against: its own recipe's held-out part, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..data.blocks import Packed
from ..data.shards import tokenize
from ..model import Model, shipped_models
from ..types import Dataset
from .corpus import Corpus, corpus
from .recipe import as_recipe, read_recipe, shipped


def own_corpus(name: str, model: Model) -> Corpus | None:
    """The corpus of the recipe that a model was trained by; None if nobody knows it.

    A run folder holds its recipe; a model that ships has the name of one.
    """
    stored = Path(name) / "config.yaml"
    if stored.is_file():
        recipe = as_recipe(yaml.safe_load(stored.read_text(encoding="utf-8")))
    elif name in shipped_models() and name in shipped():
        recipe = read_recipe(name, ())
    else:
        return None
    return corpus(recipe.data, model.codec)


def rows_of(source: str, model: Model) -> Dataset:
    """A text file, or a folder of them, in rows of the model's length."""
    codec, length = model.codec, model.config.get("length")
    if codec is None or codec.kind != "text" or length is None:
        raise ValueError(
            f"{source} is text, and this model is not one of text with a tokenizer"
        )
    framed = bool(model.config.get("framed"))
    ends = (codec.bos_id, codec.eos_id) if framed else (None, None)
    return Packed(tokenize(source, codec), length, codec.separator_id, *ends)


def held_out(name: str, model: Model, source: str | None = None) -> Dataset:
    """What a model is judged by: a named file, else the held-out part of its own corpus."""
    if source is not None:
        return rows_of(source, model)
    known: Any = own_corpus(name, model)
    if known is None:
        raise ValueError(
            f"nobody knows what {name} was trained on: name real data to compare it with"
        )
    return known.valid
