"""torch's database of operations, on RaggedTensors and whole tensors: `python -m tests.ragged.operators 3 float32`.

It prints a JSON object: the number of calls, and what went wrong. It has a process of its own, as the database changes
settings of torch.

A call on RaggedTensors is *right* if it has the results of the whole tensors, *refused* if it names what to do instead,
and may raise what torch raises for whole tensors. It is *wrong* if it has other results, or none of torch's errors, and
*unclear* if it raises anything else.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import laconic
from laconic.comm.cluster import Cluster
from laconic.ragged.tensor import RaggedTensor
from laconic.rehearse import ranks
from tests.support.sharded_net import cut

NO_STRIDES = {"sparse.sampled_addmm", "sparse.mm.reduce"}
"""Operations on sparse tensors, which are not cut."""
UNDEFINED = ("empty", "new_empty")
"""Operations whose results have no defined values begin like this."""
BOXED = {"tensor_split", "slice"}
"""torch reads the memory of their indices, or refuses tensors as indices, before it asks a tensor."""
_WITH_DIMS = {
    "sum", "mean", "var", "std", "amax", "amin", "any", "all", "norm", "linalg.vector_norm", "select", "narrow",
    "split", "unbind", "chunk",
}  # fmt: skip
_DIMS = (-4, -3, -1, 1, 2, 5, (0, 0), (0, -2), ())
_WITH_OPERANDS = {"add", "mul", "lt", "where", "masked_select", "copysign"}
_OPERANDS = ((1, 1, 1), (1, 3), (5, 1), (3,), (2, 5, 3), (1,), (4, 3), ())
_REFUSALS = ("full_tensor", "to_local", "RaggedTensor")


def sweep(names: Sequence[str], dtype: torch.dtype, num_samples: int) -> tuple[int, list[str]]:
    """Run operations, all without names, on the ranks that call this. Returns the calls, and what went wrong."""
    cluster, found, num = Cluster.of(laconic.init_mesh("cpu")), [], 0
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}".removesuffix(".")
        is_left_out = name in NO_STRIDES | BOXED or name.startswith(UNDEFINED) or (names and name not in names)
        if is_left_out or dtype not in op.supported_dtypes("cpu"):
            continue
        for sample in _samples(op, dtype, num_samples):
            for way, call in _ways(op):
                for are_all in (False, True):
                    num += 1
                    problem = _compare(call, sample, cluster, are_all=are_all)
                    found += [f"{name}, {way}, {'all' if are_all else 'first'} cut: {problem}"] if problem else []
    return num, found


def _samples(op: Any, dtype: torch.dtype, number: int) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    given = [*islice(op.sample_inputs("cpu", dtype), number)]
    if op.error_inputs_func is not None:
        given += [each.sample_input for each in islice(op.error_inputs("cpu"), number)]
    yield from ((each.input, tuple(each.args), dict(each.kwargs)) for each in given)
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for dim in _DIMS if op.name in _WITH_DIMS else ():
        yield values, (), {"dim": dim}
        yield values, (dim,), {}
    for shape in _OPERANDS if op.name in _WITH_OPERANDS else ():
        yield values, (torch.ones(shape, dtype=dtype),), {}


def _ways(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "new", op.op
    if op.inplace_variant is not None:
        yield "in place", lambda x, *args, **kwargs: (op.inplace_variant(x, *args, **kwargs), x)


def _compare(call: Callable[..., Any], sample: Any, cluster: Cluster, *, are_all: bool) -> str:
    """The problem with a call, or ""."""

    def cut_each(value: Any) -> Any:
        return cut(value, cluster) if isinstance(value, Tensor) else value

    given, args, kwargs = sample
    rest = tree_map(cut_each, (args, kwargs)) if are_all else (args, kwargs)
    want, error = _tried(call, tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given), args, kwargs)
    got, raised = _tried(call, tree_map(cut_each, given), *rest)
    if raised is not None:
        is_refused = isinstance(raised, NotImplementedError | ValueError | TypeError)
        if (is_refused and any(word in str(raised) for word in _REFUSALS)) or type(raised) is type(error):
            return ""
        return f"unclear, {type(raised).__name__}: {str(raised)[:100]}"
    return "wrong, no error" if error is not None else _difference(got, want)


def _tried(call: Callable[..., Any], given: Any, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(0)
    try:
        return call(given, *args, **kwargs), None
    except Exception as error:  # of any kind: it is compared
        return None, error


def _difference(got: Any, want: Any) -> str:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    for one, other in pairs:
        if not isinstance(other, Tensor):
            if one != other and not (isinstance(other, float) and abs(one - other) < 1e-4 * max(1.0, abs(other))):
                return f"wrong, {one} for {other}"
            continue
        whole = one.full_tensor() if isinstance(one, RaggedTensor) else one
        if (whole.shape, whole.dtype) != (other.shape, other.dtype):
            return f"wrong, {whole.dtype} {tuple(whole.shape)} for {other.dtype} {tuple(other.shape)}"
        tolerance = 2e-2 if other.dtype.itemsize < 4 else 1e-4
        try:
            torch.testing.assert_close(whole.detach() + 0, other + 0, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"wrong, {str(error).splitlines()[0]}"
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    num_ranks, dtype, *chosen = sys.argv[1:]
    calls, problems = ranks(sweep, chosen, getattr(torch, dtype), 2, local=int(num_ranks), timeout_s=900)[0]
    print(json.dumps({"calls": calls, "problems": problems}))
