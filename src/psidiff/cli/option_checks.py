"""Which options go together, and with what a model makes: none is ignored in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..experiment.report.formatting import listed

_PART_OF = {
    "steps": "psi",
    "questions": "harness",
    "harness_draws": "harness",
    "metrics": "samples",
    "judge": "samples",
    "truth": "samples",
    "reference": "samples",
    "features": "samples",
    "drop_unknown": "data",
}
_OF_DATA = ("psi", "protocol", "sequences", "draws", "batch_size")
_FOR = {
    "judge": "text",
    "truth": "text",
    "reference": "text",
    "features": "image",
    "clues": "puzzle",
    "error": "toy",
}
_MAKES = {
    "text": "models of text",
    "image": "models of images",
    "puzzle": "models of puzzles",
    "toy": "the toys of --oracle",
}


def check_together(options: Collection[str]) -> None:
    """Of `psidiff evaluate`: each option with the one that it is a part of."""
    for option, whole in _PART_OF.items():
        if option in options and whole not in options:
            raise ValueError(f"{as_flag(option)} is a part of {as_flag(whole)}: give that too")
    if {"psi", "protocol"} <= set(options):
        raise ValueError("--psi has a protocol of its own: give it or --protocol, not both")
    instead = [each for each in ("samples", "harness") if each in options]
    for option in _OF_DATA if instead and "data" not in options else ():
        if option in options:
            raise ValueError(
                f"{as_flag(option)} is for real data, of which {as_flag(instead[0])} measures "
                "none: name some by --data"
            )


def check_kinds(options: Collection[str], kinds: Mapping[str, str]) -> None:
    """Each option for text, images, puzzles or toys with a model that is one of these."""
    for option, kind in _FOR.items():
        if option in options and kind not in kinds.values():
            are = "is" if len(kinds) == 1 else "are"
            raise ValueError(
                f"{as_flag(option)} is for {_MAKES[kind]}, and {listed(list(kinds))} {are} none"
            )


def as_flag(option: str) -> str:
    return "--" + option.replace("_", "-")
