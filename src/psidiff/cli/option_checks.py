"""Which options go together, and with what a model makes: none is ignored in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..experiment.report.formatting import join_words
from .options import as_flag

PARTS = {  # of what an option is a part
    "psi": ("steps",),
    "harness": ("questions", "harness_draws"),
    "samples": ("metrics", "judge", "truth", "reference", "features"),
    "data": ("drop_unknown",),
}
_OF_DATA = ("psi", "protocol", "sequences", "draws", "batch_size")
_KINDS = (  # of models, in words, and their options
    (("text",), "models of text", ("judge", "truth", "protocol", "choose")),
    (("text", "image"), "models of text or images", ("reference",)),
    (("image",), "models of images", ("features",)),
    (("puzzle",), "models of puzzles", ("clues",)),
    (("toy",), "the toys of --oracle", ("error",)),
)


def check_option_conflicts(options: Collection[str]) -> None:
    """Of `psidiff evaluate`: each option with the one that it is a part of."""
    for owner, parts in PARTS.items():
        for part in parts:
            if part in options and owner not in options:
                raise ValueError(
                    f"{as_flag(part)} is a part of {as_flag(owner)}: give that too"
                )
    if {"psi", "protocol"} <= set(options):
        raise ValueError("--psi has a protocol of its own: give it or --protocol, not both")
    instead = [each for each in ("samples", "harness") if each in options]
    for option in _OF_DATA if instead and "data" not in options else ():
        if option in options and (option, instead[0]) != ("protocol", "samples"):
            raise ValueError(
                f"{as_flag(option)} is for real data, of which {as_flag(instead[0])} measures "
                "none: name some by --data"
            )


def check_protocol_of_text(protocol: str, judge: str | None) -> None:
    """A protocol of samples of text, with the judge that it is of."""
    if protocol == "paper":
        raise ValueError("--protocol paper is for images; that of text is released")
    if protocol != "exact" and judge is None:
        raise ValueError(
            "--protocol says how a language model judges samples: name it by --judge"
        )


def check_kinds(options: Collection[str], kinds: Mapping[str, str]) -> None:
    """Each option for text, images, puzzles or toys with a model that is one of these.

    kinds: of each model by its name.
    """
    for its, models, names in _KINDS:
        for name in names if not set(its) & set(kinds.values()) else ():
            if name in options:
                are = "is" if len(kinds) == 1 else "are"
                raise ValueError(
                    f"{as_flag(name)} is for {models}, and {join_words(list(kinds))} {are} none"
                )
