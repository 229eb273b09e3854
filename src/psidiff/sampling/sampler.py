"""A sampler as a value: how noise becomes tokens. It reads from words and prints as them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..process.described import SCHEDULES
from ..process.posterior import PREDICTORS
from ..process.prior import Masked, Prior
from ..process.schedule import Cosine, NoiseSchedule
from ..registry import NUMBER, Registry, format_number, parse_value
from ..sampler_options import OPTIONS
from ..types import as_count
from .confident import Confident
from .corrector import Corrector
from .filters import PROCESSORS, Chain, RowFilter, chain
from .guidance import Guidance, Interval, Ramp
from .kappa import (
    Cap,
    Constant,
    Kappa,
    Loop,
    Rescale,
    RescaleReleased,
    check_window,
    format_kappa,
    parse_kappa,
)
from .plan import Step, plan

_SIGNED = rf"-?{NUMBER}"
_PREDICTORS = Registry("predictor")
for _name in PREDICTORS:
    _PREDICTORS.constant(_name, _name)
_PREDICTORS.register(
    "confident",
    "confident",
    "confident:margin",
    "confident:entropy,threshold=.3",
    "confident:probability,gumbel=1,argmax,take-back",
    "confident:argmax,commit",
    short={
        **{score: ("by", score) for score in ("probability", "margin", "entropy")},
        **{flag: (flag.replace("-", "_"), True) for flag in ("argmax", "take-back", "commit")},
    },
)(Confident)


def parse_predictor(text: str) -> Any:
    """markov, maximal, confident, or confident: and any of its settings, apart by commas."""
    found = _PREDICTORS.parse(text)
    if not isinstance(found, str) and not callable(found):
        raise ValueError(f"{text!r} is no predictor: nothing can call it")
    return found


def parse_guidance(text: str, on: str = "x") -> Guidance:
    """2, ramp:3, ramp:3^2 (its power), or 2@.1-.6 (t from .1 to .6); 2,posterior for `on`."""
    text = str(text).strip()
    words, comma, said = text.partition(",")
    on = said if comma else on
    if match := re.fullmatch(rf"ramp:({_SIGNED})(?:\^({NUMBER}))?", words):
        return Guidance(Ramp(float(match[1]), float(match[2] or 1)), on)
    match = re.fullmatch(rf"({_SIGNED})(?:@({NUMBER})-({NUMBER}))?", words)
    if match is None:
        raise ValueError(f"{text!r} is no guidance; these are: 2, 2@.1-.6, ramp:3, ramp:3^2")
    if match[2] is None:
        return Guidance(float(match[1]), on)
    t_off, t_on = float(match[2]), float(match[3])
    check_window(t_on, t_off)
    return Guidance(Interval(float(match[1]), t_on, t_off), on)


def format_guidance(guidance: Guidance) -> str:
    """The words that `parse_guidance` reads; a rule of one's own by its repr."""
    weight: Any = guidance.weight
    if isinstance(weight, Interval):
        window = f"{format_number(weight.t_off)}-{format_number(weight.t_on)}"
        said = f"{format_number(weight.weight)}@{window}"
    elif isinstance(weight, Ramp):
        said = f"ramp:{format_number(weight.largest)}^{format_number(weight.power)}"
    else:
        said = repr(weight) if callable(weight) else format_number(weight)
    return said if guidance.on == "x" else f"{said},{guidance.on}"


def parse_corrector(text: str) -> Corrector:
    """2x12, sweeps by size, or 2x12:uncertain"""
    text = str(text).strip()
    match = re.fullmatch(r"([0-9]{1,18})x([0-9]{1,18})(?::(random|uncertain))?", text)
    if match is None:
        raise ValueError(
            f"{text!r} is no corrector; these are: 2x12 (sweeps x size), 2x12:uncertain"
        )
    return Corrector(int(match[1]), int(match[2]), match[3] or "random")


def format_corrector(corrector: Corrector) -> str:
    """The words that `parse_corrector` reads."""
    select = "" if corrector.select == "random" else f":{corrector.select}"
    return f"{corrector.sweeps}x{corrector.size}{select}"


@dataclass(frozen=True)
class LeftToRight:
    """Stands where a kappa rule stands for autoregressive models, which have no plan."""


LEFT_TO_RIGHT = LeftToRight()


def _parse_rule(text: str) -> Kappa | LeftToRight:
    return LEFT_TO_RIGHT if text.strip() == "left-to-right" else parse_kappa(text)


def _format_rule(rule: Kappa | LeftToRight) -> str:
    return "left-to-right" if isinstance(rule, LeftToRight) else format_kappa(rule)


def _parse_grid(text: str) -> str | tuple[float, ...] | None:
    if text == "linear":
        return text
    times = [parse_value(float, each) for each in text.split(",")]
    return None if None in times else tuple(times)


def _format_grid(grid: str | Sequence[float]) -> str:
    return grid if isinstance(grid, str) else ",".join(map(format_number, grid))


Words = tuple[Callable[[str], Any], Callable[[Any], str]]  # from words, and to them
_WORDS: dict[str, Words] = {  # of the settings that are no number and no plain word
    "kappa": (_parse_rule, _format_rule),
    "schedule": (SCHEDULES.parse, SCHEDULES.format),
    "grid": (_parse_grid, _format_grid),
    "predictor": (parse_predictor, _PREDICTORS.format),
    "corrector": (parse_corrector, format_corrector),
    "guidance": (parse_guidance, format_guidance),
    "processor": (PROCESSORS.parse, PROCESSORS.format),
}
_USUAL = Cap(0.005)
_SHAPING = ("temperature", "top_k", "top_p", "min_p", "nucleus", "processor")
_OF_LOOP = (*_SHAPING, "predictor", "corrector", "guidance", "head", "micro_batch")


@dataclass(frozen=True)
class Sampler:
    """How noise becomes tokens.

    kappa, steps, schedule, grid, last   the plan: see `psidiff.sampling.plan`; schedule None is
                 the model's own. A rule with clipped=False (ReMDM's full sigma) is for masks;
                 other priors follow it clipped
    predictor, corrector, guidance       what a step does: see `psidiff.sampling.sample`
    temperature, processor, top_k, top_p, min_p, nucleus   change x_theta, in this order; the
                 processor is a function of rows of logits (N, K) of your own
    head         "lazy" or "dense", for the same tokens
    micro_batch  the batch the network always sees, so that float32 gives the same tokens

    Example:
        >>> str(Sampler.parse("cap:0.01 steps=64 top-p=.9"))
        'cap:.01 steps=64 top_p=.9'
    """

    kappa: Kappa | LeftToRight = _USUAL
    steps: int = 256
    schedule: NoiseSchedule | None = None
    grid: str | tuple[float, ...] = "linear"
    predictor: Any = "markov"
    corrector: Corrector | None = None
    guidance: Guidance | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    nucleus: str = "keep"
    processor: RowFilter | None = None
    last: str = "sample"
    head: str = "lazy"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.predictor == "confident":
            object.__setattr__(self, "predictor", Confident())
        for name, predictor in PREDICTORS.items():
            if self.predictor is predictor:  # equal samplers have one spelling
                object.__setattr__(self, "predictor", name)
        if not isinstance(self.grid, str):
            object.__setattr__(self, "grid", tuple(map(float, self.grid)))
            object.__setattr__(self, "steps", len(self.grid))
        as_count("num_steps", self.steps)
        if self.micro_batch is not None:
            as_count("micro_batch", self.micro_batch)
        self.chain()
        for is_wrong, sentence in _CONFLICTS:
            if is_wrong(self):
                raise ValueError(sentence.format(self))
        if self.left_to_right and (wrong := self._not_of_shaping()):
            raise ValueError(_LEFT_TO_RIGHT_TAKES_NO.format(wrong))

    @classmethod
    def parse(cls, text: str, recommended: Sampler | None = None) -> Sampler:
        """A sampler from words.

        Args:
            text: a rule and settings as name=value, `cap:.01 steps=256 top_p=.9 last=greedy`;
                preset=NAME stands for a named one.
            recommended: where what is not said comes from; None: cap:.005, 256 steps.
        """
        return cls.of(parse_options(text), recommended)

    @classmethod
    def of(cls, said: Mapping[str, Any], recommended: Sampler | None = None) -> Sampler:
        """A sampler from options by name, as words or as values; None says nothing.

        Beside `OPTIONS` there are `preset`, a name, and `sampler`, words or a Sampler; what the
        other options say comes before these. Without any of the three, confident decoding
        takes no rule from `recommended`, because it renoises by itself.
        """
        given = _said(said)
        base = given.pop("sampler", None)
        if isinstance(base, str):
            given, base = {**_said(parse_options(base)), **given}, None
        named = given.pop("preset", None)
        usual = recommended or cls()
        if named is not None and base is not None:
            raise ValueError("give a sampler or a preset, not both")
        values = {name: read_option(name, value) for name, value in given.items()}
        if named is not None:
            base = replace(preset(named), steps=usual.steps)
            if usual.left_to_right:
                raise ValueError(_LEFT_TO_RIGHT_TAKES_NO.format("preset"))
        elif base is None and not usual.left_to_right:
            confident = isinstance(values.get("predictor"), Confident)
            base = replace(usual, kappa=Constant(1.0)) if confident else usual
        made = replace(base or usual, **values)
        if values.get("steps", made.steps) not in (made.steps, made.steps - 1):
            raise ValueError(
                f"the grid has {made.steps} times, but num_steps is {values['steps']}"
            )
        return made

    def __str__(self) -> str:
        usual, said = Sampler(), [_format_rule(self.kappa)]
        linear = self.grid == "linear"
        if linear and not self.left_to_right:
            said.append(f"steps={self.steps}")
        for name in [each for each in OPTIONS if each not in ("kappa", "steps")]:
            if (value := getattr(self, name)) != getattr(usual, name):
                said.append(f"{name}={_format_option(name, value)}")
        return " ".join(said)

    @property
    def left_to_right(self) -> bool:
        """Whether it is for autoregressive models."""
        return isinstance(self.kappa, LeftToRight)

    @property
    def confident(self) -> bool:
        """Whether it keeps what x_theta is most confident of."""
        return isinstance(self.predictor, Confident)

    @property
    def remembers(self) -> bool:
        """Whether kappa depends on how sure x_theta was of the tokens."""
        return callable(self.kappa) and callable(self.kappa(0.5, 0.6, 0.5))

    @property
    def keeps_marginals(self) -> bool:
        """Whether z_t has the forward process' law at every t, were x_theta perfect."""
        return not (
            self.left_to_right
            or self.remembers
            or self.confident
            or self.guidance is not None
            or self.options(_SHAPING)
        )

    def chain(self) -> Chain:
        """What changes x_theta, as one function of rows of logits (N, K)."""
        return chain(**{name: getattr(self, name) for name in _SHAPING})

    def options(self, names: Sequence[str] = _OF_LOOP) -> dict[str, Any]:
        """What `psidiff.sampling.sample` takes beside the plan, where it is not the default."""
        usual = Sampler.__dataclass_fields__
        held = {name: getattr(self, name) for name in names}
        return {name: value for name, value in held.items() if value != usual[name].default}

    def rule(self, prior: Prior | None) -> Kappa:
        """kappa as this prior can follow it: only masks go below 0, as ReMDM does."""
        assert not isinstance(self.kappa, LeftToRight)
        if isinstance(self.kappa, Cap | Rescale) and not isinstance(prior, Masked):
            return replace(self.kappa, clipped=True)
        return self.kappa

    def plan(self, schedule: NoiseSchedule, prior: Prior | None = None) -> tuple[Step, ...]:
        """The steps of a model with this schedule and prior; left to right there are none."""
        if self.left_to_right:
            return ()
        rule = self.rule(prior)
        return plan(self.steps, self.schedule or schedule, rule, self.grid, self.last)

    def check(self, prior: Prior | None, labelled: bool) -> None:
        """Raise ValueError unless a model of this prior can follow it, with labels or without.

        prior is None for autoregressive models.
        """
        if prior is None and not self.left_to_right:
            raise ValueError(_LEFT_TO_RIGHT_TAKES_NO.format("kappa"))
        if prior is not None and self.left_to_right:
            raise ValueError("left-to-right is for autoregressive models, and this is none")
        if self.guidance is not None and not labelled:
            raise ValueError("guidance needs labels to be guided by")
        if self.corrector is not None and prior is not None and not _is_everywhere(prior):
            raise ValueError(
                f"a leave-one-out corrector needs a prior with mass on every token; "
                f"{type(prior).__name__} has none on some"
            )

    def _not_of_shaping(self) -> str | None:
        """A setting that autoregressive models do not know, or None."""
        others = [name for name in OPTIONS if name not in (*_SHAPING, "kappa", "steps")]
        return next(iter(self.options(others)), None)


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something; the rule "auto" says nothing."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and not (name == "kappa" and value == "auto")
    }


def parse_options(text: str) -> dict[str, Any]:
    """`cap:.1 top-p=.9 preset=paper-text` as {"kappa": Cap(.1), "top_p": .9, "preset": ...}.

    The word auto stands for a rule that is not said.
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or ":" in name:
            name, value = "kappa", word
        name = name.replace("-", "_")
        if name in found:
            raise ValueError(f"the sampler {text!r} says {name} twice")
        if name not in (*OPTIONS, "preset"):
            names = ", ".join((*OPTIONS, "preset"))
            raise ValueError(f"a sampler has no {name!r}; it may have {names}")
        as_is = name == "preset" or value == "auto"
        found[name] = value if as_is else read_option(name, value)
    if not found:
        raise ValueError("a sampler is a rule such as cap:.02, settings as name=value, or both")
    return found


def format_options(said: Mapping[str, Any]) -> str:
    """The words that `parse_options` reads, each setting at its place."""
    names = ("kappa", "preset", *(name for name in OPTIONS if name != "kappa"))
    words = {
        name: said[name] if isinstance(said[name], str) else _format_option(name, said[name])
        for name in names
        if name in said
    }
    return " ".join(v if n == "kappa" else f"{n}={v}" for n, v in words.items())


def read_option(name: str, value: Any) -> Any:
    """A setting from words, or from a number or an object as it is.

    Raises:
        ValueError: a sampler has no such setting, or the words are wrong.
    """
    if name not in OPTIONS:
        raise ValueError(f"a sampler has no {name!r}; it may have {', '.join(OPTIONS)}")
    if name == "guidance" and isinstance(value, (int, float)):
        return Guidance(float(value))
    if not isinstance(value, str):
        return value
    parse = _WORDS[name][0] if name in _WORDS else partial(parse_value, OPTIONS[name].kind)
    if (found := parse(value)) is None:
        raise ValueError(f"{name} must be {OPTIONS[name].must_be}, got {value!r}")
    return found


def _format_option(name: str, value: Any) -> str:
    """The words that `read_option` reads."""
    if name in _WORDS:
        return _WORDS[name][1](value)
    return format_number(value) if OPTIONS[name].kind is float else str(value)


def _is_everywhere(prior: Prior) -> bool:
    return bool((prior.probs(like=torch.zeros(())) > 0).all())


_LEFT_TO_RIGHT_TAKES_NO = "an autoregressive model is sampled left to right: it takes no {}"
_CONFLICTS: tuple[tuple[Callable[[Sampler], Any], str], ...] = (
    (
        lambda s: not callable(s.predictor) and s.predictor not in tuple(PREDICTORS),
        f"predictor must be one of {', '.join(PREDICTORS)}, confident, got {{0.predictor!r}}",
    ),
    (
        lambda s: s.last not in ("sample", "greedy"),
        "last must be 'sample' or 'greedy', got {0.last!r}",
    ),
    (
        lambda s: s.head not in ("lazy", "dense"),
        "head must be 'lazy' or 'dense', got {0.head!r}",
    ),
    (
        lambda s: s.processor is not None and not callable(s.processor),
        "processor must be a function of rows of logits, got {0.processor!r}",
    ),
    (
        lambda s: s.guidance is not None and not isinstance(s.guidance, Guidance),
        "guidance must be a Guidance(weight), got {0.guidance!r}",
    ),
    (
        lambda s: s.corrector is not None and not isinstance(s.corrector, Corrector),
        "corrector must be a Corrector(...), got {0.corrector!r}",
    ),
    (
        lambda s: s.confident and s.kappa != Constant(1.0),
        "predictor 'confident' renoises by itself: leave kappa and preset out",
    ),
    (
        lambda s: s.guidance and s.guidance.on == "posterior" and s.predictor != "markov",
        "guidance on posteriors needs predictor='markov', got {0.predictor!r}",
    ),
    (
        lambda s: s.corrector and getattr(s.predictor, "commit", False),
        "a corrector would redraw what 'confident:commit' keeps: leave it out",
    ),
)
_REMDM: dict[str, Any] = {"top_p": 0.9, "nucleus": "drop", "last": "greedy"}
PRESETS: dict[str, Sampler] = {
    # q_{s|t} alone: the sampler that every other refines
    "ancestral": Sampler(Constant(1.0)),
    # the paper's text: its rows "rescale .05" fit only the released formula (about cap .0025),
    # not its equation, which is rescale:.05
    "paper-text": Sampler(RescaleReleased(0.05), top_p=0.9),
    # the paper's best CIFAR-10 FID (Duo, 15.05 at 4096 steps, labels without guidance); greedy
    # at the end by the caption of its ancestral table, the others name none
    "paper-images": Sampler(Constant(0.95, 0.5, 0.1), schedule=Cosine(), last="greedy"),
    # ReMDM as its own scripts run it; for masks with its full sigma
    "remdm-cap": Sampler(Cap(0.008, clipped=False), **_REMDM),
    "remdm-rescale": Sampler(Rescale(0.015, clipped=False), **_REMDM),
    # alpha stays .9 from t = .55 to t = .05
    "remdm-loop": Sampler(Loop(0.02), **_REMDM),
}


def preset(name: str) -> Sampler:
    """The named sampler; a ValueError names the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.5)
    nearest = f"; the nearest is {close[0]}" if close else ""
    raise ValueError(f"{name!r} is no preset{nearest}; these are: {', '.join(PRESETS)}")
