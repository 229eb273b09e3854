"""The real data that a model is held against: its own recipe's held-out part, or a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.codec import Codec
from ..data.image_files import read_images
from ..data.image_formats import NoSuchSplit
from ..data.images import Images, Pixels
from ..data.sequence_datasets import Packed, TokenArray, read_tokens
from ..data.source_files import find
from ..data.text_sources import documents
from ..data.token_store import tokenize
from ..evaluation.zero_shot import stored
from ..model import Model, list_pretrained
from ..types import Dataset
from .datasets import Corpus, corpus, held_out_part
from .recipe import Recipe
from .recipe_files import read_recipe, shipped, stored_recipe


def training_data_of(name: str, model: Model) -> Corpus | None:
    """The corpus of the recipe that a model was trained by; None if nobody knows it."""
    recipe = _recipe_of(name, model)
    return None if recipe is None else corpus(recipe.data, model.codec)


def _recipe_of(name: str, model: Model) -> Recipe | None:
    """A run folder holds its recipe; others name one that ships, or have its name."""
    if (Path(name) / "config.yaml").is_file():
        return stored_recipe(Path(name))
    named = model.config.recipe or (name if name in list_pretrained() else None)
    return read_recipe(named) if named in shipped() else None


def rows_of(source: str, model: Model, drop_unknown: bool = False) -> Dataset:
    """Real data from files for a model: text in rows of its length, images, or token ids.

    drop_unknown: characters that the model's alphabet does not have are left out.
    """
    codec, length = model.codec, model.config.length
    if source.endswith(".npy"):
        return _tokens_of(source, model)
    if isinstance(codec, Pixels):
        return _images_of(source, codec)
    if codec is None or codec.kind != "text" or length is None:
        raise ValueError(
            f"{source} is text, and this model is not one of text with a tokenizer"
        )
    framed = model.config.framed
    ends = (codec.bos_id, codec.eos_id) if framed else (None, None)
    store = stored(documents(source), codec, True) if drop_unknown else tokenize(source, codec)
    return Packed(store, length, codec.separator_id, *ends)


def _images_of(source: str, codec: Pixels) -> Images:
    """The test set, or all where there is none; labels where the classes are the model's."""
    path = find(source)
    try:
        pixels, labels, names = read_images(path, "test")
    except NoSuchSplit:
        pixels, labels, names = read_images(path, "train")
    wanted = (codec.channels, codec.height, codec.width)
    if pixels.shape[1:] != wanted:
        raise ValueError(
            f"{source} has images of (channels, height, width) = {pixels.shape[1:]}, and this "
            f"model makes {wanted}"
        )
    return Images(pixels, labels if names == codec.classes else None, codec.levels)


def _tokens_of(source: str, model: Model) -> TokenArray:
    data = TokenArray(read_tokens(find(source), (model.codec or model).vocab_size))
    length = model.config.length
    if length is not None and data.length > length:
        raise ValueError(
            f"{source} has sequences of {data.length} tokens, more than the model's {length}"
        )
    return data


def held_out(name: str, model: Model) -> Dataset:
    """What a model is judged by: the held-out part of its own corpus."""
    recipe = _recipe_of(name, model)
    if recipe is None:
        raise ValueError(
            f"nobody knows what {name} was trained on: name real data to compare it with"
        )
    return held_out_part(recipe.data, model.codec)


def whole_texts(data: Any, codec: Codec, most: int) -> Iterator[str]:
    """Documents that rows of text are cut from, themselves uncut, up to so many tokens."""
    store, first = data.store, 0
    for last in np.minimum(store.ends, most).tolist():
        if last > first:
            ids = store.tokens[first:last].astype(np.int64)
            yield codec.decode(torch.from_numpy(ids))
        first = last
