"""A sampler as a value: how noise becomes tokens. It reads from words and prints as them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..process.posterior import PREDICTORS
from ..process.prior import Masked, Prior
from ..process.schedule import SCHEDULES, NoiseSchedule
from ..registry import Registry, format_number, format_value, nearest, parse_value
from ..sampler_options import OPTIONS
from ..sampler_presets import PRESET_WORDS
from ..types import as_count, check_choice
from .confident import Confident
from .corrector import Corrector, format_corrector, parse_corrector
from .filters import PROCESSORS, Chain, LogitsProcessor, chain
from .guidance import Guidance, format_guidance, parse_guidance
from .kappa import Cap, Constant, Kappa, LeftToRight, Rescale, format_kappa, parse_kappa
from .plan import GRIDS, Step, check_grid, plan

_PREDICTORS = Registry("predictor", Callable)
for _name in PREDICTORS:
    _PREDICTORS.register(_name)(_name)
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
    """A predictor from words.

    Args:
        text: markov, maximal, confident, confident:margin,gumbel=1 (settings of `Confident`,
            between commas), or FILE.py:NAME of a file that was imported.

    Returns:
        The name "markov" or "maximal", or the predictor itself.

    Raises:
        ValueError: the words are no predictor; the sentence lists them.

    Example:
        >>> from psidiff.sampling import parse_predictor
        >>> parse_predictor("confident:margin,argmax").by
        'margin'
    """
    return _PREDICTORS.parse(text)


def _parse_grid(text: str) -> str | tuple[float, ...] | None:
    if text in GRIDS:
        return text
    times = [parse_value(float, each) for each in text.split(",")]
    if len(times) == 1 and None in times:
        check_grid(text)
    return None if None in times else tuple(times)


def _format_grid(grid: str | Sequence[float]) -> str:
    return grid if isinstance(grid, str) else ",".join(map(format_number, grid))


Words = tuple[Callable[[str], Any], Callable[[Any], str]]  # from words, and to them
_WORDS: dict[str, Words] = {  # of the settings that are no number and no plain word
    "kappa": (parse_kappa, format_kappa),
    "schedule": (SCHEDULES.parse, SCHEDULES.format),
    "grid": (_parse_grid, _format_grid),
    "predictor": (parse_predictor, _PREDICTORS.format),
    "corrector": (parse_corrector, format_corrector),
    "guidance": (parse_guidance, format_guidance),
    "processor": (PROCESSORS.parse, PROCESSORS.format),
}
_USUAL = Cap(0.005)
_LEFT_TO_RIGHT_TAKES_NO = "an autoregressive model is sampled left to right: it takes no {}"
_SHAPING = ("temperature", "top_k", "top_p", "min_p", "nucleus", "processor")
_OF_LOOP = (*_SHAPING, "predictor", "corrector", "guidance", "head", "micro_batch")


@dataclass(frozen=True)
class Sampler:
    """How noise becomes tokens.

    Args:
        kappa: the rule; one with clipped=False (ReMDM's full sigma) is for masks, and other
            priors follow it clipped.
        steps: number of steps; of a grid of times, their number.
        schedule: noise levels; None: the model's own.
        grid: "linear", "alpha", "quadratic", or falling times, as for `psidiff.sampling.plan`.
        predictor: "markov", "maximal", "confident", or such an object.
        corrector: extra redraws at every level; None: none.
        guidance: classifier-free guidance; None: none.
        temperature: x_theta^(1/temperature), the first change of x_theta.
        top_k: how many tokens are kept, after temperature and processor; None: all.
        top_p: mass of the tokens that are kept, after top_k; None: all.
        min_p: least probability as a share of the largest, after top_p; None: 0.
        nucleus: "keep" or "drop" the token that crosses top_p.
        processor: a function of rows of logits (N, K) of your own, after the temperature.
        last: the last step, "sample" or "greedy".
        head: "lazy" or "dense", for the same tokens.
        micro_batch: the batch the network always sees, so that float32 gives the same tokens;
            None: any.

    Raises:
        ValueError: if a setting is out of range, or two of them do not go together.

    Example:
        >>> from psidiff.sampling import Sampler
        >>> sampler = Sampler.parse("cap:0.01 steps=64 top-p=.9")
        >>> str(sampler), sampler.steps
        ('cap:.01 steps=64 top_p=.9', 64)
    """

    kappa: Kappa = _USUAL
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
    processor: LogitsProcessor | None = None
    last: str = "sample"
    head: str = "lazy"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if self.predictor == "confident":
            object.__setattr__(self, "predictor", Confident())
        for name, predictor in PREDICTORS.items():
            if self.predictor is predictor:  # equal samplers have one spelling
                object.__setattr__(self, "predictor", name)
        if isinstance(self.grid, str):
            check_grid(self.grid)
        else:
            object.__setattr__(self, "grid", tuple(map(float, self.grid)))
            object.__setattr__(self, "steps", len(self.grid))
        as_count("num_steps", self.steps)
        if self.micro_batch is not None:
            as_count("micro_batch", self.micro_batch)
        self.chain()
        check_choice("last", self.last, ("sample", "greedy"))
        check_choice("head", self.head, ("lazy", "dense"))
        if not callable(self.predictor):
            check_choice("predictor", self.predictor, _PREDICTORS.names)
        for name, kind in (("guidance", Guidance), ("corrector", Corrector)):
            value = getattr(self, name)
            if not isinstance(value, kind | None):
                raise ValueError(f"{name} must be a {kind.__name__}(...), got {value!r}")
        self._check_together()

    def _check_together(self) -> None:
        """Settings that exclude each other."""
        if self.confident and self.kappa != Constant(1.0):
            raise ValueError(
                "predictor 'confident' renoises by itself: leave kappa and preset out"
            )
        on_posteriors = self.guidance is not None and self.guidance.on == "posterior"
        if on_posteriors and self.predictor != "markov":
            raise ValueError(
                f"guidance on posteriors needs predictor='markov', got {self.predictor!r}"
            )
        if self.corrector is not None and getattr(self.predictor, "commit", False):
            raise ValueError(
                "a corrector would redraw what 'confident:commit' keeps: leave it out"
            )
        others = [name for name in OPTIONS if name not in (*_SHAPING, "kappa", "steps")]
        if self.left_to_right and (wrong := self.options(others)):
            raise ValueError(_LEFT_TO_RIGHT_TAKES_NO.format(next(iter(wrong))))

    @classmethod
    def parse(cls, text: str, recommended: Sampler | None = None) -> Sampler:
        """A sampler from words.

        Args:
            text: a rule and settings as name=value, `cap:.01 steps=256 top_p=.9 last=greedy`;
                preset=NAME stands for a named one.
            recommended: where what is not said comes from; None: cap:.005, 256 steps.

        Returns:
            The sampler.

        Raises:
            ValueError: the words are wrong, or do not go together.
        """
        return cls.of(_split(text), recommended)

    @classmethod
    def of(cls, options: Mapping[str, Any], recommended: Sampler | None = None) -> Sampler:
        """A sampler from options by name, as words or as values; None says nothing.

        Beside `OPTIONS` there are `preset`, a name, and `sampler`, words or a Sampler; what the
        other options say comes before these. A rule in words that leaves `clipped` out has it
        from the preset. Without any of the three, confident decoding takes no rule from
        `recommended`, because it renoises by itself.
        """
        given = _chosen(options)
        base = given.pop("sampler", None)
        if isinstance(base, str):
            given, base = {**_chosen(_split(base)), **given}, None
        named = given.pop("preset", None)
        usual = recommended or cls()
        if named is not None and base is not None:
            raise ValueError("give a sampler or a preset, not both")
        values = {name: read_option(name, value, named) for name, value in given.items()}
        if named is not None:
            base = replace(preset(named), steps=usual.steps)
            if usual.left_to_right:
                raise ValueError(_LEFT_TO_RIGHT_TAKES_NO.format("preset"))
        elif base is None:
            confident = isinstance(values.get("predictor"), Confident)
            ancestral = confident and not usual.left_to_right
            base = replace(usual, kappa=Constant(1.0)) if ancestral else usual
        made = replace(base, **values)
        if values.get("steps", made.steps) not in (made.steps, made.steps - 1):
            raise ValueError(
                f"the grid has {made.steps} times, but num_steps is {values['steps']}"
            )
        return made

    def __str__(self) -> str:
        others = self.options([name for name in OPTIONS if name not in ("kappa", "steps")])
        said = self.left_to_right or not isinstance(self.grid, str)
        steps = {} if said else {"steps": self.steps}
        return format_options({"kappa": self.kappa, **steps, **others})

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
        return not self.left_to_right and callable(self.kappa(0.5, 0.6, 0.5))

    @property
    def keeps_marginals(self) -> bool:
        """Whether z_t has the forward process' law at every t, were x_theta perfect."""
        if self.left_to_right or self.remembers or self.confident:
            return False
        return self.guidance is None and not self.options(_SHAPING)

    def chain(self, static: bool = False) -> Chain:
        """What changes x_theta, as one function of rows of logits; whole: as in `chain`."""
        return chain(**self.options(_SHAPING), static=static)

    def options(self, names: Sequence[str] = _OF_LOOP) -> dict[str, Any]:
        """What `psidiff.sampling.sample` takes beside the plan, where it is not the default."""
        usual = Sampler.__dataclass_fields__
        held = {name: getattr(self, name) for name in names}
        return {name: value for name, value in held.items() if value != usual[name].default}

    def rule(self, prior: Prior | None) -> Kappa:
        """kappa as this prior can follow it: only masks go below 0, as ReMDM does."""
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
        like = torch.zeros(())
        if self.corrector and prior is not None and not bool(prior.probs(like=like).all()):
            raise ValueError(
                f"a leave-one-out corrector needs a prior with mass on every token; "
                f"{type(prior).__name__} has none on some"
            )


def _chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something; the rule "auto" says nothing."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and not (name == "kappa" and value == "auto")
    }


def parse_options(text: str) -> dict[str, Any]:
    """The settings of a sampler from words.

    Args:
        text: a rule, settings as name=value, or both; the rule auto stands for the recommended
            one, and preset=NAME for a named sampler.

    Returns:
        Values by name, in the order of the words; "auto" and a preset stay words.

    Raises:
        ValueError: the words are wrong, or one setting is there twice.

    Example:
        >>> from psidiff.sampling import parse_options
        >>> parse_options("cap:.1 top-p=.9 preset=paper-text")
        {'kappa': Cap(eta=0.1, clipped=True), 'top_p': 0.9, 'preset': 'paper-text'}
    """
    said = _split(text)
    return {name: read_option(name, value, said.get("preset")) for name, value in said.items()}


def _split(text: str) -> dict[str, str]:
    """The words of each setting."""
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or ":" in name:
            name, value = "kappa", word
        name = name.replace("-", "_")
        if name in found:
            raise ValueError(f"the sampler {text!r} says {name} twice")
        found[name] = value
    if not found:
        raise ValueError("a sampler is a rule such as cap:.02, settings as name=value, or both")
    return found


def format_options(options: Mapping[str, Any]) -> str:
    """The words that `parse_options` reads.

    Args:
        options: values by name, or words of them.

    Returns:
        One line, the rule first and then the others in one order.

    Example:
        >>> from psidiff.sampling import Cap, format_options
        >>> format_options({"top_p": 0.9, "kappa": Cap(0.1)})
        'cap:.1 top_p=.9'
    """
    words = []
    for name in dict.fromkeys(("kappa", "preset", *OPTIONS)):
        if (value := options.get(name)) is not None:
            word = value if isinstance(value, str) else _words_of(name)[1](value)
            words.append(word if name == "kappa" else f"{name}={word}")
    return " ".join(words)


def read_option(name: str, value: Any, named: str | None = None) -> Any:
    """A setting of a sampler from words.

    Args:
        name: a field of `Sampler`, or preset.
        value: its words; a number or an object is given back as it is, but a number for
            guidance becomes a `Guidance`.
        named: the preset that it changes: a rule whose words leave `clipped` out has it from
            there.

    Returns:
        The value.

    Raises:
        ValueError: a sampler has no such setting, or the words are wrong.

    Example:
        >>> from psidiff.sampling import read_option
        >>> read_option("kappa", "rescale:.05"), read_option("top_p", ".9")
        (Rescale(eta=0.05, clipped=True), 0.9)
    """
    if name not in (*OPTIONS, "preset"):
        names = (*OPTIONS, "preset")
        near = nearest(name, names)
        raise ValueError(f"a sampler has no {name!r}{near}; it may have {', '.join(names)}")
    if name == "guidance" and isinstance(value, (int, float)):
        return Guidance(float(value))
    if not isinstance(value, str) or name == "preset" or (name, value) == ("kappa", "auto"):
        return value
    rule = preset(named).kappa if name == "kappa" and named is not None else None
    if not getattr(rule, "clipped", True):
        return parse_kappa(value, clipped=False)
    if (found := _words_of(name)[0](value)) is None:
        raise ValueError(f"{name} must be {OPTIONS[name].must_be}, got {value!r}")
    return found


def _words_of(name: str) -> Words:
    """How a setting is read from words, and printed as them."""
    return _WORDS.get(name, (partial(parse_value, OPTIONS[name].kind), format_value))


PRESETS = {name: Sampler.parse(each.words) for name, each in PRESET_WORDS.items()}


def preset(name: str) -> Sampler:
    """The sampler of a name, such as the paper's for text.

    Args:
        name: a key of `PRESETS`.

    Returns:
        The sampler, with 256 steps.

    Raises:
        ValueError: there is none of this name; the sentence has the nearest one.

    Example:
        >>> from psidiff.sampling import preset
        >>> str(preset("paper-text"))
        'rescale-released:.05 steps=256 top_p=.9'
    """
    if name in PRESETS:
        return PRESETS[name]
    near = nearest(str(name), PRESETS)
    some = near or "; some are: ancestral, paper-text, paper-images, remdm-cap"
    raise ValueError(f"{name!r} is no preset{some}; docs/samplers.md has all of them")
