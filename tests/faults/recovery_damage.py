"""Damaged, exchanged and lost files of the recovery of islands: what a restart then loads, and what it says.

Two islands of two ranks train and keep their last syncs. Then every case does one thing to a copy of these files, and
lets new ranks restore. Each rank compares what it has got with what it had when the state was saved.

A fault does harm if the restart fails ("blocks"), if a value is not the one that was saved, or ranks restore different
syncs ("altered"), if the state is of another run, rank or start ("foreign"), or if less is restored than without the
fault and no line says so ("silent").
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import rehearse
from laconic.islands.saved_state import SavedState
from laconic.store.series import MANIFEST
from tests.faults.bench import Bench, Found, campaign
from tests.faults.damage import damage, tries
from tests.support.sharded_net import shard

CASES = 600
HARMS = ("blocks", "altered", "foreign", "silent")
ISLANDS, LOCAL, SYNCS = 2, 2, (2, 4, 6, 8)
State = tuple[list[Tensor], dict[str, dict[str, Tensor]]]
"""Outer vectors, and the inner optimizer's state by parameter and key."""


@campaign(
    "recovery-damage",
    "faults in the recovery files of islands: flipped, cut, zeroed, exchanged, older, lost, of another rank",
    harms=HARMS,
)
def recoveries(bench: Bench) -> Found:
    """Let islands restart from damaged files."""
    cases = 16 if bench.quick else CASES
    counts, harmed = try_cases(bench.out / "recovery-damage", cases)
    return cases, harmed, f"Restored: {dict(counts)}."


def try_cases(folder: Path, cases: int) -> tuple[Counter[str], list[str]]:
    """Try `cases` faults; count what was restored, and list the harms."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    truths = rehearse.ranks(_train, folder / "kept", nodes=ISLANDS, local=LOCAL)

    def use(copy: Path) -> str:
        return _verdict(rehearse.ranks(_restore, copy, truths, nodes=ISLANDS, local=LOCAL))

    found = list(tries(folder / "kept", cases, spoil, use))
    harmed = [f"{outcome}, {what}" for what, outcome in found if outcome.startswith(HARMS)]
    return Counter(outcome for _, outcome in found if not outcome.startswith(HARMS)), harmed


# -- one rank ----------------------------------------------------------------------------------------------------------


def _start(folder: Path, seed: int) -> tuple[nn.Module, laconic.LocalSteps]:
    dist.init_process_group("gloo")
    mesh = laconic.init_mesh("cpu", islands=ISLANDS, nodes=1, local=LOCAL)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 3))
    shard(model, list(model), mesh=mesh)
    options = {"every": 4, "fragments": 2, "codec": "fp32", "run_id": "damage"}
    optimizer, machine = torch.optim.AdamW(model.parameters(), lr=0.01), folder / f"machine-{dist.get_rank() // LOCAL}"
    return model, laconic.LocalSteps(model, optimizer, mesh=mesh, recovery=machine, **options)  # type: ignore[arg-type]


def _train(folder: Path) -> dict[int, State]:
    """Train to the last sync; return the state of this rank after every sync, as it should be on the machine."""
    model, steps = _start(folder, seed=0)
    truth: dict[int, State] = {}
    inner: dict[str, dict[str, Tensor]] = {}
    for step in range(1, SYNCS[-1] + 1):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 5)).square().mean().backward()
        steps.step()
        steps.zero_grad()
        for report in steps.reports:  # the fragment's part is new; the first state has all fragments
            synced = steps.fragments if step == SYNCS[0] else [steps.fragments[report.fragment]]
            outer, all_inner = _state(steps)
            inner |= {name: all_inner[name] for fragment in synced for name in fragment.parameters}
            truth[step] = outer, dict(inner)
    steps.finish()
    return truth


def _state(steps: laconic.LocalSteps) -> State:
    parameters = {name: p for fragment in steps.fragments for name, p in fragment.parameters.items()}
    inner = {
        name: {
            key: (value.to_local() if isinstance(value, laconic.RaggedTensor) else value).clone()
            for key, value in steps.optimizer.state.get(parameter, {}).items()
        }
        for name, parameter in parameters.items()
    }
    return [vector.clone() for fragment in steps.fragments for vector in fragment.vectors()], inner


def _restore(folder: Path, truths: list[dict[int, State]]) -> tuple[int, bool, bool, list[str], str]:
    """Restore; return the step, whether values are right, whether there is inner state, the lines, and the error."""
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        try:
            _, steps = _start(folder, seed=1)
        except Exception as error:
            return 0, False, False, [], f"{type(error).__name__}: {error}"
    truth, (outer, inner) = truths[dist.get_rank()], _state(steps)
    inner = {name: state for name, state in inner.items() if state}
    is_right = steps.steps in (0, *truth)
    if steps.steps:
        wanted, kept = truth[steps.steps]
        is_right = all(map(torch.equal, outer, wanted))
        is_right &= not inner or (inner.keys() == kept.keys() and all(_same(inner[name], kept[name]) for name in kept))
    return steps.steps, is_right, bool(inner), [str(line.message) for line in lines], ""


def _same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)


def _verdict(found: list[tuple[int, bool, bool, list[str], str]]) -> str:
    """The outcome of a case, with a detail, from what all ranks have found."""
    steps, are_right, has_inner, said, errors = zip(*found, strict=True)
    halves = [has_inner[i * LOCAL : (i + 1) * LOCAL] for i in range(ISLANDS)]
    if any(errors):
        return f"blocks: {errors}"
    if not set(steps) <= {0, *SYNCS}:
        return f"foreign: {steps}"
    if len(set(steps)) > 1 or not all(are_right) or any(len(set(half)) > 1 for half in halves):
        return f"altered: {steps}, {has_inner}, {said}"
    if steps[0] == SYNCS[-1] and all(has_inner):
        return "restored newest"
    if not any(said):
        return f"silent: {steps}, {has_inner}"
    return "restored less" if steps[0] else "nothing"


# -- the faults --------------------------------------------------------------------------------------------------------


def spoil(folder: Path, rng: random.Random) -> str:
    """Do one thing to the files below `folder`; return its name."""
    files = sorted(path for path in folder.rglob("start-*/*") if path.is_file())
    path = rng.choice(files)
    if rng.random() >= 0.4:
        return f"{damage(path, files, rng)} in {path.parent.relative_to(folder)}"
    fault = rng.choice(["older", "lost", "wandering", "renamed", "of another run"])
    state, machine = path.parent, path.parent.parent
    match fault:
        case "older":  # an older file of the same rank, as after a restored backup
            own = machine.glob(f"*-island{state.name.partition('-island')[2]}/{path.name}")
            path.write_bytes(min(own).read_bytes())
        case "lost":  # all files of one rank, of one machine, or of one step on one machine
            rank, step = state.name.split("shard-")[1][:1], state.name.split("-island")[0]
            for each in list(machine.glob(rng.choice([f"*shard-{rank}-*", "*", f"{step}-*"]))):
                shutil.rmtree(each)
        case "wandering":  # on another machine, as when nodes have other numbers
            state.rename(rng.choice([each for each in folder.glob("*/*") if each != machine]) / state.name)
        case "renamed":  # a name of another start, step, island or shard
            pairs = [("start-1", "start-7"), ("step-8", "step-88"), ("island-0", "island-5"), ("d-0", "d-1")]
            name = state.name.replace(*rng.choice(pairs))
            state.rename(state.with_name(name if name != state.name else f"start-9{name[7:]}"))
        case "of another run":  # its folder has another name, or has this run's name
            if rng.random() < 0.5:
                machine.rename(machine.with_name("run-yesterday"))
            else:
                for each in machine.glob(f"*/{MANIFEST}"):
                    replace(SavedState.read(each), run="yesterday").write(each)
    return f"{fault}: {path.relative_to(folder)}"
