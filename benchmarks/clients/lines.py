"""The row about the size of the change: how many lines of a script differ with laconic."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from benchmarks.clients.bench import BENCHMARK, Bench
from tests.support.record import Row

_EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = {"trainer.py": 3, "sft_lora.py": 3, "train_gpt.py": 8}
_MARK = re.compile(r"# (was: .*|new)$")


@BENCHMARK.row("lines")
def lines(bench: Bench) -> Row:
    counts = {"train_gpt.py": changed("train_gpt_ddp.py", "train_gpt.py")}
    counts |= {name: marked(name) for name in ("trainer.py", "sft_lora.py")}
    return Row(
        claim="lines changed in a Trainer script / an SFTTrainer + peft script / a DDP loop",
        required=" / ".join(f"<= {limit}" for limit in LIMITS.values()),
        measured=" / ".join(str(counts[name]) for name in LIMITS),
        is_met=all(counts[name] <= limit for name, limit in LIMITS.items()),
        note=(
            "examples/trainer.py and examples/sft_lora.py say in a comment where they differ from a stock script. "
            "examples/train_gpt.py is compared with train_gpt_ddp.py; a line that replaces another counts once, "
            "imports count, empty lines do not."
        ),
    )


def marked(name: str) -> int:
    """Return the number of lines that a comment marks as new or changed."""
    found = [line for line in (_EXAMPLES / name).read_text().splitlines() if _MARK.search(line)]
    if not found:
        raise RuntimeError(f"examples/{name} marks no line with '# was: ...' or '# new'")
    return len(found)


def changed(old: str, new: str) -> int:
    """Return the number of lines that differ between two examples, without their docstrings."""
    before, after = (_code(name) for name in (old, new))
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def _code(name: str) -> list[str]:
    text = re.sub(r'^""".*?"""\n', "", (_EXAMPLES / name).read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]
