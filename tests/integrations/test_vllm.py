"""Versions in vLLM, and flushes for verl's loader in SGLang: a model that takes them has what was published.

Their own code is called where it is installed, else a stand-in with its conditions. By hand, the tests passed with the
Python code of vLLM 0.33.0 and torch 2.13 on a CPU, and with `apply_delta` of verl 0.9.1.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.integrations.verl import delta_flushes
from laconic.integrations.vllm import LaconicWorker, checkpoint_patches, load_version, sparse_patches, weight_source
from laconic.publish import FolderSource, PublishError, Reader, WeightPatch
from laconic.publish.versions import version_name
from tests.support import vllm_stand_in
from tests.support.published import Run

try:
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta
except ImportError:
    from tests.support.vllm_stand_in import apply_delta


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is None:
        for name, module in vllm_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)


class Trained(nn.Module):
    """A model as the hub has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.q, self.k = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(8, bias=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def load_whole(param: Tensor, whole: Tensor) -> None:
    param.data.copy_(whole)


class Served(nn.Module):
    """The half of one of two ranks: `q` and `k` packed in one parameter, and cut by rows; the rest whole."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        self.rank = rank
        self.embed = nn.Parameter(torch.zeros(13, 8, dtype=torch.bfloat16), requires_grad=False)
        self.qk = nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.qk.weight_loader = self._load_rows  # type: ignore[attr-defined]
        self.fails = False
        self.loaded: list[set[str]] = []
        reload.record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> set[str]:
        weights = list(weights)
        self.loaded.append({name for name, _ in weights})
        for name, whole in weights:
            if name in ("q.weight", "k.weight"):
                self.qk.weight_loader(self.qk, whole, name)  # type: ignore[operator]
            else:
                tensor = getattr(self, name.removesuffix(".weight"))
                getattr(tensor, "weight_loader", load_whole)(tensor, whole)
            if self.fails:
                raise RuntimeError("out of memory")
        return {name for name, _ in weights}

    def _load_rows(self, param: Tensor, whole: Tensor, name: str) -> None:
        begin = 3 * (name == "k.weight")
        param.data[begin : begin + 3].copy_(whole.narrow(0, 3 * self.rank, 3))

    def expected(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        half = slice(3 * self.rank, 3 * self.rank + 3)
        return {
            "embed": weights["embed.weight"],
            "qk": torch.cat([weights["q.weight"][half], weights["k.weight"][half]]),
            "norm": weights["norm.weight"],
            "count": weights["count"],
        }


def config(quant_config: Any = None, *, is_moe: bool = False, moe_backend: str = "auto") -> Any:
    return SimpleNamespace(
        quant_config=quant_config,
        model_config=SimpleNamespace(dtype=torch.bfloat16, is_moe=is_moe),
        kernel_config=SimpleNamespace(moe_backend=moe_backend),
    )


def few(net: Any, _: int) -> None:
    """Change a few elements, and all of the norm."""
    net.embed.weight.view(-1)[3::17] += 0.1
    net.q.weight[2:4, 2:5] *= 1.5
    net.norm.weight += 0.25


def one(name: str, value: float) -> Callable[[nn.Module, int], Any]:
    """Change the first element of a tensor."""
    return lambda net, _: net.state_dict()[name].view(-1)[0].fill_(value)


def every(net: nn.Module, _: int) -> None:
    """Change all but the integers."""
    for parameter in net.parameters():
        parameter.mul_(1.5)


def begun(folder: Path, **keys: Any) -> Run:
    torch.manual_seed(0)
    return Run(folder, Trained(), every, **{"base_every": 100, **keys})


def assert_served(served: Served, weights: dict[str, Tensor]) -> None:
    for name, wanted in served.expected(weights).items():
        torch.testing.assert_close(served.state_dict()[name], wanted, rtol=0, atol=0, equal_nan=True)


ALL = {"embed.weight", "q.weight", "k.weight", "norm.weight", "count"}
CHANGED = {"embed.weight", "q.weight", "norm.weight"}


def test_all_values_and_then_what_changes(tmp_path: Path) -> None:
    """The norm comes whole in a patch, as all of it changes."""
    run, served, reader = begun(tmp_path), Served(1), Reader(tmp_path)
    for version in (2, 3, 4):
        weights = run.step(few)
        assert load_version(served, reader, config()) == reader.version == version
        assert_served(served, weights)
    assert served.loaded == [ALL, CHANGED, CHANGED]
    assert load_version(served, reader, config()) == 4
    assert len(served.loaded) == 3, "nothing is new, nothing is loaded"
    assert load_version(served, Reader(tmp_path), config()) == 4
    assert served.loaded[3] == ALL
    assert_served(served, weights)


def test_all_values_where_patches_do_not_fit(tmp_path: Path) -> None:
    run, served, reader = begun(tmp_path, base_every=1), Served(0), Reader(tmp_path)

    def load(weights: dict[str, Tensor], **keys: Any) -> set[str]:
        load_version(served, reader, config(**keys))
        assert_served(served, weights)
        return served.loaded[-1]

    assert load(run.step(lambda *_: None)) == ALL
    assert load(run.step(one("count", 7))) == ALL
    assert load(run.step(one("k.weight", torch.nan))) == ALL
    assert load(run.step(one("k.weight", 1.0))) == {"k.weight"}
    run.step(every)
    assert load(run.step(every)) == ALL, "two patches are more bytes than all values"
    assert load(run.step(few), quant_config="fp8") == ALL
    assert load(run.step(few), is_moe=True) == ALL
    assert load(run.step(few), is_moe=True, moe_backend="triton") == CHANGED


@pytest.mark.parametrize("version", [1, 2])
def test_after_a_loader_that_fails_all_values_come_and_values_coded_by_others_are_refused(
    version: int, tmp_path: Path
) -> None:
    run, served, reader = begun(tmp_path), Served(0), Reader(tmp_path)
    if version == 2:
        load_version(served, reader, config())
        run.step(few)
    served.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        load_version(served, reader, config())
    served.fails = False
    weights = run.step(few)
    load_version(served, reader, config())
    assert_served(served, weights)
    assert served.loaded[-1] == ALL
    coded, other = begun(tmp_path / "coded", encoding="lossless"), Reader(tmp_path / "coded")
    load_version(served, other, config())
    coded.step(few)
    with pytest.raises(PublishError, match='publish with encoding="gaps"'):
        load_version(served, other, config())


# -- workers -----------------------------------------------------------------------------------------------------------


class Worker(LaconicWorker):
    """As vLLM mixes them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.vllm_config, self.model = rank, config(), Served(rank)

    def get_model(self) -> nn.Module:
        return self.model


def test_all_workers_read_the_version_that_is_named(tmp_path: Path) -> None:
    run, workers = begun(tmp_path), [Worker(rank) for rank in range(2)]
    weights = {2: run.step(few), 3: run.step(few)}
    for version in (2, 3):
        for worker in workers:
            assert worker.read_weights(str(tmp_path), version, "sampler") == version
            assert_served(worker.model, weights[version])
    assert {n: r.version for n, r in FolderSource(tmp_path).registrations().items()} == {"sampler-0": 3, "sampler-1": 3}
    with pytest.raises(PublishError, match="has no version 9, and its newest is 3; wait for it, or ask"):
        workers[0].read_weights(str(tmp_path), 9)
    shutil.rmtree(tmp_path / version_name(3))
    run.step(few)
    with pytest.raises(PublishError, match="has no version 3, and its newest is 4"):
        workers[0].read_weights(str(tmp_path), 3)
    with pytest.raises(PublishError, match="no whole values lead to version 4"):
        Worker(0).read_weights(str(tmp_path), 4)


# -- trainer engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gaps", "lossless"])
def test_a_source_of_whole_tensors(encoding: str, tmp_path: Path) -> None:
    """Each pass has the newest version, in the order of the metadata."""
    run, reader = begun(tmp_path, encoding=encoding), Reader(tmp_path)
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    source = weight_source(reader, device="cpu")
    assert isinstance(source, base.WeightSource)
    for version in (2, 3):
        weights = run.step(few)
        sent = list(source.iter_full())
        meta = source.metadata
        assert [(m.name, m.dtype, m.shape) for m in meta] == [(n, t.dtype, tuple(t.shape)) for n, t in sent]
        assert {m.name for m in meta} == ALL
        assert all(torch.equal(tensor, weights[name]) for name, tensor in sent)
        assert reader.version == version


def test_sparse_patches_of_int32(tmp_path: Path) -> None:
    run, reader = begun(tmp_path), Reader(tmp_path)
    state = {patch.name: patch.values for patch in reader.patches()}
    weights = run.step(few)
    patches = sparse_patches(reader.patches(), device="cpu")
    assert {patch.name for patch in patches} == CHANGED
    for patch in patches:
        vllm_stand_in.check_sparse(patch)
        assert patch.full_shape == tuple(state[patch.name].shape)
        state[patch.name].view(-1)[patch.indices.long()] = patch.values
    assert all(torch.equal(state[name], weights[name]) for name in ALL)


# -- verl's loader -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [5, 1 << 20])
def test_a_loader_of_verl_has_what_was_published(most: int, tmp_path: Path) -> None:
    """All values first, then patches, in flushes of any size; integers do not go."""
    run, served, reader = begun(tmp_path), Served(0), Reader(tmp_path)
    for wanted in (ALL - {"count"}, CHANGED):
        weights = run.step(few)
        patches = [patch for patch in reader.patches() if patch.name != "count"]
        flushes = list(delta_flushes(patches, max_entry_numel=most, max_flush_numel=2 * most))
        served.loaded.clear()
        for flush in flushes:
            apply_delta(served, flush)
        assert set[str]().union(*served.loaded) == wanted
        assert (len(flushes) == 1) == (most > 5)
        assert_served(served, weights)
    assert list(delta_flushes(reader.patches())) == []
    dtypes = {"embed.weight": torch.bfloat16, "norm.weight": torch.float32, "q.weight": torch.bfloat16}
    whole = [
        WeightPatch(n, tuple(weights[n].shape), dtype, None, weights[n].to(dtype) + 3) for n, dtype in dtypes.items()
    ]
    flushes = list(delta_flushes(whole))
    assert [flush[2][1].dtype for flush in flushes] == list(dtypes.values()), "each flush has one dtype"
    for flush in flushes:
        apply_delta(served, flush)
    assert_served(served, weights | {name: weights[name] + 3 for name in dtypes})


@pytest.mark.parametrize("convert", [checkpoint_patches, partial(sparse_patches, device="cpu"), delta_flushes])
def test_patches_that_no_engine_takes(convert: Any) -> None:
    """The error comes before the first patch."""
    good = WeightPatch("a", (2, 3), torch.float32, torch.tensor([4]), torch.ones(1))
    for shape, value, message in (
        ((2, 3), torch.tensor([torch.nan]), "b has NaN among its new values, which stands for what stays; let a new"),
        ((2, 3), torch.tensor([4]), "b is int64, which has no NaN to mark what stays; let a new Reader"),
        ((1 << 16, 1 << 16), torch.ones(1), "b has more than 2147483648 elements, which the engine.s indices do not"),
    ):
        if convert is checkpoint_patches and "elements" in message:
            continue  # whose indices have 64 bits
        wrong = WeightPatch("b", shape, value.dtype, torch.tensor([3]), value)
        with pytest.raises(PublishError, match=message):
            next(iter(convert([good, wrong])))
    whole = WeightPatch("c", (2, 3), torch.float32, None, torch.ones(2, 3))
    assert [(p.indices, p.values.shape) for p in checkpoint_patches([whole])] == [(None, (6,))]
    assert [p.indices.tolist() for p in checkpoint_patches([whole, good])] == [[0, 1, 2, 3, 4, 5], [4]]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.checkpoint_weight_patch", None)
    with pytest.raises(ImportError, match=r"laconic.integrations.vllm needs vLLM 0.33: pip install -U vllm"):
        checkpoint_patches([])
