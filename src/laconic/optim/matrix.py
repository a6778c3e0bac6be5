"""The base of optimizers with a rule for whole matrices, and AdamW for all other parameters."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from laconic.optim.base import Group, RaggedOptimizer, check_range
from laconic.optim.joint import JointParameter, join
from laconic.optim.owners import Matrix, MatrixWork, Owners
from laconic.ragged.tensor import RaggedTensor

ADAMW = "adamw"
_ADAMW_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}


class MatrixOptimizer(RaggedOptimizer):
    """A rule for matrices, which owners apply to RaggedTensors and every rank to plain tensors; AdamW for the rest."""

    algorithm: str
    """The `algorithm` of groups that follow the rule for matrices."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.owners = Owners()
        self.matrices: dict[Tensor, list[Matrix]] = {}
        """The matrices of each RaggedTensor that has an owner for them, in the order of the parameters."""
        self.joined: dict[Tensor, JointParameter] = {}
        """The RaggedTensors whose matrices other mesh axes cut: [Note: Matrices over two meshes] in optim/joint.py."""
        self._has_new_group = True
        super().__init__(params, defaults | {"algorithm": self.algorithm})

    # -- subclasses define ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _check_rule(self, group: Group) -> None:
        """Raise ValueError for a setting that the rule for matrices does not accept."""

    @abstractmethod
    def _cost(self, shape: tuple[int, ...], group: Group) -> float:
        """The work of one step on a matrix, or a stack, of this shape: `Matrix.cost`."""

    @abstractmethod
    def _itemsize(self, parameter: Tensor) -> int:
        """The bytes per element when a matrix travels."""

    @abstractmethod
    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        """Fill `state` with the state of a matrix parameter before its first step."""

    @abstractmethod
    def _works(self, parameter: Tensor, group: Group) -> list[MatrixWork]:
        """The work of one step, for each of the parameter's matrices."""

    def _needs_whole(self, parameter: Tensor, group: Group) -> bool:
        return group["algorithm"] != ADAMW

    def _pieces(self, tensor: Any) -> list[Any]:
        """What has an owner of its own, by default a whole stack: views of a tensor, or of this rank's shard of one."""
        return [tensor.without_outer_axes() if isinstance(tensor, RaggedTensor) else tensor]

    def _adamw_eps(self, group: Group) -> float:
        return group["eps"]

    # -- torch.optim.Optimizer -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; `algorithm="adamw"` gives it to AdamW. See `RaggedOptimizer.add_param_group`."""
        group = dict(param_group)  # the order of its keys decides which rank writes them into a checkpoint
        algorithm = group.setdefault("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, ADAMW):
            raise ValueError(f'algorithm must be "{self.algorithm}" or "{ADAMW}", got {algorithm!r}')
        for key, value in _ADAMW_DEFAULTS.items() if algorithm == ADAMW else ():
            group.setdefault(key, value)
        super().add_param_group(group)
        self._has_new_group = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "owners" not in self.__dict__:  # a copy, or unpickled: it plans owners anew
            self.owners, self.matrices, self.joined, self._has_new_group = Owners(), {}, {}, True

    def _step(self) -> None:
        self._plan_owners()
        works: dict[Matrix, MatrixWork] = {}
        for group in self.param_groups:
            parameters = self._with_gradient(group)
            self._adamw([p for p in parameters if not self._needs_whole(p, group)], group)
            for parameter in parameters:
                if self._needs_whole(parameter, group):
                    works |= self._matrix_works(parameter, group)
        self.owners.run(works)

    # -- the parts of a step -------------------------------------------------------------------------------------------

    def _check_settings(self, group: Group) -> None:
        if group["algorithm"] == ADAMW:
            check_range(group, "betas", high=1)
            check_range(group, "eps", is_open=True)
        else:
            self._check_rule(group)

    def _init_state(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if self._needs_whole(parameter, group):
            self._plan_owners()
            self._init_matrix(parameter, state, group)
        else:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _plan_owners(self) -> None:
        """Assign owners, at once, to the matrices of all groups that have no owner yet.

        After a new group without a matrix, too, this rank takes part in the check of all ranks' matrices: another rank
        may have put a matrix into its group by mistake.
        """
        ragged: list[tuple[RaggedTensor, Group]] = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, RaggedTensor)
        ]
        new = [(p, group) for p, group in ragged if p not in self.matrices and self._needs_whole(p, group)]
        if new or self._has_new_group:
            self._has_new_group = False
            every = [parameter for parameter, _ in ragged]
            self.joined |= join([parameter for parameter, _ in new], every)
            matrices: dict[Tensor, list[Matrix]] = {p: self._matrices_of(p, group) for p, group in new}
            self.matrices |= matrices
            clusters = [each.spec.cluster for each in every] + [each.cluster for each in self.joined.values()]
            self.owners.add([matrix for each in matrices.values() for matrix in each], clusters)

    def _matrices_of(self, parameter: RaggedTensor, group: Group) -> list[Matrix]:
        joint, matrices = self.joined.get(parameter), []
        for index, piece in enumerate(self._pieces(parameter)):
            cut = None if joint is None else joint.cut(index if piece.ndim < parameter.ndim else None)
            cost = self._cost(piece.spec.shape if cut is None else cut.shape, group)
            matrices.append(Matrix(spec=piece.spec, cost=cost, itemsize=self._itemsize(parameter), joint=cut))
        return matrices

    def _matrix_works(self, parameter: Tensor, group: Group) -> dict[Matrix, MatrixWork]:
        """Return the work for the owners of a RaggedTensor's matrices. Do the work on a plain tensor at once."""
        works = self._works(parameter, group)
        if isinstance(parameter, RaggedTensor):
            return dict(zip(self.matrices[parameter], works, strict=True))
        for work in works:
            if parameter.numel():
                work.receive(work.work(work.send()))
        return {}

    def _adamw(self, parameters: list[Tensor], group: Group) -> None:
        for is_ragged in (True, False):  # torch's operations on lists take one kind of tensor at a time
            chosen = [p for p in parameters if isinstance(p, RaggedTensor) is is_ragged]
            states = [self.state[p] for p in chosen]
            if chosen:
                adamw(
                    chosen,
                    [p.grad for p in chosen if p.grad is not None],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    foreach=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=self._adamw_eps(group),
                    maximize=False,
                )


def matrices_and_rest(model: nn.Module) -> list[Group]:
    """Split a model's trainable parameters into two groups, as Muon and Shampoo usually get them, after `fully_shard`.

    The first group holds the matrices of hidden layers, and stacks of them. The second, with `algorithm="adamw"`, holds
    the rest: embeddings, the output layer, convolutions and vectors. The output layer is the result of the model's
    `get_output_embeddings()`, or else the last `nn.Linear`. Set learning rates in the groups.
    """
    set_apart: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)):
            set_apart.update(module.parameters(recurse=False))
    if (output := _output_layer(model)) is not None:
        set_apart.update(output.parameters())
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim in (2, 3) and p not in set_apart]
    chosen = set(matrices)
    return [{"params": matrices}, {"params": [p for p in trainable if p not in chosen], "algorithm": ADAMW}]


def _output_layer(model: nn.Module) -> nn.Module | None:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return output if output is not None or not linears else linears[-1]
