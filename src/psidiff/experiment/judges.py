"""What samples may be judged by beside real data: language models, features, a known truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..evaluation.inception import Classifier, FeatureExtractor, Inception
from ..evaluation.metric_result import KnownDistribution
from ..evaluation.scoring_lm import CausalLM, PsidiffScoringLM, ScoringLM, check_released
from ..model import list_pretrained, load
from ..registry import load_object


class Judges(NamedTuple):
    """What samples may be judged by beside real data."""

    judge: ScoringLM | None = None
    features: FeatureExtractor | None = None
    truth: KnownDistribution | None = None
    protocol: str = "exact"  # of the judge: exact, or released as the papers' numbers were made


NO_JUDGES = Judges()


def load_judges(options: Any, device: str) -> Judges:
    """Those that `judge`, `features` and `truth` of the options name, each None or a name."""
    features = options.features and _features_of(options.features, device)
    judge = options.judge and _judge_of(options.judge, device)
    if judge and options.protocol == "released":
        check_released(judge)
    if "mauve-text" in (options.metrics or "") and not isinstance(judge, CausalLM):
        raise ValueError(
            "the metric mauve-text takes its features from --judge: name a causal LM of "
            "transformers, such as gpt2-large"
        )
    truth = options.truth and _truth_of(options.truth, device)
    return Judges(judge, features, truth, options.protocol)


def _features_of(name: str, device: str) -> FeatureExtractor:
    """The Inception network of a file, or FILE.py:NAME: a function of images, or features."""
    if ".py:" not in name:
        return Inception.from_file(name, device)
    own = load_object(name)
    own = own() if isinstance(own, type) else own
    if isinstance(own, FeatureExtractor):
        return own
    return Classifier(own, name, getattr(own, "fingerprint", None))


def _judge_of(name: str, device: str) -> ScoringLM:
    """An autoregressive model of ours, a causal LM of transformers, or FILE.py:NAME."""
    if ".py:" in name:
        own = load_object(name)
        judge = own() if isinstance(own, type) else own
        if not isinstance(judge, ScoringLM):
            raise ValueError(
                f"the judge {name} must have a name, a protocol and score(texts), which gives "
                "a TextScore for each text"
            )
        return judge
    path = Path(name).expanduser()
    if name not in list_pretrained() and not (path / "psidiff.json").is_file():
        if name.startswith((".", "/", "~")) and not path.exists():
            raise ValueError(f"there is no judge at {name}")
        return CausalLM(name, device=device).ready()
    model = load(name, device)
    if model.prior is not None:
        raise ValueError(
            f"the judge {name} is no autoregressive model: it has no NLL of a text"
        )
    return PsidiffScoringLM(model)


def _truth_of(name: str, device: str) -> KnownDistribution:
    """An autoregressive model of ours as the distribution that text was sampled from."""
    judge = _judge_of(name, device)
    if not isinstance(judge, PsidiffScoringLM):
        raise ValueError(f"the truth is an autoregressive model of ours, which {name} is not")
    return judge.ground_truth(judge.model.sample(256, split=False).tokens)
