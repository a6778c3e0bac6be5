"""The figures of a cluster, measured on the machines at hand.

[Note: What is measured]
All ranks measure at once, since in training they compute and talk at once, and share their node. A repetition takes as
long as it takes on the slowest rank. Every figure is the median of its repetitions, and says how far they were apart.
The size of the work grows until a repetition takes long enough for the clock. Transfers are all-gathers of
`Communicator`, which the engine uses: on the wire each rank talks to the ranks with its place on the other nodes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from laconic.comm.traffic import IslandLevel
from laconic.plan.cluster_file import cluster_from_dict, to_toml
from laconic.plan.cluster_spec import DEFAULT_HEADER_FACTOR, ClusterSpec
from laconic.plan.known import device_named
from laconic.plan.units import format_quantity, unit_for
from laconic.store import files

_MOST_CALLS = 100
"""The calls of an action that one repetition may take."""
_MOST_PRODUCTS = 1000
"""The products during one transfer."""
_LATENCY_CALLS = 10
"""The products, and the small transfers, of one repetition of a latency."""
_LEAST_LATENCY_S = 1e-6
"""The latency where a transfer seems to add nothing."""
_HEADS, _HEAD_SIZE = 8, 64
_MOST_HEADERS = 1.25
"""If an interface has counted more than this many bytes for each byte of payload, something else has used it."""
_UNSTEADY = 0.2
"""The spread above which a figure should be measured again."""
_FLOPS = "device_flops_per_s"
_Action = TypeVar("_Action", bound=Callable[[], object])


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The sizes of the work, from small to large, and the number of repetitions."""

    products: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384)
    """The rows of square matrices."""
    attention_tokens: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192)
    """The length of the sequence of an attention with `_HEADS` heads of size `_HEAD_SIZE`."""
    copies_bytes: Sequence[int] = (2**26, 2**28, 2**30)
    transfers_bytes: Sequence[int] = tuple(2**power for power in range(20, 29))
    """Of what a rank has after an all-gather."""
    enough_s: float = 0.15
    """The seconds of an action at which its size stops growing. A repetition of short actions takes a third of them."""
    repetitions: int = 7


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure."""

    key: str
    """The key of the cluster file; `device_flops_per_s.float32` for a rate by dtype."""
    values: tuple[float, ...]
    """One for each repetition, or one for a figure that is read."""
    how: str
    """What was done, in words."""
    kind: Literal["measured", "assumed"] = "measured"

    @property
    def median(self) -> float:
        """The figure itself, with four digits."""
        return float(f"{statistics.median(self.values):.4g}") if len(self.values) > 1 else self.values[0]

    @property
    def spread(self) -> float:
        """The distance between the lowest and the highest value, as a share of the median."""
        return (max(self.values) - min(self.values)) / (statistics.median(self.values) or 1.0)

    @property
    def source(self) -> str:
        """The comment of the cluster file."""
        if len(self.values) == 1:
            return f"{self.kind}: {self.how}"
        unit = unit_for(self.key.partition(".")[0])
        low, high = (format_quantity(value, unit) for value in (min(self.values), max(self.values)))
        return f"{self.kind}: {self.how}, {len(self.values)} times, {low} to {high}"


def measure(cluster: Cluster, ranks: RankGroup, effort: Effort | None = None) -> list[Figure]:
    """Measure all figures of a cluster: [Note: What is measured]. Collective over the ranks of `cluster` and `ranks`.

    Returns the same figures on every rank. `ranks` is a group of all ranks that carries CPU tensors.
    """
    return list(_Measuring(cluster, ranks, effort or Effort()).figures())


def as_spec(figures: Sequence[Figure], names: Mapping[str, str]) -> ClusterSpec:
    """Make a cluster of measured figures and of the names of its device and network.

    Raises:
        ConfigError: a figure is out of bounds.
    """
    table: dict[str, Any] = dict(names)
    sources = {}
    for figure in figures:
        section, _, dtype = figure.key.partition(".")
        value = figure.median
        value = int(value) if isinstance(figure.values[0], int) else value
        if dtype:
            table.setdefault(section, {})[dtype] = value
        else:
            table[section] = value
        sources[figure.key] = figure.source
    spec = cluster_from_dict(table)
    return replace(spec, sources={**spec.sources, **sources})


def check_out(out: Path | None, ranks: RankGroup) -> None:
    """Refuse the path of a cluster file before the measurement, not after it. Collective. Raises: JobError."""
    if out is not None:
        ranks.on_rank_0(partial(_check_writable, out), f"cannot write {out}")


def _check_writable(out: Path) -> None:
    folder = out.absolute().parent
    if out.is_dir():
        raise OSError(f"{out} is a folder; give the name of a file")
    if not os.access(folder, os.W_OK):
        raise OSError(f"the folder {folder} does not exist or is not writable")


def write_out(out: Path, figures: Sequence[Figure], device: torch.device, ranks: RankGroup) -> list[str]:
    """Write the cluster file of figures that were measured with such a device. Collective. Raises: JobError.

    Returns a line about figures that should be measured again, if there are any.
    """
    text = to_toml(as_spec(figures, {"device": device_name(device)}))
    ranks.on_rank_0(lambda: files.write_text(out, text), f"cannot write {out}")
    return _unsteady_lines(figures)


def _unsteady_lines(figures: Sequence[Figure]) -> list[str]:
    unsteady = [figure.key for figure in figures if figure.spread > _UNSTEADY]
    if not unsteady:
        return []
    again = "measure again while nothing else runs on these machines"
    return [f"{'unsteady':<10}{', '.join(unsteady)} varied by more than {_UNSTEADY:.0%}; {again}"]


def device_name(device: torch.device) -> str:
    """The name of a device in the table of devices, or in its maker's words."""
    if device.type != "cpu":
        name = str(torch.get_device_module(device).get_device_name(device))
        known = device_named(name)
        return known.name if known else name
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if os.path.exists("/proc/cpuinfo") else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.machine())}, threads of a rank: {torch.get_num_threads()}"


class _Measuring:
    """One rank's part of the measurement."""

    def __init__(self, cluster: Cluster, ranks: RankGroup, effort: Effort) -> None:
        self.cluster, self.ranks, self.effort = cluster, ranks, effort
        self.device = cluster.device
        self.host = torch.device("cpu")
        self._sizes: dict[torch.dtype, int] = {}
        """The rows of the products with the highest rate."""

    def figures(self) -> Iterator[Figure]:
        """All figures, in the order of the cluster file."""
        yield Figure(key="nodes", values=(self.cluster.num_nodes,), how="as started")
        yield Figure(key="ranks_per_node", values=(self.cluster.num_local,), how="as started")
        yield from self._memory()
        first = [*self._compute()]
        rest = [*self._host_copies(), *self._transfers("local"), *self._transfers("node")]
        for figure, later in zip(first, self._compute(), strict=True):
            yield replace(figure, values=figure.values + later.values)
        yield from rest

    def _compute(self) -> Iterator[Figure]:
        """The figures of compute, which are measured twice, as other guests of a machine come and go."""
        rates = {}
        for figure in self._products():
            rates[figure.key] = figure.median
            yield figure
        yield self._attention(rates)
        yield from self._launches()
        on_device = self._copy_rate(self.device)
        yield Figure(key="device_memory_bytes_per_s", values=on_device, how="a copy; what it reads and writes")
        on_host = on_device if self.device == self.host else self._copy_rate(self.host)
        values = tuple(self.cluster.num_local * rate for rate in on_host)
        yield Figure(key="host_memory_bytes_per_s", values=values, how="copies by all ranks of a node")

    def _memory(self) -> Iterator[Figure]:
        machines = self.ranks.gather(machine_id())
        sharing = machines.count(machines[self.ranks.rank]) // self.cluster.num_local  # as in a lab
        host = min(self.ranks.gather(host_memory_bytes() // max(1, sharing)))
        how = "the least of all nodes" if sharing <= 1 else f"one machine plays {sharing} nodes"
        if self.device == self.host:
            device, on = host // self.cluster.num_local, "a rank's part of the host's memory"
        else:
            total = torch.accelerator.get_memory_info()[1]
            ranks = -(-self.cluster.num_local // torch.accelerator.device_count())
            device, on = min(self.ranks.gather(total // ranks)), "the least of all devices"
        yield Figure(key="device_memory_bytes", values=(device,), how=on)
        yield Figure(key="host_memory_bytes", values=(host,), how=how)

    def _products(self) -> Iterator[Figure]:
        """Products of square matrices, of the size with the highest rate."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            best = self._sizes[dtype] = self._sizes.get(dtype) or self._best_size(dtype)
            values = tuple(2 * best**3 / seconds for seconds in self._repeated(self._product(best, dtype)))
            name = str(dtype).removeprefix("torch.")
            yield Figure(key=f"{_FLOPS}.{name}", values=values, how=f"a product of {best} x {best}")

    def _best_size(self, dtype: torch.dtype) -> int:
        rates = {}
        for size in self.effort.products:
            seconds = self._trial(self._product(size, dtype))
            if seconds >= self.effort.enough_s / 50 or size == self.effort.products[-1]:
                rates[size] = 2 * size**3 / seconds
            if seconds >= self.effort.enough_s:
                break
        return max(rates, key=lambda size: rates[size])

    def _product(self, size: int, dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return partial(torch.matmul, a, b, out=torch.empty_like(a))

    def _attention(self, rates: Mapping[str, float]) -> Figure:
        """Causal attention, forward and backward: its rate as a share of that of products in the same dtype."""
        dtype = torch.float32 if self.device == self.host else torch.bfloat16

        def attention(tokens: int) -> Callable[[], object]:
            shape = (1, _HEADS, tokens, _HEAD_SIZE)
            inputs = [torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True) for _ in range(3)]
            return partial(_attend, inputs)

        tokens, step = self._first_long(self.effort.attention_tokens, attention, self.effort.enough_s / 10)
        flops = 7 * _HEADS * tokens**2 * _HEAD_SIZE  # two products forward and five backward, of half a square each
        name = str(dtype).removeprefix("torch.")
        rate = rates[f"{_FLOPS}.{name}"]
        values = tuple(float(f"{min(flops / seconds / rate, 1.0):.4g}") for seconds in self._repeated(step))
        how = f"causal attention over {tokens} tokens in {name}, forward and backward, beside products"
        return Figure(key="device_attention_share", values=values, how=how)

    def _launches(self) -> Iterator[Figure]:
        """The time of an operation that has nothing to do. On an accelerator the operations before it hide it."""
        if self.device != self.host:
            return
        layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(4)]
        model, given = nn.Sequential(*layers), torch.ones(2, 8)
        parameters = list(model.parameters())

        def step() -> None:
            torch.autograd.grad(model(given).sum(), parameters)

        with _Operations() as operations:
            step()
        values = tuple(seconds / operations.count for seconds in self._repeated(step))
        how = f"forward and backward of a tiny model, {operations.count} operations"
        yield Figure(key="device_launch_s", values=values, how=how)

    def _copy_rate(self, device: torch.device) -> tuple[float, ...]:
        """The bytes per second that a copy inside a memory reads and writes, for each repetition."""

        def copy_of(nbytes: int) -> Callable[[], object]:
            source = torch.ones(nbytes // 4, device=device)
            return partial(torch.ones_like(source).copy_, source)

        nbytes, copy = self._first_long(self.effort.copies_bytes, copy_of, self.effort.enough_s / 2)
        return tuple(2 * nbytes / seconds for seconds in self._repeated(copy))

    def _host_copies(self) -> Iterator[Figure]:
        """Copies between pinned host memory and the device; on CPU between two parts of the host's memory."""
        size = self.effort.copies_bytes[min(1, len(self.effort.copies_bytes) - 1)]
        on_device = torch.ones(size // 4, device=self.device)
        on_host = torch.ones(size // 4, pin_memory=self.device != self.host)
        is_first = self.cluster.local_rank == 0
        link = 0.0
        for key, source, target in (
            ("host_to_device_bytes_per_s", on_host, on_device),
            ("device_to_host_bytes_per_s", on_device, on_host),
        ):
            copy = partial(target.copy_, source, non_blocking=True)
            alone = self._repeated(copy if is_first else _nothing)
            rates = tuple(size / duration for duration in alone)
            how = "one rank of each node copies " + ("pinned memory" if self.device != self.host else "host memory")
            yield Figure(key=key, values=rates, how=how)
            link = link or statistics.median(rates)
        together = self._repeated(partial(on_device.copy_, on_host, non_blocking=True))
        ratio = link / (size / statistics.median(together))
        sharing = min(max(round(ratio), 1), self.cluster.num_local)
        how = f"a rank copies {ratio:.2f} times faster alone than with all ranks of its node"
        yield Figure(key="ranks_per_host_link", values=(sharing,), how=how)

    def _transfers(self, level: IslandLevel) -> Iterator[Figure]:
        """Latency and rate of a level; nothing if the level has one rank."""
        communicator = Communicator(self.cluster, level)
        if communicator.size == 1:
            return

        def gather_of(size: int) -> _Gather:
            piece_bytes = size // communicator.size
            whole = torch.zeros(piece_bytes * communicator.size, dtype=torch.uint8, device=self.device)
            return _Gather(communicator, whole)

        small = gather_of(8 * communicator.size)
        latency = statistics.median(self._repeated(small))
        _, gather = self._first_long(self.effort.transfers_bytes, gather_of, self.effort.enough_s / 3)
        whole = gather.whole
        before, interfaces_before = self.cluster.traffic.snapshot(), _sent_bytes()
        seconds = self._repeated(gather)
        counted = {name: size - interfaces_before.get(name, size) for name, size in _sent_bytes().items()}
        payload_bytes = (self.cluster.traffic.snapshot() - before).total(level, direction="sent")
        sent = whole.nbytes * (communicator.size - 1) // communicator.size
        rates = tuple(sent / max(duration - latency, duration / 2) for duration in seconds)
        how = f"all-gathers of {format_quantity(whole.nbytes, 'B')} by {communicator.size} ranks"
        latencies = self._latencies(small)
        few = f"an all-gather of 8 bytes by {communicator.size} ranks, after a product"
        overlap = self._overlap(level, gather)
        if level == "local":
            yield Figure(key="local_bytes_per_s", values=rates, how=how)
            yield Figure(key="local_latency_s", values=latencies, how=few)
            yield overlap
            return
        local = self.cluster.num_local
        header_factor = self._header_factor(counted, local * payload_bytes)
        on_wire = tuple(8 * header_factor.median * local * rate for rate in rates)
        yield Figure(key="wire_bits_per_s", values=on_wire, how=f"{how}, on {local} ranks of each node at once")
        yield Figure(key="wire_latency_s", values=latencies, how=few)
        yield overlap
        yield header_factor

    def _latencies(self, small: _Gather) -> tuple[float, ...]:
        """The time that a small transfer adds to a product before it: [Note: What is measured]."""
        of_floats = partial(self._product, dtype=torch.float32)
        _, product = self._first_long(self.effort.products, of_floats, self.effort.enough_s / 75)

        def after() -> None:
            product()
            small()

        found = []
        for _ in range(self.effort.repetitions):  # in turn, as a processor's clock and its other guests change
            alone, both = (self._seconds(action, 3, calls=_LATENCY_CALLS) for action in (product, after))
            found.append(max(statistics.median(both) - statistics.median(alone), _LEAST_LATENCY_S))
        return tuple(found)

    def _overlap(self, level: IslandLevel, gather: _Gather) -> Figure:
        """The share of a transfer that products of about the same duration hide: 1 if neither slows the other down."""
        product = self._product(self.effort.products[min(1, len(self.effort.products) - 1)], torch.float32)
        products = min(max(round(self._trial(gather) / self._trial(product)), 1), _MOST_PRODUCTS)

        def compute() -> None:
            for _ in range(products):
                product()

        *alone, both = (self._repeated(action) for action in (gather, compute, partial(gather, compute)))
        transfer_s, compute_s = map(statistics.median, alone)
        hidden = [(transfer_s + compute_s - seconds) / min(transfer_s, compute_s) for seconds in both]
        values = tuple(min(max(share, 0.0), 1.0) for share in hidden)
        how = f"an all-gather of {format_quantity(gather.whole.nbytes, 'B')} during products that take as long"
        key = "local_overlap" if level == "local" else "wire_overlap"
        return Figure(key=key, values=values, how=how)

    def _header_factor(self, counted: Mapping[str, int], payload_bytes: int) -> Figure:
        """The bytes of the network interface for each byte of payload, on the mean of all nodes, if they make sense."""
        name, sent = max(counted.items(), key=lambda item: item[1], default=("no interface", 0))
        factors = [factor for factor in self.ranks.gather(sent / payload_bytes) if 1 <= factor <= _MOST_HEADERS]
        key = "wire_header_factor"
        if len(factors) < self.ranks.size:
            how = "TCP in frames of 1500 bytes, since no network interface has counted these transfers alone"
            return Figure(key=key, values=(DEFAULT_HEADER_FACTOR,), how=how, kind="assumed")
        factor = float(f"{statistics.mean(factors):.5g}")
        return Figure(key=key, values=(factor,), how=f"bytes that {name} has counted for each byte of payload")

    def _first_long(self, sizes: Sequence[int], make: Callable[[int], _Action], enough_s: float) -> tuple[int, _Action]:
        """Make an action of each size until one takes `enough_s`. Returns that size, or the last, with its action."""
        for size in sizes:
            action = make(size)
            if self._trial(action) >= enough_s:
                break
        return size, action

    def _trial(self, action: Callable[[], object]) -> float:
        """About how long `action` takes."""
        return min(self._seconds(action, 2))

    def _repeated(self, action: Callable[[], object]) -> tuple[float, ...]:
        """The duration of `action` in each repetition. A repetition of a short action calls it many times."""
        calls = int(self.effort.enough_s / 3 / self._trial(action))
        return self._seconds(action, self.effort.repetitions, calls=min(max(calls, 1), _MOST_CALLS))

    def _seconds(self, action: Callable[[], object], repetitions: int, *, calls: int = 1) -> tuple[float, ...]:
        """The duration of `action` in each repetition, on the slowest rank. The first does not count. Collective."""
        own = []
        for _ in range(repetitions + 1):
            self._finish()
            self.ranks.gather(None)  # all ranks begin together
            start = time.perf_counter()
            for _ in range(calls):
                action()
            self._finish()
            own.append((time.perf_counter() - start) / calls)
        return tuple(max(durations) for durations in zip(*self.ranks.gather(own[1:]), strict=True))

    def _finish(self) -> None:
        if self.device != self.host:
            torch.accelerator.synchronize()


def _attend(inputs: Sequence[torch.Tensor]) -> None:
    query, key, value = inputs
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def _nothing() -> None:
    """Wait for the ranks that work."""


class _Operations(TorchDispatchMode):
    """Counts operations; views take nothing."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class _Gather:
    """An all-gather, which may go on while something else is done."""

    def __init__(self, communicator: Communicator, whole: torch.Tensor) -> None:
        self.whole, self._communicator = whole, communicator
        self._piece = whole.view(communicator.size, -1)[communicator.rank]

    def __call__(self, meanwhile: Callable[[], object] = _nothing) -> None:
        pending = self._communicator.all_gather(self.whole, self._piece, "control")
        meanwhile()
        if pending is not None:
            pending.wait()


def _sent_bytes() -> dict[str, int]:
    """The bytes that each network interface has sent."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    return {name: counts.bytes_sent for name, counts in counted.items() if name != "lo"}


def machine_id() -> str:
    """A text that is the same for processes of one machine, also in different containers of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return platform.node()


def host_memory_bytes() -> int:
    """The memory that processes here may use: the machine's, or less if a control group limits it."""
    return min([psutil.virtual_memory().total, *_memory_limits()])


def _memory_limits() -> Iterator[int]:
    """The limit of each control group that has one."""
    root = Path("/sys/fs/cgroup")
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[0].split(":", 2)[2]
    except (OSError, IndexError):
        group = "/"
    folder = root / group.strip("/")
    for path in (folder, *folder.parents):
        if path == root.parent:
            break
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            yield int((path / "memory.max").read_text(encoding="utf-8"))
