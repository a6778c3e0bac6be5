"""Whole matrices for optimizers that need them: who works on which, and how they get there and back.

[Note: Owners]
Every matrix has one owner, a rank that gets it whole, works on it and sends the outcome back to where the elements
live. Every rank derives the same owners from shapes and layouts. In order of falling cost a matrix goes to the rank
with the least work so far (longest processing time first, within 4/3 of the best possible), and among equals to the one
that already holds most of it. A matrix that lies whole on a rank stays there and moves nothing, unless that rank
would then have more than `STAY_WITHIN` times its fair share, which is the mean, or the costliest matrix if that is
more. Matrices that come later (another parameter group) are added to the work that is there.
The rule is torchtitan's DistMuon's; balancing over all buckets at once is Canzona's (arXiv 2602.06079).

[Note: Rounds]
Matrices travel in rounds of bounded bytes, in the order in which they were given owners, so that every round's work is
balanced too; those that stay come first, and give the first transfer something to hide behind. Two slots are in
flight: while one round is worked on, the next one's matrices come in and the last one's outcome goes back.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.layout.bucket import BucketLayout, Slot
from laconic.ragged.redistribute import Redistribution, TransferPlan, moved_elements, whole_on
from laconic.ragged.tensor import RaggedSpec, RaggedTensor

STAY_WITHIN = 2.0
"""Times its fair share of the work that a rank may have before matrices that lie whole on it move away."""
ROUND_BYTES = 64 << 20
"""What a rank gets in one round, at most, if it is more than one matrix."""
_MIN_ROUNDS = 4
_SMALLEST_ROUND_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """What has to be in one place to be worked on."""

    spec: RaggedSpec
    """Where its elements live."""
    cost: float
    """Work, in any unit that all matrices share."""
    itemsize: int
    """Bytes per element on the way."""

    @property
    def name(self) -> str:
        """Fully qualified within its unit."""
        return self.spec.layout.slots[self.spec.index].name

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole on the way."""
        return self.numel * self.itemsize

    @property
    def home(self) -> int | None:
        """The shard that holds all of it, if one does."""
        return next(
            (shard for shard in self.spec.layout.holders(self.spec.index) if self.held(shard) == self.numel), None
        )

    def held(self, shard: int) -> int:
        """Elements that lie in `shard`."""
        extent = self.spec.layout.extent(self.spec.index, shard)
        return extent.numel if extent is not None else 0


def assign(matrices: Sequence[Matrix], loads: list[float]) -> list[tuple[int, int]]:
    """Give each matrix an owner: [Note: Owners]. A pure function.

    Args:
        loads: work of each shard so far; what is assigned is added.

    Returns:
        (index of the matrix, owning shard), in the order of assignment.
    """
    costs = [matrix.cost for matrix in matrices]
    fair = max((sum(loads) + sum(costs)) / len(loads), max(costs, default=0.0))
    falling = sorted(range(len(matrices)), key=lambda i: (-costs[i], -matrices[i].nbytes, i))
    owners: dict[int, int] = {}
    for index in falling:
        home = matrices[index].home
        if home is not None and loads[home] + costs[index] <= STAY_WITHIN * fair:
            owners[index] = home
            loads[home] += costs[index]
    for index in falling:
        if index not in owners:
            matrix = matrices[index]
            owner = min(range(len(loads)), key=lambda shard: (loads[shard], -matrix.held(shard), shard))
            owners[index] = owner
            loads[owner] += costs[index]
    return list(owners.items())


class Work:
    """What to do with one matrix in one step; works on plain tensors alike, where every rank does everything."""

    def send(self) -> Tensor:
        """What the owner shall get, cut as the matrix is. Called on every rank."""
        raise NotImplementedError

    def work(self, whole: Tensor) -> Tensor:
        """Called on the owner with the whole of it, in the matrix's shape; the outcome has the same shape and dtype."""
        raise NotImplementedError

    def receive(self, outcome: Tensor) -> None:
        """Called on every rank with the outcome, cut as the matrix is."""
        raise NotImplementedError


class Owners:
    """The owners of an optimizer's matrices, and the traffic to them and back."""

    def __init__(self, round_bytes: int = ROUND_BYTES) -> None:
        self._round_bytes = round_bytes
        self._loads: dict[Cluster, list[float]] = {}
        self._owners: dict[Matrix, int] = {}  # in the order of assignment
        self._rounds: list[_Round] = []
        self._planned: list[tuple[Matrix, int]] = []
        self._num_agreed = 0

    def add(self, matrices: Sequence[Matrix]) -> None:
        """Give `matrices` owners. Call it alike on every rank."""
        for cluster in dict.fromkeys(matrix.spec.cluster for matrix in matrices):
            own = [matrix for matrix in matrices if matrix.spec.cluster is cluster]
            loads = self._loads.setdefault(cluster, [0.0] * cluster.size)
            self._owners.update((own[index], owner) for index, owner in assign(own, loads))

    def owner_of(self, matrix: Matrix) -> int:
        """The owning shard."""
        return self._owners[matrix]

    def spec_on_owner(self, matrix: Matrix, name: str, shape: tuple[int, ...]) -> RaggedSpec:
        """Of a tensor that belongs to the matrix and lives, whole, where the matrix is worked on."""
        spec, size = matrix.spec, max(1, math.prod(shape))
        slot = Slot(name=f"{matrix.name}.{name}", shape=shape, block=size, offset=self._owners[matrix] * size)
        layout = BucketLayout(slots=(slot,), num_shards=spec.layout.num_shards, shard_numel=size)
        return RaggedSpec(cluster=spec.cluster, layout=layout, index=0)

    def loads(self, cluster: Cluster) -> list[float]:
        """Work by shard."""
        return list(self._loads[cluster])

    def moved_elements(self) -> int:
        """Elements that cross between ranks when every matrix goes to its owner, summed over ranks; as many return."""
        return sum(moved_elements(m.spec, whole_on(m.spec, owner)) for m, owner in self._owners.items())

    def run(self, works: Mapping[Matrix, Work]) -> None:
        """Take matrices to their owners, work on them and take the outcome back: [Note: Rounds].

        Collective over the island: the same matrices on every rank.

        Raises:
            ValueError: ranks have different matrices or owners.
        """
        self._agree()
        rounds = self._plan(works)
        if not rounds:
            return
        arriving = rounds[0].send(works)
        returning: tuple[_Round, Redistribution] | None = None
        for index, current in enumerate(rounds):
            inputs = arriving
            if index + 1 < len(rounds):
                arriving = rounds[index + 1].send(works)
            outcomes = current.work(works, inputs)
            if returning is not None:
                returning[0].receive(works, returning[1])
            returning = current, current.backward.start(outcomes)
        assert returning is not None
        returning[0].receive(works, returning[1])

    def _plan(self, works: Mapping[Matrix, Work]) -> list[_Round]:
        """The rounds for these matrices; kept until others are asked for."""
        owned = [(matrix, owner) for matrix, owner in self._owners.items() if matrix in works and matrix.numel]
        if owned != self._planned:
            self._rounds, self._planned = _rounds(owned, self._round_bytes), owned
        return self._rounds

    def _agree(self) -> None:
        """Once per change: do all ranks have the same owners in mind? If not, messages would be mistaken."""
        if len(self._owners) == self._num_agreed:
            return
        for cluster in self._loads:
            plan = [(m.name, tuple(m.spec.shape), o) for m, o in self._owners.items() if m.spec.cluster is cluster]
            fingerprint = zlib.crc32(repr(plan).encode())
            both = torch.tensor([fingerprint, -fingerprint], device=cluster.device)
            largest, smallest_negated = all_reduce(cluster, both, dist.ReduceOp.MAX).tolist()
            if largest != -smallest_negated:
                raise ValueError(
                    "ranks disagree about the matrices of this optimizer or their order, for instance because "
                    "parameter groups were filled from a set; give every rank the same parameters in the same order"
                )
        self._num_agreed = len(self._owners)


class _Round:
    """Matrices of one cluster that travel together."""

    def __init__(self, matrices: Sequence[Matrix], owners: Sequence[int]) -> None:
        self.matrices = matrices
        self.mine = [owner == matrices[0].spec.cluster.shard_index for owner in owners]
        self.whole = [whole_on(matrix.spec, owner) for matrix, owner in zip(matrices, owners, strict=True)]
        here = [matrix.spec for matrix in matrices]
        self.forward, self.backward = TransferPlan(here, self.whole), TransferPlan(self.whole, here)

    def send(self, works: Mapping[Matrix, Work]) -> Redistribution:
        return self.forward.start([_ragged(works[matrix].send()) for matrix in self.matrices])

    def work(self, works: Mapping[Matrix, Work], inputs: Redistribution) -> list[RaggedTensor]:
        outcomes = []
        for matrix, arrived, spec, is_mine in zip(self.matrices, inputs.wait(), self.whole, self.mine, strict=True):
            local = _ragged(arrived).to_local()
            if is_mine:
                local = works[matrix].work(local.view(spec.shape)).reshape(-1)
            outcomes.append(RaggedTensor(local, spec))
        return outcomes

    def receive(self, works: Mapping[Matrix, Work], outcomes: Redistribution) -> None:
        for matrix, outcome in zip(self.matrices, outcomes.wait(), strict=True):
            works[matrix].receive(outcome)


def _ragged(tensor: Tensor) -> RaggedTensor:
    assert isinstance(tensor, RaggedTensor)
    return tensor


def _rounds(owned: Sequence[tuple[Matrix, int]], limit: int) -> list[_Round]:
    """Cut the sequence where some owner would get more than it may in one round, or where the cluster changes."""
    totals: dict[tuple[Cluster, int], int] = {}
    for matrix, owner in owned:
        key = matrix.spec.cluster, owner
        totals[key] = totals.get(key, 0) + matrix.nbytes
    # Few matrices, too, are worth several rounds, or nothing hides behind anything.
    limit = min(limit, max(_SMALLEST_ROUND_BYTES, max(totals.values(), default=0) // _MIN_ROUNDS))
    rounds: list[list[tuple[Matrix, int]]] = []
    filled: dict[tuple[Cluster, int], int] = {}
    for matrix, owner in owned:
        key = matrix.spec.cluster, owner
        is_full = key in filled and filled[key] + matrix.nbytes > limit
        if not rounds or is_full or rounds[-1][0][0].spec.cluster is not matrix.spec.cluster:
            rounds.append([])
            filled = {}
        rounds[-1].append((matrix, owner))
        filled[key] = filled.get(key, 0) + matrix.nbytes
    return [_Round([m for m, _ in members], [owner for _, owner in members]) for members in rounds]
