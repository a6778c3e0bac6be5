"""Every state that a power cut may leave of a save, loaded: see [Note: What a power cut may leave] in power_loss.py."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from laconic import checkpoint
from tests.faults import saves
from tests.faults.bench import Bench, Found, campaign
from tests.faults.power_loss import Recorder, State, crash_states, sampled_states, undisturbed

KINDS = (*saves.STEPS, *saves.JOBS)
LIMIT = 64
"""States of one instant that are all built; see `power_loss.crash_states`."""
_IN_PLACE = re.compile(r"^(latest|step-\d+)$")
HARMS = ("not loadable", "loaded differing", "foreign errors", "false alarms", "saves after it that failed")


def tally(recorder: Recorder, states: Iterable[State], *, save_every: int = 8) -> tuple[int, list[str]]:
    """Load states of a recorded save, and save again on top of each `save_every`-th of them.

    Returns their number, and the harms, which begin with their kind.
    """
    expected, harmed, number = {0: ""}, [], 0
    for state in undisturbed(recorder, saves.COMMITTED):
        with on_disk(state) as folder:
            loaded = saves.load(folder / saves.RUN)
            assert loaded.sequence == len(state.marks), loaded
            expected[loaded.sequence] = loaded.digest
    for number, state in enumerate(states, 1):
        with on_disk(state) as folder:
            harm = harm_of(saves.load(folder / saves.RUN), expected, len(state.marks))
            if not harm and number % save_every == 1:
                harm = _harm_of_save(folder / saves.RUN)
        harmed += [f"{harm}: {state.folders}, {sorted(state.files)}"] if harm else []
    return number, harmed


def harm_of(loaded: saves.Loaded, expected: dict[int, str], num_committed: int) -> str:
    """The harm that a state does to a resume, and what the resume said; empty if there is none."""
    if loaded.foreign:
        return f"foreign errors: {loaded.foreign}"
    if loaded.refusal or loaded.sequence not in (num_committed, num_committed + 1):
        return f"not loadable: {loaded.refusal or f'found {loaded.sequence} of {num_committed}'}"
    if loaded.digest != expected[loaded.sequence]:
        return f"loaded differing: checkpoint {loaded.sequence}"
    return f"false alarms: {loaded.warned[0]}" if loaded.warned else ""


def _harm_of_save(folder: Path) -> str:
    """Save on top of a state; the folder must be in order then."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = checkpoint.save_checkpoint(folder, 9, model=saves.small_model(), optimizer=None, extra={})
    except Exception as error:  # of any kind: that is what the campaign counts
        return f"saves after it that failed: {type(error).__name__}: {error}"
    loaded, names = saves.load(folder), [entry.name for entry in folder.iterdir()]
    rubbish = [name for name in names if not _IN_PLACE.match(name)]
    is_bad = path.name != "step-9" or loaded.refusal or loaded.warned or loaded.foreign or rubbish
    return f"saves after it that failed: {loaded}, left {rubbish}" if is_bad else ""


@contextmanager
def on_disk(state: State) -> Iterator[Path]:
    """Yield a folder, in memory if possible, with the files of a state."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        state.write(Path(name))
        yield Path(name)


@campaign(
    "crash-states",
    "states that a power cut may leave of a save; not loadable, or loaded differing",
    harms=HARMS,
)
def power_cuts(bench: Bench) -> Found:
    """Load each state: the newest checkpoint, or the one whose save was under way, equal to the bit, and no warning."""
    numbers, harmed = {}, list[str]()
    for kind, recorder in saves.record(list(KINDS), bench.out / "crash-states").items():
        states = sampled_states(recorder, 40) if bench.quick else crash_states(recorder, limit=LIMIT)
        numbers[kind], found = tally(recorder, states)
        harmed += found
    return sum(numbers.values()), harmed, f"By kind of save: {numbers}. Instants with over {LIMIT} states are sampled."
