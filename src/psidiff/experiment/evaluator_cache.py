"""The models of a comparison, each loaded once, with the bench that measures it."""

from __future__ import annotations

from ..data.characters import Characters
from ..data.toy import Chain, perturbed
from ..evaluation.known_distribution import KnownDistribution
from ..evaluation.scoring_lm import ScoringLM
from ..model import Model, load
from ..model_config import ModelConfig
from ..process import LogLinear, Masked, Uniform
from .results_log import Protocol
from .sample_evaluators import (
    Bench,
    OracleBench,
    bench_of,
    features_of,
    judge_of,
    kind_of,
    truth_of,
)

ORACLES = ("toy-uniform", "toy-masked")


class Benches:
    """Each model with its bench, made once; the judge is loaded once for all."""

    def __init__(self, protocol: Protocol, device: str, compiled: bool = False) -> None:
        self.protocol, self.device, self.compiled = protocol, device, compiled
        self._models: dict[str, Model] = {}
        self._benches: dict[str, Bench] = {}
        self._judge: ScoringLM | None = None
        self._truth: KnownDistribution | None = None

    def kind(self, name: str) -> str:
        """What a model makes: text, image, puzzle or toy."""
        return "toy" if name in ORACLES else kind_of(self._model(name))

    def prepare(self, name: str) -> tuple[Model, Bench]:
        model = self._model(name)
        if name not in self._benches:
            self._benches[name] = self._bench(name, model)
        return model, self._benches[name]

    def _model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = self._oracle(name) if name in ORACLES else self._loaded(name)
        return self._models[name]

    def _loaded(self, name: str) -> Model:
        model = load(name, self.device, self.protocol.dtype)
        return model.compile() if self.compiled else model

    def _bench(self, name: str, model: Model) -> Bench:
        wanted = self.protocol
        if name in ORACLES:
            return OracleBench(Chain.syllables())
        return bench_of(
            name,
            model,
            wanted.reference if kind_of(model) == "text" else None,
            self._judged(model),
            features_of(wanted.features, self.device) if kind_of(model) == "image" else None,
            wanted.clues,
            wanted.seed,
            self._known(model),
        )

    def _judged(self, model: Model) -> ScoringLM | None:
        if self.protocol.judge is None or kind_of(model) != "text":
            return None
        if self._judge is None:
            self._judge = judge_of(self.protocol.judge, self.device)
        return self._judge

    def _known(self, model: Model) -> KnownDistribution | None:
        if self.protocol.truth is None or kind_of(model) != "text":
            return None
        if self._truth is None:
            self._truth = truth_of(self.protocol.truth, self.device)
        return self._truth

    def _oracle(self, name: str) -> Model:
        """The syllables' exact denoiser with errors on its logits, as a network has them."""
        chain = Chain.syllables()
        K = chain.num_tokens
        prior = Uniform(K) if name == "toy-uniform" else Masked(K + 1, K)
        denoiser = chain.denoiser(prior)
        if self.protocol.error:
            denoiser = perturbed(denoiser, self.protocol.error)
        config = ModelConfig(length=chain.length, name=name)
        return Model(denoiser, prior, LogLinear(), Characters(chain.alphabet), config)
