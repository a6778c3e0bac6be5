"""Owners of matrices: which rank works on which matrix, and how matrices travel to their owners and back.

[Note: Owners]
Every matrix has one owner: the rank that receives the whole matrix, works on it and sends the outcome back to the ranks
that hold the elements. All ranks derive the same owners from shapes and layouts. Matrices are assigned in order of
falling cost, each to the rank with the least work so far (longest processing time first, within 4/3 of the best
balance). Among ranks with equal work, the one that holds most of the matrix gets it.

A matrix that lies whole on a rank stays there and moves nothing, unless that rank would then have more than
`STAY_WITHIN` times its fair share. The fair share is the mean work of a rank, or the cost of the costliest matrix if
that is more. Matrices that come later (another parameter group) add to the present work. Sources: torchtitan's DistMuon
for the rule, Canzona (arXiv 2602.06079) for balancing over all buckets at once.

[Note: Rounds]
Matrices travel in rounds of bounded bytes. The order of rounds is the order of assignment, so the work of every round
is balanced too. Matrices that stay come first, and their work hides the first transfer. While the owners work on one
round, the matrices of the next round arrive and the outcomes of the previous round return.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.layout.bucket import BucketLayout
from laconic.optim.base import local_of
from laconic.optim.joint import DIFFERENT, JointCut
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.redistribute import Redistribution, TransferPlan, whole_on
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

STAY_WITHIN = 2.0
"""How many fair shares of the work a rank may have before matrices that lie whole on it move away."""
ROUND_BYTES = 64 << 20
"""The most bytes that a rank receives in one round, unless a single matrix has more."""
_MIN_ROUNDS = 4
_SMALLEST_ROUND_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A matrix that one rank needs whole."""

    spec: RaggedSpec
    """The cut of what a `MatrixWork` sends and receives: the matrix, or this rank's shard of it with `joint`."""
    cost: float
    """The work on the matrix, in any unit that all matrices share."""
    itemsize: int
    """The bytes per element when the matrix travels."""
    joint: JointCut | None = None
    """The whole, of a matrix that other mesh axes cut as well: [Note: Matrices over two meshes] in optim/joint.py."""

    @property
    def route(self) -> RaggedSpec:
        """The cut over the ranks of which one owns the matrix."""
        return self.spec if self.joint is None else self.joint.spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix."""
        return self.spec.shape if self.joint is None else self.joint.shape

    @property
    def numel(self) -> int:
        """The number of elements of the whole matrix."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole matrix when it travels."""
        return self.numel * self.itemsize

    @property
    def home(self) -> int | None:
        """The shard that holds the whole matrix; None if several do."""
        shards = self.route.layout.holders(self.route.index)
        return next((shard for shard in shards if self.num_held(shard) == self.numel), None)

    def num_held(self, shard: int) -> int:
        """The number of the matrix's elements in `shard`."""
        return self.route.held_by(shard).numel


def assign(matrices: Sequence[Matrix], loads: list[float]) -> list[tuple[int, int]]:
    """Assign owners to the matrices of one cluster: [Note: Owners]. A pure function but for `loads`.

    The work of the matrices is added to `loads`, the work of each shard so far. The result holds (index of the matrix,
    owning shard), in the order of assignment.
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
            owner = min(range(len(loads)), key=lambda shard: (loads[shard], -matrix.num_held(shard), shard))
            owners[index] = owner
            loads[owner] += costs[index]
    return list(owners.items())


class MatrixWork(Protocol):
    """One step's work on one matrix, a RaggedTensor. On a plain tensor, every rank does all three parts itself."""

    def send(self) -> Tensor:
        """Return the tensor that the owner needs, cut like the matrix. Every rank calls this."""

    def work(self, whole: Tensor) -> Tensor:
        """Work on the whole tensor; the outcome has its shape and dtype. The owner alone calls this."""

    def receive(self, outcome: Tensor) -> None:
        """Use the outcome, cut like the matrix. Every rank calls this."""


class Owners:
    """The owners of an optimizer's matrices, and the transfers to them and back."""

    def __init__(self, round_bytes: int = ROUND_BYTES) -> None:
        self._round_bytes = round_bytes
        self.loads: dict[Cluster, list[float]] = {}  # the work of each shard of a cluster
        self.by_matrix: dict[Matrix, int] = {}  # the shard whose rank owns each matrix, in the order of assignment
        self._rounds: list[_Round] = []
        self._planned: list[tuple[Matrix, int]] = []
        self._is_agreed = True

    def add(self, matrices: Sequence[Matrix], clusters: Iterable[Cluster] = ()) -> None:
        """Assign owners to further matrices. All ranks must add the same matrices in the same order.

        `run` then checks this on `clusters` and on those of the matrices. So a rank that adds no matrix to a cluster
        where another rank adds one must give the cluster, or else the other rank would wait for it forever.
        """
        self._is_agreed = False
        for cluster in dict.fromkeys([*(matrix.route.cluster for matrix in matrices), *clusters]):
            members = [matrix for matrix in matrices if matrix.route.cluster is cluster]
            loads = self.loads.setdefault(cluster, [0.0] * cluster.size)
            self.by_matrix.update((members[index], owner) for index, owner in assign(members, loads))

    def spec_on_owner(
        self, matrix: Matrix, name: str, shape: tuple[int, ...], place: DTensorShard | None = None
    ) -> RaggedSpec:
        """The spec of a tensor that belongs to the matrix and lies whole with its owner.

        `place` says which shard it is of a tensor that other mesh axes cut; `shape` is then the shard's.
        """
        route, owner = matrix.route, self.by_matrix[matrix]
        name = f"{route.slot.name}.{name}"
        layout = BucketLayout.whole_in(owner, name=name, shape=shape, num_shards=route.layout.num_shards)
        return RaggedSpec(cluster=route.cluster, layout=layout, index=0, dtensor=place)

    def run(self, works: Mapping[Matrix, MatrixWork]) -> None:
        """Move matrices to owners, work on them, and move outcomes back: [Note: Rounds]. Collective over the island.

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

    def _plan(self, works: Mapping[Matrix, MatrixWork]) -> list[_Round]:
        """The rounds for these matrices, kept until other matrices come."""
        owned = [(matrix, owner) for matrix, owner in self.by_matrix.items() if matrix in works and matrix.numel]
        if owned != self._planned:
            self._rounds, self._planned = _rounds(owned, self._round_bytes), owned
        return self._rounds

    def _agree(self) -> None:
        """After every `add`, check that all ranks have the same owners. Otherwise they would misread messages."""
        if self._is_agreed:
            return
        for cluster in sorted(self.loads, key=_place_of):  # ranks may have met the clusters in another order
            owned = [(m, owner) for m, owner in self.by_matrix.items() if m.route.cluster is cluster]
            plan = [(matrix.route.slot.name, matrix.shape, owner) for matrix, owner in owned]
            fingerprint = zlib.crc32(repr(plan).encode())
            both = torch.tensor([fingerprint, -fingerprint], device=cluster.device)
            largest, smallest_negated = all_reduce(cluster, both, dist.ReduceOp.MAX).tolist()
            if largest != -smallest_negated:
                raise ValueError(DIFFERENT)
        self._is_agreed = True


def _place_of(cluster: Cluster) -> tuple[Any, ...]:
    """A key that orders clusters alike on all their ranks: two of them may have the same ranks, arranged otherwise."""
    return cluster.mesh.mesh.flatten().tolist(), cluster.num_islands, cluster.num_nodes


class _Round:
    """Matrices of one cluster that travel together."""

    def __init__(self, owned: Sequence[tuple[Matrix, int]]) -> None:
        self.matrices = [matrix for matrix, _ in owned]
        self.is_own = [owner == matrix.route.cluster.shard_index for matrix, owner in owned]
        whole, cut = [whole_on(matrix.route, owner) for matrix, owner in owned], [m.route for m in self.matrices]
        self.forward, self.backward = TransferPlan(cut, whole), TransferPlan(whole, cut)

    def send(self, works: Mapping[Matrix, MatrixWork]) -> Redistribution:
        return self.forward.start([local_of(works[matrix].send()) for matrix in self.matrices])

    def work(self, works: Mapping[Matrix, MatrixWork], inputs: Redistribution) -> list[Tensor]:
        return [
            _worked_on(matrix, works[matrix], arrived) if is_own else arrived
            for matrix, arrived, is_own in zip(self.matrices, inputs.wait(), self.is_own, strict=True)
        ]

    def receive(self, works: Mapping[Matrix, MatrixWork], outcomes: Redistribution) -> None:
        for matrix, outcome in zip(self.matrices, outcomes.wait(), strict=True):
            works[matrix].receive(RaggedTensor(outcome, matrix.spec))


def _worked_on(matrix: Matrix, work: MatrixWork, arrived: Tensor) -> Tensor:
    """The outcome of the owner's work, in the order of elements in which the matrix has arrived; both flat."""
    joint = matrix.joint
    if joint is None:
        return work.work(arrived.view(matrix.shape)).reshape(-1)
    return joint.flatten(work.work(joint.assemble(arrived)))


def _rounds(owned: Sequence[tuple[Matrix, int]], limit: int) -> list[_Round]:
    """Cut the sequence where an owner would receive more than `limit` in one round, or where the cluster changes."""
    totals: Counter[tuple[Cluster, int]] = Counter()
    for matrix, owner in owned:
        totals[matrix.route.cluster, owner] += matrix.nbytes
    # Few matrices take several rounds, too: otherwise no work could hide a transfer.
    limit = min(limit, max(_SMALLEST_ROUND_BYTES, max(totals.values(), default=0) // _MIN_ROUNDS))
    rounds: list[list[tuple[Matrix, int]]] = []
    filled: Counter[int] = Counter()
    for matrix, owner in owned:
        is_full = filled[owner] and filled[owner] + matrix.nbytes > limit
        if not rounds or is_full or rounds[-1][0][0].route.cluster is not matrix.route.cluster:
            rounds.append([])
            filled.clear()
        rounds[-1].append((matrix, owner))
        filled[owner] += matrix.nbytes
    return [_Round(members) for members in rounds]
