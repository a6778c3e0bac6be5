"""Versions in vLLM: by its own code where it is installed, else by a stand-in with its conditions.

By hand, they passed with the Python code of vLLM 0.33.0 and torch 2.13 on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.integrations.vllm import LaconicWorker, checkpoint_patches, load_version, sparse_patches, weight_source
from laconic.publish import FolderSource, Publisher, PublishError, Reader, WeightPatch
from laconic.publish.versions import version_name
from tests.support import vllm_stand_in


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


class Run:
    """A training run that publishes; it begins with version 1."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        torch.manual_seed(0)
        self.model = Trained()
        self.publisher = Publisher(self.model, folder, **{"keep": 100, "base_every": 100, **keys})
        self.publish()

    def publish(self) -> dict[str, Tensor]:
        """Publish a version, and return its weights."""
        self.publisher.publish()
        self.publisher.wait()
        return {n: t.bfloat16() if t.is_floating_point() else t.clone() for n, t in self.model.state_dict().items()}

    @torch.no_grad()
    def step(self, name: str = "", value: float = 1.5) -> dict[str, Tensor]:
        """Change the first element of a tensor; or all but the integers; or a few and all of the norm. Publish."""
        if name == "all":
            for parameter in self.model.parameters():
                parameter.mul_(value)
        elif name:
            self.model.state_dict()[name].view(-1)[0] = value
        else:
            self.model.embed.weight.view(-1)[3::17] += 0.1
            self.model.q.weight[2:4, 2:5] *= 1.5
            self.model.norm.weight += 0.25
        return self.publish()


def assert_served(served: Served, weights: dict[str, Tensor]) -> None:
    for name, wanted in served.expected(weights).items():
        torch.testing.assert_close(served.state_dict()[name], wanted, rtol=0, atol=0, equal_nan=True)


ALL = {"embed.weight", "q.weight", "k.weight", "norm.weight", "count"}
CHANGED = {"embed.weight", "q.weight", "norm.weight"}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_values_and_then_what_changes(rank: int, tmp_path: Path) -> None:
    """The norm comes whole in a patch, as all of it changes."""
    run, served, reader = Run(tmp_path), Served(rank), Reader(tmp_path)
    for version in (2, 3, 4):
        weights = run.step()
        assert load_version(served, reader, config()) == reader.version == version
        assert_served(served, weights)
    assert served.loaded == [ALL, CHANGED, CHANGED]
    assert load_version(served, reader, config()) == 4
    assert len(served.loaded) == 3, "nothing is new, nothing is loaded"
    assert load_version(served, Reader(tmp_path), config()) == 4
    assert served.loaded[3] == ALL
    assert_served(served, weights)


def test_all_values_where_patches_do_not_fit(tmp_path: Path) -> None:
    run, served, reader = Run(tmp_path, base_every=1), Served(0), Reader(tmp_path)

    def load(weights: dict[str, Tensor], **keys: Any) -> set[str]:
        load_version(served, reader, config(**keys))
        assert_served(served, weights)
        return served.loaded[-1]

    assert load(run.publish()) == ALL
    assert load(run.step("count", 7)) == ALL
    assert load(run.step("k.weight", torch.nan)) == ALL
    assert load(run.step("k.weight", 1.0)) == {"k.weight"}
    run.step("all")
    assert load(run.step("all")) == ALL, "two patches are more bytes than all values"
    assert load(run.step(), quant_config="fp8") == ALL
    assert load(run.step(), is_moe=True) == ALL
    assert load(run.step(), is_moe=True, moe_backend="triton") == CHANGED


@pytest.mark.parametrize("version", [1, 2])
def test_after_a_loader_that_fails_all_values_come_and_values_coded_by_others_are_refused(
    version: int, tmp_path: Path
) -> None:
    run, served, reader = Run(tmp_path), Served(0), Reader(tmp_path)
    if version == 2:
        load_version(served, reader, config())
        run.step()
    served.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        load_version(served, reader, config())
    served.fails = False
    weights = run.step()
    load_version(served, reader, config())
    assert_served(served, weights)
    assert served.loaded[-1] == ALL
    coded, other = Run(tmp_path / "coded", encoding="lossless"), Reader(tmp_path / "coded")
    load_version(served, other, config())
    coded.step()
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
    run, workers = Run(tmp_path), [Worker(rank) for rank in range(2)]
    weights = {2: run.step(), 3: run.step()}
    for version in (2, 3):
        for worker in workers:
            assert worker.read_weights(str(tmp_path), version, "sampler") == version
            assert_served(worker.model, weights[version])
    assert {n: r.version for n, r in FolderSource(tmp_path).registrations().items()} == {"sampler-0": 3, "sampler-1": 3}
    with pytest.raises(PublishError, match="has no version 9, and its newest is 3; wait for it, or ask"):
        workers[0].read_weights(str(tmp_path), 9)
    shutil.rmtree(tmp_path / version_name(3))
    run.step()
    with pytest.raises(PublishError, match="has no version 3, and its newest is 4"):
        workers[0].read_weights(str(tmp_path), 3)
    with pytest.raises(PublishError, match="no whole values lead to version 4"):
        Worker(0).read_weights(str(tmp_path), 4)


# -- trainer engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gaps", "lossless"])
def test_a_source_of_whole_tensors(encoding: str, tmp_path: Path) -> None:
    """Each pass has the newest version, in the order of the metadata."""
    run, reader = Run(tmp_path, encoding=encoding), Reader(tmp_path)
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    source = weight_source(reader, device="cpu")
    assert isinstance(source, base.WeightSource)
    for version in (2, 3):
        weights = run.step()
        sent = list(source.iter_full())
        meta = source.metadata
        assert [(m.name, m.dtype, m.shape) for m in meta] == [(n, t.dtype, tuple(t.shape)) for n, t in sent]
        assert {m.name for m in meta} == ALL
        assert all(torch.equal(tensor, weights[name]) for name, tensor in sent)
        assert reader.version == version


def test_sparse_patches_of_int32(tmp_path: Path) -> None:
    run, reader = Run(tmp_path), Reader(tmp_path)
    state = {patch.name: patch.values for patch in reader.patches()}
    weights = run.step()
    patches = sparse_patches(reader.patches(), device="cpu")
    assert {patch.name for patch in patches} == CHANGED
    for patch in patches:
        vllm_stand_in.check_sparse(patch)
        assert patch.full_shape == tuple(state[patch.name].shape)
        state[patch.name].view(-1)[patch.indices.long()] = patch.values
    assert all(torch.equal(state[name], weights[name]) for name in ALL)
    index, value = torch.tensor([2**31]), torch.ones(1)
    message = "wide has more than 2147483648 elements, which the engine.s indices do not reach; let a new Reader"
    with pytest.raises(PublishError, match=message):
        sparse_patches([WeightPatch("wide", (2**16, 2**16), torch.float32, index, value)], device="cpu")


def test_patches_are_all_whole_or_all_sparse() -> None:
    whole = WeightPatch("a", (2, 3), torch.float32, None, torch.ones(2, 3))
    part = WeightPatch("b", (2, 3), torch.float32, torch.tensor([4]), torch.ones(1))
    assert [(p.indices, p.values.shape) for p in checkpoint_patches([whole])] == [(None, (6,))]
    assert [p.indices.tolist() for p in checkpoint_patches([whole, part])] == [[0, 1, 2, 3, 4, 5], [4]]
    wrong = WeightPatch("c", (2,), torch.int64, None, torch.ones(2, dtype=torch.int64))
    with pytest.raises(PublishError, match="c is int64, which has no NaN to mark what stays; let a new Reader"):
        checkpoint_patches([part, wrong])


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.checkpoint_weight_patch", None)
    with pytest.raises(ImportError, match=r"laconic.integrations.vllm needs vLLM 0.33: pip install -U vllm"):
        checkpoint_patches([])
