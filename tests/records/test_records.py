"""Sampling gives what it gave when the records were made: see make_records.py."""

import json

import pytest
from make_records import GROUPS, RECORDS, SLOW, all_of

HELD = json.loads(RECORDS.read_text())["groups"]


def check(group, cases):
    names = []
    for case in cases:
        names.append(case.name)
        assert all_of(group, case) == HELD[group][case.name], f"{group}: {case.name}"
    assert names == list(HELD[group]), "the records are of other cases: make them anew"


@pytest.mark.parametrize("group", GROUPS)
def test_tokens_routes_passes_head_rows_and_traces_are_those_on_record(group):
    check(group, GROUPS[group]())


@pytest.mark.slow
@pytest.mark.parametrize("group", SLOW)
def test_so_are_those_of_every_combination(group):
    check(group, SLOW[group]())
