"""Calls that change a model, two by two in each order."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.composition.transforms import CALLS, judge, pairs

CYCLE = [pair for pair in pairwise((*CALLS, "shards")) if "compiles" not in pair]
"""Each call after another one, but for the compiler, which takes seconds."""


@pytest.mark.parametrize("pair", CYCLE, ids=" then ".join)
def test_a_pair_trains_as_alone_or_is_refused(pair: tuple[str, str]) -> None:
    assert not judge(pair).startswith(("WRONG", "UNCLEAR"))


@pytest.mark.parametrize(
    ("second", "answer"),
    [
        ("adds adapters", "refused: .*add adapters before fully_shard"),
        ("ties", "refused: .*up.weight of blocks.1 was tied to up.weight of blocks.0 after fully_shard"),
        ("replaces a layer", "warned: 2 trainable parameters, such as out.weight"),
        ("loads by assignment", "right"),
    ],
)
def test_what_comes_after_fully_shard_and_would_train_by_itself_is_named(second: str, answer: str) -> None:
    assert re.match(answer, judge(("shards", second)))


def test_a_frozen_weight_in_few_bits_takes_no_other() -> None:
    assert "has a frozen weight in nf4 and takes no other" in judge(("quantises", "parallelises tensors"))


@pytest.mark.campaign(seconds=90)
def test_all_pairs_train_as_alone_or_are_refused() -> None:
    found = {pair: judge(pair) for pair in pairs()}
    assert not {pair: text for pair, text in found.items() if text.startswith(("WRONG", "UNCLEAR"))}
