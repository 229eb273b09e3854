"""Named settings: what the paper and ReMDM sampled with, as values."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from ..process.prior import Masked, Prior
from ..process.schedule import Cosine, NoiseSchedule
from .kappa import Cap, Kappa, Rescale, parse_kappa


@dataclass(frozen=True)
class Preset:
    """A rule for kappa, in words, and what was used with it; `about` says where it is from.

    schedule        replaces the model's; None keeps it
    top_p, nucleus  as `sample` takes them
    last            as `plan` takes it
    exact_remdm     for masks sigma may exceed 1 - alpha_s, so kappa may be below 0
    """

    kappa: str
    about: str
    schedule: NoiseSchedule | None = None
    top_p: float | None = None
    nucleus: str = "keep"
    last: str = "sample"
    exact_remdm: bool = False

    def __post_init__(self) -> None:
        rule = parse_kappa(self.kappa)
        if self.exact_remdm and not isinstance(rule, Cap | Rescale):
            raise ValueError(f"exact_remdm is for cap and rescale, got kappa {self.kappa!r}")

    def rule(self, prior: Prior) -> Kappa:
        """The rule as this prior can follow it."""
        rule = parse_kappa(self.kappa)
        if self.exact_remdm and isinstance(prior, Masked) and isinstance(rule, Cap | Rescale):
            return replace(rule, clipped=False)
        return rule


PRESETS: dict[str, Preset] = {
    "ancestral": Preset("ancestral", "q_{s|t} alone: the sampler that every other refines"),
    "paper-text": Preset(
        "rescale-released:.05",
        "the paper's text: its rows 'rescale .05' fit only the released formula (about cap "
        ".0025), not its equation, which is rescale:.05",
        top_p=0.9,
    ),
    "paper-images": Preset(
        "constant:.95@.1-.5",
        "the paper's best CIFAR-10 FID (Duo, 15.05 at 4096 steps, labels without guidance); "
        "greedy at the end by the caption of its ancestral table, the others name none",
        schedule=Cosine(),
        last="greedy",
    ),
    "remdm-cap": Preset(
        "cap:.008",
        "ReMDM-cap as its own scripts run it; for masks with its full sigma",
        top_p=0.9,
        nucleus="drop",
        last="greedy",
        exact_remdm=True,
    ),
    "remdm-rescale": Preset(
        "rescale:.015",
        "ReMDM-rescale as its own scripts run it; for masks with its full sigma",
        top_p=0.9,
        nucleus="drop",
        last="greedy",
        exact_remdm=True,
    ),
    "remdm-loop": Preset(
        "loop:.02",
        "ReMDM-loop as its own scripts run it: alpha stays .9 from t = .55 to t = .05",
        top_p=0.9,
        nucleus="drop",
        last="greedy",
    ),
}


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.5)
    nearest = f"; the nearest is {close[0]}" if close else ""
    raise ValueError(f"{name!r} is no preset{nearest}; these are: {', '.join(PRESETS)}")
