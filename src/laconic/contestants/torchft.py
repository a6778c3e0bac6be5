"""The stepper of a job whose islands sync by torchft's DiLoCo, beside laconic's own local steps.

[Note: torchft as a baseline]
Every island is a replica group of torchft: FSDP2 inside, and between islands `torchft.local_sgd.DiLoCo`, which
averages pseudo-gradients in float32 by Gloo's all-reduce, one for each fragment. Rank 0 runs the lighthouse, and the
first rank of every island a manager. torchft swallows a failed all-reduce, and goes on with the weights of the last
sync. A comparison must not, so the stepper counts the syncs that torchft has committed.
"""

import contextlib
import importlib
import logging
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import nn

from laconic.checkpoint.state import named_parameters
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import make_mesh
from laconic.comm.ring import own_address
from laconic.config import JobError, SyncConfig
from laconic.extras import how_to_install
from laconic.islands.exchange import SyncReport
from laconic.islands.fragments import fragment_of
from laconic.strategies.islands import num_islands
from laconic.strategies.parallelize import shard_by_fsdp2
from laconic.strategies.simultaneous import Simultaneous
from laconic.strategies.stepper import Setup

_LOGGERS = ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors")


def import_torchft() -> tuple[ModuleType, ModuleType]:
    """Import torchft's module of DiLoCo, and the top module with `Manager`.

    Raises:
        JobError: torchft is not installed.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # its servers write several lines for every sync
    try:
        found = importlib.import_module("torchft"), importlib.import_module("torchft.local_sgd")
    except ImportError as error:
        advice = how_to_install("torchft", of_contestants=True)
        raise JobError(f"shard.strategy = 'torchft-diloco' needs torchft ({error}): {advice}") from error
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    return found


def shard_inside_islands(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """FSDP2 over the ranks of each island: see `parallelize`."""
    islands = num_islands(setup.sync, setup.ranks)
    mesh = make_mesh(setup.device.type, (islands, setup.ranks.world_size // islands), ("island", "shard"))
    return shard_by_fsdp2(model, setup, mesh["shard"])


class TorchftStepper(Simultaneous):
    """A `Stepper` for islands that sync by torchft: [Note: torchft as a baseline]."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        """Shard the model inside this rank's island, and join torchft's quorum of islands. Collective.

        Raises:
            JobError: torchft is not installed.
            ValueError: the model cannot be divided into sync.fragments fragments.
        """
        torchft, local_sgd = import_torchft()
        super().__init__(model, setup)
        sync = setup.sync
        schedule, rates = sync.policy.schedule, sync.policy.outer
        self._interval, self._num_steps_taken = schedule.interval, 0
        self.steps_per_sync = self._interval
        self._lighthouse: Any = None
        self._manager = self._join(torchft, setup)
        fragments = _fragments(model, sync)
        options: dict[str, Any] = {"lr": rates.lr, "momentum": rates.momentum, "nesterov": rates.momentum > 0}
        outer = [torch.optim.SGD(fragment.parameters(), **options) for fragment in fragments]
        self._diloco = local_sgd.DiLoCo(
            self._manager, fragments, self.optimizer, outer, sync_every=schedule.every, use_bucketization=True
        )
        self._diloco.__enter__()

    def _join(self, torchft: ModuleType, setup: Setup) -> Any:
        """Start the lighthouse, a store for each island, and the manager; return the manager. Collective."""
        ranks, timeout = setup.ranks, timedelta(seconds=setup.train.timeout_s)
        islands = num_islands(setup.sync, ranks)
        world = dist.group.WORLD
        assert world is not None
        host = own_address(dist.distributed_c10d._get_default_store(), ranks.world_size)
        address: str | None = None
        if ranks.is_main:
            from torchft.coordination import LighthouseServer

            self._lighthouse = LighthouseServer(
                bind="0.0.0.0:0", min_replicas=islands, join_timeout_ms=60_000, quorum_tick_ms=20
            )
            address = f"http://{host}:{urlsplit(self._lighthouse.address()).port}"
        is_first = ranks.rank == self.peers.start
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_first else None
        found: list[list[Any]] = RankGroup().gather([address, host, self._store.port if self._store else 0])
        lighthouse, (store_host, store_port) = found[0][0], found[self.peers.start][1:]
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=islands,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            rank=ranks.rank - self.peers.start,
            world_size=len(self.peers),
            store_addr=store_host,
            store_port=store_port,
            lighthouse_addr=lighthouse,
            replica_id=f"island-{self.peers.start // len(self.peers)}",
            hostname=host,
            init_sync=False,  # islands start from equal weights
        )

    def _update(self, num_targets: int, *, is_last: bool) -> tuple[SyncReport, ...]:
        """Take the optimizer's step, after which torchft's hook syncs when it is time.

        Raises:
            RuntimeError: torchft has not committed a sync.
        """
        self.optimizer.step()
        self._num_steps_taken += 1
        due, done = self._num_steps_taken // self._interval, self._manager.current_step()
        if done != due:
            raise RuntimeError(
                f"torchft committed {done} of {due} syncs up to step {self._num_steps_taken}; its error: "
                f"{self._manager.errored()}"
            )
        return ()

    @contextlib.contextmanager
    @torch.no_grad()
    def consistent(self) -> Iterator[None]:
        """See `Stepper.consistent`. Inside, the model has the outer parameters."""
        parameters = list(self.module.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        self._diloco._restore_parameters()
        try:
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.copy_(value)

    def resting_bytes(self) -> int:
        """See `Stepper.resting_bytes`. On a CPU the outer parameters and momentum are in the same memory."""
        kept = sum(
            math.prod(tensor.shape) * tensor.element_size()
            for fragment in self._diloco._fragments
            for tensor in fragment.original_parameters.values()
        )
        return super().resting_bytes() + kept

    def close(self) -> None:
        """See `Stepper.close`."""
        self._diloco.__exit__(None, None, None)
        dist.barrier()
        self._manager.shutdown(wait=False)
        dist.barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def _fragments(model: nn.Module, sync: SyncConfig) -> list[nn.Module]:
    """The fragments as modules, in the order in which laconic's local steps send them: 1, 2, ..., 0."""
    trained = {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    assigned = fragment_of(trained, sync.policy.schedule.fragments, sync.policy.schedule.pattern)
    modules = []
    for index in [*range(1, sync.policy.schedule.fragments), 0]:
        fragment = nn.Module()
        for name, parameter in trained.items():
            if assigned[name] == index:
                fragment.register_parameter(name.replace(".", "/"), parameter)
        modules.append(fragment)
    return modules
