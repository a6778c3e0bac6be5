"""The facts of one rank that need no other rank: versions, limits, network interfaces.

[Note: Facts come before groups]
The fault may be one that keeps the ranks from making a process group: a wrong interface, or a firewall. So the facts of
all ranks meet in the rendezvous store, which needs no interface variable, and are judged before there is a group.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import ipaddress
import mmap
import os
import platform
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from laconic.comm.entries import EntryError, decode, encode
from laconic.comm.launch import RankInfo
from laconic.errors import JobError
from laconic.plan.measure import device_name, machine_id

_T = TypeVar("_T")
_Place: Any = tuple[str, int] | None

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST_TRIED_BYTES = 64 << 20
"""A limit of lockable memory above this is believed without a trial, which would take that much memory."""
_BOUNDLESS = 1 << 60
"""A limit from here on is none; the kernel says -1, or a number near 2**63."""
_CONNECT_S = 5.0
"""A connection inside a cluster takes less than a millisecond; a lost packet is sent again after 1 s and after 3 s."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that this rank can use."""

    addresses: tuple[str, ...]
    """IPv4 and IPv6."""
    is_up: bool
    bits_per_s: float | None
    """The rate that the adapter has agreed on with the other end of its cable; None if it is no adapter."""

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches this machine alone."""
        return any(is_loopback(address) for address in self.addresses)


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank has read about itself and its node."""

    rank: int
    node: int
    host: str
    network: str
    """The same text for ranks that share network interfaces."""
    device_type: str
    device: str
    versions: dict[str, str]
    """What all ranks must have alike, by name."""
    locked_bytes: int | None
    """The memory that this process may lock; None: as much as it likes."""
    open_files: int
    """The files and sockets that this process may open."""
    has_rdma: bool
    """Whether the node has an RDMA adapter, which needs locked memory."""
    interfaces: dict[str, Interface]
    chosen: dict[str, str]
    """The `INTERFACE_VARIABLES` that are set."""
    route: str
    """The interface that leads to rank 0's address; "" if there is none."""
    own_address: str
    """What the host's own name means here, which Gloo uses where no variable names an interface; "" if nothing."""

    def interface(self) -> str:
        """The interface over which this rank talks: the first that a variable names, or the one that has a route."""
        names = [name for value in self.chosen.values() for name in named_interfaces(value, self.interfaces)]
        return next(iter(names), self.route)


def read_facts(ranks: RankInfo, device: torch.device) -> RankFacts:
    """Read the facts of this rank."""
    interfaces = _interfaces()
    return RankFacts(
        rank=ranks.rank,
        node=ranks.rank // ranks.num_local,
        host=platform.node(),
        network=f"{machine_id()}/{_network_namespace()}",
        device_type=device.type,
        device=device_name(device),
        versions=_versions(),
        locked_bytes=_lockable_bytes(),
        open_files=min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**64, _BOUNDLESS),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        interfaces=interfaces,
        chosen={name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)},
        route=_route(os.environ.get("MASTER_ADDR", "127.0.0.1"), interfaces),
        own_address=_address_of(platform.node()),
    )


class Meeting:
    """The rendezvous store of all ranks, where they exchange values without a process group."""

    def __init__(self, ranks: RankInfo, timeout_s: float) -> None:
        self._ranks, self._round, limit = ranks, 0, timedelta(seconds=timeout_s)
        store = dist.HashStore() if ranks.world_size == 1 else next(rendezvous("env://", timeout=limit))[0]
        self._store = dist.PrefixStore("laconic-doctor", store)
        self._store.set_timeout(limit)

    def exchange(self, value: _T, kind: type[_T]) -> list[_T]:
        """Return the values of all ranks, of the type `kind`, by rank, on every rank: [Note: Entries].

        Raises:
            JobError: a rank did not come in time, or tells something else.
        """
        self._round += 1
        self._store.set(f"{self._round}/{self._ranks.rank}", encode(value))
        values = []
        for rank in range(self._ranks.world_size):
            try:
                values.append(decode(kind, self._store.get(f"{self._round}/{rank}")))
            except RuntimeError as error:
                message = f"rank {rank} did not come: look whether its node runs, and what it has printed"
                raise JobError(message) from error
            except EntryError as error:
                raise JobError(
                    f"rank {rank} tells something else: {error}; install one laconic on all nodes"
                ) from error
        return values

    def leave(self) -> None:
        """Wait, on the rank that may host the store, until all have read what they need."""
        self.exchange("", str)
        self._store.set(f"left/{self._ranks.rank}", "")
        if self._ranks.is_main:
            with contextlib.suppress(RuntimeError):  # a rank that has died needs no store
                self._store.wait([f"left/{rank}" for rank in range(self._ranks.world_size)])


def unreachable(meeting: Meeting, ranks: RankInfo, facts: Sequence[RankFacts]) -> list[tuple[int, int, str]]:
    """The pairs of nodes of which the first cannot open a connection to the second, with the address and the reason.

    Collective: a rank of each node listens on a port that the kernel chooses, as Gloo's and NCCL's ranks will, and the
    ranks of other nodes connect to it.
    """
    own = facts[ranks.rank]
    interface = own.interfaces.get(own.interface())
    address = next((it for it in interface.addresses if "%" not in it), "") if interface else ""
    failed: list[tuple[int, int, str]] = []
    with contextlib.ExitStack() as stack:
        place: tuple[str, int] | None = None
        if address and ranks.is_first_on_node:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                server = stack.enter_context(socket.create_server((address, 0), family=family))
                place = address, server.getsockname()[1]
            except OSError as error:
                failed.append((own.node, own.node, f"{address}: {error}"))
        for rank, other in enumerate(meeting.exchange(place, _Place)):
            if other and ranks.is_first_on_node and facts[rank].node != own.node:
                try:
                    socket.create_connection(other, timeout=_CONNECT_S).close()
                except OSError as error:
                    failed.append((own.node, facts[rank].node, f"{other[0]}: {error}"))
        found = meeting.exchange(failed, list[tuple[int, int, str]])
    return [pair for pairs in found for pair in pairs]


def named_interfaces(value: str, interfaces: Sequence[str] | dict[str, Interface]) -> list[str]:
    """The interfaces that a value of Gloo's or NCCL's variable means: names or NCCL's prefixes, `=` or `^` before them.

    Names that no interface has are left out.
    """
    exact, names = value.startswith(("=", "^=")), [name for name in value.lstrip("^=").split(",") if name]

    def means(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    if value.startswith("^"):
        return [name for name in interfaces if not means(name)]
    return [name for name in interfaces if name in names] or [name for name in interfaces if means(name)]


def is_loopback(address: str) -> bool:
    """Whether an IP address, with or without a scope, means this machine alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "Python": platform.python_version()}
    versions["laconic"] = importlib.metadata.version("laconic")
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.version.hip:
        versions["HIP"] = torch.version.hip
    if dist.is_nccl_available() and torch.cuda.is_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError, IndexError):
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].split()
        versions["NVIDIA driver"] = next(word for word in words if word[0].isdigit() and "." in word)
    return versions


def _lockable_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft % 2**64 >= _BOUNDLESS or (soft < _MOST_TRIED_BYTES and _can_lock(soft + mmap.PAGESIZE)):
        return None  # a process with the capability IPC_LOCK has no limit
    return soft


def _can_lock(nbytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.closing(mmap.mmap(-1, nbytes)) as pages:
        view = ctypes.c_char.from_buffer(pages)
        address, size = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(nbytes)
        has_locked = libc.mlock(address, size) == 0
        if has_locked:
            libc.munlock(address, size)
        del view  # else the memory could not be given back
    return has_locked


def _interfaces() -> dict[str, Interface]:
    families = (socket.AF_INET, socket.AF_INET6)
    found, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return {
        name: Interface(
            addresses=tuple(it.address for it in found.get(name, ()) if it.family in families),
            is_up=state.isup,
            bits_per_s=state.speed * 1e6 if state.speed > 0 and _is_adapter(name) else None,
        )
        for name, state in states.items()
    }


def _is_adapter(interface: str) -> bool:
    """Whether it is hardware. Bridges, tunnels and pairs inside a machine say any rate."""
    return Path(f"/sys/class/net/{interface}/device").exists()


def _route(address: str, interfaces: dict[str, Interface]) -> str:
    """The interface from which the kernel would send to `address`."""
    for family, *_, place in _resolved(address):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place[0], 9))  # sends nothing
            own = probe.getsockname()[0]
            return next((name for name, it in interfaces.items() if own in it.addresses), "")
    return ""


def _address_of(host: str) -> str:
    return next((str(place[0]) for *_, place in _resolved(host)), "")


def _resolved(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None)
    except OSError:
        return []


def _network_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:  # not Linux
        return ""
