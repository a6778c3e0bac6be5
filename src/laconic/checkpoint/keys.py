"""The keys under which a DCP folder holds a model and an optimizer.

laconic writes `{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}`, as PyTorch's tutorials
do. So the keys are `model.NAME`, `optim.state.NAME.KEY` and `optim.param_groups.INDEX.SETTING`. Other programs nest
deeper (`app.model.NAME`), rename the optimizer, leave the model at the top, or flatten the groups
(`optimizer.param_groups.NAME.SETTING`, as torchtitan does). The names of a model's parameters show a folder's prefixes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from laconic.checkpoint import state, storage
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.storage import TensorMeta

MODEL, OPTIMIZER, STATE, GROUPS = "model", "optim", "state", "param_groups"
OUTER, ISLANDS = "outer", "islands"
"""The prefixes of the tensors that islands add: [Note: The layout of a checkpoint] in checkpoint/islands.py."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The prefixes, with the dot, of the model's tensors, and of the optimizer's state and groups; None if missing."""

    model: str | None
    optimizer: str | None
    optimizers: tuple[str, ...] = ()
    """The prefixes of all optimizers in the folder whose parameters have the model's names."""

    @property
    def state(self) -> str | None:
        """The prefix before the parameters' names in the optimizer's state."""
        return None if self.optimizer is None else f"{self.optimizer}{STATE}."

    @staticmethod
    def found_in(
        keys: Collection[str],
        *,
        tensors: Collection[str],
        parameters: Collection[str],
        model: str | None = None,
        optimizer: str | None = None,
        with_optimizer: bool = True,
    ) -> Keys:
        """Find the prefixes in `keys` that the names of a model's `tensors` and `parameters` follow.

        Raises CheckpointError if several fit equally well. `model` and `optimizer`, without the dot, choose one.
        """
        keys = [key for key in keys if not key.startswith((f"{OUTER}.", f"{ISLANDS}."))]
        states = (key.rpartition(".")[0] for key in keys if f"{GROUPS}." not in key)
        found = tuple(prefix.removesuffix(f"{STATE}.") for prefix in _most_common_prefixes(states, parameters))
        others = [key for key in keys if not any(key.startswith(f"{root}{STATE}.") for root in found)]
        return Keys(
            model=_choice(_most_common_prefixes(others, tensors), model, "such a model", "model_key"),
            optimizer=_choice(found, optimizer, "an optimizer of it", "optimizer_key") if with_optimizer else None,
            optimizers=found,
        )

    def model_entries(self, entries: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        """Return the model's tensors by name. At the top of a folder, the optimizers' tensors are left out."""
        if self.model is None:
            return {}
        others = tuple(root for root in self.optimizers if not self.model.startswith(root))
        return {
            key.removeprefix(self.model): entry
            for key, entry in entries.items()
            if key.startswith(self.model) and not key.startswith(others)
        }

    def state_entries(self, entries: Mapping[str, TensorMeta]) -> dict[str, dict[str, TensorMeta]]:
        """Return the optimizer's tensors by parameter, then by key."""
        return by_parameter(entries, self.state)


LACONIC_KEYS = Keys(model=f"{MODEL}.", optimizer=f"{OPTIMIZER}.", optimizers=(f"{OPTIMIZER}.",))


def by_parameter(entries: Mapping[str, TensorMeta], prefix: str | None) -> dict[str, dict[str, TensorMeta]]:
    """Return the entries `prefix` NAME.KEY by NAME, then by KEY; none if `prefix` is None."""
    found: dict[str, dict[str, TensorMeta]] = {}
    for full_key, entry in entries.items():
        if prefix is not None and full_key.startswith(prefix):
            name, _, key = full_key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[key] = entry
    return found


def _most_common_prefixes(keys: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the prefix that most keys have before one of `names`; several prefixes if their counts are equal."""
    names = frozenset(names)
    begins = ((key, begin) for key in keys for begin in (0, *(dot.end() for dot in re.finditer(r"\.", key))))
    votes = Counter(key[:begin] for key, begin in begins if key[begin:] in names)
    return sorted(prefix for prefix in votes if votes[prefix] == max(votes.values()))


def _choice(found: Sequence[str], given: str | None, description: str, argument: str) -> str | None:
    if given is not None:
        return f"{given}." if given else ""
    if len(found) > 1:
        keys = ", ".join(repr(prefix.removesuffix(".")) for prefix in found)
        raise CheckpointError(f"the folder holds {description} under each of {keys}; say which one with {argument}=")
    return found[0] if found else None


# -- hyper-parameters --------------------------------------------------------------------------------------------------


def torch_settings(
    folder: Path, metadata: Metadata, keys: Keys, model: nn.Module, optimizer: Optimizer
) -> dict[str, Any] | None:
    """Read the settings that PyTorch wrote, in the form of `state.optimizer_settings`; None if there are none."""
    everything, entries = metadata.state_dict_metadata, storage.entries_of(metadata)
    root, state_root = f"{keys.optimizer}{GROUPS}.", keys.state
    if keys.optimizer is None or state_root is None:
        return None
    settings = [key for key in everything if key.startswith(root)]
    if not settings:
        return None
    numbers = [key for key in everything if key.startswith(state_root) and key not in entries]
    values = storage.read_values(folder, metadata, settings + numbers)
    if f"{root}0.params" in everything:
        groups = _nested_groups(values, root)
    else:
        current = state.optimizer_settings(model, optimizer)["groups"]
        groups = [_flattened_group(values, root, group["names"]) for group in current]
    return {
        "class": None,
        "groups": groups,
        "numbers": {key.removeprefix(state_root): values[key] for key in numbers},
    }


def _nested_groups(values: Mapping[str, Any], root: str) -> list[dict[str, Any]]:
    settings: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        index, _, setting = key.removeprefix(root).partition(".")
        if key.startswith(root):
            settings.setdefault(int(index), {})[setting] = value
    return [{"names": settings[i].pop("params"), "settings": settings[i]} for i in sorted(settings)]


def _flattened_group(values: Mapping[str, Any], root: str, names: list[str]) -> dict[str, Any]:
    """Join the settings that a group's parameters have in the folder. Raises CheckpointError if they differ."""
    by_name = {
        name: {key.removeprefix(f"{root}{name}."): v for key, v in values.items() if key.startswith(f"{root}{name}.")}
        for name in names
    }
    by_name = {name: settings for name, settings in by_name.items() if settings}
    first, expected = next(iter(by_name.items()), ("", {}))
    if differing := [name for name, settings in by_name.items() if settings != expected]:
        raise CheckpointError(
            f"the checkpoint has other hyper-parameters for {', '.join(differing)} than for {first}, which is in "
            "one group with them here; make the optimizer's groups as they were"
        )
    return {"names": list(by_name), "settings": expected}
