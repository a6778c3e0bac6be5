"""Policies check themselves, and what contains them is built from their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import laconic
from laconic.config import Config, ConfigError, ShardConfig, all_keys, from_dict, to_dict
from laconic.config.job import get_type_hints
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.policy import Policy, PolicyError, from_keys, keys_of, to_keys, with_keys
from laconic.shard.policies import Cache, Checks, ShardPolicy, Wire


def test_every_key_has_a_docstring_which_reaches_files_and_options() -> None:
    documented = {name: key.documentation() for name, key in keys_of(ShardPolicy).items()}
    assert len(documented) >= 10
    assert all(text.endswith(".") for text in documented.values())
    helps = {each.name: each.metadata["help"] for each in dataclasses.fields(LaconicArguments)}
    assert {name: helps[name] for name in documented} == {k: v.replace("%", "%%") for k, v in documented.items()}
    assert all(helps.values())
    sections = get_type_hints(Config).values()
    assert [key for cls in sections for key, each in keys_of(cls).items() if not each.documentation()] == []
    assert {f"shard.{name}" for name in documented} <= set(all_keys())


@pytest.mark.parametrize(
    ("keys", "in_python", "in_a_file"),
    [
        (
            {"cache": "device", "device_budget_bytes": 5},
            "Cache(device_budget_bytes=5) needs where='host', because it moves a part of the host cache to the device; "
            "got Cache(where='device')",
            "shard.device_budget_bytes = 5 needs shard.cache = 'host', because it moves a part of the host cache to "
            "the device; got shard.cache = 'device'",
        ),
        (
            {"on_damage": "regather"},
            "Checks(on_damage='regather') is for steps that are checked; set interval too",
            "shard.on_damage = 'regather' is for steps that are checked; set shard.check_every too",
        ),
        (
            {"wire": {"gradients": "int4", "feedback": True}, "param_dtype": "float16"},
            "Wire(gradients='int4', feedback=True) cannot feed errors back with param_dtype='float16', whose loss "
            "scale changes; leave it out",
            "shard.wire = {'gradients': 'int4', 'feedback': True} cannot feed errors back with shard.param_dtype = "
            "'float16', whose loss scale changes; leave it out",
        ),
    ],
)
def test_a_refusal_is_one_text_in_three_spellings(keys: dict[str, Any], in_python: str, in_a_file: str) -> None:
    with pytest.raises(PolicyError) as refused:
        from_keys(ShardPolicy, keys)
    assert str(refused.value) == in_python
    with pytest.raises(ConfigError) as refused_file:
        from_dict(Config, {"shard": keys})
    assert str(refused_file.value) == in_a_file
    with pytest.raises(ArgumentError) as refused_option:
        LaconicArguments(**{"cache": "host", **keys})
    assert str(refused_option.value) == in_a_file.replace("shard.", "").replace(" = ", "=")


def test_short_spellings_are_read_in_one_place() -> None:
    policy = ShardPolicy(cache="host", wire="4bit", granularity={"a*": "2 rows"})  # type: ignore[arg-type]
    assert policy.cache == Cache(where="host")
    assert policy.wire == Wire(weights="int4", gradients="int4")
    assert policy.granularity == {"a*": laconic.rows(2)}
    keys = to_keys(policy)
    assert (keys["wire"], keys["granularity"]) == ("4bit", {"a*": "2 rows"})
    assert from_keys(ShardPolicy, keys) == policy
    assert LaconicArguments(**{name: keys[name] for name in ("cache", "wire", "granularity")}).policy == policy
    assert ShardConfig.of_keys(keys).policy == policy
    assert to_dict(ShardConfig(policy=policy)).items() >= {k: v for k, v in keys.items() if v is not None}.items()


def test_other_values_of_keys() -> None:
    policy = with_keys(ShardPolicy(), cache="device", check_every=3)
    assert policy == ShardPolicy(cache=Cache(where="device"), checks=Checks(interval=3))
    assert with_keys(policy, cache="none").checks.interval == 3
    with pytest.raises(TypeError, match=r"ShardPolicy has no key 'cash'; its keys are cache, cache_until, device_b"):
        with_keys(policy, cash="none")
    with pytest.raises(ConfigError, match=r"shard\.check_every = 3 is for shard\.strategy = 'laconic', got 'ddp'"):
        ShardConfig(strategy="ddp").with_keys(check_every=3)


def test_a_new_field_is_a_key_of_all_that_contain_its_policy() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Newer(Cache):
        new: int = 7

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Holder(Policy):
        cache: Newer = Newer(where="host")  # frozen

    Holder.__annotations__["cache"] = Newer  # a class of a function has no name that a text could find
    assert to_keys(Holder()) == {**to_keys(Cache(where="host")), "new": 7}
    assert from_keys(Holder, {"new": 8}).cache.new == 8


def test_weights_that_stay_whole_are_not_freed_after_forward_unless_the_user_says_so() -> None:
    """A flag that is not set means "frees" where nothing stays whole, and nothing where something may."""
    frees = {
        where: [
            ShardPolicy(cache=Cache(where=where), reshard_after_forward=flag).arguments()["reshard_after_forward"]
            for flag in (None, False)
        ]
        for where in ("none", "host", "rank", "auto")
    }
    assert frees == {"none": [True, False], "host": [True, False], "rank": [None, False], "auto": [None, False]}
