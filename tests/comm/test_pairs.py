"""Two ranks that make different blocking calls: each pair ends soon, with an error that names the difference.

It is that of a proof or of a call that compares. No two calls may meet in one transfer: Gloo would end the process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import laconic
from laconic import checkpoint
from laconic.comm.agreement import RankGroup
from laconic.publish import Publisher
from laconic.rehearse import ranks
from tests.comm.test_journal import give_up_soon, watching
from tests.support import sharded_net

LATEST_S = 15.0
NAMED = re.compile(r"RanksDifferError|JobError: ranks make different calls")
WHOLE = StateDictOptions(full_state_dict=True)
BATCH = torch.zeros(2, 5)


def clip(model: Any, folder: Path) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "trains": lambda model, folder: model(BATCH).sum().backward(),
    "evaluates": lambda model, folder: torch.no_grad()(model)(BATCH),
    "gathers a tensor": lambda model, folder: model.out.weight.full_tensor(),
    "takes a norm": lambda model, folder: model.out.weight.norm(),
    "clips": clip,
    "gathers a state": lambda model, folder: get_model_state_dict(model, options=WHOLE),
    "saves": lambda model, folder: checkpoint.save_checkpoint(folder, 1, model=model, optimizer=None, extra={}),
    "exports": lambda model, folder: laconic.save_safetensors(model, folder / "export"),
    "publishes": lambda model, folder: Publisher(model, folder / "versions").publish(),
    "shards": lambda model, folder: laconic.fully_shard(sharded_net.build(), broadcast=True),
}


def job(calls: tuple[str, str], folder: Path) -> tuple[str, float]:
    """The error of a rank, and the seconds until then."""
    model = give_up_soon()
    dist.barrier()
    begun = time.monotonic()
    error = "nothing"
    try:
        CALLS[calls[dist.get_rank()]](model, folder)
        RankGroup().gather("the end")  # a call may end on one rank: then the other is the one that waits
    except Exception as found:  # of any kind: the test looks at it
        error = f"{type(found).__name__}: {found}"
    return error, time.monotonic() - begun


def problems(pairs: Iterable[tuple[str, str]], folder: Path) -> list[str]:
    """The pairs that end late, or without a word about the difference."""
    found = []
    for number, pair in enumerate(pairs):
        with watching():
            answers = ranks(job, pair, folder / str(number), nodes=2, goes_on=True)
        is_late = max(seconds for _, seconds in answers) > LATEST_S
        if is_late or not any(NAMED.match(error) for error, _ in answers):
            found.append(f"{pair}: {answers}")
    return found


def test_a_sample_of_pairs_ends_with_the_difference(tmp_path: Path) -> None:
    assert problems(pairwise(CALLS), tmp_path) == []


@pytest.mark.campaign(seconds=15)
def test_all_pairs_end_with_the_difference(tmp_path: Path) -> None:
    assert problems(combinations(CALLS, 2), tmp_path) == []
