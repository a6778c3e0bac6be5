"""Under which keys a DCP folder holds a model and an optimizer.

laconic writes what PyTorch's tutorials write, `{"model": get_model_state_dict(...), "optim":
get_optimizer_state_dict(...)}`, so the keys are `model.NAME`, `optim.state.NAME.KEY` and
`optim.param_groups.INDEX.SETTING`. Others nest deeper (`app.model.NAME`), name the optimizer otherwise, leave the model
at the top, or flatten the groups (`optimizer.param_groups.NAME.SETTING`, as torchtitan does). Whatever comes before the
names is found by the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from laconic.checkpoint import state, storage
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.storage import Entry

MODEL, OPTIMIZER, STATE, GROUPS = "model", "optim", "state", "param_groups"
OUTER, ISLANDS = "outer", "islands"
_OF_ISLANDS = (f"{OUTER}.", f"{ISLANDS}.")
"""What comes before what islands add: [Note: The layout of a checkpoint] in slices.py."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What comes before the names, with the dot; None where the folder holds no such thing."""

    model: str | None
    optimizer: str | None
    """Of its state and groups both."""
    optimizers: tuple[str, ...] = ()
    """Of all optimizers of such a model in the folder."""

    @property
    def state(self) -> str | None:
        """What comes before the names of parameters in the optimizer's state."""
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
        """By the names of a model's tensors, and of its parameters, which are what an optimizer has state for.

        `model` and `optimizer`, without the dot, are taken as they are. Raises: CheckpointError if several could be
        meant.
        """
        keys = [key for key in keys if not key.startswith(_OF_ISLANDS)]
        states = (key.rpartition(".")[0] for key in keys if f"{GROUPS}." not in key)
        found = tuple(prefix.removesuffix(f"{STATE}.") for prefix in _most_common_prefixes(states, parameters))
        others = [key for key in keys if not any(key.startswith(f"{root}{STATE}.") for root in found)]
        return Keys(
            model=_choice(_most_common_prefixes(others, tensors), model, "such a model", "model_key"),
            optimizer=_choice(found, optimizer, "an optimizer of it", "optimizer_key") if with_optimizer else None,
            optimizers=found,
        )

    def model_entries(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """The model's tensors by name. At the top of a folder, where anything may lie, only what is no optimizer's."""
        if self.model is None:
            return {}
        others = tuple(root for root in self.optimizers if not self.model.startswith(root))
        return {
            key.removeprefix(self.model): entry
            for key, entry in entries.items()
            if key.startswith(self.model) and not key.startswith(others)
        }

    def state_entries(self, entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
        """The optimizer's tensors by parameter and key."""
        return by_parameter(entries, self.state)


def by_parameter(entries: Mapping[str, Entry], prefix: str | None) -> dict[str, dict[str, Entry]]:
    """The tensors `prefix` NAME.KEY of an optimizer's state, by parameter and key; none for None."""
    found: dict[str, dict[str, Entry]] = {}
    for full_key, entry in entries.items():
        if prefix is not None and full_key.startswith(prefix):
            name, _, key = full_key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[key] = entry
    return found


OURS = Keys(model=f"{MODEL}.", optimizer=f"{OPTIMIZER}.", optimizers=(f"{OPTIMIZER}.",))


def optimizer_settings(
    folder: Path, metadata: Metadata, keys: Keys, model: nn.Module, optimizer: Optimizer
) -> dict[str, Any] | None:
    """`state.optimizer_settings` as a folder that PyTorch wrote has them; None if it has no groups.

    Raises: CheckpointError if flattened groups contradict each other.
    """
    everything = metadata.state_dict_metadata
    root = f"{keys.optimizer}{GROUPS}."
    wanted = [key for key in everything if keys.optimizer is not None and key.startswith(root)]
    entries = storage.tensors_of(metadata)
    numbers = [k for k in everything if keys.state is not None and k.startswith(keys.state) and k not in entries]
    if not wanted:
        return None
    values = storage.read_values(folder, metadata, wanted + numbers)
    if f"{root}0.params" in everything:
        groups = _nested_groups(values, root)
    else:
        ours = state.optimizer_settings(model, optimizer)["groups"]
        groups = [_flattened_group(values, root, group["names"]) for group in ours]
    return {
        "class": None,
        "groups": groups,
        "numbers": {key.removeprefix(keys.state or ""): values[key] for key in numbers},
    }


def _nested_groups(values: Mapping[str, Any], root: str) -> list[dict[str, Any]]:
    settings: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        index, _, setting = key.removeprefix(root).partition(".")
        if key.startswith(root):
            settings.setdefault(int(index), {})[setting] = value
    return [{"names": settings[i].pop("params"), "settings": settings[i]} for i in sorted(settings)]


def _flattened_group(values: Mapping[str, Any], root: str, names: list[str]) -> dict[str, Any]:
    """Parameters that are one group here; in the folder each has its settings, which must be the same."""
    present = [name for name in names if any(key.startswith(f"{root}{name}.") for key in values)]
    every = []
    for name in present:
        prefix = f"{root}{name}."
        every.append({key.removeprefix(prefix): v for key, v in values.items() if key.startswith(prefix)})
    if differing := [name for name, settings in zip(present, every, strict=True) if settings != every[0]]:
        raise CheckpointError(
            f"the checkpoint has other hyper-parameters for {', '.join(differing)} than for {present[0]}, which is in "
            "one group with them here; make the optimizer's groups as they were"
        )
    return {"names": present, "settings": every[0] if every else {}}


def _most_common_prefixes(keys: Iterable[str], names: Collection[str]) -> list[str]:
    """What most of the keys that end with one of `names` begin with: usually one, several if as many begin so."""
    names = frozenset(names)
    votes = Counter(prefix for key in keys for prefix, rest in _cuts(key) if rest in names)
    return sorted(prefix for prefix in votes if votes[prefix] == max(votes.values()))


def _choice(found: Sequence[str], wanted: str | None, what: str, argument: str) -> str | None:
    if wanted is not None:
        return f"{wanted}." if wanted else ""
    if len(found) > 1:
        keys = ", ".join(repr(prefix.removesuffix(".")) for prefix in found)
        raise CheckpointError(f"the checkpoint holds {what} under each of {keys}; say which one with {argument}=")
    return found[0] if found else None


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    yield "", key
    for position, character in enumerate(key):
        if character == ".":
            yield key[: position + 1], key[position + 1 :]
