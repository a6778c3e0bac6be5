"""Ranks that run different programs: all of them end soon, with an exception that says who differs, where and how.

The last rank is the odd one; it differs from the others in one way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row

WIDTH, HIDDEN = 17, 29
STEPS = 4


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Module.forward`."""
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks by name, called in the order of `calls`, and a head."""

    def __init__(self, names: str = "abc", hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleDict({name: Block(hidden) for name in names})
        self.head, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.calls = names

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Module.forward`."""
        for name in self.calls:
            x = self.blocks[name](x)
        return self.head(x) + self.other(x)


def sharded(model: nn.Module | None = None, *, skip: str = "", **policies: Any) -> Any:
    """Shard the blocks but those in `skip`, then the model."""
    model = model or Net()
    mesh = policies.pop("mesh", None) or laconic.init_mesh("cpu")
    for name, block in model.blocks.items():  # type: ignore[union-attr, operator]
        if name not in skip:
            laconic.fully_shard(block, mesh=mesh, **policies)
    return laconic.fully_shard(model, mesh=mesh, **policies)


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


def _settings(is_odd: bool, odd: Mapping[str, Any], **common: Any) -> None:
    train(sharded(**common, **(odd if is_odd else {})))


def _names(is_odd: bool) -> None:
    train(sharded(Net("abd" if is_odd else "abc")))


def _order(is_odd: bool) -> None:
    train(sharded(Net("acb" if is_odd else "abc")))


def _tied(is_odd: bool) -> None:
    model = Net()
    if is_odd:
        model.other.weight = model.head.weight
    train(sharded(model))


def _frozen(is_odd: bool) -> None:
    model = Net()
    model.blocks["b"].up.weight.requires_grad_(not is_odd)  # type: ignore[union-attr, operator]
    train(sharded(model))


def _weights(is_odd: bool) -> None:
    model = Net()
    if is_odd:
        with torch.no_grad():
            model.blocks["b"].up.weight.add_(1)  # type: ignore[union-attr, operator]
    train(sharded(model))


def _mesh(is_odd: bool) -> None:
    sizes = (4, 1) if is_odd else (2, 2)
    train(sharded(mesh=laconic.init_mesh("cpu", nodes=sizes[0], local=sizes[1])))


def _islands(is_odd: bool) -> None:
    train(sharded(mesh=laconic.init_mesh("cpu", islands=2 if is_odd else 1, local=1)))


def _flag(is_odd: bool) -> None:
    model = sharded()
    if is_odd:
        model.blocks["b"].set_requires_gradient_sync(False)
    train(model)


def _later(change: Callable[[Any], None]) -> Callable[[bool], None]:
    """Let all ranks take two steps; then `change` the odd one's model, and go on."""

    def run(is_odd: bool) -> None:
        model = sharded()
        train(model, 2)
        if is_odd:
            change(model)
        train(model)

    return run


def _call(calls: str) -> Callable[[Any], None]:
    return lambda model: setattr(model, "calls", calls)


def _evaluate_other_unit(is_odd: bool) -> None:
    model = sharded()
    train(model, 2)
    model.calls = "aba" if is_odd else "abb"
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def _without_sync(model: Any) -> None:
    with model.no_sync():
        loss_of(model).backward()


def _only_first(action: Callable[[Any], Any]) -> Callable[[bool], None]:
    """Let all ranks take two steps; then rank 0 alone does something collective, and all go on."""

    def run(is_odd: bool) -> None:
        model = sharded()
        train(model, 2)
        loss_of(model).backward()
        if not is_odd:
            action(model)
        train(model)

    return run


def _evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def _save(model: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        laconic.save_safetensors(model, folder)


def _skip_step(is_odd: bool) -> None:
    model = sharded()
    train(model, 3)
    train(model, 2 if is_odd else 3)
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _end_early(is_odd: bool) -> None:
    train(sharded(), 2 if is_odd else 4)


def _end_in_forward(is_odd: bool) -> None:
    model = sharded()
    train(model, 2)
    if is_odd:
        model.blocks["b"].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(SystemExit(0)))
    train(model)


def _fail_in_forward(is_odd: bool) -> None:
    model = sharded()
    train(model, 2)
    if is_odd:
        model.blocks["b"].register_forward_pre_hook(lambda *_: 1 / 0)
    train(model)


def _skip_backward(is_odd: bool) -> None:
    """The odd rank finds a loss that is not finite, and goes on with the next batch."""
    model = sharded()
    train(model, 2)
    if is_odd:
        loss_of(model)
    train(model)


def _swallow(is_odd: bool) -> None:
    """The odd rank catches an error of its forward, and goes on with the next batch."""
    model = sharded()
    train(model, 2)
    if is_odd:
        hook = model.blocks["c"].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            loss_of(model)
        except ZeroDivisionError:
            hook.remove()
            model.reset_iter_state()
    train(model)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which the odd rank differs."""

    run: Callable[[bool], None]
    """The program of a rank; the argument is true for the odd one."""
    words: tuple[str, ...]
    """What the exception of every rank must contain, besides the name of a rank."""
    num_ranks: int = 2
    num_local: int = 1


def _of(odd: Mapping[str, Any], *words: str, **common: Any) -> Kind:
    return Kind(run=lambda is_odd: _settings(is_odd, odd, **common), words=words)


def _alone(action: Callable[[Any], Any], *words: str) -> Kind:
    return Kind(run=_only_first(action), words=("rank 1 ", *words))


def kinds() -> dict[str, Kind]:
    """All kinds by name."""
    whole, bf16 = laconic.whole(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "depth": Kind(
            run=lambda odd: train(sharded(Net("abcd" if odd else "abc"))), words=("blocks.d", "rank 1 differs")
        ),
        "depth with broadcast": Kind(
            run=lambda odd: train(sharded(Net("abcd" if odd else "abc"), broadcast=True)),
            words=("rank 1 differs", "fully_shard(broadcast=True) of Block"),
        ),
        "width": Kind(
            run=lambda odd: train(sharded(Net(hidden=31 if odd else 29))), words=("blocks.a", "up.weight", "(31, 17)")
        ),
        "names": Kind(run=_names, words=("blocks.c", "rank 1 differs")),
        "order": Kind(run=_order, words=("order of the units", "blocks.c")),
        "cache": _of({"cache": "host"}, "rank 1 differs", "cache Cache(where=host", "Net"),
        "wire": _of({"wire": "8bit"}, "rank 1 differs", "wire", "Net", cache="host"),
        "precision": _of({"mp_policy": bf16}, "rank 1 differs", "precision", "bfloat16"),
        "checks": _of({"checks": laconic.Checks(interval=3)}, "rank 1 differs", "checks", "interval=3"),
        "granularity": _of({"granularity": whole}, "rank 1 differs", "Net", "blocks"),
        "reshard after forward": _of({"reshard_after_forward": False}, "rank 1 differs", "reshard_after_forward False"),
        "offload": _of({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "rank 1 differs", "offload"),
        "broadcast": _of({"broadcast": True}, "rank 1 differs", "broadcast=True"),
        "unit lists": _of({"skip": "c"}, "rank 1 differs", "blocks.c"),
        "dtype": Kind(run=lambda odd: train(sharded(Net().double() if odd else Net())), words=("Net", "torch.float64")),
        "tied weights": Kind(run=_tied, words=("rank 1 differs", "other.weight")),
        "trainability": Kind(run=_frozen, words=("rank 1 differs", "blocks.b", "up.weight", "frozen")),
        "weights": Kind(run=_weights, words=("rank 1 has others", "blocks.b")),
        "mesh": Kind(run=_mesh, words=("rank 3 differs", "mesh"), num_ranks=4, num_local=2),
        "islands": Kind(run=_islands, words=("rank 1 differs", "mesh")),
        "accumulation": Kind(run=_flag, words=("rank 1 differs", "blocks.b", "requires_gradient_sync False")),
        "unit b for unit c": Kind(run=_later(_call("abb")), words=("rank 1", "blocks.b", "blocks.c")),
        "other order of calls": Kind(run=_later(_call("acb")), words=("rank 1", "blocks.b", "blocks.c")),
        "a unit once more": Kind(run=_later(_call("abcc")), words=("rank 1", "blocks.c")),
        "a unit left out": Kind(run=_later(_call("ac")), words=("rank 1", "blocks.")),
        "evaluation of another unit": Kind(run=_evaluate_other_unit, words=("rank 1", "blocks.a", "blocks.b")),
        "no_sync": Kind(run=_later(_without_sync), words=("rank 1",)),
        "frozen later": Kind(
            run=_later(lambda model: model.blocks["b"].requires_grad_(False)), words=("rank 1", "blocks.")
        ),
        "evaluation on rank 0": _alone(_evaluate),
        "skipped step": Kind(run=_skip_step, words=("rank 1 ",)),
        "uneven steps": Kind(run=_end_early, words=("rank 1 ", "forward 3")),
        "full_tensor on rank 0": _alone(lambda model: next(model.parameters()).full_tensor(), "the whole"),
        "save on rank 0": _alone(_save),
        "clip_grad_norm_ on rank 0": _alone(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        "exception in forward": Kind(run=_fail_in_forward, words=("rank 1", "ZeroDivisionError")),
        "exit in forward": Kind(run=_end_in_forward, words=("rank 1 ", "blocks.b")),
        "skipped backward": Kind(run=_skip_backward, words=("rank 1 ",)),
        "caught exception": Kind(run=_swallow, words=("rank 1 ",)),
    }


def run_kind(name: str) -> list[Any]:
    """Run this rank's program. Returns the text of the exception that ended it, or "", and the seconds from its start.

    The end of the process follows, as a script's would.
    """
    import atexit
    import time
    import traceback

    from laconic.comm.failure import record_failure

    dist.init_process_group("gloo")
    dist.barrier()
    begin, told = time.monotonic(), ""
    try:
        kinds()[name].run(dist.get_rank() == dist.get_world_size() - 1)
    except SystemExit:
        pass
    except Exception as error:
        told = "".join(traceback.format_exception_only(error))
        record_failure(error)
    wall_s = time.monotonic() - begin
    atexit._run_exitfuncs()
    return [told, wall_s]


MOST_S = 15.0
QUICK = ("depth", "cache", "unit b for unit c", "evaluation on rank 0", "uneven steps", "full_tensor on rank 0")
_EXITS = ("uneven steps", "exit in forward")  # here the odd rank ends in order, and has no exception
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one kind."""

    name: str
    wall_s: float
    """The seconds until the last rank ended."""
    fault: str
    """What was missing; "" if all ranks ended as promised."""
    told: list[str]
    """The exceptions of all ranks."""


def try_kind(name: str) -> Outcome:
    """Run all ranks of a kind, and look at their exceptions."""
    kind = kinds()[name]
    try:
        ends = launch(run_kind, name, num_ranks=kind.num_ranks, num_local=kind.num_local, timeout_s=90, backend=None)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(name=name, wall_s=90.0, fault=f"no end: {str(error)[-300:]}", told=[])
    told, wall_s = [end[0] for end in ends], max(end[1] for end in ends)
    judged = told[:-1] if name in _EXITS else told
    words = ("rank ", *kind.words)
    # the rank whose own exception began all has that exception
    missing = [
        f"rank {rank} lacks {word!r}"
        for rank, text in enumerate(judged)
        for word in words
        if word not in text and not (name == "exception in forward" and rank == kind.num_ranks - 1)
    ]
    if wall_s > MOST_S:
        missing.append(f"took {wall_s:.1f} s")
    return Outcome(name=name, wall_s=wall_s, fault="; ".join(missing), told=told)


@campaign_row("ranks-differ", section="mend")
def row(bench: Bench) -> Row:
    """Try all kinds."""
    names = [name for name in kinds() if not bench.quick or name in QUICK]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = list(pool.map(try_kind, names))
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.wall_s:.1f} s {outcome.fault or 'ok'}", flush=True)
    faulty = [outcome.name for outcome in outcomes if outcome.fault]
    good, longest = len(outcomes) - len(faulty), max(outcome.wall_s for outcome in outcomes)
    least = len(QUICK) if bench.quick else 30
    return Row(
        claim="ranks that differ in settings, in what they call, or that miss",
        required=f">= {least} kinds; all of them end on all ranks within {MOST_S:g} s with an exception that names "
        "rank, unit and difference",
        measured=f"{good} of {len(outcomes)}; the longest {longest:.1f} s",
        is_met=good == len(outcomes) >= least,
        note=f"2 or 4 processes with Gloo; fails: {', '.join(faulty)}" if faulty else "2 or 4 processes with Gloo.",
    )
