"""The registry of strategies: every record is complete, and names code that exists."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic import registry
from laconic.config import Config, ConfigError, ModelConfig, ShardConfig
from laconic.config.job import from_dict
from laconic.policy import to_keys
from laconic.registry import Strategy
from laconic.strategies.under import job_under


@pytest.mark.parametrize("strategy", registry.strategies().values(), ids=lambda each: each.name)
def test_a_record_is_complete_names_code_that_exists_and_gives_a_job_its_keys(strategy: Strategy) -> None:
    assert strategy.note.endswith(".")
    assert strategy.source or not strategy.in_plan
    assert strategy.predict or not strategy.in_plan
    base = registry.named(strategy.shard["strategy"])
    assert base.is_way_to_train, "a variant's way to train is registered, too"
    assert strategy.limits[: len(base.limits)] == base.limits
    paths = (strategy.stepper, strategy.parallelize, strategy.predict)
    assert all(callable(registry.load(path)) for path in paths if path)
    if strategy.name != registry.AUTO:
        job = job_under(strategy, Config(model=ModelConfig(config={"model_type": "llama"})))
        keys = to_keys(job.shard)
        assert all(keys[key] == value for key, value in strategy.shard.items())
        assert job.sync.is_local is strategy.has_islands
        assert job.schedule.is_cyclic is (strategy.schedule is not None)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The registry is read again in the test, and after it."""
    registry.strategies.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    registry.strategies.cache_clear()
    for name in [name for name in sys.modules if name.startswith("newcomers")]:
        del sys.modules[name]


def test_a_new_record_is_a_strategy_everywhere(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One file in one of the packages is enough; no other list has its name."""
    (tmp_path / "newcomers" / "known").mkdir(parents=True)
    for package in ("newcomers", "newcomers/known"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "newcomers" / "known" / "one.py").write_text(
        "from laconic.strategies.known.pytorch import FSDP2\n"
        "STRATEGIES = (FSDP2.variant(name='new', label='New', shard={'strategy': 'new'}),)\n"
    )
    fresh.syspath_prepend(str(tmp_path))
    fresh.setattr(registry, "SOURCES", ("newcomers.known", *registry.SOURCES))
    assert "new" in registry.ways_to_train()
    assert ShardConfig(strategy="new").strategy == "new"
    assert [name for name in registry.strategies() if name.startswith("new")] == ["new"]


def test_without_contestants_their_strategies_are_unknown(fresh: pytest.MonkeyPatch) -> None:
    """As after an installation of laconic's wheel alone."""
    fresh.setattr(registry, "SOURCES", ("laconic.no_such_room.known", "laconic.strategies.known"))
    assert "deepspeed" not in registry.strategies()
    assert "fsdp2" in registry.ways_to_train()
    with pytest.raises(ConfigError, match=r"'deepspeed' is not known; .*pip install ./contestants"):
        ShardConfig(strategy="deepspeed")


def test_an_unknown_value_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'must be one of "laconic", "fsdp2", .*"ddp", .*"ddp-zero1", "deepspeed"'):
        from_dict(Config, {"shard": {"strategy": "zero"}})
    with pytest.raises(ConfigError, match=r"shard.strategy: strategy 'zero' is not known; .*, torchft-diloco$"):
        ShardConfig(strategy="zero")
    with pytest.raises(ValueError, match="has no colour"):
        Strategy(name="grey", label="Grey", note="No colour.")


def test_strategies_are_listed_by_maker_and_islands_last() -> None:
    names = list(registry.strategies())
    for earlier, later in (("fsdp2", "ddp"), ("ddp", "deepspeed"), ("deepspeed", "none"), ("4bit", "local-steps")):
        assert names.index(earlier) < names.index(later)
    assert names[0] == "fsdp2"
    assert names.index("local-fp32") < names.index("torchft-diloco") < names.index("cyclic")
