"""What optimizers that work on whole matrices share: groups, AdamW for the rest, the way to owners and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from laconic.optim.owners import Matrix, Owners, Work
from laconic.ragged.tensor import RaggedTensor

Group = dict[str, Any]

ADAMW = "adamw"
_ADAMW_BETAS = (0.9, 0.999)
_ADAMW_EPS = 1e-8


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer with a rule of its own for matrices and AdamW for the rest.

    Parameters are RaggedTensors, or plain tensors, on which every rank does all the work. A subclass says what a
    matrix's state is, and what to send to its owner, do there, and do with the outcome.
    """

    algorithm: str
    """What groups say that are not AdamW's."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.owners = Owners()
        self._matrices: dict[Tensor, list[Matrix]] = {}
        super().__init__(params, defaults | {"algorithm": self.algorithm})

    # -- what subclasses say -------------------------------------------------------------------------------------------

    def _check_group(self, group: Group) -> None:
        """Raise ValueError for settings or parameters that the matrix rule cannot have."""
        raise NotImplementedError

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        """The matrices of a parameter, or of a tensor cut alike, that may have different owners; views."""
        return [tensor]

    def _cost(self, shape: torch.Size, group: Group) -> float:
        """Work on one piece."""
        raise NotImplementedError

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        """What pieces are sent as."""
        return parameter.dtype

    def _init_matrix(self, parameter: Tensor, state: dict[str, Any], group: Group) -> None:
        raise NotImplementedError

    def _works(self, parameter: Tensor, group: Group) -> list[Work]:
        """One per piece, for one step."""
        raise NotImplementedError

    def _is_matrix(self, parameter: Tensor, group: Group) -> bool:
        """Whether the matrix rule holds for it."""
        return group["algorithm"] != ADAMW

    # -- torch.optim.Optimizer -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; `algorithm="adamw"` gives it to AdamW."""
        param_group = dict(param_group)
        algorithm = param_group.setdefault("algorithm", self.algorithm)
        if algorithm not in (self.algorithm, ADAMW):
            raise ValueError(f'algorithm must be "{self.algorithm}" or "{ADAMW}", got {algorithm!r}')
        if algorithm == ADAMW:
            param_group.setdefault("betas", _ADAMW_BETAS)
            param_group.setdefault("eps", _ADAMW_EPS)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, parameter in enumerate(group["params"]):
            self._check_parameter(parameter, name_of(group, index), group)
        if float(group["lr"]) < 0:
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        if group["weight_decay"] < 0:
            raise ValueError(f"weight_decay must not be negative, got {group['weight_decay']}")
        if algorithm != ADAMW:
            self._check_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "owners" not in self.__dict__:  # a copy, or unpickled: it makes its own plans
            self.owners, self._matrices = Owners(), {}

    @torch.no_grad()
    def init_state(self, parameter: Tensor) -> None:
        """Give `parameter` its empty state, as before its first step. The same parameters on every rank."""
        if not self.state[parameter]:
            self._init(parameter, self._group_of(parameter))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its dtype, where torch gives it the parameter's."""
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(self.state[parameter][key].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective over the island."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_owners()
        works: dict[Matrix, Work] = {}
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            for parameter in with_grad:
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
                if not self.state[parameter]:
                    self._init(parameter, group)
            self._adamw([p for p in with_grad if not self._is_matrix(p, group)], group)
            for parameter in with_grad:
                if self._is_matrix(parameter, group):
                    works |= self._matrix_works(parameter, group)
        self.owners.run(works)
        return loss

    def _check_parameter(self, parameter: Tensor, name: str, group: Group) -> None:
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is a DTensor; {type(self).__name__} takes parameters of laconic.fully_shard, or plain ones. "
                "Use torch's own optimizers with torch's own sharding"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}; {type(self).__name__} is for real numbers")
        outer = parameter.spec.outer if isinstance(parameter, RaggedTensor) else None
        if outer is not None and outer.local_shape != outer.shape and self._is_matrix(parameter, group):
            raise ValueError(
                f"{name} is cut over another mesh axis as well ({outer.placement}), so that no rank of this one can "
                f'have it whole; put it into a group with algorithm="{ADAMW}"'
            )

    # -- steps of a step -----------------------------------------------------------------------------------------------

    def _matrix_works(self, parameter: Tensor, group: Group) -> dict[Matrix, Work]:
        """What its owners shall do; a plain tensor's work is done right here."""
        works = self._works(parameter, group)
        if isinstance(parameter, RaggedTensor):
            return dict(zip(self._matrices[parameter], works, strict=True))
        for work in works:
            if parameter.numel():
                work.receive(work.work(work.send()))
        return {}

    def _adamw(self, parameters: list[Tensor], group: Group) -> None:
        for kind in (True, False):  # a list operation takes one kind at a time
            chosen = [p for p in parameters if isinstance(p, RaggedTensor) is kind]
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

    def _adamw_eps(self, group: Group) -> float:
        return group["eps"]

    def _init(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if self._is_matrix(parameter, group):
            self._give_owners()
            self._init_matrix(parameter, state, group)
        else:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _give_owners(self) -> None:
        """Plan for all matrices that have come since the last time, of all groups at once."""
        new: list[Matrix] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, RaggedTensor) or parameter in self._matrices:
                    continue
                if self._is_matrix(parameter, group):
                    self._matrices[parameter] = [
                        Matrix(
                            spec=piece.spec,
                            cost=self._cost(piece.shape, group),
                            itemsize=self._dtype(parameter).itemsize,
                        )
                        for piece in self._pieces(parameter)
                        if isinstance(piece, RaggedTensor)
                    ]
                    new += self._matrices[parameter]
        if new:
            self.owners.add(new)

    def _group_of(self, parameter: Tensor) -> Group:
        for group in self.param_groups:
            if any(parameter is other for other in group["params"]):
                return group
        raise ValueError(f"a tensor of shape {tuple(parameter.shape)} is not one of this optimizer's parameters")


def name_of(group: Group, index: int) -> str:
    """What to call a parameter in a message: its name if somebody told it, its place if not."""
    if "param_names" in group:
        return str(group["param_names"][index])
    parameter = group["params"][index]
    if isinstance(parameter, RaggedTensor):
        return parameter.spec.layout.slots[parameter.spec.index].name
    return f"parameter {index} of its group, of shape {tuple(parameter.shape)},"


def matrices_and_rest(model: nn.Module) -> list[Group]:
    """Two parameter groups, the way Muon and Shampoo are usually given a model's trainable parameters.

    The first holds the hidden layers' matrices, and stacks of them; the second, with `algorithm="adamw"`, the rest:
    embeddings, the output layer, convolutions, vectors. The output layer is what `get_output_embeddings()` says, or
    else the last `nn.Linear` of the model. Call it after `fully_shard`; set learning rates in the groups.
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
    told = getattr(model, "get_output_embeddings", lambda: None)()
    if told is not None:
        return told
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linears[-1] if linears else None
