"""Where a name in a recipe meets a class: model, objective and curriculum of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..data.codec import same_codec
from ..model import Model, load
from ..model_config import ModelConfig
from ..models import NETWORKS, Parameterized
from ..process import Prior
from ..process.prior import PRIORS, prior_over
from ..process.schedule import SCHEDULES
from ..sampling import Sampler
from ..training import Curriculum, Objective, Phase, RelaxedNelbo
from ..training.objective import OBJECTIVES
from ..types import Dataset
from .datasets import Corpus
from .recipe import Own, Recipe, TransformerModel


def build_model(recipe: Recipe, corpus: Corpus) -> Model:
    """An untrained model that fits the data, or a sentence naming the key that does not."""
    prior = _prior(recipe, corpus)
    schedule = SCHEDULES.parse(recipe.schedule.kind, **_parameters(recipe.schedule))
    autoregressive = recipe.objective == "next-token"
    size = corpus.vocab_size + 1 if autoregressive else prior.vocab_size
    _check_fits(recipe, corpus, size)
    torch.manual_seed(recipe.train.seed)
    name, options = _options(recipe, corpus, size)
    network: nn.Module = NETWORKS.find_class(name)(**options)
    if recipe.init is not None:
        _load_initial_weights(network, corpus, recipe.init)
    predicts = "plain" if recipe.objective == "plain-cross-entropy" else "loo"
    data = recipe.data
    config = ModelConfig(
        name=recipe.name,
        network=name,
        options=options,
        predicts=predicts,
        length=corpus.train.length,
        kappa=recipe.eval.kappa,
        framed=getattr(data, "block_ends", False) or getattr(data, "packing", "") == "padded",
        bos_id=corpus.vocab_size if autoregressive else None,
    )
    if autoregressive:
        return Model(network, None, schedule, corpus.codec, config)
    denoiser = Parameterized(network, prior, predicts)
    model = Model(denoiser, prior, schedule, corpus.codec, config)
    _check_sampler(recipe, model)
    return model


def _check_sampler(recipe: Recipe, model: Model) -> None:
    """The recommended sampler can be followed, so that no run stops at its first samples."""
    try:
        sampler = Sampler.of({"steps": recipe.eval.steps, "sampler": recipe.eval.kappa})
        sampler.check(model.prior, labelled=model.num_classes is not None)
        with torch.device("cpu"):  # whatever the parameters are made on
            sampler.plan(model.schedule, model.prior)
    except ValueError as error:
        raise ValueError(f"eval.kappa: {error}") from error


def _load_initial_weights(network: nn.Module, corpus: Corpus, init: str) -> None:
    """The parameters of another model, if it is of the same kind and speaks the same tokens."""
    other = load(init, device="cpu", dtype="float32")
    if other.codec is not None and not same_codec(other.codec, corpus.codec):
        raise ValueError(f"init={init} was trained on other tokens: its codec differs")
    found = getattr(other.denoiser, "network", other.denoiser).state_dict()
    try:
        network.load_state_dict(found)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[1].strip()
        raise ValueError(f"init={init} is another network than model: {first}") from error


def build_curriculum(recipe: Recipe, model: Model) -> Curriculum:
    """Which objective at which step."""
    exact = objective_of(recipe, model)
    soft = recipe.curriculum
    if soft is None:
        return Curriculum((Phase(exact),))
    assert model.prior is not None  # next-token has no curriculum: the recipe checks it
    K, steps = model.prior.vocab_size, max(round(soft.share * recipe.train.steps), 1)
    try:
        relaxed = RelaxedNelbo(K, soft.top_k, soft.temperature, soft.alpha_range)
        return Curriculum.relaxed(relaxed, exact, steps, soft.final_temperature)
    except ValueError as error:
        raise ValueError(f"curriculum.{error}") from error


def objective_of(recipe: Recipe, model: Model) -> Objective:
    """What the recipe trains by.

    Parameterized gives leave-one-out answers whatever the network predicts, so both
    cross-entropies compare the same answer; they differ in what the network says by itself.
    """
    return OBJECTIVES.parse(
        recipe.objective,
        prior=model.prior,
        schedule=model.schedule,
        time_power=recipe.train.time_power,
        predicts="loo",
        bos_id=None if model.prior is not None else model.config.start_id,
    )


def _options(recipe: Recipe, corpus: Corpus, size: int) -> tuple[str, dict[str, Any]]:
    """The network's name and what its constructor takes."""
    if isinstance(recipe.model, Own):
        known = {"vocab_size": size, "length": corpus.train.length}
        return NETWORKS.arguments(recipe.model.kind, **known, num_classes=corpus.num_classes)
    chosen = asdict(recipe.model)
    name = chosen.pop("kind")
    chosen.pop("length")
    chosen |= {"vocab_size": size, "num_classes": corpus.num_classes}
    if isinstance(recipe.model, TransformerModel):
        chosen["learned_positions"] = (
            corpus.train.length if recipe.model.learned_positions else None
        )
        if recipe.train.given == 0:  # it never sees a token at a level of its own
            chosen["per_position_levels"] = False
        if recipe.objective == "next-token":
            chosen |= {"causal": True, "num_classes": None, "time_conditioning": False}
        return name, chosen
    if corpus.image is None or corpus.image[1] != corpus.image[2]:
        raise ValueError(f"model.kind=unet needs square images, got data of {corpus.image}")
    for key in ("width_mult", "attention_scales"):
        chosen[key] = list(chosen[key])
    return name, chosen | {"channels": corpus.image[0], "image_size": corpus.image[1]}


def _check_fits(recipe: Recipe, corpus: Corpus, size: int) -> None:
    wanted, length = recipe.model, corpus.train.length
    if recipe.train.class_dropout and corpus.num_classes is None:
        raise ValueError("train.class_dropout needs labels, and the data has none")
    if recipe.objective == "next-token" and wanted.kind != "transformer":
        raise ValueError("objective: next-token needs model.kind=transformer")
    if isinstance(wanted, Own):
        return
    if wanted.vocab_size not in (None, size):
        raise ValueError(
            f"model.vocab_size is {wanted.vocab_size}, but the data with its prior has {size} "
            "tokens: leave it out, or name another data.tokenizer"
        )
    if wanted.length is not None and length > wanted.length:
        raise ValueError(
            f"sequences of {length} tokens are longer than model.length={wanted.length}: lower "
            "data.length or raise model.length"
        )


def _prior(recipe: Recipe, corpus: Corpus) -> Prior:
    """The recipe's prior over the corpus' tokens; a mask of the codec's own is its mask."""
    words, known = recipe.prior.kind, _parameters(recipe.prior)
    if "counts" in PRIORS.parameters(words):
        known["counts"] = _counts(corpus.train, corpus.vocab_size)
    mask = None if corpus.codec is None else corpus.codec.mask_id
    return prior_over(words, corpus.vocab_size, mask, **known)


def _parameters(section: Any) -> dict[str, Any]:
    """What a section says beside its kind."""
    return {name: value for name, value in asdict(section).items() if name != "kind"}


def _counts(data: Dataset, size: int, most: int = 10_000_000) -> list[float]:
    """How often each token occurs, in at most so many tokens; one is added to each."""
    rows = min(len(data), max(most // data.length, 1))
    chosen = torch.arange(rows) * len(data) // rows
    total = torch.ones(size, dtype=torch.int64)
    for part in chosen.split(1024):
        total += data.rows(part).tokens.flatten().bincount(minlength=size)
    return total.double().tolist()
