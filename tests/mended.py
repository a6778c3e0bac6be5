"""Classes of defects that were mended: every member is tried again.

python -m tests.mended                    all, recorded in RESULTS.md
python -m tests.mended --rows calls       some, recorded too
python -m tests.mended --quick            fewer members, printed only
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

from tests.checkpoint.test_storages import SAVES, STORAGES, cells
from tests.comm.test_journal import CALLS, LATEST_S, problems
from tests.composition import transforms as transforming
from tests.docs import methods
from tests.faults import first_contact as first
from tests.faults.bench import BENCHMARK, Bench, Found, campaign
from tests.kernels.apart import told
from tests.publish.test_http import TOKEN, read_twice
from tests.support.launch import launch


@campaign(
    "operators",
    "calls of torch's operator database on sharded tensors: results that are wrong, and errors that name no remedy",
    at_least=18_000, harms=("wrong", "unclear"), section="mend",
)  # fmt: skip
def operators(bench: Bench) -> Found:
    """Run the database in fp32 and bf16 on two and three ranks, in place and new, all arguments cut or the first."""
    tried, found = 0, []
    for dtype, num_ranks in [("float32", 2)] if bench.quick else product(("float32", "bfloat16"), (2, 3)):
        answer = told("tests.ragged.operators", str(num_ranks), dtype)
        tried += answer["calls"]
        for text in answer["problems"]:
            found.append(f"{'wrong' if ': wrong' in text else 'unclear'}: {text}, {dtype}, {num_ranks} ranks")
    return tried, found, "fp32 and bf16, 2 and 3 ranks; new results and in place; the first argument cut, or all"


@campaign(
    "optimizer-database",
    "configurations of torch's optimizer database on sharded parameters, against plain ones",
    at_least=500, harms=("wrong",), section="mend",
)  # fmt: skip
def optimizers(bench: Bench) -> Found:
    """Step every configuration on two and three ranks."""
    answers = [told("tests.ragged.optimizers", size) for size in (("2",) if bench.quick else ("2", "3"))]
    found = [f"wrong: {text}" for answer in answers for text in answer["problems"]]
    return sum(answer["configurations"] for answer in answers), found, "2 and 3 ranks"


@campaign(
    "storages",
    "storages of torch.distributed.checkpoint x ways to save x cuts, read by laconic, FSDP2, plain torch: other bits",
    at_least=80, harms=("other bits",), section="mend",
)  # fmt: skip
def storages(bench: Bench) -> Found:
    """Save by each storage, with cuts inside rows, and read three ways. A cell ends with an error if a bit differs."""
    tried, found = 0, []
    for num_ranks in (2,) if bench.quick else (2, 3, 5):
        with tempfile.TemporaryDirectory(prefix="laconic-storages-") as folder:
            try:
                tried += launch(cells, folder, list(SAVES), num_ranks=num_ranks, timeout_s=900)[0]
            except Exception as error:  # of any kind: it is the finding
                found.append(f"other bits: {num_ranks} ranks: {error}")
    note = f"{', '.join(STORAGES)}; {', '.join(SAVES)}; whole tensors and cuts inside rows; 2, 3 and 5 ranks"
    return tried, found, note


@campaign(
    "calls",
    f"pairs of different blocking calls on two ranks: no word about the difference within {LATEST_S:.0f} s",
    at_least=len(CALLS) * (len(CALLS) - 1) // 2, harms=("pair",), section="mend",
)  # fmt: skip
def calls(bench: Bench) -> Found:
    """Let each pair of calls meet, in one process."""
    pairs = list(combinations(CALLS, 2))
    with tempfile.TemporaryDirectory(prefix="laconic-calls-") as folder:
        found = [f"pair {text}" for text in problems(pairs, Path(folder))]
    return len(pairs), found, f"{', '.join(CALLS)}; ranks in one process, with its clock"


@campaign(
    "transforms",
    "pairs of calls that change a model, in each order: other losses than without data parallelism, or a raw error",
    at_least=210, harms=("WRONG", "UNCLEAR"), section="mend",
)  # fmt: skip
def transforms(bench: Bench) -> Found:
    """Train each pair on two ranks of data parallelism times two of tensor parallelism."""
    pairs = transforming.pairs()[:: 9 if bench.quick else 1]
    answers = {" then ".join(pair): transforming.judge(pair) for pair in pairs}
    found = [f"{answer.split(':')[0]} {pair}: {answer}" for pair, answer in answers.items()]
    right = sum(answer == "right" for answer in answers.values())
    note = (
        f"{', '.join(transforming.CALLS)}; {right} train as without data parallelism, the others are refused or named"
    )
    return len(pairs), [text for text in found if text.startswith(("WRONG", "UNCLEAR"))], note


@campaign(
    "raw-requests",
    "raw HTTP requests that two parsers may read in two ways, to `laconic publish serve`: a second answer, or none",
    at_least=300, harms=("misread",), section="mend",
)  # fmt: skip
def raw_requests(bench: Bench) -> Found:
    """Send each, with another request behind it, with and without a token."""
    tried, found = 0, []
    for token in (None, TOKEN):
        with tempfile.TemporaryDirectory(prefix="laconic-requests-") as folder:
            number, misread = read_twice(Path(folder), token, ("GET", "PUT", "POST", "DELETE", "HEAD"))
        tried += number
        found += [f"misread: {request}" for request in misread]
    return tried, found, "heads, lines and ends that are no HTTP, or HTTP of two kinds; in process"


@campaign(
    "first-contact",
    "first commands with torch alone, and without torchrun: neither works, nor ends with code 2 and one line",
    at_least=20, harms=("unclear",), section="mend",
)  # fmt: skip
def first_contact(bench: Bench) -> Found:
    """Run each in a process in which no package of the extras can be imported."""
    with tempfile.TemporaryDirectory(prefix="laconic-contact-") as folder:
        problems = [first.problem_of(command, Path(folder)) for command in first.COMMANDS]
    found = [f"unclear: {problem}" for problem in problems if problem]
    return len(problems), found, f"{', '.join(first.COMMANDS)}; a usage may precede the line"


@campaign(
    "methods",
    "public methods and hooks of FSDP2, DDP and torch on a sharded model: no effect, and no error",
    at_least=40, harms=("no effect", "not tried"), section="mend",
)  # fmt: skip
def every_method(bench: Bench) -> Found:
    """Call each, and look for its effect: the table in docs/from-fsdp2.md."""
    results = methods.results()
    found = [f"no effect: {owner}.{name}" for owner, name, result in results if result == methods.NO_EFFECT]
    found += [f"not tried: {name}" for name in methods.missing()]
    return len(results), found, f"{sum(result == methods.WORKS for *_, result in results)} work, the others raise"


if __name__ == "__main__":
    sys.exit(replace(BENCHMARK, module="tests.mended").main(doc=__doc__))
