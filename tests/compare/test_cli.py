"""The command line of `laconic compare`, before the first run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laconic.compare import cli
from laconic.compare.case import STRATEGIES
from laconic.config import ConfigError, load
from laconic.extras import how_to_install
from tests.compare.conftest import TINY


def cases(*argv: str) -> list[tuple[str, str, float | None]]:
    options = cli.parse(list(argv))
    made = cli.make_cases(load(options.config), options)
    return [(case.job, case.strategy, case.rate_bits_per_s) for case in made]


def made_by(maker: str) -> list[str]:
    """The strategies of a maker that sync in every step."""
    return [name for name, each in STRATEGIES.items() if each.maker == maker and not each.has_islands]


SYNCING, BASELINES = made_by("laconic"), made_by("PyTorch")


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages, and no others, be installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in packages else None)


def test_all_strategies_that_are_installed_run_by_default(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    in_fp32 = [name for name in SYNCING if not name.startswith("lossless")]
    assert [strategy for _, strategy, _ in cases(str(job))] == [*BASELINES, "zero++", *in_fp32]
    assert cli._left_out(cli.parse([str(job)])) == [
        "left out:        strategies that need deepspeed: " + how_to_install("deepspeed", of_contestants=True),
        "left out:        strategies that need torchft: " + how_to_install("torchft", of_contestants=True),
    ]
    assert cli._left_out(cli.parse([str(job), "--strategies", "fsdp2"])) == []
    with pytest.raises(ConfigError, match=r"--strategies deepspeed needs the package deepspeed: pip install"):
        cases(str(job), "--strategies", "fsdp2,deepspeed")
    install(monkeypatch, "deepspeed", "torchft")
    zero = ["deepspeed", "deepspeed-hpz", "zero++"]
    assert [strategy for _, strategy, _ in cases(str(job))] == [*BASELINES, *zero, *in_fp32]
    assert cli._left_out(cli.parse([str(job)])) == []
    job.write_text(TINY + '[sync]\nmode = "local"\nevery = 2\n')
    islands = ["local-steps", "local-fp32", "torchft-diloco"]
    assert [name for _, name, _ in cases(str(job), "--steps", "9")] == [*BASELINES, *zero, *in_fp32, *islands]


def test_strategies_that_cannot_run_the_job_are_left_out_with_the_reason(job: Path) -> None:
    options = cli.parse([str(job), "--local", "1"])
    names = {each.strategy for each in cli.make_cases(load(job), options)}
    assert "fsdp2" in names
    assert names.isdisjoint({"fsdp2-hpz", "lossless", "lossless-4bit"})
    lines = "\n".join(cli._left_out(options))
    assert "fsdp2-hpz: shard.strategy = 'fsdp2-hpz' keeps parameters on the ranks of one node" in lines
    assert "lossless: shard.wire sends patterns of 16 bits or fewer without loss, but model.dtype = 'float32'" in lines


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--strategies fsdp2,none --rates 1gbit,none",
         [("full", "fsdp2", 1e9), ("full", "none", 1e9), ("full", "fsdp2", None), ("full", "none", None)]),
        ("--lora --strategies host", [("full", "host", 200e6), ("lora", "host", 200e6)]),
    ],
)  # fmt: skip
def test_every_strategy_runs_at_every_rate_and_lora_last(job: Path, argv: str, expected: list[tuple[Any, ...]]) -> None:
    assert cases(str(job), *argv.split()) == expected
    job.write_text(TINY.replace("[lora]", "[lora]\nenabled = true"))
    assert cases(str(job), "--strategies", "host") == [("lora", "host", 200e6)]


def test_the_demo_trains_fully_and_by_lora_and_is_shorter_or_longer_on_request() -> None:
    options = {length: cli.parse(["--demo", *length.split()]) for length in ("", "--quick", "--full")}
    demo, quick, full = (cli.make_cases(load(each.config), each) for each in options.values())
    assert [(case.job, case.strategy, case.save) for case in demo] == [
        (job, strategy, strategy in ("host", "4bit"))
        for job in ("full", "lora")
        for strategy in ("fsdp2", "hsdp", "ddp", "host", "4bit")
    ]
    assert {case.rate_bits_per_s for case in demo} == {200e6}
    assert options[""].device_bytes == 50e6
    assert {case.job for case in quick} == {"full"}
    assert quick[0].steps < full[0].steps
    chosen = cli.parse(["--demo", "--quick", "--steps", "4", "--strategies", "host", "--device-mb", "7"])
    assert (chosen.steps, chosen.strategies, chosen.device_bytes) == (4, "host", 7e6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a CONFIG.toml, or --demo"),
        (["job.toml", "--quick"], "--quick is for --demo; choose --strategies and --steps for a job of your own"),
        (["job.toml", "--strategies", "zero"], "strategy 'zero' is not known; there are fsdp2, "),
        (["job.toml", "--rates", "fast"], "rate 'fast' is not a rate"),
        (["missing.toml"], "cannot read the configuration 'missing.toml'"),
        (["job.toml", "--steps", "2"], "2 steps leave nothing to time"),
        (["job.toml", "--nodes", "0"], "nodes=0 is not possible"),
    ],
)
def test_mistakes_exit_with_2_before_anything_runs(
    argv: list[str], message: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
