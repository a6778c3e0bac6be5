"""The axolotl plugin, against the interface that axolotl 0.19.0 declares: axolotl itself pins other releases."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.integrations.transformers import LaconicMixin
from tests.support import trainers


class BasePlugin:
    """The methods of axolotl's BasePlugin that a configuration of plain fine-tuning calls, as declared there."""

    def register(self, cfg: dict[str, Any]) -> None: ...

    def get_input_args(self) -> str | None: ...

    def pre_model_load(self, cfg: Any) -> None: ...

    def post_model_build(self, cfg: Any, model: Any) -> None: ...

    def post_model_load(self, cfg: Any, model: Any) -> None: ...

    def get_trainer_cls(self, cfg: Any) -> type[Trainer] | None: ...

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None: ...


class AxolotlTrainer(Trainer):
    """The constructor of axolotl's trainer."""

    def __init__(
        self, *args: Any, bench_data_collator: Any = None, eval_data_collator: Any = None, dataset_tags: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)


class AxolotlRewardTrainer(Trainer):
    """axolotl's reward trainer."""


class DictDefault(dict[str, Any]):
    """axolotl's configuration: a key that is not there is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    trainers_ = {"AxolotlTrainer": AxolotlTrainer, "AxolotlRewardTrainer": AxolotlRewardTrainer}
    contents = {"": {}, ".integrations": {}, ".core": {}, ".core.trainers": trainers_}
    for name, members in {**contents, ".integrations.base": {"BasePlugin": BasePlugin}}.items():
        module = types.ModuleType(f"axolotl{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "laconic.integrations.axolotl", raising=False)
    return importlib.import_module("laconic.integrations.axolotl").LaconicPlugin()


def test_the_trainer_is_axolotls_and_shards(plugin: Any, tmp_path: Path) -> None:
    cls = plugin.get_trainer_cls(DictDefault(laconic={"cache": "device", "granularity": "32 rows"}))
    assert issubclass(cls, LaconicMixin)
    assert issubclass(cls, AxolotlTrainer)
    arguments = TrainingArguments(**trainers.settings(str(tmp_path), 1))
    trainer = cls(model=trainers.llama(), args=arguments, train_dataset=trainers.token_rows(4), dataset_tags=["rows"])
    assert trainer.laconic_arguments == LaconicArguments(cache="device", granularity="32 rows")
    assert issubclass(plugin.get_trainer_cls(DictDefault(reward_model=True)), AxolotlRewardTrainer)
    module, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(importlib.import_module(module), name)(laconic={"cache": "none"}).laconic == {"cache": "none"}


def test_the_plugin_refuses(plugin: Any) -> None:
    with pytest.raises(ArgumentError, match="passes no model"):
        plugin.get_trainer_cls(DictDefault(rl="dpo"))
    with pytest.raises(ArgumentError, match="cache='disk' is not known"):
        plugin.get_trainer_cls(DictDefault(laconic={"cache": "disk"}))
    model = trainers.llama()
    plugin.post_model_load(DictDefault(), model)
    model.quantization_method = "bitsandbytes"
    with pytest.raises(ArgumentError, match="quantised"):
        plugin.post_model_load(DictDefault(), model)
