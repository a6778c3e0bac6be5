"""The time steps of a cyclic schedule, as the runtime executes them: ops, live activations and messages."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from laconic.cyclic.program import largest_burst, messages_per_step
from laconic.cyclic.schedule import Message, MessageKind, Rule, Schedule

_CELLS_PER_LINE = 24

KINDS: tuple[MessageKind, ...] = get_args(MessageKind)

_PARAMETER_KINDS: tuple[MessageKind, ...] = ("gradient", "total", "weights", "rear weights")
"""The kinds of messages that are as large as a stage. Other messages are activations of a stage, or single numbers."""


@dataclass(frozen=True, kw_only=True)
class CyclicPlan:
    """A schedule that is drained after some batches, and plain data parallelism with as many workers to compare."""

    schedule: Schedule
    batches: int

    def live(self) -> list[int]:
        """Return the number of stage activations that are alive in each time step, over all workers."""
        return self.schedule.live_activations(self.batches)

    def messages(self) -> list[list[Message]]:
        """Return, for each time step, the messages that leave at its beginning."""
        return messages_per_step(self.schedule, self.batches)

    def largest_burst(self) -> tuple[int, int]:
        """Return the most messages of a stage's size that one device sends, and receives, in one time step."""
        return largest_burst(self.schedule, self.batches, _PARAMETER_KINDS)

    @property
    def plain(self) -> Schedule:
        """The schedule of plain data parallelism, where all workers run at once."""
        return Schedule(Rule.named("dp", self.schedule.num_stages))

    def facts(self) -> dict[str, Any]:
        """Return the numbers below the time table. `largest_burst` is a fraction of all parameters of the model."""
        rule, n = self.schedule.rule, self.schedule.num_stages
        sends, receives = self.largest_burst()
        return {
            "rule": rule.name,
            "states": self.schedule.states,
            "stages": n,
            "workers": n,
            "devices": self.schedule.num_devices,
            "batches": self.batches,
            "time_steps": self.schedule.num_steps(self.batches),
            "time_steps_plain": self.plain.num_steps(self.batches),
            "fresh": rule.freshness,
            "switch": list(rule.switch),
            "slack": [rule.slack(stage) for stage in range(n)],
            "allows_global_norm": rule.allows_global_norm,
            "peak_live": max(self.live()),
            "peak_live_plain": max(self.plain.live_activations(self.batches)),
            "messages_by_kind": dict(Counter(m.kind for step in self.messages() for m in step)),
            "most_sends": sends,
            "most_receives": receives,
            "largest_burst": sends / n,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the facts, every worker's ops, the live activations, and every message."""
        return {
            **self.facts(),
            "table": [[op and op.label for op in row] for row in self.schedule.table(self.batches)],
            "live": self.live(),
            "messages": [dataclasses.asdict(message) for step in self.messages() for message in step],
        }

    def __str__(self) -> str:
        return "\n".join([*self._time_table(), *self._summary()])

    def _time_table(self) -> Iterator[str]:
        live, sent = self.live(), self.messages()
        columns: dict[str, list[object]] = {"step": list(range(len(sent)))}
        for worker, row in enumerate(self.schedule.table(self.batches), start=1):
            columns[f"w{worker}"] = [op.label if op else "." for op in row]
        columns |= {"live": list(live), "sent": list(map(len, sent))}
        width = 1 + max(len(str(cell)) for cells in columns.values() for cell in cells)
        for start in range(0, len(sent), _CELLS_PER_LINE):
            for name, cells in columns.items():
                yield f"{name:>4} " + "".join(f"{cell:>{width}}" for cell in cells[start : start + _CELLS_PER_LINE])
            yield ""

    def _summary(self) -> Iterator[str]:
        facts, rule = self.facts(), self.schedule.rule
        n, counts = rule.num_stages, facts["messages_by_kind"]
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if kind in counts) or "none"
        against = f", against {n * n} for model and data parallelism" if self.schedule.states == "shared" else ""
        first_fresh = [f"w{switch + 1}" if switch < n else "nobody" for switch in rule.switch]
        clipping = "can be clipped, and steps can be skipped"
        if not rule.allows_global_norm:
            clipping = "cannot be clipped, nor steps skipped: some stages are updated before all gradients are known"
        lines = {
            "live": f"stage activations of all workers: at most {facts['peak_live']}, or "
            f"{facts['peak_live_plain']} if all workers run at once",
            "sent": f"messages that leave at the beginning of the time step: {kinds}",
            "time steps": f"{facts['time_steps']} for {self.batches} batches, or "
            f"{facts['time_steps_plain']} if all workers run at once",
            "devices": f"{facts['devices']}{against}",
            "largest burst": f"{facts['most_sends']} sends and {facts['most_receives']} receives of one stage's "
            "parameters, by one device in one time step",
            "fresh": f"{facts['fresh']:.1%} of all (worker, stage) pairs have the newest parameters; F1 to F{n} have "
            f"them from {', '.join(first_fresh)} on",
            "slack": f"{', '.join(map(str, facts['slack']))} time steps for the sum of B1 to B{n} to become parameters",
            "global norm": clipping,
        }
        return (f"{name:>13}  {text}" for name, text in lines.items())
