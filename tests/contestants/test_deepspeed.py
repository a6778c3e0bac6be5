"""DeepSpeed's ZeRO-3 as a strategy, beside FSDP2 on the same job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.comm.launch import RankInfo
from laconic.config import JobError
from laconic.contestants.deepspeed import Sizes, import_deepspeed, own_part, zero_3
from laconic.strategies.checks import check_job
from laconic.strategies.stepper import Setup
from tests.contestants import peers
from tests.contestants.peers import under
from tests.support.launch import run_ranks

RANKS = RankInfo(rank=0, world_size=4, local_rank=0, num_local=2, num_nodes=2)
CPU = torch.device("cpu")


@pytest.mark.machine
def test_two_ranks_train_as_under_fsdp2(tmp_path: Path) -> None:
    configs = [under(tmp_path, strategy, train={"steps": 2}) for strategy in ("fsdp2", "deepspeed")]
    fsdp2, deepspeed = run_ranks(peers.train, 2, *configs, local=1)[0]
    assert deepspeed["losses"] == pytest.approx(fsdp2["losses"], rel=1e-5)


@pytest.mark.campaign
def test_three_ranks_train_and_evaluate_as_under_fsdp2(tmp_path: Path) -> None:
    """Odd sizes: no parameter's elements divide by three."""
    clipped: dict[str, dict[str, Any]] = {"optimizer": {"max_grad_norm": 0.5, "weight_decay": 0.3}}
    whole = {"accumulation": 2, "steps": 4, "eval_every": 2}
    configs = [
        under(tmp_path, "fsdp2", train=whole, **clipped),
        under(tmp_path, "deepspeed", train=whole, **clipped),
        under(tmp_path, "deepspeed", "wild", optimizer={"lr": 1e30, "max_grad_norm": 0.0}, train={"steps": 2}),
    ]
    fsdp2, deepspeed, wild = run_ranks(peers.train, 3, *configs, local=1)[0]
    for key in ("losses", "grad_norms"):
        assert deepspeed[key] == pytest.approx(fsdp2[key], rel=1e-5)
    evaluations = [[one["eval_loss"] for one in each["evaluations"]] for each in (deepspeed, fsdp2)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    assert len(evaluations[0]) == 2
    assert [deepspeed[key] for key in ("num_parameters", "num_trainable")] == [12112, 12112]
    assert "training stopped before the optimizer of step 2" in wild
    assert "The weights are as after step 1" in wild


@pytest.mark.campaign
def test_copies_on_each_node_adapters_and_mixed_precision(tmp_path: Path) -> None:
    lora: dict[str, dict[str, Any]] = {"lora": {"enabled": True, "rank": 2}}
    bf16: dict[str, dict[str, Any]] = {"shard": {"param_dtype": "bfloat16"}}
    kept: dict[str, dict[str, Any]] = {"shard": {"reshard_after_forward": False}}
    configs = [
        under(tmp_path, "fsdp2"),
        under(tmp_path, "deepspeed-hpz", "hpz"),
        under(tmp_path, "deepspeed", "kept", **kept),
        under(tmp_path, "fsdp2", "fsdp2-lora", **lora, **bf16),
        under(tmp_path, "deepspeed", "lora", **lora, **bf16),
    ]
    fsdp2, hpz, whole, fsdp2_lora, adapters = run_ranks(peers.train, 4, *configs, local=2)[0]
    assert hpz["losses"] == pytest.approx(fsdp2["losses"], rel=1e-5)
    assert whole["losses"] == pytest.approx(fsdp2["losses"], rel=1e-5)
    assert adapters["losses"] == pytest.approx(fsdp2_lora["losses"], rel=1e-3)  # both round, in other orders
    assert adapters["losses"] != fsdp2["losses"]
    assert adapters["num_trainable"] == fsdp2_lora["num_trainable"] < adapters["num_parameters"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"name": "adamw8bit"}}, "optimizer.name = 'adamw8bit'"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype = 'bfloat16'.*keeps master weights.*in float32"),
        ({"shard": {"param_dtype": "float16"}}, "shard.param_dtype = 'float16'.*its own rule"),
        ({"lora": {"enabled": True, "quantize": "nf4"}}, "lora.quantize = 'nf4'"),
        ({"train": {"compile": True}}, "train.compile = True"),
        ({"train": {"save_every": 0}}, "train.save_every = -1"),
        ({"train": {"rows": "by-speed"}}, "gathers inside the layers, where no compute can be timed alone; give the"),
    ],
)
def test_jobs_that_deepspeed_would_run_in_another_way_are_refused(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        check_job(under(tmp_path, "deepspeed", **sections), RANKS)


def test_quantised_crossings_on_a_cpu_and_copies_on_one_rank_are_refused_with_the_reason(tmp_path: Path) -> None:
    alone = RankInfo(rank=0, world_size=2, local_rank=0, num_local=1, num_nodes=2)
    with pytest.raises(JobError, match="at least 2 ranks per node, got 1"):
        check_job(under(tmp_path, "deepspeed-hpz"), alone)
    config = under(tmp_path, "deepspeed-zero++")
    with pytest.raises(JobError, match=r"CUDA kernels.*This op had not been implemented on CPU backend"):
        check_job(config, RANKS, "cpu")
    check_job(config, RANKS, "cuda")


def test_without_deepspeed_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(JobError, match=r"DS_BUILD_OPS=0 pip install '\./contestants\[deepspeed\]' in a clone"):
        import_deepspeed(CPU)


class Tower(nn.Module):
    """Three layers of unlike sizes, with an embedding whose weight the output shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)])


def test_buffers_are_as_large_as_layers(tmp_path: Path) -> None:
    sizes = Sizes.of(Tower())
    assert sizes == Sizes(layer=20, root=40, model=96)
    zero = zero_3(Setup.of(under(tmp_path, "deepspeed"), RANKS, torch.device("cpu")), sizes)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (20, 20)
    assert (zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]) == (80, 0)
    assert "zero_hpz_partition_size" not in zero
    kept = under(tmp_path, "deepspeed-hpz", shard={"reshard_after_forward": False})
    zero = zero_3(Setup.of(kept, RANKS, torch.device("cpu")), sizes)["zero_optimization"]
    assert (zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]) == (96, 96)
    assert zero["zero_hpz_partition_size"] == 2


@pytest.mark.parametrize("numel", [1, 2, 6, 7])
def test_parts_make_the_whole(numel: int) -> None:
    whole = torch.arange(numel)
    parts = [own_part(whole, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert max(part.numel() for part in parts) == -(-numel // 3)
