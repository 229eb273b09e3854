"""Size, ways and docstrings stay within bounds that never rise: see count_code.py."""

import ast
import json

import pytest
from count_code import (
    BOUNDS,
    LONGEST_BODY,
    WAYS,
    body_lines,
    files_on_the_way,
    functions,
    lines_of_code,
    long_functions,
    missing_in_docstring,
    mixture_places,
    total_lines,
    undocumented,
)

BOUND = json.loads(BOUNDS.read_text())
SOURCE = '''"""A module
of two lines."""

import os  # counts


class Thing:
    """Not counted."""

    size = """counted,
    twice"""

    def call(self):
        """Neither is this."""
        # nor this

        return os
'''


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings():
    assert lines_of_code(SOURCE) == 6
    assert [(name, body_lines(f)) for name, f in functions(ast.parse(SOURCE))] == [
        ("Thing.call", 1)
    ]


def test_a_docstring_names_every_argument_what_comes_back_and_an_example():
    def bare(x: int, y: int) -> int:
        """Add."""
        return x + y

    def said(x: int) -> int:
        """Double.

        Args:
            x: a number.

        Returns:
            Twice as much.

        Example:
            >>> said(1)
            2
        """
        return 2 * x

    assert missing_in_docstring(bare) == ["Args", "Returns", "Example"]
    assert missing_in_docstring(said) == []


def test_lines_of_code_do_not_grow():
    assert total_lines() <= BOUND["lines of code"]


def test_the_body_of_a_function_has_at_most_40_lines():
    allowed = BOUND["long functions"]
    longer = {n: s for n, s in long_functions().items() if s > allowed.get(n, LONGEST_BODY)}
    assert longer == {}


def test_the_mixture_is_applied_in_few_places():
    assert 1 <= len(mixture_places()) <= BOUND["places that apply the mixture"]


def test_public_names_have_complete_docstrings():
    allowed = set(BOUND["incomplete docstrings"])
    assert {n: lacks for n, lacks in undocumented().items() if n not in allowed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_few_files_are_on_the_way_of_a_command(way):
    files = files_on_the_way(way)
    assert len(files) <= BOUND["files on the way"][way], files
