"""`with_laconic`: the `parallelize_fn` of a torchtitan model with laconic in place of FSDP2.

```python
spec = model_registry("8B")
spec = dataclasses.replace(spec, parallelize_fn=with_laconic(spec.parallelize_fn))
```

The tests use a stand-in for torchtitan with the interface of its release 0.3.0, because what torchtitan needs does not
go with what laconic's other extras need:
`parallelize_fn(model, *, parallel_dims, training, parallelism, compile_config, ac_config, dump_folder)`. By hand, the
Llama 3 of torchtitan 0.3.0 was initialised, run and clipped on two CPU ranks, with its backends `spmd_types` (the
default) and `partial_dtensor`.

[Note: torchtitan's own calls]
Each model of torchtitan has a `parallelize_fn` of its own. It applies tensor, expert and context parallelism,
activation checkpointing and torch.compile in the order that the model needs, and calls `fully_shard` last, with torch's
policies, on meshes with its own axes. laconic takes the same arguments. So `with_laconic` leaves these functions as
they are, and gives them laconic's `fully_shard` while they run. `to_empty` and `init_weights` come afterwards, as with
FSDP2.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.fsdp
from torch import nn

import laconic
from laconic.integrations.options import ArgumentError, LaconicArguments

_TITANS_OWN = {
    "param_dtype": "training.mixed_precision_param",
    "reduce_dtype": "training.mixed_precision_reduce",
    "reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "units": "no key: the model's parallelize_fn knows its layers",
    "local_steps": "no key: laconic.LocalSteps goes around an optimizer in a loop of your own, or use `laconic train`",
    "audit_every": "no key: laconic.audit is for a loop of your own, or use `laconic train`",
}
"""Options of laconic that torchtitan has keys of its own for."""


def with_laconic(
    parallelize_fn: Callable[..., nn.Module], arguments: LaconicArguments | None = None
) -> Callable[..., nn.Module]:
    """Return a `parallelize_fn` that does as the given one does, but shards with laconic.

    Args:
        parallelize_fn: a torchtitan model's own, `ModelSpec.parallelize_fn`.
        arguments: laconic's options: `cache`, `wire`, `device_budget_bytes`, `granularity`, `check_every` and
            `on_damage`. torchtitan has keys of its own for the others. All ranks begin with equal weights, as
            `init_weights` makes them so.

    Raises:
        ArgumentError: an option is set for which torchtitan has a key of its own. The returned function raises it if
            no call of `fully_shard` reached laconic.
    """
    chosen = arguments if arguments is not None else LaconicArguments()
    defaults = LaconicArguments()
    for name, key in _TITANS_OWN.items():
        if getattr(chosen, name) != getattr(defaults, name):
            raise ArgumentError(f"{name}={getattr(chosen, name)!r} is torchtitan's to decide; its key is {key}")

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, **settings: Any) -> nn.Module:
        policies = chosen.policy.arguments()
        del policies["reshard_after_forward"]  # torchtitan's own call says it
        shard = functools.partial(laconic.fully_shard, **policies)
        with _in_place_of_fsdp2(shard, {"torchtitan", parallelize_fn.__module__.partition(".")[0]}):
            parallel = parallelize_fn(model, **settings)
        if not any(isinstance(module, laconic.ShardedModule) for module in parallel.modules()):
            raise ArgumentError(
                f"{parallelize_fn.__qualname__} has not called fully_shard by the name that its module imports, so "
                "laconic shards nothing: write `from torch.distributed.fsdp import fully_shard` at the module's top"
            )
        return parallel

    return parallelize


@contextmanager
def _in_place_of_fsdp2(shard: Callable[..., Any], packages: set[str]) -> Iterator[None]:
    """Let the modules of some packages find `shard` under the name `fully_shard`: [Note: torchtitan's own calls]."""
    fsdp2 = torch.distributed.fsdp.fully_shard
    importers: list[Any] = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and vars(module).get("fully_shard") is fsdp2
    ]
    for module in importers:
        module.fully_shard = shard
    try:
        yield
    finally:
        for module in importers:
            module.fully_shard = fsdp2
