"""Ranks that run different programs: all of them end soon, with an exception that says who differs, where and how.

The last rank is the odd one; it differs from the others in one way. The suite runs all kinds on ranks in one process,
where the connections to a rank that has ended close. What only the rank's own last word can tell takes processes.
"""

from __future__ import annotations

import atexit
import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic.comm.failure import record_failure
from tests.faults.bench import Bench, Found, campaign
from tests.support.launch import launch
from tests.support.sharded_net import Block, shard

WIDTH, HIDDEN = 17, 29
STEPS = 4


class Net(nn.Module):
    """Blocks by name, called in the order of `calls`, and a head."""

    def __init__(self, names: str = "abc", hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleDict({name: Block(WIDTH, hidden) for name in names})
        self.head, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.calls = names

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Module.forward`."""
        for name in self.calls:
            x = self.blocks[name](x)
        return self.head(x) + self.other(x)


def sharded(model: Net | None = None, *, skip: str = "", **policies: Any) -> Any:
    """Shard the blocks but those in `skip`, then the model."""
    model = model or Net()
    return shard(model, [block for name, block in model.blocks.items() if name not in skip], **policies)


def loss_of(model: Any) -> Tensor:
    """The loss of a batch of this rank's own."""
    loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
    return loss


def train(model: Any, steps: int = STEPS) -> None:
    """Train with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which the odd rank differs."""

    run: Callable[[bool], None]
    """The program of a rank; the argument is true for the odd one."""
    words: tuple[str, ...]
    """The text that the exception of every rank must contain, besides the name of a rank."""
    num_ranks: int = 2
    num_local: int = 1


def _built(make: Callable[[bool], Any], *words: str) -> Kind:
    """The odd rank builds another model."""
    return Kind(run=lambda is_odd: train(make(is_odd)), words=words)


def _made(change: Callable[[Net], Any], *words: str) -> Kind:
    """The odd rank changes its model before it shards it."""

    def make(is_odd: bool) -> Any:
        model = Net()
        with torch.no_grad():
            if is_odd:
                change(model)
        return sharded(model)

    return _built(make, *words)


def _set(odd: dict[str, Any], *words: str, **common: Any) -> Kind:
    """The odd rank has another setting of `fully_shard`."""
    return _built(lambda is_odd: sharded(**common, **(odd if is_odd else {})), *words)


def _buffered(**buffers: Tensor) -> Any:
    model = Net()
    for name, buffer in buffers.items():
        model.head.register_buffer(name, buffer)
    return sharded(model, broadcast_buffers=True)


def _buffers(odd: dict[str, Tensor], *words: str) -> Kind:
    """The odd rank has other buffers, which the first rank gives to all."""
    return _built(lambda is_odd: _buffered(**odd if is_odd else {"a": torch.ones(2), "b": torch.ones(4)}), *words)


def _later(change: Callable[[Any], Any], *words: str, make: Callable[[], Any] = sharded) -> Kind:
    """All take two steps; then the odd rank does something with its model, and all go on."""

    def run(is_odd: bool) -> None:
        model = make()
        train(model, 2)
        if is_odd:
            change(model)
        train(model)

    return Kind(run=run, words=("rank 1", *words))


def _alone(action: Callable[[Any], Any], *words: str) -> Kind:
    """All take two steps and a backward; then rank 0 alone does something collective, and all go on."""

    def run(is_odd: bool) -> None:
        model = sharded()
        train(model, 2)
        loss_of(model).backward()
        if not is_odd:
            action(model)
        train(model)

    return Kind(run=run, words=("rank 1 ", *words))


def _call(calls: str, *words: str) -> Kind:
    return _later(lambda model: setattr(model, "calls", calls), *words)


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def _evaluate_other_unit(is_odd: bool) -> None:
    model = sharded()
    train(model, 2)
    model.calls = "aba" if is_odd else "abb"
    _evaluate(model)


def _without_sync(model: Any) -> None:
    with model.no_sync():
        loss_of(model).backward()


def _save(model: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        laconic.save_safetensors(model, folder)


def _skip_step(is_odd: bool) -> None:
    model = sharded()
    train(model, 5 if is_odd else 6)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _exit() -> None:
    raise SystemExit(0)


def _before(block: str, action: Callable[[], Any]) -> Callable[[Any], Any]:
    """Do something before each forward of a block."""
    return lambda model: model.blocks[block].register_forward_pre_hook(lambda *_: action())


def _swallow(model: Any) -> None:
    """Catch an error of a forward, and go on with the next batch."""
    hook = _before("c", lambda: 1 / 0)(model)
    try:
        loss_of(model)
    except ZeroDivisionError:
        hook.remove()
        model.reset_iter_state()


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
_DIFFERS = "rank 1 differs"
KINDS: dict[str, Kind] = {
    "depth": _built(lambda odd: sharded(Net("abcd" if odd else "abc")), "blocks.d", _DIFFERS),
    "depth with broadcast": _built(
        lambda odd: sharded(Net("abcd" if odd else "abc"), broadcast=True),
        _DIFFERS, "fully_shard(broadcast=True) of Block",
    ),
    "width": _built(lambda odd: sharded(Net(hidden=31 if odd else 29)), "blocks.a", "up.weight", "(31, 17)"),
    "names": _built(lambda odd: sharded(Net("abd" if odd else "abc")), "blocks.c", _DIFFERS),
    "order": _built(lambda odd: sharded(Net("acb" if odd else "abc")), "order of the units", "blocks.c"),
    "cache": _set({"cache": "host"}, _DIFFERS, "cache Cache(where=host", "Net"),
    "wire": _set({"wire": "8bit"}, _DIFFERS, "wire", "Net", cache="host"),
    "precision": _set({"mp_policy": _BF16}, _DIFFERS, "precision", "bfloat16"),
    "checks": _set({"checks": laconic.Checks(interval=3)}, _DIFFERS, "checks", "interval=3"),
    "granularity": _set({"granularity": laconic.whole()}, _DIFFERS, "Net", "blocks"),
    "reshard after forward": _set({"reshard_after_forward": False}, _DIFFERS, "reshard_after_forward False"),
    "offload": _set({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, _DIFFERS, "offload"),
    "broadcast": _set({"broadcast": True}, _DIFFERS, "broadcast=True"),
    "unit lists": _set({"skip": "c"}, _DIFFERS, "blocks.c"),
    "dtype": _made(lambda model: model.double(), "Net", "torch.float64"),
    "tied weights": _made(lambda model: setattr(model.other, "weight", model.head.weight), _DIFFERS, "other.weight"),
    "trainability": _made(
        lambda model: model.blocks["b"].up.weight.requires_grad_(False), _DIFFERS, "blocks.b", "up.weight", "frozen"
    ),
    "dtype of a buffer": _buffers(
        {"a": torch.ones(2).half(), "b": torch.ones(4)}, _DIFFERS, "buffer head.a (2,) torch.float16"
    ),
    "shapes of buffers": _buffers({"a": torch.ones(4), "b": torch.ones(2)}, _DIFFERS, "buffer head.a (4,)"),
    "a buffer more": _buffers(
        {"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(1)}, _DIFFERS, "buffer head.c (1,) torch.float32"
    ),
    "order of buffers": _built(
        lambda odd: _buffered(**{name: torch.ones(2) for name in ("ba" if odd else "ab")}),
        _DIFFERS, "the order differs",
    ),
    "dtype of a buffer later": _later(
        lambda model: setattr(model.head, "a", model.head.a.half()), make=lambda: _buffered(a=torch.ones(2)),
    ),
    "weights": _made(lambda model: model.blocks["b"].up.weight.add_(1), "rank 1 has others", "blocks.b"),
    "mesh": Kind(
        run=lambda odd: train(sharded(mesh=laconic.init_mesh("cpu", nodes=4 if odd else 2, local=1 if odd else 2))),
        words=("rank 3 differs", "mesh"), num_ranks=4, num_local=2,
    ),
    "islands": _built(
        lambda odd: sharded(mesh=laconic.init_mesh("cpu", islands=2 if odd else 1, local=1)), _DIFFERS, "mesh"
    ),
    "accumulation": Kind(
        run=lambda odd: train(_flagged(sharded(), odd)), words=(_DIFFERS, "blocks.b", "requires_gradient_sync False")
    ),
    "unit b for unit c": _call("abb", "blocks.b", "blocks.c"),
    "other order of calls": _call("acb", "blocks.b", "blocks.c"),
    "a unit once more": _call("abcc", "blocks.c"),
    "a unit left out": _call("ac", "blocks."),
    "evaluation of another unit": Kind(run=_evaluate_other_unit, words=("rank 1", "blocks.a", "blocks.b")),
    "no_sync": _later(_without_sync),
    "frozen later": _later(lambda model: model.blocks["b"].requires_grad_(False), "blocks."),
    "frozen later, in a host cache": _later(
        lambda model: model.blocks["b"].requires_grad_(False), "blocks.", make=lambda: sharded(cache="host")
    ),
    **{
        f"root frozen later, {cache}": _later(
            lambda model: (model.head.requires_grad_(False), model.other.requires_grad_(False)), "Net",
            make=partial(sharded, cache=cache),
        )
        for cache in ("none", "host", "device", "rank")
    },
    "frozen later, in four bits": _later(
        lambda model: model.blocks["b"].requires_grad_(False), "blocks.",
        make=lambda: sharded(cache="host", wire="4bit"),
    ),
    "one parameter frozen later": _later(
        lambda model: model.blocks["b"].up.weight.requires_grad_(False), "blocks.b", "up.weight"
    ),
    "evaluation on rank 0": _alone(_evaluate),
    "skipped step": Kind(run=_skip_step, words=("rank 1 ",)),
    "uneven steps": Kind(run=lambda odd: train(sharded(), 2 if odd else 4), words=("rank 1 ", "forward 3")),
    "full_tensor on rank 0": _alone(lambda model: next(model.parameters()).full_tensor(), "the whole"),
    "save on rank 0": _alone(_save),
    "clip_grad_norm_ on rank 0": _alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "exception in forward": _later(_before("b", lambda: 1 / 0), "ZeroDivisionError"),
    "exit in forward": _later(_before("b", _exit), "blocks.b"),
    "skipped backward": _later(loss_of),  # the odd rank finds a loss that is not finite, and goes on
    "caught exception": _later(_swallow),
}  # fmt: skip
LAST_WORDS = ("uneven steps", "exit in forward", "exception in forward")
"""The kinds whose odd rank ends first; the others learn why from its last word, which takes processes."""


def _flagged(model: Any, is_odd: bool) -> Any:
    model.blocks["b"].set_requires_gradient_sync(not is_odd)
    return model


def play(name: str) -> str:
    """Run this rank's program; return the text of the exception that ended it, or ""."""
    dist.init_process_group("gloo")
    with contextlib.suppress(SystemExit):
        KINDS[name].run(dist.get_rank() == dist.get_world_size() - 1)
    return ""


def run_kind(name: str) -> tuple[str, float]:
    """Run this rank's program in its process. Returns the text of its exception, and the seconds from its start.

    The end of the process follows, as a script's would.
    """
    begin, told = time.monotonic(), ""
    try:
        told = play(name)
    except Exception as error:
        told = "".join(traceback.format_exception_only(error))
        record_failure(error)
    wall_s = time.monotonic() - begin
    atexit._run_exitfuncs()
    return told, wall_s


def missing(name: str, told: Sequence[str]) -> list[str]:
    """The texts that the ranks' exceptions lack. That of an odd rank that ended first does not count."""
    judged = told[:-1] if name in LAST_WORDS else told
    words = ("rank ", *KINDS[name].words)
    return [f"rank {rank} lacks {word!r}" for rank, text in enumerate(judged) for word in words if word not in text]


MOST_S = 15.0
QUICK = ("unit b for unit c", *LAST_WORDS)


def try_kind(name: str) -> list[str]:
    """Run all ranks of a kind in processes. Returns what their exceptions lack, or that they took too long."""
    kind = KINDS[name]
    try:
        ends = launch(run_kind, name, num_ranks=kind.num_ranks, num_local=kind.num_local, backend=None)
    except (RuntimeError, TimeoutError) as error:
        return [f"no end: {str(error)[-300:]}"]
    longest = max(wall_s for _, wall_s in ends)
    return missing(name, [told for told, _ in ends]) + [f"{longest:.1f} s"] * (longest > MOST_S)


@campaign(
    "ranks-differ",
    f"ranks that differ: all end within {MOST_S:g} s with an exception that names rank, unit and difference",
    harms=("kinds that do not",),
    section="mend",
)
def differences(bench: Bench) -> Found:
    """Try all kinds in processes."""
    found = {name: try_kind(name) for name in (QUICK if bench.quick else KINDS)}
    return len(found), [f"kinds that do not: {name}, {lacks}" for name, lacks in found.items() if lacks], ""
