"""What is wrong with a cluster, judged from the facts of its ranks and from what they measured: pure functions.

A limit lies far from what a healthy cluster shows, since a doctor that often errs is not heard.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from laconic.doctor.facts import Interface, RankFacts, is_loopback, named_interfaces
from laconic.doctor.probes import Measured
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.units import format_quantity

Kind = Literal[
    "interface", "unreachable", "versions", "devices", "memlock", "open-files", "clock", "slow-link", "slow-node",
    "slower-than-before",
]  # fmt: skip
"""What can be found; docs/doctor.md has a line for each."""

_LEAST_LOCKED_BYTES = 4e9
"""A model that needs sharding has a larger host cache, and RDMA locks its buffers as well."""
_FILES, _FILES_PER_RANK = 256, 16
"""What a rank opens: libraries, data and checkpoints; and the connections of its groups to each other rank."""
_MOST_SKEW_S = 1.0
"""NTP keeps clocks within a tenth of a second; file systems and log files are read by the second."""
_SLOW_LINK = 0.5
"""Links of one kind differ by less than a tenth. A wrong cable or port costs half or more: adapters' rates are 1, 2.5,
5, 10 Gbit/s and so on."""
_SOCKET_BITS_PER_S = 10e9
"""What a few TCP connections reach on ordinary processors. A faster adapter is not slow because they do not fill it."""
_SLOW_NODE = {"cpu": 0.4}
"""Ranks on CPU share cores, and two threads of a core have half of it each."""
_SLOW_DEVICE = 0.8
"""Equal devices differ by a few percent; heat, a power limit or another process cost more."""
_BEFORE = 0.5
"""Of a figure in the cluster file; measurements that are repeated differ by less."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    severity: Literal["error", "warning"]
    """error: a run fails, or gives what nobody wants. warning: it is slower than it need be, or may fail later."""
    kind: Kind
    what: str
    """Where and what it is."""
    cost: str
    remedy: str
    stops: bool = False
    """Whether it keeps the ranks from making a process group, so that nothing can be measured."""

    def __str__(self) -> str:
        return f"{self.severity:7} {self.kind}: {self.what}. Cost: {self.cost}. Remedy: {self.remedy}"


_UNREACHABLE = "the ranks cannot reach each other: the first step hangs or fails"
_SLOWEST = "every step waits for it"
_THEN = (
    "plans made with that file are wrong, and steps are slower",
    "find what has changed, or measure again: `laconic doctor --out FILE`",
)
_ADVICE: dict[str, tuple[Kind, str, str]] = {
    "interface": ("interface", _UNREACHABLE,
        "export {variable}={better} on {node}, before torchrun; `ip -brief address` lists names"),
    "slower interface": ("interface",
        "every transfer takes longer by that factor, if the faster one reaches the other nodes",
        "export NCCL_SOCKET_IFNAME={better} GLOO_SOCKET_IFNAME={better} and give torchrun the address of that network"),
    "unreachable": ("unreachable", _UNREACHABLE,
        "let {node} accept TCP on all ports from the cluster, such as `ufw allow from NETWORK/24`; or name an "
        "interface that both have in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"),
    "versions": ("versions",
        "ranks may compute differently, wait for each other for ever, or refuse each other's messages",
        "install the same {name} on all nodes; one lock file or one image for all of them is simplest"),
    "devices": ("devices",
        "every step takes as long as on the slowest, and every rank's memory is that of the smallest",
        'run equal devices together; or train.rows = "by-speed" gives slower ones fewer rows, and shard.shares smaller '
        "ones fewer states; islands with local steps may have unlike ones (docs/local-steps.md)"),
    "memlock": ("memlock",
        "a host cache is not page-locked, so its copies are several times slower; RDMA does not start",
        "`ulimit -l unlimited`; for good: `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity "
        "in the unit of Slurm or Docker, --ulimit memlock=-1 of docker run"),
    "open-files": ("open-files", "the run fails with `Too many open files`, often after hours",
        "`ulimit -n 65536`; for good: `* - nofile 65536` in /etc/security/limits.conf"),
    "clock": ("clock",
        "log files of nodes do not line up, files on a shared disk seem new or old, certificates may fail",
        "`timedatectl set-ntp true` on both, or chrony with one server for all nodes"),
    "slow link": ("slow-link", _SLOWEST + ": what crosses takes {factor:.1f} times as long",
        "`ethtool {interface}` on {node}, then cable, port of the switch, duplex, and what else uses the link"),
    "slow wire": ("slow-link", "what crosses takes {factor:.1f} times as long as it need",
        "look for what else uses the network, and for a switch, a firewall or a tunnel between the nodes"),
    "slow adapter": ("slow-link", "every step waits for the slowest link",
        "`ethtool {interface}` on {node}, then another cable or port"),
    "slow-node": ("slow-node", _SLOWEST + ": compute takes up to {factor:.1f} times as long",
        'see {tool} for another process, heat or a power limit; if it stays slow, train.rows = "by-speed" gives it '
        "fewer rows"),
    "slower wire": ("slow-link", *_THEN), "slower": ("slower-than-before", *_THEN),
}  # fmt: skip
"""By case: the kind of the finding, its cost, and the remedy, which is a command or a variable where one helps."""


def _found(
    case: str, what: str, *, severity: Literal["error", "warning"] = "warning", stops: bool = False, **values: object
) -> Finding:
    kind, cost, remedy = _ADVICE[case]
    return Finding(
        severity=severity, kind=kind, what=what, cost=cost.format(**values), remedy=remedy.format(**values), stops=stops
    )


def judge_facts(facts: Sequence[RankFacts]) -> list[Finding]:
    """Judge what the ranks have read, by rank, before they have a process group."""
    return [*judge_interfaces(facts), *judge_versions(facts), *judge_limits(facts)]


def judge_measured(facts: Sequence[RankFacts], measured: Measured, before: ClusterSpec | None = None) -> list[Finding]:
    """Judge what the ranks have measured together. `before` is the cluster file of a time when all was well."""
    return [
        *judge_clocks(facts, measured.clocks_s),
        *judge_links(facts, measured.links),
        *judge_products(facts, measured.products_s),
        *judge_against(before, measured.figures),
    ]


def judge_interfaces(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """interface: a variable names none, one that is down, or loopback; or Gloo would choose loopback by itself."""
    if len({own.network for own in facts}) == 1:
        return  # one machine talks to itself over any
    for own in _first_of_nodes(facts):
        better = own.route or "NAME"
        for variable, value in own.chosen.items():
            is_gloo = variable.startswith("GLOO")
            exact = [name for name in value.split(",") if name in own.interfaces]
            names = exact if is_gloo else named_interfaces(value, own.interfaces)
            if problem := _problem(own.interfaces, names):
                yield _found(
                    "interface", f"{_node(own)}: {variable}={value} names {problem}", severity="error",
                    stops=is_gloo or own.device_type == "cuda", variable=variable, better=better, node=_node(own),
                )  # fmt: skip
        if "GLOO_SOCKET_IFNAME" not in own.chosen and is_loopback(own.own_address):
            yield _found(
                "interface", f"{_node(own)}: the host's own name means {own.own_address}, where Gloo would listen",
                severity="error", stops=True, variable="GLOO_SOCKET_IFNAME", better=better, node=_node(own),
            )  # fmt: skip
        used = own.interfaces.get(own.interface())
        fastest = max(own.interfaces.items(), key=lambda item: _rate(item[1]))
        if used and used.bits_per_s and _rate(fastest[1]) > used.bits_per_s:
            yield _found(
                "slower interface",
                f"{_node(own)} talks over {own.interface()}, of {format_quantity(used.bits_per_s, 'bit/s')}, and has "
                f"{fastest[0]}, of {format_quantity(_rate(fastest[1]), 'bit/s')}",
                better=fastest[0],
            )


def judge_unreachable(facts: Sequence[RankFacts], pairs: Sequence[tuple[int, int, str]]) -> Iterator[Finding]:
    """unreachable: one node cannot open a connection to another."""
    nodes = _first_of_nodes(facts)
    for of, to, reason in pairs:
        what = f"{_node(nodes[of])} cannot connect to {_node(nodes[to])} at {reason}"
        yield _found("unreachable", what, severity="error", stops=True, node=_node(nodes[to]))


def judge_versions(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """versions, devices: ranks have unlike software or unlike devices."""
    names = dict.fromkeys(name for own in facts for name in own.versions)
    for name in names:
        found = _by_value({own.rank: own.versions.get(name, "none") for own in facts})
        if found:
            severity: Literal["error", "warning"] = "warning" if name in ("Python", "NVIDIA driver") else "error"
            yield _found("versions", f"{name} is {found}", severity=severity, name=name)
    found = _by_value({own.rank: own.device for own in facts})
    if found:
        yield _found("devices", f"the device is {found}")


def judge_limits(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """memlock, open-files: a process may lock too little memory, or open too few files."""
    most = max(_locked(own) for own in facts)
    for own in _first_of_nodes(facts):
        locks = own.device_type != "cpu" or own.has_rdma
        if _locked(own) < (min(most, _LEAST_LOCKED_BYTES) if not locks else _LEAST_LOCKED_BYTES):
            others = f", elsewhere {_limit(most)}" if _locked(own) < most else ""
            what = f"{_node(own)}: a process may lock {_limit(_locked(own))} of memory{others}"
            yield _found("memlock", what, severity="error" if own.has_rdma else "warning")
        needed = _FILES + _FILES_PER_RANK * len(facts)
        if own.open_files < needed:
            what = f"{_node(own)}: a process may open {own.open_files} files; {len(facts)} ranks need {needed}"
            yield _found("open-files", what, severity="error")


def judge_clocks(facts: Sequence[RankFacts], clocks_s: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """clock: a node's clock is surely ahead of, or behind, that of node 0."""
    for own in _first_of_nodes(facts):
        low, high = clocks_s[own.rank]
        sure = max(low, -high)
        if sure > _MOST_SKEW_S:
            side = "ahead of" if low > 0 else "behind"
            what = f"{_node(own)}: its clock is {format_quantity(sure, 's')} {side} that of {_node(facts[0])}"
            yield _found("clock", what)


def judge_links(facts: Sequence[RankFacts], links: Mapping[tuple[int, int], float]) -> Iterator[Finding]:
    """slow-link: a node's link is slower than the others', or all are slower than their adapters.

    A link counts as slow beside the best links of most nodes. The node that has most of the slow links is named first.
    """
    if not links:
        return
    nodes = _first_of_nodes(facts)
    typical = statistics.median_high([max(rate for pair, rate in links.items() if own.node in pair) for own in nodes])
    slow = {pair: rate for pair, rate in links.items() if rate < _SLOW_LINK * typical}
    while slow:

        def blame(node: int) -> tuple[int, int]:
            return sum(node in pair for pair in slow), sum(node == pair[0] for pair in slow)

        worst = max(range(len(nodes)), key=blame)
        own = {pair: slow.pop(pair) for pair in list(slow) if worst in pair}
        pairs = ", ".join(f"{of} to {to}" for of, to in own)
        yield _found(
            "slow link",
            f"{_node(nodes[worst])}: {format_quantity(min(own.values()), 'bit/s')} from node {pairs}; other links give "
            f"{format_quantity(typical, 'bit/s')}",
            factor=typical / min(own.values()), node=_node(nodes[worst]), interface=_interface(nodes[worst]),
        )  # fmt: skip
    rates = [rate for rate in (_rate(own.interfaces.get(own.interface())) for own in nodes) if rate]
    expected = min([*rates, _SOCKET_BITS_PER_S])
    if len(rates) == len(nodes) and typical < _SLOW_LINK * expected:
        yield _found(
            "slow wire",
            f"the wire gives {format_quantity(typical, 'bit/s')}; the adapters agreed on "
            f"{format_quantity(min(rates), 'bit/s')} or more",
            factor=expected / typical,
        )
    if rates and max(rates) > min(rates):
        slowest = min(nodes, key=lambda own: _rate(own.interfaces.get(own.interface())) or float("inf"))
        yield _found(
            "slow adapter",
            f"{_node(slowest)}: its adapter agreed on {format_quantity(min(rates), 'bit/s')}, others on "
            f"{format_quantity(max(rates), 'bit/s')}",
            node=_node(slowest), interface=_interface(slowest),
        )  # fmt: skip


def judge_products(facts: Sequence[RankFacts], products_s: Sequence[float]) -> Iterator[Finding]:
    """slow-node: a rank takes much longer for the same product than most others."""
    typical = statistics.median_low(products_s)
    slow = [own for own in facts if typical / products_s[own.rank] < _SLOW_NODE.get(own.device_type, _SLOW_DEVICE)]
    for node in dict.fromkeys(own.node for own in slow):
        ranks = [own for own in slow if own.node == node]
        factor = max(products_s[own.rank] for own in ranks) / typical
        tool = "`top`" if ranks[0].device_type == "cpu" else "`nvidia-smi -q -d CLOCK,POWER,TEMPERATURE`"
        yield _found(
            "slow-node",
            f"{_node(ranks[0])}: for the same product rank {', '.join(str(own.rank) for own in ranks)} takes "
            f"{factor:.1f} times as long as others",
            factor=factor, tool=tool,
        )  # fmt: skip


def judge_against(before: ClusterSpec | None, figures: Mapping[str, float]) -> Iterator[Finding]:
    """slower-than-before: a rate is far below that of the cluster file that was given."""
    for key, now in figures.items():
        section, _, dtype = key.partition(".")
        then = getattr(before, section, None)
        then = then.get(dtype) if dtype and then else then
        if then and section.endswith("_per_s") and now < _BEFORE * then:
            unit: Literal["bit/s", "FLOP/s", "B/s"] = "bit/s" if "bits" in key else "FLOP/s" if dtype else "B/s"
            what = f"{key} is {format_quantity(now, unit)}; the cluster file says {format_quantity(then, unit)}"
            yield _found("slower wire" if section.startswith("wire") else "slower", what)


def _first_of_nodes(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """The facts of the first rank of each node, by node."""
    return list({own.node: own for own in reversed(facts)}.values())[::-1]


def _node(own: RankFacts) -> str:
    return f"node {own.node} ({own.host})"


def _locked(own: RankFacts) -> float:
    return float("inf") if own.locked_bytes is None else own.locked_bytes


def _limit(nbytes: float) -> str:
    return "as much as it likes" if nbytes == float("inf") else format_quantity(nbytes, "B")


def _problem(interfaces: Mapping[str, Interface], names: Sequence[str]) -> str:
    """What is wrong with all of the interfaces that a variable names; "" if one of them is right."""
    if not names:
        return f"no interface (there are {', '.join(interfaces)})"
    problems = {name: _problem_of(interfaces[name]) for name in names}
    return "" if "" in problems.values() else ", ".join(f"{name}, which {problems[name]}" for name in names)


def _problem_of(interface: Interface) -> str:
    if interface.is_loopback:
        return "reaches this machine alone"
    return "has no address" if not interface.addresses else "" if interface.is_up else "is down"


def _rate(interface: Interface | None) -> float:
    return interface.bits_per_s or 0.0 if interface and interface.is_up and interface.addresses else 0.0


def _interface(own: RankFacts) -> str:
    return own.interface() or "INTERFACE"


def _by_value(values: Mapping[int, str]) -> str:
    """Which ranks have which value, in words; "" if all have the same."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    words = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in found.items())
    return words if len(found) > 1 else ""
