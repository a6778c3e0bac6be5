"""The rows that each rank gets, by the configuration or by measured speed: [Note: Unequal rows] in data/batches.py.

[Note: Seconds of its own]
Ranks wait for each other in every gather and reduction, so all take equally long for a step, whatever their speeds. The
forward of one layer is the piece of a step in which a rank waits for nobody: transfers are awaited before it and after
it. So a clock reads the time when a layer begins, behind the hooks that gather its weights, and when it ends, before
those that free them. On an accelerator these are events on the stream that computes, and the host waits for none of
them until ranks compare. Wall time it is, since a rank that is stopped, as by a quota of its control group, does not
see that in the time of its processor. Backward needs a fixed multiple of forward on every rank, and is not measured.
The clock divides by the tokens that the layers have seen, so repeated forwards of recomputation and of audits count
rightly.

[Note: When ranks compare]
Ranks compare after 4, 8, 16 and 32 steps and then after every 64th, counted from the start or the resumption of a run.
They compare the medians of the steps since they last did so, of the last 16 if there are more. The first step is not
measured: it compiles, allocates and connects. Ranks tell each other their seconds per token, and all compute the same
division from them. It changes only if the last rank of an island would end at least 5 % earlier, as measurements are
never equal twice. Fixed costs of a micro-batch are in the measured time, so a rank with few rows looks slower than it
is. But the next comparison measures what the new rows take, so the times of ranks still meet.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic import _compat
from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.config import TrainConfig
from laconic.data.batches import LEAST_TOKENS
from laconic.hf.layers import layers_to_shard
from laconic.train.meter import moment_on, seconds_between

_FIRST_STEPS, _EVERY_STEPS = (4, 8, 16, 32), 64
_MOST_STEPS = 16
_LEAST_GAIN = 0.05


def is_compared(taken: int) -> bool:
    """Whether ranks compare after so many steps of this process: [Note: When ranks compare]."""
    return taken in _FIRST_STEPS or (taken > 0 and taken % _EVERY_STEPS == 0)


class LayerClock:
    """Measures the seconds per token in which layers run forward on this rank: [Note: Seconds of its own]."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Watch `layers`, which no other layer contains, after their own hooks are there."""
        self._device = device
        self._steps: list[list[tuple[Any, Any, int]]] = []  # of each step: begin, end and tokens of each forward
        self._is_on = False
        self._begun: Any = None
        self._handles = [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers]
        self._handles += [layer.register_forward_hook(self._leave, prepend=True, with_kwargs=True) for layer in layers]

    def begin_step(self) -> None:
        """Measure from now on."""
        self._steps.append([])
        self._is_on = True

    def end_step(self) -> None:
        """Measure no more until the next `begin_step`."""
        self._is_on = False

    def seconds_per_token(self) -> float | None:
        """The median over the measured steps, which are then forgotten; None if no row had tokens. Waits for them."""
        steps, self._steps = [step for step in self._steps if step], []
        return statistics.median(map(self._of_step, steps)) if steps else None

    def close(self) -> None:
        """Leave the layers as they were."""
        for handle in self._handles:
            handle.remove()

    @_compat.outside_compilation
    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._begun = moment_on(self._device) if self._is_on else None

    @_compat.outside_compilation
    def _leave(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # a recomputation may end inside a layer, whose end is then never seen
        if self._begun is None:
            return
        hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if (num_tokens := hidden.shape[:-1].numel()) > LEAST_TOKENS:  # no micro-batch without rows
            self._steps[-1].append((self._begun, moment_on(self._device), num_tokens))
        self._begun = None

    def _of_step(self, forwards: Sequence[tuple[Any, Any, int]]) -> float:
        seconds = sum(seconds_between(begin, end) for begin, end, _ in forwards)
        return seconds / sum(num_tokens for *_, num_tokens in forwards)


class RowBalance:
    """Divides the rows of a step over the ranks of each island, and keeps the division even with their speeds."""

    def __init__(
        self, model: nn.Module, train: TrainConfig, ranks: RankInfo, peers: range, device: torch.device,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Begin with the rows of the job; under "by-speed" they are equal at first.

        Args:
            model: the model, sharded.
            train: the section with `rows`, which fit the ranks.
            ranks: the ranks of this launch.
            peers: the parts of the global batch that share an optimizer step with this rank's.
            device: where the model is.
            say: gets a line for the user.
        """
        self._size, self._say = len(peers), say
        self._place = ranks.rank // self._size  # of this rank's island
        self._cluster = [ranks.num_nodes, ranks.num_local, self._size]
        mean = train.micro_batch_size * train.accumulation
        self._rows_of_island = mean * self._size
        self.rows: tuple[int, ...] = ()
        """The rows of each rank of this launch; empty where the job wants equal ones."""
        self._clock: LayerClock | None = None
        if isinstance(train.rows, tuple):
            self.rows = train.rows
        elif train.rows == "by-speed":
            self.rows = (mean,) * ranks.world_size
            self._clock = LayerClock(layers_to_shard(model), device)

    def own_rows(self) -> tuple[int, ...] | None:
        """The rows of each rank of this rank's island, for `Division.rows`."""
        return self._of_island(self._place, self.rows) or None

    def state(self) -> dict[str, Any]:
        """The part that a checkpoint needs; empty unless the rows are measured."""
        return {} if self._clock is None else {"rows": {"cluster": self._cluster, "by_rank": list(self.rows)}}

    def load(self, extra: Mapping[str, Any]) -> None:
        """Go on with the rows of a saved run, if it had as many rows on the same cluster; `extra` has its `state`."""
        saved = extra.get("rows")
        if saved is None or self._clock is None or saved["cluster"] != self._cluster:
            return
        rows = tuple(saved["by_rank"])
        if all(sum(self._of_island(island, rows)) == self._rows_of_island for island in range(self._num_islands)):
            self.rows = rows

    def begin_step(self, taken: int) -> None:
        """Before the step that makes `taken` steps of this process: measure it if a comparison is near."""
        if self._clock is not None and taken > 1 and any(is_compared(taken + ahead) for ahead in range(_MOST_STEPS)):
            self._clock.begin_step()

    def end_step(self) -> None:
        """After a step."""
        if self._clock is not None:
            self._clock.end_step()

    def compare(self, taken: int, step: int, peers: RankGroup) -> bool:
        """After `taken` steps of this process, compare if it is time, and return whether rows change. Collective.

        `step` is the number of the run's last step, and `peers` are the ranks of the launch.
        """
        if self._clock is None or not is_compared(taken):
            return False
        by_rank: list[float | None] = peers.gather(self._clock.seconds_per_token())
        seconds = tuple(each for each in by_rank if each)
        if len(seconds) < len(by_rank):  # a rank had no row in any of the last steps
            return False
        old, self.rows = self.rows, self._divided(seconds)
        if self.rows == old:
            return False
        before, after = last_end(old, seconds), last_end(self.rows, seconds)
        each = ", ".join(f"{1e6 * own:.3g}" for own in seconds)
        self._say(
            f"rows by speed after step {step}: {', '.join(map(str, self.rows))} for ranks 0 to {len(self.rows) - 1}, "
            f"whose layers take {each} us a token in forward; the last rank then computes for {after / before:.0%} of "
            "the time before"
        )
        return True

    def close(self) -> None:
        """Leave the model as it was."""
        if self._clock is not None:
            self._clock.close()

    def _divided(self, seconds: tuple[float, ...]) -> tuple[int, ...]:
        """The rows by these seconds per token, or the present ones where that gains too little."""
        rows: list[int] = []
        for island in range(self._num_islands):
            own, present = self._of_island(island, seconds), self._of_island(island, self.rows)
            best = fastest_rows(own, self._rows_of_island)
            gains = last_end(best, own) <= (1 - _LEAST_GAIN) * last_end(present, own)
            rows += best if gains else present
        return tuple(rows)

    @property
    def _num_islands(self) -> int:
        return len(self.rows) // self._size

    def _of_island(self, island: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values[island * self._size : (island + 1) * self._size]


def fastest_rows(seconds: Sequence[float], num_rows: int) -> tuple[int, ...]:
    """Divide `num_rows` rows over ranks so that the last rank ends as early as possible. Each gets at least one.

    Each further row goes to the rank that would have it done first; of several, to the first rank. No other division
    ends earlier. Reference: tests/reference/unequal.py.

    Args:
        seconds: the seconds that each rank takes for a row, above 0.
        num_rows: the rows of a step, at least as many as there are ranks.
    """
    rows = [1] * len(seconds)
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]  # of each rank, if it gets one more row
    heapq.heapify(ends)
    for _ in range(num_rows - len(seconds)):
        _, rank = ends[0]
        rows[rank] += 1
        heapq.heapreplace(ends, ((rows[rank] + 1) * seconds[rank], rank))
    return tuple(rows)


def last_end(rows: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds after which the last rank has done its rows, if it waits for nobody."""
    return max(number * each for number, each in zip(rows, seconds, strict=True))
