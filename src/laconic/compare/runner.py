"""The runner of a comparison: it opens one lab, runs one case after the other, and reports the progress."""

import shutil
from pathlib import Path
from typing import Self

from rich.console import Console

from laconic.compare.case import Case, ComparisonError, config_of
from laconic.compare.progress import ConsoleReporter
from laconic.compare.result import Result, read_result
from laconic.config import Config, to_toml
from laconic.lab import Lab, RunResult

_WARM = (
    "laconic.train.cli", "laconic.train.loop",
    "torch._dynamo",  # when a rank makes an optimizer
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama", "peft",
)  # fmt: skip
"""The modules that every rank imports, sooner or later."""
_SHOWN_LINES = 30  # of the output of a run that failed


class Comparison:
    """A lab that is open inside a `with` block, and runs one case after the other.

    Args:
        base: the training job that all cases share.
        out: the folder for the tokens and for a folder per run; the caller may write other files there.
        nodes: the number of emulated nodes.
        local: the number of ranks on each node.
        wire: whether the lab has a wire. Without a wire the rates of cases have no effect.
        timeout_s: the seconds after which a run has failed.
        reporter: the receiver of the progress; by default nothing shows it.

    Raises:
        laconic.lab.LabUnavailable: on entry, if the machine cannot make a wire.
    """

    def __init__(
        self, base: Config, out: Path, *, nodes: int = 2, local: int = 2, wire: bool = True,
        timeout_s: float = 1800.0, reporter: ConsoleReporter | None = None,
    ) -> None:  # fmt: skip
        self.base, self.out, self.local = base, out.absolute(), local
        self.lab = Lab(nodes=nodes, wire=wire)
        self.timeout_s = timeout_s
        self.reporter = reporter or ConsoleReporter(Console(quiet=True))

    def __enter__(self) -> Self:
        self.out.mkdir(parents=True, exist_ok=True)
        self.lab.__enter__()
        self.lab.warm_up(_WARM)
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.close()

    def run(self, case: Case) -> Result:
        """Train `case` from the beginning to the end, and return its measurements.

        Raises: ComparisonError if the run fails, ConfigError if the strategy cannot run this job.
        """
        config = config_of(self.base, case, self.out)
        folder = Path(config.train.output)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier comparison may have left it
        folder.mkdir(parents=True)
        job = folder / "job.toml"
        job.write_text(to_toml(config), encoding="utf-8")
        with self.reporter.running(case):
            outcome = self.run_ranks(["-m", "laconic.train.cli", str(job)], case.rate_bits_per_s)
        (folder / "output.txt").write_text("".join(node.output for node in outcome.nodes), encoding="utf-8")
        if outcome.exit_code:
            raise ComparisonError(f"{case.label} failed: {explain_failure(outcome)}")
        result = read_result(case, folder, wall_s=outcome.wall_s)
        self.reporter.finished(result)
        return result

    def run_ranks(self, command: list[str], rate_bits_per_s: float | None) -> RunResult:
        """Run any script on the lab's ranks, with every link limited to a rate. For the command see `Lab.run`."""
        if self.lab.wire:
            self.lab.set_rate(rate_bits_per_s)
        return self.lab.run(command, local=self.local, timeout_s=self.timeout_s, show=False)


def explain_failure(outcome: RunResult) -> str:
    """Explain a failed run in text: the trainer's own message, the first traceback, or the last lines of output."""
    if outcome.timed_out:
        return f"ended at its timeout after {outcome.wall_s:.0f} s"
    lines = [line for node in outcome.nodes for line in node.output.splitlines()]
    refused = [line.removeprefix("laconic train: ") for line in lines if line.startswith("laconic train: ")]
    if refused:
        return refused[0]
    if outcome.failure is None:
        return _ending(lines)
    found = f"rank {outcome.failure.rank} failed first:\n{outcome.failure.error.rstrip()}"
    if outcome.failure.exit_code < 0:  # after a signal there is no traceback, but the output may explain it
        found += "\n" + _ending(outcome.nodes[outcome.failure.node].output.splitlines())
    return found


def _ending(lines: list[str]) -> str:
    return "\n".join(["its last lines are", *lines[-_SHOWN_LINES:]])
