"""Rows as in the paper's tables: a rule and setting at all numbers of steps; which it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .formatting import join_words, short, short_models, short_name
from .results import Cell, finite, grouped

PERPLEXITY, NLL = "generative perplexity", "generative NLL"


@dataclass(frozen=True, eq=False)
class Row:
    """The cells of a model with one rule, top-p and temperature, by rising steps."""

    cells: tuple[Cell, ...]

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def steps(self) -> set[int]:
        """Where an entropy and a quality are known."""
        known = (c for c in self.cells if None not in (finite(c.entropy), finite(c.quality)))
        return {cell.steps for cell in known}

    @property
    def key(self) -> tuple[str, str]:
        """Its model, its rule and what is varied of top-p and temperature."""
        return self.first.model, self.first.name


@dataclass(frozen=True, eq=False)
class Choice:
    """Of a model and setting: the row that the paper draws beside ancestral sampling's.

    told: why it is this one, or why none is, in a sentence.
    """

    rows: tuple[Row, ...]
    told: str

    @property
    def cells(self) -> list[Cell]:
        return [cell for row in self.rows for cell in row.cells]


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """Rows of text in the order of their models, settings and rules."""
    texts = [cell for cell in cells if cell.about["kind"] == "text"]
    groups = grouped(texts, lambda cell: (cell.model, cell.name)).values()
    rows = [Row(tuple(sorted(group, key=lambda cell: cell.steps))) for group in groups]
    return sorted(rows, key=lambda row: (row.first.place[0], row.first.place[3:], _rule(row)))


def _rule(row: Row) -> tuple[bool, int]:
    """Ancestral sampling first, the others in their order."""
    return not row.first.ancestral, row.first.place[2]


def choose(cells: Sequence[Cell]) -> list[Choice]:
    """For each model and setting the row whose entropy is nearest to ancestral sampling's.

    Of the cells that were asked for, not of those that a folder has besides. So the paper
    chooses (App. "OpenWebText"); of rows at equal entropies it takes the one with
    the lowest perplexity. Entropies are as near as their mean distance over the steps that the
    two rows have in common, in the two decimals that the paper prints; perplexity is the
    geometric mean over the same steps. Rows with fewer steps than others are left out.
    """
    asked = rows_of([cell for cell in cells if cell.about.get("asked", True)])
    groups = grouped(asked, lambda row: (row.first.model, row.first.settings))
    return [_choice(rows) for rows in groups.values()]


def drawn_of(cells: Sequence[Cell], choices: Sequence[Choice]) -> list[Cell]:
    """What is drawn of all models: the chosen rows, and what is no text."""
    others = [cell for cell in cells if cell.about["kind"] != "text"]
    return [cell for choice in choices for cell in choice.cells] + others


def _choice(rows: Sequence[Row]) -> Choice:
    """Of the rows of one model at one setting."""
    one = rows[0]
    place = ", ".join(filter(None, [one.first.model, one.first.settings]))
    usual = next((row for row in rows if row.first.ancestral), None)
    if usual is None:
        if len(rows) == 1:  # an autoregressive model
            return Choice((one,), f"{place}: {one.first.kappa}, the only row")
        return Choice((), f"{place}: nothing to choose by, without ancestral sampling")
    most = max((len(row.steps & usual.steps) for row in rows if row is not usual), default=0)
    if not most:
        return Choice((usual,), f"{place}: ancestral, and no other rule has its steps")
    able = [r for r in rows if r is not usual and len(r.steps & usual.steps) == most]
    keys = {row: (_distance(row, usual), _badness(row, usual)) for row in able}
    best = min(able, key=keys.__getitem__)
    alike = sum(key[0] == keys[best][0] for key in keys.values())
    why = f"its entropy is {keys[best][0]:.2f} from ancestral sampling's on average"
    why += f", like that of {alike - 1} more, and it is the best of these" if alike > 1 else ""
    left = [row.first.kappa for row in rows if row is not usual and row not in able]
    short_of = f"; {join_words(left)} left out, with fewer steps" if left else ""
    return Choice((usual, best), f"{place}: {best.first.kappa} ({why}{short_of})")


def _pairs(row: Row, usual: Row) -> list[tuple[Cell, Cell]]:
    """Cells of both rows at the steps that they have in common."""
    both, other = row.steps & usual.steps, {cell.steps: cell for cell in usual.cells}
    return [(cell, other[cell.steps]) for cell in row.cells if cell.steps in both]


def _distance(row: Row, usual: Row) -> float:
    pairs = _pairs(row, usual)
    apart = [abs(finite(a.entropy) - finite(b.entropy)) for a, b in pairs]
    return round(math.fsum(apart) / len(apart), 2)


def _badness(row: Row, usual: Row) -> float:
    """Less is better: nats a token where a judge gave them, else the quality."""
    pairs = _pairs(row, usual)
    nll = [finite(cell.measures.get(NLL)) for cell, _ in pairs]
    values = nll if None not in nll else [-cell.score for cell, _ in pairs]
    return math.fsum(values) / len(values)


def paper_title(cells: Sequence[Cell]) -> str:
    """What is in the table."""
    one = rows_of(cells)[0].first
    quality, entropy = one.quality, one.entropy
    inside = "" if entropy is None else f" ({short_name(entropy)})"
    fixed = "" if one.setting or not one.settings else f", {one.settings}"
    return f"As in the paper's tables: {short_name(quality)}{inside} by steps{fixed}"


def paper_table(cells: Sequence[Cell], choices: Sequence[Choice]) -> dict[str, Any]:
    """Head and lines of the table: quality (entropy) at each number of steps of each row.

    A line has its words, the cells that these are of, and whether it is chosen.
    """
    rows = rows_of(cells)
    numbers = sorted({cell.steps for row in rows for cell in row.cells})
    chosen = {row.key for choice in choices for row in choice.rows[-1:]}
    models = list(dict.fromkeys(row.first.model for row in rows))
    names = dict(zip(models, short_models(models), strict=True))
    lines = []
    for row in rows:
        at = {cell.steps: cell for cell in row.cells}
        words = [_words(at[n]) if n in at else "–" for n in numbers]
        held = [at.get(n) for n in numbers]
        name = [names[row.first.model], row.first.name]
        lines.append({"words": name + words, "cells": held, "chosen": row.key in chosen})
    return {"head": ["model", "sampler", *map(str, numbers)], "lines": lines}


def _words(cell: Cell) -> str:
    """44.5 ± 0.3 (5.40)"""
    entropy = "" if cell.entropy is None else f" ({short(finite(cell.entropy))})"
    return f"{short(cell.quality.value, cell.quality.stderr or None)}{entropy}"
