"""benchmarks.cyclic: counts and comparisons on small jobs, and the command that chooses and records rows."""

from __future__ import annotations

import dataclasses
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.cyclic import accuracy, image_accuracy, schedule, traces
from benchmarks.cyclic.__main__ import BENCHMARK
from benchmarks.cyclic.bench import QUICK, Bench
from benchmarks.cyclic.schedule import stages_of_devices
from laconic.cyclic.schedule import Rule, Schedule
from tests.support import record
from tests.support.launch import run_ranks
from tests.support.measure import Benchmark

pytestmark = pytest.mark.machine


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(**QUICK, out=tmp_path)  # type: ignore[arg-type]


def test_sleeping_stages_are_observed_from_outside() -> None:
    batches, n = 3, 2
    observations = run_ranks(schedule.run_sleeping, n, "v2", "replicated", n, batches, 0.02)
    ops = 2 * n * batches
    for worker in observations:
        assert [change for _, change in worker.log.alive].count(1) == ops // 2
        assert sum(change for _, change in worker.log.alive) == 0
        assert len(worker.log.sent_bytes) == len(worker.log.received_bytes) == ops  # one moment before each op
        assert worker.end_s - worker.start_s >= ops * 0.02
        assert {size for step in worker.log.sent_bytes for size in step} == {schedule.STAGE_BYTES}
    alive = [count for _, count in schedule.live_over_time(observations)]
    assert alive[-1] == 0
    assert max(alive) >= n * (n + 1) // 2 - 1


def test_live_activations_are_summed_over_workers_in_time() -> None:
    def worker(*events: tuple[float, int]) -> schedule.Observation:
        return schedule.Observation(start_s=0.0, end_s=1.0, log=schedule.Log(alive=list(events)), on_time=1.0)

    both = [worker((0.1, 1), (0.3, -1)), worker((0.2, 1), (0.3, 1), (0.4, -1), (0.5, -1))]
    assert schedule.live_over_time(both) == [(0.1, 1), (0.2, 2), (0.3, 1), (0.3, 2), (0.4, 1), (0.5, 0)]


def test_stages_of_shared_devices_must_agree() -> None:
    schedule = Schedule(Rule.named("v2", 2), "shared")
    a, b = (torch.full((2,), value).numpy() for value in (1.0, 2.0))
    assert [part.tolist() for part in stages_of_devices(schedule, [[a], [a], [b]])] == [[1, 1], [2, 2]]
    with pytest.raises(AssertionError):
        stages_of_devices(schedule, [[a], [b], [b]])


def test_the_trace_row_holds_models_to_their_claims(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
        return model, lambda: model(torch.ones(32, 64)).sum()

    easy = traces.MODELS[0].__class__(name="easy", required=0.4, build=build)
    monkeypatch.setattr(traces, "MODELS", (easy,))
    row = traces.traced_bytes(bench)
    assert row.is_met
    assert row.required == "easy -40%"
    monkeypatch.setattr(traces, "MODELS", (easy, dataclasses.replace(easy, name="hard", required=0.6)))
    assert not traces.traced_bytes(bench).is_met


# ------------------------------------------------------------------------------------------------ accuracy


_SLOW, _FAST = (accuracy.Setting(lr=lr, momentum=0.5) for lr in (1e-9, 0.05))


def study(*, is_loss: bool = True, seeds: int = 2) -> accuracy.Study:
    """Least squares with a noisy teacher."""

    def task(seed: int) -> accuracy.Task:
        generator = torch.Generator().manual_seed(seed)
        teacher = torch.randn(4, 1, generator=generator)

        def batches(steps: int) -> Iterator[accuracy.Batch]:
            for _ in range(steps):
                x = torch.randn(accuracy.WORKERS, 8, 4, generator=generator)
                yield [(part, part @ teacher) for part in x]

        def evaluate(predict: Any) -> tuple[float, float]:
            x = torch.eye(4)
            error = float(functional.mse_loss(predict(x), x @ teacher))
            return error, error

        return accuracy.Task(
            model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 1)),
            example=torch.zeros(8, 4),
            loss=functional.mse_loss,
            optimizer=lambda ps, setting: torch.optim.Adam(ps, lr=0.1, betas=(setting.momentum, 0.9)),
            batches=batches,
            evaluate=evaluate,
        )

    return accuracy.Study(
        name="toy", measure="error", is_loss=is_loss, settings=(_SLOW, _FAST), seeds=seeds,
        tuning_seeds=1, steps=20, task=task,
    )  # fmt: skip


def test_every_rule_learns_and_gets_the_setting_that_validates_best() -> None:
    found = accuracy.outcomes(study, {})
    assert [outcome.rule for outcome in found] == list(accuracy.RULES)
    for outcome in found:
        assert outcome.setting == _FAST
        assert len(outcome.results) == 2
        assert outcome.mean < 0.5 * accuracy.train(study(), outcome.rule, _SLOW, 0)[1]


def test_equal_seeds_repeat_to_the_bit() -> None:
    assert accuracy.train(study(), "v2", _FAST, 1) == accuracy.train(study(), "v2", _FAST, 1)
    assert accuracy.train(study(), "v2", _FAST, 1) != accuracy.train(study(), "dp", _FAST, 1)


def test_plain_steps_are_those_of_rule_dp() -> None:
    """A run with plain steps equals a plain run under dp. Under v1 it equals neither a plain run nor a run without."""
    made = study()
    first_plain = dataclasses.replace(made, plain_steps=10)
    assert accuracy.train(first_plain, "dp", _FAST, 0) == accuracy.train(made, "dp", _FAST, 0)
    results = [accuracy.train(each, rule, _FAST, 0) for each, rule in ((made, "dp"), (made, "v1"), (first_plain, "v1"))]
    assert len(set(results)) == 3


@pytest.mark.parametrize(("is_loss", "better", "worse"), [(True, 0.5, 1.5), (False, 1.5, 0.5)])
def test_noise_is_the_deviation_between_seeds(is_loss: bool, better: float, worse: float) -> None:
    def outcome(middle: float, spread: float) -> accuracy.Outcome:
        return accuracy.Outcome(rule="v2", setting=_FAST, results=(middle - spread, middle, middle + spread))

    plain = outcome(1.0, 0.1)
    made = study(is_loss=is_loss)
    assert accuracy.is_within_noise(made, plain, outcome(better, 0.0))
    assert not accuracy.is_within_noise(made, plain, outcome(worse, 0.1))
    assert accuracy.is_within_noise(made, plain, outcome(worse, 0.6))
    # The standard error of the difference: three seeds of deviation 0.6, and three of 0.1.
    error = math.sqrt((0.6**2 + 0.1**2) / 3)
    assert accuracy.is_within_error(made, plain, outcome(1.0 + math.copysign(0.99 * error, worse - 1.0), 0.6))
    assert not accuracy.is_within_error(made, plain, outcome(1.0 + math.copysign(1.01 * error, worse - 1.0), 0.6))
    assert accuracy.is_within_error(made, plain, outcome(better, 0.0))


def test_the_rate_of_the_papers_schedule_falls_to_a_fifth_three_times() -> None:
    factors = [image_accuracy.thrice_a_fifth(step / 10) for step in range(1, 11)]
    assert factors == pytest.approx([1, 1, *[0.2] * 3, *[0.04] * 3, *[0.008] * 2])


def test_the_small_resnet_is_cut_into_stages_that_all_train() -> None:
    made = image_accuracy.digits_study(seeds=1, tuning_seeds=1, epochs=1, settings=())
    task = made.task(0)
    (first, *_) = task.batches(made.steps)
    assert len(first) == accuracy.WORKERS
    assert all(inputs.shape == (16, 1, 8, 8) and targets.shape == (16,) for inputs, targets in first)
    validation, test = accuracy.train(dataclasses.replace(made, steps=4), "v2", _FAST, 0)
    assert 0 <= validation <= 1
    assert 0 <= test <= 1


def test_fashion_mnist_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"seeds": 1, "tuning_seeds": 1, "epochs": 2, "num_train": 64, "settings": ()}
    monkeypatch.setattr(image_accuracy, "FASHION", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        image_accuracy.fashion_study(**arguments)

    monkeypatch.setattr(image_accuracy, "FASHION", tmp_path)
    for part, num in (("train", 120), ("t10k", 20)):
        labels = torch.arange(num, dtype=torch.uint8) % 10
        pixels = labels.repeat_interleave(28 * 28)
        for name, offset, values in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
            with gzip.open(tmp_path / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(bytes(offset) + values.numpy().tobytes())
    made = image_accuracy.fashion_study(**arguments)
    assert made.steps == 2
    task = made.task(0)
    for batch in task.batches(made.steps):
        assert len(batch) == accuracy.WORKERS
        for images, labels in batch:
            assert images.shape == (16, 1, 28, 28)
            expected = ((labels / 255 - 0.286) / 0.353).view(-1, 1, 1, 1).expand_as(images)  # an image shows its label
            torch.testing.assert_close(images, expected)
    stages = accuracy.begin(made, "v2", _FAST, 0)[1]
    assert [len(list(stage.children())) for stage in stages] == [
        3,
        2,
        2,
        3,
    ]  # the first layer is half a block, the last none


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def canned() -> Benchmark[Bench]:
    """The benchmark with rows that take no time."""
    row = record.Row(key="live", claim="live", required="10", measured="10", is_met=True)
    return dataclasses.replace(BENCHMARK, rows=dict.fromkeys(BENCHMARK.rows, lambda bench: row))


def test_every_row_of_the_claim_can_be_asked_for(
    canned: Benchmark[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canned.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("| live ") == len(BENCHMARK.rows)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "RESULTS.md")
    assert canned.main(["--rows", "live"]) == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("# Results")
    assert "`python -m benchmarks.cyclic --rows live`" in text
    with pytest.raises(SystemExit):
        canned.main(["--rows", "speed"])
    assert "there is no row 'speed'" in capsys.readouterr().err


def test_a_row_that_fails_lets_the_others_go_on(canned: Benchmark[Bench], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(bench: Bench) -> record.Row:
        raise RuntimeError("the wire is cut")

    failing = dataclasses.replace(canned, rows={**canned.rows, "bytes": fail})
    assert failing.main(["--quick"]) == 1
    out, err = capsys.readouterr()
    assert out.count("| live ") == len(BENCHMARK.rows) - 1
    assert "the wire is cut" in err
    assert "rows that failed: bytes" in err
