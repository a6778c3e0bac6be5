"""docs/results.md, docs/studies.md and the table of twins in README.md, from the record.

python -m benchmarks.page    writes all three anew
"""

from __future__ import annotations

import csv
import textwrap
from dataclasses import dataclass
from pathlib import Path

from laconic.compare.markdown import markdown
from tests.support.record import RESULTS, STUDIES, Row, is_old, note_of, recorded_rows

README = Path(__file__).parents[1] / "README.md"
DOCS = README.with_name("docs")
_HEAD = """\
# Results

Each line is a row of the record, in the folder [results](../results/wire.json): a JSON file for each section, with the
method, the command, the date, the machine and the commit of each row, and CSV files with raw figures. `python -m
benchmarks.page` writes this page. A † means that code which the row measured has changed since: treat its figure as
history until somebody measures it again (`python -m tests.support.record` lists the commands). [Studies](studies.md)
has what was measured once, failures included. {spread}

**No cluster of GPUs has run laconic yet.** An H200 and an H100 have, each alone. All other figures are from a lab on
two processors, with real sockets at shaped rates and up to 16 ranks: trust its ratios of bytes, and its ratios of
seconds where the wire is the bound.
"""
_SPREAD = "The spread is the least and the most of the ratio over runs that took turns."


@dataclass(frozen=True)
class Line:
    """A row of the record, as the page shows it."""

    section: str
    key: str
    words: str
    peer: str
    pairs: tuple[tuple[str, str], ...] = ()
    """What ran, ours and the peer, for each ratio whose spread is shown."""


GAINS = (
    Line("wire", "time-2x2", 'full training, exact (`cache="host"`), 2 x 2 at 200 Mbit/s: seconds', "FSDP2 / HSDP",
         (("host", "fsdp2"), ("host", "hsdp"))),
    Line("wire", "wire-full", "the same: bytes on the wire", "FSDP2 / HSDP"),
    Line("wire", "device-memory", "the same: peak of device memory", '`cache="none"` / FSDP2'),
    Line("thinner", "seconds", "full training, four bits, at 200 / 50 Mbit/s: seconds", "FSDP2",
         (("4bit at 200mbit", "fsdp2 at 200mbit"), ("4bit at 50mbit", "fsdp2 at 50mbit"))),
    Line("thinner", "against-hsdp", "the same at 50 Mbit/s", "HSDP / ZeRO++'s algorithm",
         (("4bit", "hsdp"), ("4bit", "zero++"))),
    Line("thinner", "bytes", "the same: bytes for each parameter; bytes on the wire", "FSDP2 / exact / ZeRO++"),
    Line("thinner", "accumulated", "the same with 4 micro-batches: bytes on the wire", "ZeRO++"),
    Line("twins", "bytes", "bytes on the wire in fp32 / bf16 / fp32 with 8 micro-batches / bf16 with 8: exact; four "
         "bits", "FSDP2"),
    Line("thinner", "paired", "the same: loss, from one checkpoint", "exact / ZeRO++"),
    Line("lossless", "lossless-seconds", "bf16, lossless, at 200 / 50 Mbit/s: seconds; with gradients in four bits",
         "exact; four bits",
         (("lossless at 200mbit", "host at 200mbit"), ("lossless at 50mbit", "host at 50mbit"))),
    Line("wire", "lora-hpz", "LoRA at 50 Mbit/s: seconds", "FSDP2 hpZ / DeepSpeed hpZ / ZeRO++'s algorithm",
         (("host", "fsdp2-hpz"), ("host", "deepspeed-hpz"), ("host", "zero++"))),
    Line("placement", "rank-lora", 'LoRA at 200 Mbit/s, weights whole (`cache="rank"`): seconds', "DDP / FSDP2",
         (("rank", "ddp"), ("rank", "fsdp2"))),
    Line("pipeline", "seconds", "full training, few tokens, a pipeline over machines: seconds at 200 / 50 Mbit/s; loss",
         "laconic exact; four bits; FSDP2's pipeline; HSDP"),
    Line("pipeline", "two-boxes", "two boxes at 200 Mbit/s: tokens/s, full training with 2 / 8 rows a rank / LoRA",
         "one box, at its best"),
    Line("placement", "unequal", "two of four ranks at half speed, rows by measured speed: tokens/s; loss",
         "equal rows"),
    Line("local_steps", "bytes", "local steps (DiLoCo, int4): bytes a token", "DDP"),
    Line("local_steps", "loss-codecs", "the same: loss at equal tokens, whole / streamed", "DDP"),
    Line("cyclic", "run", "cyclic schedule, 4 workers: activations held at the peak", "data parallelism"),
    Line("optimizers", "adamw8bit-loss", "AdamW in eight bits: loss", "AdamW"),
    Line("publish", "bytes", "weight sync after a step, by learning rate: bytes", "whole weights"),
    Line("publish", "sync-1", "weight sync to one reader at 200 Mbit/s: seconds", "a broadcast"),
    Line("gpu", "step-fsdp2", "one H100, one rank: seconds", "FSDP2"),
    Line("gpu", "step-plain", "the same", "plain PyTorch"),
    Line("gpu", "policies", "one GPU: policies whose losses are those on CPU", ""),
    Line("plan", "bytes-interface", "`laconic plan`: error in bytes on the wire", "what the lab's interfaces count"),
    Line("plan", "seconds", "`laconic plan`: error in seconds", "steps in the lab"),
    Line("plan", "pipelines", "`laconic plan`: error in seconds and memory of pipelines", "steps in the lab"),
    Line("trust", "kills", "killed ranks, nodes and runs", ""),
    Line("trust", "races", "races between streams, messages and threads", ""),
    Line("trust", "bit-flips", "flipped bits, with checksums on", ""),
)  # fmt: skip
PEERS = (
    Line("placement", "rank-unshaped", "full training, no slow wire: seconds of ours", "DDP (better) / FSDP2",
         (("rank", "ddp"), ("rank", "fsdp2"))),
    Line("placement", "rank-shaped", "full training at 200 Mbit/s, weights whole: ours; our bytes on the wire alone",
         "DDP: better on 4 x 1"),
    Line("placement", "grid-peers", '`cache="auto"`, 100 cells: median and worst of seconds; memory',
         "the best peer in the same memory"),
    Line("wire", "time-4x1", "full training, exact, one rank on each of 4 machines: seconds", "FSDP2 / HSDP (level)",
         (("host", "fsdp2"), ("host", "hsdp"))),
    Line("host_time", "host-time", "the host's own time, none / host / rank / 4bit, on a CPU", "FSDP2 (4bit: better)"),
    Line("lossless", "lossless-unshaped", "bf16, lossless, no slow wire, coded on a CPU: seconds", "exact"),
    Line("gpu", "memory-fsdp2", "one GPU, 4 ranks over Gloo: peak of device memory", "FSDP2"),
    Line("gpu", "host-4bit", "one GPU: the host's time of a step, four bits", "FSDP2"),
    Line("gpu", "adamw8bit", "one GPU: a step of AdamW in eight bits", "torch's fused AdamW"),
    Line("local_steps", "slices-mlp-8", "partial updates, 1/2, 1/4, 1/8 of MLPs: loss at equal tokens",
         "streaming DiLoCo"),
    Line("local_steps", "slices-time", "the same: seconds to a loss at 20 Mbit/s", "streaming DiLoCo"),
    Line("local_steps", "loss-top-k", "local steps, top-k in two bits: loss at equal tokens", "DDP"),
    Line("published", "seconds", "`laconic plan`: error in strangers' published seconds, median; worst",
         "their measurements"),
)  # fmt: skip
UNMEASURED = (
    "Two or more machines with GPUs: NCCL over Ethernet, InfiniBand, RoCE. [Simulated](simulated.md) and "
    "[published](published.md) are predictions.",
    "Overlap of four-bit crossings with compute on GPUs over a real wire.",
    "Seconds in bf16 with accumulation on a processor that multiplies bf16: `python -m benchmarks.twins` has the rows.",
    "Models above 20 M parameters in the lab, and losses after more than some thousand steps.",
    "DDP's PowerSGD hook beside ours in the lab; the planner has it.",
    "Slices of MLPs with 10 M parameters, 16 islands and five seeds; the row above has 0.13 M and two.",
    "ResNet-50 and a ViT under the cyclic schedule on images, at their published accuracy.",
)
"""What nobody has measured."""


def results() -> str:
    """The page of results."""
    rows = recorded_rows()
    is_spread = any(_spread(rows[line.section, line.key], line.pairs) for line in (*GAINS, *PEERS))
    unmeasured = [textwrap.fill(f"- {each}", 120, subsequent_indent="  ") for each in UNMEASURED]
    return "\n".join([
        _HEAD.format(spread=_SPREAD if is_spread else ""), "## What you get\n", _table(GAINS, rows), "",
        "## Where a peer is better, or as good\n", _table(PEERS, rows), "", "## What nobody has measured\n",
        *unmeasured, "",
    ])  # fmt: skip


def _table(lines: tuple[Line, ...], rows: dict[tuple[str, str], Row]) -> str:
    cells = []
    for line in lines:
        row = rows[line.section, line.key]
        cells.append([
            line.words, line.peer, row.measured, _spread(row, line.pairs),
            f"{row.date}{' †' if is_old(row) else ''}", f"[{line.section}](../results/{line.section}.json) {line.key}",
        ])  # fmt: skip
    return markdown(("what", "beside", "measured", "spread", "on", "row"), cells, num_text_columns=6)


def _spread(row: Row, pairs: tuple[tuple[str, str], ...]) -> str:
    """The least and the most of each ratio over runs that took turns; empty if the record has not each run."""
    found = [
        [a / b for a, b in zip(row.runs.get(ours, ()), row.runs.get(peer, ()), strict=True)] for ours, peer in pairs
    ]
    return " / ".join(f"{min(ratios):.3f} to {max(ratios):.3f}x" for ratios in found) if all(found) else ""


def studies() -> str:
    """The page of what was measured once, the newest first."""
    rows = [row for (section, _), row in recorded_rows().items() if section == STUDIES]
    told = [
        f"## {row.claim}\n\n**{row.measured}** (`{row.key}`, {row.date})\n\n{note_of(row)}\n\n"
        f"`{row.command}`; {row.machine}.\n"
        for row in sorted(rows, key=lambda row: row.date, reverse=True)
    ]
    return "\n".join([_STUDIES, *told])


_STUDIES = """\
# Studies

What was measured once, the newest first. Their programs are gone from the repository, as each has answered its
question; the history has them. What failed stands here as what went well.
"""


_BEGIN, _END = "<!-- from results/twins-bytes.csv: python -m benchmarks.page -->\n", "<!-- end -->\n"


def front(page: str) -> str:
    """README with the megabytes of a step in fp32 and bf16, with one micro-batch and with eight."""
    with (RESULTS / "twins-bytes.csv").open(encoding="utf-8", newline="") as file:
        (_, *twins), *rows = csv.reader(file)
    base = [float(each) for each in rows[0][1:]]
    shown = [
        [label, *(f"{value} ({float(value) / least:.3f}x)" for value, least in zip(values, base, strict=True))]
        for label, *values in rows
    ]
    table = markdown(("MB on the wire (x FSDP2)", *twins), shown, num_text_columns=1)
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}{table}\n{_END}{rest.partition(_END)[2]}"


def main() -> None:
    """Write the pages."""
    README.write_text(front(README.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "results.md").write_text(results(), encoding="utf-8")
    (DOCS / "studies.md").write_text(studies(), encoding="utf-8")


if __name__ == "__main__":
    main()
