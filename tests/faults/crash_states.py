"""Every state that a power cut may leave of a save, loaded: see [Note: What a power cut may leave] in power_loss.py."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from laconic import checkpoint
from tests.faults import saves
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.power_loss import Recorder, State, crash_states, sampled_states, undisturbed
from tests.support.record import Row

KINDS = (*saves.STEPS, *saves.JOBS)
LIMIT = 64
"""States of one instant that are all built; see `power_loss.crash_states`."""
_IN_PLACE = re.compile(r"^(latest|step-\d+)$")
HARMS = ("not loadable", "loaded differing", "foreign errors", "false alarms", "saves after it that failed")


@dataclass
class Tally:
    """The states of one kind of save, and those with harm."""

    num_states: int = 0
    harmed: dict[str, list[str]] = field(default_factory=lambda: {harm: [] for harm in HARMS})

    @property
    def harms(self) -> dict[str, int]:
        return {harm: len(found) for harm, found in self.harmed.items()}


def tally(recorder: Recorder, states: Iterable[State], *, save_every: int = 8) -> Tally:
    """Load states of a recorded save, and save again on top of each `save_every`-th of them."""
    found = Tally()
    expected = {0: ""}
    for state in undisturbed(recorder, saves.COMMITTED):
        with on_disk(state) as folder:
            loaded = saves.load(folder / saves.RUN)
            assert loaded.sequence == len(state.marks), loaded
            expected[loaded.sequence] = loaded.digest
    for number, state in enumerate(states):
        found.num_states += 1
        with on_disk(state) as folder:
            harm, why = harm_of(saves.load(folder / saves.RUN), expected, len(state.marks))
            if not harm and number % save_every == 0:
                harm, why = _harm_of_save(folder / saves.RUN)
        if harm:
            found.harmed[harm].append(f"{why}: {state.folders}, {sorted(state.files)}")
    return found


def harm_of(loaded: saves.Loaded, expected: dict[int, str], num_committed: int) -> tuple[str, str]:
    """The harm that a state does to a resume, and what the resume said; the harm is empty if there is none."""
    if loaded.foreign:
        return "foreign errors", loaded.foreign
    if loaded.refusal or loaded.sequence not in (num_committed, num_committed + 1):
        return "not loadable", loaded.refusal or f"found {loaded.sequence} of {num_committed}"
    if loaded.digest != expected[loaded.sequence]:
        return "loaded differing", f"checkpoint {loaded.sequence}"
    if loaded.warned:
        return "false alarms", loaded.warned[0]
    return "", ""


def _harm_of_save(folder: Path) -> tuple[str, str]:
    """Save on top of a state; the folder must be in order then."""
    harm = "saves after it that failed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = checkpoint.save_checkpoint(folder, 9, model=saves.small_model(), optimizer=None, extra={})
    except Exception as error:  # of any kind: that is what the campaign counts
        return harm, f"{type(error).__name__}: {error}"
    loaded, names = saves.load(folder), [entry.name for entry in folder.iterdir()]
    if path.name != "step-9" or loaded.refusal or loaded.warned or loaded.foreign:
        return harm, str(loaded)
    rubbish = [name for name in names if not _IN_PLACE.match(name)]
    return (harm, f"left {rubbish}") if rubbish else ("", "")


@contextmanager
def on_disk(state: State) -> Iterator[Path]:
    """Yield a folder, in memory if possible, with the files of a state."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        state.write(Path(name))
        yield Path(name)


def tallies(folder: Path, *, quick: bool) -> Iterator[tuple[str, Tally]]:
    """Tally all kinds."""
    for kind, recorder in saves.record(list(KINDS), folder).items():
        states = sampled_states(recorder, 40) if quick else crash_states(recorder, limit=LIMIT)
        yield kind, tally(recorder, states)


@campaign_row("crash-states")
def row(bench: Bench) -> Row:
    """Count the states of all kinds of saves that do harm."""
    by_kind = {}
    for kind, found in tallies(bench.out / "crash-states", quick=bench.quick):
        by_kind[kind] = found
        print(f"{kind}: {found.num_states} states, {found.harms}", flush=True)
        for harm, examples in found.harmed.items():
            for example in examples[:3]:
                print(f"  {harm}: {example}", flush=True)
    counts = ", ".join(f"{kind} {found.num_states:,}" for kind, found in by_kind.items())
    return faults_row(
        claim="states that a power cut may leave of a save; not loadable, or loaded differing",
        tried=sum(found.num_states for found in by_kind.values()),
        at_least=1,
        harms={harm: sum(found.harms[harm] for found in by_kind.values()) for harm in HARMS},
        note=f"Distinct states by kind of save: {counts}. Each is loaded, and must give the newest checkpoint or the "
        "one whose save was under way, equal to the bit and without a warning. On top of each eighth another save "
        f"follows. Instants with more than {LIMIT} states are sampled, as the module `power_loss` says.",
    )
