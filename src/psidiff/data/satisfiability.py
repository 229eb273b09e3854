"""Random 3-SAT: a formula of clauses with three literals, and an assignment that satisfies it.

A sequence is the literals of all clauses, then a value for each variable. 38 clauses of nine
variables are near the ratio at which half of all formulas can be satisfied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from ..types import as_count, check_shape
from .codec import CODECS
from .puzzle import Puzzle, PuzzleRows, cached_array, random_orders, unanswered

VARIABLES, CLAUSES = 9, 38
_FALSE = 2 * VARIABLES  # the token of false; true comes after it
_QUESTION, _LENGTH = 3 * CLAUSES, 3 * CLAUSES + VARIABLES
_FORMAT, _CHUNK = 1, 512


@CODECS.register("3sat")
@dataclass(frozen=True)
class Satisfiability(Puzzle):
    """Text such as "a B c, ... : 1 0 1 ...": small letters are variables, large negated.

    Example:
        >>> from psidiff.data.satisfiability import Satisfiability
        >>> codec = Satisfiability()
        >>> text = codec.decode(codec.held_out(1, seed=0)[0])
        >>> text.count(","), text.endswith("_ _ _ _ _ _ _ _ _")
        (37, True)
    """

    vocab_size = _FALSE + 2
    length = _LENGTH

    def encode(self, text: str) -> Tensor:
        """Return tokens (123,) of clauses and values, -1 for values "_" or missing ones."""
        question, _, answer = text.partition(":")
        names = "".join(_literal(i) for i in range(_FALSE))
        letters, values = question.replace(",", " ").split(), answer.split()
        if len(letters) != _QUESTION or len(values) > VARIABLES:
            raise ValueError(
                f"a formula has {CLAUSES} clauses of three letters from a to i, then a colon "
                f"and at most {VARIABLES} values"
            )
        wrong = [x for x in letters if len(x) != 1 or x not in names]
        wrong += [x for x in values if x not in ("0", "1", "_")]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is neither a literal from a to i nor a value")
        said = [_FALSE + int(x) if x != "_" else -1 for x in values]
        said += [-1] * (VARIABLES - len(said))
        return torch.tensor([names.index(x) for x in letters] + said)

    def decode(self, tokens: Tensor) -> str:
        """Return "a B c, ...: 1 0 ..."; "_" for what is missing."""
        check_shape("tokens", tokens, (_LENGTH,))
        said = self.pieces(tokens)
        clauses = [" ".join(said[i : i + 3]) for i in range(0, _QUESTION, 3)]
        return f"{', '.join(clauses)}: {' '.join(said[_QUESTION:])}"

    def pieces(self, tokens: Tensor) -> list[str]:
        """Return each literal or value by itself."""
        names = [*(_literal(i) for i in range(_FALSE)), "0", "1"]
        return [names[t] if 0 <= t < len(names) else "_" for t in tokens.tolist()]

    def valid(self, tokens: Tensor) -> Tensor:
        """Whether every clause has a literal that the values make true."""
        literals, values = tokens[:, :_QUESTION], tokens[:, _QUESTION:]
        read = ((literals >= 0) & (literals < _FALSE)).all(1) & (values >= _FALSE).all(1)
        literals = literals.clamp(0, _FALSE - 1)
        true = values.gather(1, literals // 2) - _FALSE != literals % 2
        return read & true.unflatten(1, (CLAUSES, 3)).any(2).all(1)

    def held_out(self, count: int, seed: int) -> Tensor:
        """Formulas to judge by, (count, 123): of a stream that no training set has."""
        return unanswered(formulas(count, seed, held_out=True), _question_mask())


def satisfiability_rows(count: int, seed: int = 0, held_out: bool = False) -> PuzzleRows:
    """So many formulas to learn from; each visit renames, negates and shuffles variables."""
    return PuzzleRows(formulas(count, seed, held_out), _question_mask(), _rearranged)


def formulas(count: int, seed: int, held_out: bool = False) -> np.ndarray:
    """Formulas (count, 123) of uint8 with one of their satisfying assignments, by chance.

    The same for the same seed; among random formulas those that can be satisfied.
    """
    count, seed = as_count("count", count), as_count("seed", seed, least=0)

    def draw() -> np.ndarray:
        parts, chunk = list[np.ndarray](), 0
        while sum(map(len, parts)) < count:
            rng = np.random.Generator(np.random.PCG64([seed, chunk, _FORMAT + 2 * held_out]))
            parts.append(_drawn(rng))
            chunk += 1
        return np.concatenate(parts)[:count]

    name = f"3sat-v{_FORMAT}-{count}-{seed}" + ("-held-out" if held_out else "")
    return cached_array(name, (count, _LENGTH), np.uint8, draw)


def _drawn(rng: np.random.Generator) -> np.ndarray:
    """Formulas that can be satisfied, each with a satisfying assignment."""
    variables = rng.random((_CHUNK, CLAUSES, VARIABLES)).argsort(-1)[..., :3]
    negated = rng.integers(2, size=variables.shape)
    assignments = np.arange(2**VARIABLES)[:, None] >> np.arange(VARIABLES) & 1  # (512, 9)
    true = np.zeros((_CHUNK, 2**VARIABLES), bool)
    for i in range(_CHUNK):
        true[i] = (assignments[:, variables[i]] != negated[i]).any(-1).all(-1)
    chosen = (true * (1 - rng.random(true.shape))).argmax(1)  # one of them, by chance
    kept = true.any(1)
    literals = (2 * variables + negated).reshape(_CHUNK, -1)
    solved = np.concatenate((literals, _FALSE + assignments[chosen]), 1)
    return solved[kept].astype(np.uint8)


def _rearranged(tokens: Tensor, generator: Generator) -> Tensor:
    """The same formulas under other names: variables, signs, clauses and literals in order."""
    count = len(tokens)
    names = random_orders(count, VARIABLES, generator)  # old variable -> new
    flips = torch.randint(2, (count, VARIABLES), generator=generator, device=generator.device)
    literals, values = tokens[:, :_QUESTION], tokens[:, _QUESTION:] - _FALSE
    variable, flips = literals // 2, flips.cpu()
    sign = literals % 2 ^ flips.gather(1, variable)
    literals = (2 * names.gather(1, variable) + sign).unflatten(1, (CLAUSES, 3))
    order = random_orders(count, CLAUSES, generator)[..., None].expand(-1, -1, 3)
    within = random_orders(count * CLAUSES, 3, generator).view(count, CLAUSES, 3)
    literals = literals.gather(1, order).gather(2, within).flatten(1)
    moved = torch.empty_like(values).scatter(1, names, values ^ flips)
    return torch.cat((literals, moved + _FALSE), 1)


def _literal(token: int) -> str:
    """a, A, b, B, ...: a large letter is the negation."""
    letter = chr(ord("a") + token // 2)
    return letter.upper() if token % 2 else letter


def _question_mask() -> Tensor:
    return torch.arange(_LENGTH) < _QUESTION
