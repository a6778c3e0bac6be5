"""The `laconic` command finds its commands and says clearly when it does not."""

import importlib.metadata
import sys
import types

import pytest

from laconic import cli


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_names_every_command(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([argument]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("train", "export", "compare", "lab"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"laconic {importlib.metadata.version('laconic')}\n"


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: laconic" in capsys.readouterr().err


def test_unknown_command_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    message = capsys.readouterr().err
    assert "'trian'" in message
    assert "train, export, compare, rendezvous, lab" in message


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A command `echo` that keeps the arguments it was given and returns 7."""
    seen: list[list[str]] = []
    module = types.ModuleType("laconic_test_echo")
    module.main = lambda argv: seen.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "laconic_test_echo", module)
    monkeypatch.setitem(cli.COMMANDS, "echo", ("laconic_test_echo:main", "a test"))
    return seen


def test_hands_over_arguments_and_exit_code(echo: list[list[str]]) -> None:
    assert cli.main(["echo", "--help", "--", "x"]) == 7
    assert echo == [["--help", "--", "x"]]


def test_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "echo", ("package_that_is_not_there:main", "a test"))
    assert cli.main(["echo"]) == 2
    assert "'package_that_is_not_there'; pip install '.[train]' in a clone" in capsys.readouterr().err


def test_a_missing_module_of_laconic_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "echo", ("laconic.no_such_room:main", "a test"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["echo"])


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help is shown, so its module is where the table says."""
    try:
        code = cli.main([name, "--help"])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 0
    assert "usage:" in capsys.readouterr().out.lower()
