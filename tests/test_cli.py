"""The `laconic` command finds its commands and says clearly when it does not."""

import importlib.metadata
import runpy
import sys
import types

import pytest

from laconic import cli


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["--help"], 0, ["  train ", "  export ", "  compare ", "  lab "]),
        (["--version"], 0, [f"laconic {importlib.metadata.version('laconic')}\n"]),
        ([], 2, ["usage: laconic"]),
        (["trian"], 2, ["'trian'", "train, export, compare, rendezvous, lab"]),
    ],
)
def test_help_version_and_mistakes(
    arguments: list[str], code: int, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert all(text in (err if code else out) for text in texts)


def test_hands_over_arguments_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    module = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setitem(sys.modules, "laconic_test_echo", module)
    monkeypatch.setitem(cli.COMMANDS, "echo", ("laconic_test_echo:main", "a test"))
    assert cli.main(["echo", "--help", "--", "x"]) == 7
    assert seen == [["--help", "--", "x"]]


def test_a_missing_package_is_named_and_a_missing_module_of_laconic_is_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "echo", ("package_that_is_not_there:main", "a test"))
    assert cli.main(["echo"]) == 2
    assert "'package_that_is_not_there'; pip install '.[train]' in a clone" in capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "echo", ("laconic.no_such_room:main", "a test"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["echo"])


def test_a_command_of_another_distribution_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("laconic.extras.find_spec", lambda name: None)
    monkeypatch.setitem(cli.COMMANDS, "train", ("laconic.no_such_room:main", "a test"))
    assert cli.main(["train"]) == 2
    assert "laconic train is one of laconic-tools; pip install ./tools in a clone" in capsys.readouterr().err


def test_the_module_for_torchrun_names_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("laconic.train.cli", "laconic.config", "laconic.config.job"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("laconic.train", run_name="__main__")
    assert ended.value.code == 2
    assert "laconic.train needs the package 'pydantic'; pip install '.[train]' in a clone" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help is shown, so its module is where the table says."""
    try:
        code = cli.main([name, "--help"])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 0
    assert "usage:" in capsys.readouterr().out.lower()
