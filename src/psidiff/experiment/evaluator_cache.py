"""The models of a comparison, each loaded once, with the bench that measures it."""

from __future__ import annotations

from functools import cache, cached_property

from ..data.characters import Characters
from ..data.toy import Chain, perturbed
from ..model import Model, load
from ..model_config import ModelConfig
from ..process import LogLinear, Masked, Uniform
from .results_log import Protocol
from .sample_evaluators import Bench, Judges, OracleBench, bench_of, kind_of, load_judges

ORACLES = ("toy-uniform", "toy-masked")


class Benches:
    """Each model with its bench, made once; the judge is loaded once for all."""

    def __init__(self, protocol: Protocol, device: str, compiled: bool = False) -> None:
        self.protocol, self.device, self.compiled = protocol, device, compiled
        self._model, self._bench = cache(self._load), cache(self._make_bench)

    def kind(self, name: str) -> str:
        """What a model makes: text, image, puzzle or toy."""
        return "toy" if name in ORACLES else kind_of(self._model(name))

    def prepare(self, name: str) -> tuple[Model, Bench]:
        return self._model(name), self._bench(name)

    def _load(self, name: str) -> Model:
        if name in ORACLES:
            return self._oracle(name)
        model = load(name, self.device, self.protocol.dtype)
        return model.compile() if self.compiled else model

    def _make_bench(self, name: str) -> Bench:
        if name in ORACLES:
            return OracleBench(Chain.syllables())
        wanted, model = self.protocol, self._model(name)
        options = (wanted.reference, self._judges, wanted.clues, wanted.seed)
        return bench_of(name, model, *options)

    @cached_property
    def _judges(self) -> Judges:
        return load_judges(self.protocol, self.device)

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
