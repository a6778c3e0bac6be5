"""Damage and edits without notice are found; without them, and without a guard, training has the same bits."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import Checks, CorruptionError, Wire
from laconic.comm.cluster import Cluster
from laconic.guard import checksum, reporting
from laconic.guard.checksum import checksum_of, checksums, digest_of
from laconic.guard.guard import Guard
from laconic.shard import extension
from tests.reference.checksum import checksum as oracle
from tests.support import sharded_net
from tests.support.flips import Flip, flip_bit, flipping
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_same_bits

_Small = partial(sharded_net.Net, 1)
_ALL = Checks(interval=1, on_damage="regather", unnoticed_edits=True)
_SETTINGS: list[dict[str, Any]] = [
    {"cache": "none"},
    {"cache": "host", "reshard_after_forward": False},
    {"cache": "host", "wire": "4bit"},
    {"cache": "none", "wire": Wire(weights="int8", as_values=True, gradients="int4", feedback=True)},
    {"cache": "host", "wire": "lossless", "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    {"cache": "none", "wire": Wire(gradients="lossless")},
]


def _train(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for seed in range(2):
        with model.no_sync():
            sharded_net.squared_error(model, sharded_net.inputs(50 + seed, dist.get_rank())).backward()
        losses.append(sharded_net.train_step(model, optimizer, seed))
    with torch.no_grad():
        losses.append(sharded_net.squared_error(model, sharded_net.inputs(0, 0)))
    return [*losses, *sharded_net.full_parameters(model).values()]


@pytest.mark.parametrize(("size", "islands", "which"), [(2, 1, 1), (3, 1, 3), (2, 1, 4), (4, 2, 5)])
@on_ranks("size", local=1)
def test_checks_change_nothing(islands: int, which: int) -> None:
    mesh = laconic.init_mesh("cpu", islands=islands)
    plain, checked = (
        _train(sharded_net.shard(sharded_net.build(_Small), mesh=mesh, checks=checks, **_SETTINGS[which]))
        for checks in (None, _ALL)
    )
    assert all(torch.equal(one, two) for one, two in zip(plain, checked, strict=True))


def _outcome(model: Any, flip: Flip) -> str:
    """Train a step in which one rank gets a wrong bit; return the error, or "" if nobody saw it."""
    try:
        with flipping(flip):
            sharded_net.train_step(model)
    except CorruptionError as error:
        return str(error)
    finally:
        model.reset_iter_state()
        model.zero_grad()
    return ""


@pytest.mark.parametrize(
    ("setting", "seed", "levels"), [(0, 0, ("local", "node")), (2, 0, ("node",)), (5, 3, ("node",))]
)
@on_ranks(4, local=2)
def test_a_flipped_bit_on_the_wire_is_found_on_all_ranks(setting: int, seed: int, levels: tuple[str, ...]) -> None:
    """Of lossless gradients not in the first words: a head that is damaged is an error of its own."""
    model = sharded_net.shard(sharded_net.build(_Small), checks=Checks(interval=1), **_SETTINGS[setting])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for purpose, level in itertools.product(("weights", "gradients"), levels):
        sharded_net.train_step(model, optimizer)  # so that new weights cross, in few bits as differences
        bit = 15 if level == "local" else 0
        message = _outcome(model, Flip(rank=1, purpose=purpose, level=level, bit=bit, seed=seed))  # type: ignore[arg-type]
        assert "rank 1" in message, (purpose, level)
        wrong = "came to rank 1 with other bits" if purpose == "gradients" else "has other weights of"
        assert wrong in message, (purpose, level)
    assert not _outcome(model, Flip(rank=-1, purpose="weights", level="node", bit=0)), "no flip, no error"


@on_ranks(2, local=1)
def test_only_steps_of_the_interval_are_checked() -> None:
    """Forwards without gradients are steps, too."""
    model = sharded_net.shard(sharded_net.build(_Small), checks=Checks(interval=3))
    flip, weights = (Flip(rank=1, purpose=each, level="node", bit=9) for each in ("gradients", "weights"))  # type: ignore[arg-type]
    assert [bool(_outcome(model, flip)) for _ in range(5)] == [True, False, False, True, False]
    model, damaged = sharded_net.shard(sharded_net.build(_Small), checks=Checks(interval=2)), []
    for _ in range(3):
        with contextlib.suppress(CorruptionError), torch.inference_mode(), flipping(weights):
            model(torch.ones(1, 5))
            damaged.append(False)
            continue
        damaged.append(True)
    assert damaged == [True, False, True]


def _loss_with_damage(model: Any, *, victim: int, part: int) -> torch.Tensor:
    """Run forward, damage a block's host cache on one rank in the given node's part, and run backward."""
    loss = sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank()))
    if dist.get_rank() == victim:
        cached = sharded_net.buckets(model.blocks[1])[0].node_shard
        flip_bit(cached.buffer().view(2, -1)[part], bit=20, seed=3)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("frozen", "policy", "part"),
    [(False, "raise", 1), (True, "raise", 1), (False, "regather", 0), (False, "regather", 1), (True, "regather", 0),
     (True, "regather", 1)],
)  # fmt: skip
@on_ranks(2, local=1)
def test_damage_in_the_host_cache_is_found_or_healed(frozen: bool, policy: Any, part: int) -> None:
    """In the part of the victim's own node, and in that of the other."""
    make = _freeze_blocks if frozen else sharded_net.Net
    plain, model = (
        sharded_net.shard(sharded_net.build(make), cache="host", checks=checks)
        for checks in (None, Checks(interval=1, on_damage=policy))
    )
    sharded_net.train_step(model)
    if policy == "raise" or (frozen and part == 0):
        with pytest.raises(CorruptionError, match=r"(up|down)\.\w+ of blocks\.1"):
            _loss_with_damage(model, victim=0, part=part)
        return
    with pytest.warns(UserWarning, match="gathered again"):
        _loss_with_damage(model, victim=0, part=part)
    sharded_net.squared_error(plain, sharded_net.inputs(0, dist.get_rank())).backward()
    wanted, got = sharded_net.full_gradients(plain), sharded_net.full_gradients(model)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("policy", ["raise", "regather"])
@on_ranks(2, local=1)
def test_damage_of_a_copy_is_found_or_healed(policy: Any) -> None:
    """Of the base of the next difference, while it rests from one step to the next."""
    checks = Checks(interval=1, on_damage=policy)
    model = sharded_net.shard(sharded_net.build(), cache="host", wire="4bit", checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(2):  # the second step's weights cross as differences
        sharded_net.train_step(model, optimizer, seed)
    if dist.get_rank() == 0:
        flip_bit(sharded_net.buckets(model.blocks[1])[0].node_shard.buffer(), bit=20, seed=3)
    if policy == "raise":
        with pytest.raises(CorruptionError, match=r"\w+ of blocks\.1"):
            sharded_net.train_step(model, optimizer, 2)
        return
    with pytest.warns(UserWarning, match=r"different copies of 1 buckets, those of .*cross exactly"):
        sharded_net.train_step(model, optimizer, 2)
    sharded_net.train_step(model, optimizer, 3)  # whose checks would see different weights


def _freeze_blocks() -> torch.nn.Module:
    model = sharded_net.Net()
    model.blocks.requires_grad_(False)
    return model


@pytest.mark.parametrize("cache", ["host", "device"])
@on_ranks(3, local=1)
def test_an_edit_without_notice_is_named(cache: str) -> None:
    model = sharded_net.shard(
        sharded_net.build(_freeze_blocks), cache=cache, checks=Checks(interval=0, unnoticed_edits=True)
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
    for seed in range(2):
        sharded_net.train_step(model, optimizer, seed)
    weight = model.blocks[2].down.weight
    with torch.no_grad():
        weight.mul_(2)  # an edit that is noticed
    sharded_net.train_step(model, optimizer)
    weight.to_local().data.mul_(2)
    with pytest.raises(CorruptionError, match=r"down\.weight of blocks\.2 changed without notice.* invalidate\(\)"):
        sharded_net.train_step(model, optimizer)
    model.reset_iter_state()
    model.invalidate()
    plain = sharded_net.build(_freeze_blocks)
    with torch.no_grad():
        plain.blocks[2].down.weight.mul_(4)  # type: ignore[operator, union-attr]
        for name, value in sharded_net.full_parameters(model).items():
            if name.startswith(("inp", "out")):
                plain.get_parameter(name).copy_(value)
        x = torch.ones(1, 5)
        torch.testing.assert_close(model(x), plain(x))


def test_a_policy_says_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="interval=-1"):
        Checks(interval=-1)
    with pytest.raises(ValueError, match=r"'heal'.*'raise', 'regather'"):
        Checks(on_damage="heal")  # type: ignore[arg-type]
    assert reporting.some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def _observer_of(model: Any) -> Any:
    return type(getattr(model._laconic_unit.root, "observer", None))


def test_the_engine_trains_to_the_same_bits_without_a_guard() -> None:
    assert extension.observer_class() is Guard, "the package attaches the guard"
    scenario = Scenario(cache="host", make=_Small, look=_observer_of)
    guarded = scenario.run()[0]
    with mock.patch.object(extension, "observer_class", return_value=extension.Observer):
        alone = scenario.run()[0]
    assert alone.looks[-1] is extension.Observer
    assert_same_bits(guarded, alone)


# -- checksums ---------------------------------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 1001])
def test_it_equals_the_oracle(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_HOST_CHUNK_WORDS", 16)  # so that there are several chunks, the last one short
    values = 100 * torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    parts = values.to(dtype)
    assert checksums(parts).tolist() == [oracle(_bytes(part)) for part in parts]
    odd = torch.zeros(3 * size + 1, dtype=dtype)[1:].view(3, size)  # at an odd address
    odd.copy_(parts)
    assert checksums(odd).tolist() == checksums(parts).tolist()
    assert checksums(parts.T.contiguous().T).tolist() == checksums(parts).tolist()


def test_flipped_bits_and_exchanged_words_are_seen() -> None:
    """Every bit, and any two."""
    part = torch.randn(3, generator=torch.Generator().manual_seed(0)).view(torch.uint8)[:11]  # a last word of 3 bytes
    before = int(checksum_of(part))
    for first, second in itertools.combinations_with_replacement(range(8 * len(part)), 2):
        changed = part.clone()
        for bit in {first, second}:
            changed[bit // 8] ^= 1 << bit % 8
        assert int(checksum_of(changed)) != before, (first, second)
    words = torch.arange(9, dtype=torch.int32)
    for first, second in itertools.combinations(range(9), 2):
        changed = words.clone()
        changed[[first, second]] = words[[second, first]]
        assert checksum_of(changed) != checksum_of(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (7, 5), (3, 0)])
def test_equal_bits_have_equal_digests_and_others_do_not(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    buffer = torch.zeros(value.numel() + 3, dtype=dtype)
    elsewhere = buffer[3:].view(shape)  # at an odd address
    elsewhere.copy_(value)
    first = torch.ones(3)
    digest = digest_of([first, value])
    assert digest == digest_of([first, elsewhere])
    for place in {0, value.nbytes - 1} if value.numel() else ():
        changed = value.clone()
        changed.reshape(-1).view(torch.uint8)[place] ^= 1
        assert digest != digest_of([first, changed])
    assert value.numel() == 0 or digest != digest_of([value, first])


def test_there_is_none_without_memory() -> None:
    assert digest_of([torch.ones(2), torch.ones(2, device="meta")]) is None
    assert digest_of([]) == 0


@pytest.mark.parametrize("across_islands", [False, True])
@on_ranks(4, local=1)
def test_damage_is_raised_on_all_ranks_that_took_part(across_islands: bool) -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu", islands=2))
    is_damaged, is_there = dist.get_rank() == 0, across_islands or dist.get_rank() < 2
    with pytest.raises(CorruptionError, match="a bit") if is_there else contextlib.nullcontext():
        reporting.raise_together(cluster, ["a bit"] if is_damaged else [], across_islands=across_islands)


@on_ranks(2, local=1)
def test_damage_names_the_parameters_of_the_shard_that_has_it() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    model: Any = laconic.fully_shard(layers, granularity=laconic.whole())
    [bucket] = model._laconic_unit.buckets
    assert [reporting.names_in(bucket, shard).split(" of ")[0] for shard in range(2)] == ["0.weight", "1.weight"]


@on_ranks(2, local=1)
def test_a_forward_that_raised_leaves_no_records() -> None:
    model: Any = sharded_net.shard(sharded_net.build(), checks=Checks(interval=1))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.out.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        sharded_net.train_step(model)
    handle.remove()
    model._laconic_unit.root.abandon_iteration()
    assert model._laconic_unit.root.observer._records == []
    sharded_net.train_step(model)
