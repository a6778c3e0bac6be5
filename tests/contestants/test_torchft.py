"""torchft's DiLoCo as a strategy, beside laconic's own local steps on the same job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError
from laconic.contestants.torchft import TorchftStepper, import_torchft
from laconic.strategies.checks import check_job
from tests.contestants import peers
from tests.support.launch import run_ranks

RANKS = RankInfo(rank=0, world_size=4, local_rank=0, num_local=2, num_nodes=2)
LOCAL = {"mode": "local", "every": 4, "fragments": 2, "codec": "fp32"}


def run(folder: Path, strategy: str, **sections: dict[str, Any]) -> Config:
    sections["train"] = {"steps": 9, "eval_every": 3, **sections.get("train", {})}
    return peers.under(folder, strategy, **{"sync": LOCAL, **sections})


if sys.version_info < (3, 14):  # torchft has no wheel for Python 3.14, and `make install` leaves it out there

    @pytest.mark.machine
    def test_two_islands_of_two_ranks_take_the_steps_of_laconics_islands(tmp_path: Path) -> None:
        """Evaluations see the outer parameters in the middle of an interval, too."""
        configs = [run(tmp_path, strategy) for strategy in ("laconic", "torchft-diloco")]
        laconic, torchft = run_ranks(peers.train, 4, *configs, local=2)[0]
        assert torchft["losses"] == pytest.approx(laconic["losses"], rel=1e-5)
        assert torchft["grad_norms"] == pytest.approx(laconic["grad_norms"], rel=1e-5)
        found, wanted = ([one["eval_loss"] for one in each["evaluations"]] for each in (torchft, laconic))
        assert found == pytest.approx(wanted, rel=1e-5)
        assert len(found) == 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sync": {}}, "needs sync.mode = 'local'"),
        ({"sync": {**LOCAL, "codec": "int4"}}, "sync.codec = 'int4'.*sends float32"),
        ({"sync": {**LOCAL, "overlap": 1}}, "sync.overlap = 1.*sends a fragment earlier"),
        ({"sync": {**LOCAL, "slices": 2}}, "sync.slices = 2.*nothing like it"),
        ({"train": {"save_every": 0}}, "train.save_every = -1"),
        ({"optimizer": {"name": "adamw8bit"}}, "optimizer.name = 'adamw8bit'"),
    ],
)
def test_jobs_that_torchft_would_run_in_another_way_are_refused(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        check_job(run(tmp_path, "torchft-diloco", **sections), RANKS)


def test_without_torchft_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(JobError, match=r"pip install '\./contestants\[torchft\]' in a clone"):
        import_torchft()


class Manager:
    """As torchft's, after an all-reduce that has failed."""

    def current_step(self) -> int:
        return 0

    def errored(self) -> str:
        return "the peer has gone"


def test_a_sync_that_torchft_has_not_committed_ends_the_run() -> None:
    stepper: Any = TorchftStepper.__new__(TorchftStepper)
    stepper.optimizer = torch.optim.SGD([torch.zeros(1)])
    stepper._interval, stepper._num_steps_taken, stepper._manager = 2, 0, Manager()
    assert stepper._update(1, is_last=False) == ()
    with pytest.raises(RuntimeError, match="committed 0 of 1 syncs up to step 2; its error: the peer has gone"):
        stepper._update(1, is_last=False)
