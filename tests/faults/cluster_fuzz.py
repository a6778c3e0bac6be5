"""Random and damaged cluster files: each is read, or refused with one line."""

from __future__ import annotations

import math
import random
import tomllib

from laconic.config import ConfigError
from laconic.plan.cluster_file import cluster_from_dict, parse_cluster
from laconic.plan.cluster_spec import ClusterSpec
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support.record import Row

_NUM, _QUICK = 20_000, 500
_VALID = """\
nodes = 2
ranks_per_node = 8
device = "A100 SXM 80GB"
network = "10 GbE"
local_network = "PCIe 4 x16"
host_memory_bytes = "1 TB"
wire_latency_s = 3e-5
[device_flops_per_s]
bfloat16 = "250 TFLOP/s"
"""
_VALUES = (
    0, -1, 1, 7, 2**63, 10**400, 1e308, -0.0, math.inf, math.nan, 0.5, True, "", "x", "10 GbE", "-3 GB", "1e999 GB",
    "80 GB", "9" * 400 + " GB", "10 Gbit/s", "A100", "8 x 8 x 10 GbE", [], [1], {}, {"float32": 1}, {"x": "y"}, "\0",
)  # fmt: skip


def try_clusters(num: int, seed: int = 0) -> list[str]:
    """Read `num` cluster files that random changes have damaged. Returns the harms."""
    dice, found = random.Random(seed), []
    for _ in range(num):
        harm = _damaged_text(dice) if dice.random() < 0.5 else _odd_table(dice)
        found += [harm] if harm else []
    return found


def _damaged_text(dice: random.Random) -> str:
    begin = dice.randrange(len(_VALID))
    new = "".join(chr(dice.choice([*range(32, 127), 0, 10, 0x2028, 0x1F600])) for _ in range(dice.randrange(6)))
    text = _VALID[:begin] + new + _VALID[begin + dice.randrange(20) :]
    return _harm_of(text)


def _odd_table(dice: random.Random) -> str:
    table = tomllib.loads(_VALID)
    names = [*ClusterSpec.__dataclass_fields__, "local_network", "host_link", "gpus"]
    for _ in range(dice.randint(1, 3)):
        table[dice.choice(names)] = dice.choice(_VALUES)
    if dice.random() < 0.3:
        del table[dice.choice(list(table))]
    return _harm_of(table)


def _harm_of(given: str | dict[str, object]) -> str:
    """The harm that a cluster file does, or "": it must be read and written back, or refused with one line."""
    try:
        spec = parse_cluster(given) if isinstance(given, str) else cluster_from_dict(given)
    except ConfigError as error:
        return "" if str(error).strip() and "\n" not in str(error) else f"no single line: {error!s}: {given!r}"
    except Exception as error:  # whatever it is, it is not for users
        return f"foreign: {type(error).__name__}: {error}: {given!r}"
    plain = [value for value in vars(spec).values() if isinstance(value, int | float)]
    return "" if all(math.isfinite(value) and value > 0 for value in plain) else f"silent: {spec}"


@campaign_row("cluster-fuzz")
def row(bench: Bench) -> Row:
    """Read damaged cluster files."""
    num = _QUICK if bench.quick else _NUM
    harms = try_clusters(num)
    for harm in harms[:20]:
        print(harm, flush=True)
    kinds = {
        "foreign tracebacks": "foreign",
        "absurd figures taken": "silent",
        "refusals without one line": "no single",
    }
    return faults_row(
        claim="damaged cluster files: read, or refused with one line",
        tried=num,
        at_least=2_000,
        harms={name: sum(harm.startswith(kind) for harm in harms) for name, kind in kinds.items()},
        note="Half of them with random characters, half with odd values for random keys.",
    )
