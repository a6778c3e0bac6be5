"""Every fenced block of the documentation runs, parses, or says why it cannot."""

from __future__ import annotations

import ast
import difflib
import tomllib
import traceback

import pytest

from laconic.config import Config
from laconic.config.job import from_dict
from laconic.plan.cluster_file import cluster_from_dict
from tests.docs.blocks import ROOT, Block, blocks, check, commands
from tests.docs.scenes import scene
from tests.support.launch import run_ranks

ALL = list(blocks())
NOT_RUN = 4
"""The most blocks that may say that they cannot run."""
NO_CODE = ("text",)


def of(*languages: str) -> list[Block]:
    return [block for block in ALL if block.language in languages and not block.mark]


def test_each_block_is_of_a_known_kind_and_few_cannot_run() -> None:
    assert {block.language for block in ALL} <= {"python", "sh", "toml", "yaml", "diff", "", *NO_CODE}
    assert {block.mark for block in ALL} <= {"", "not run", "diff", "part of"}
    assert all(block.about.strip() for block in ALL if block.mark)
    excused = [str(block) for block in ALL if block.mark == "not run"]
    assert len(excused) <= NOT_RUN, excused


def job_python(chosen: list[Block]) -> list[str]:
    """The tracebacks of the blocks that fail. Each block runs in a scene of its own, on all ranks."""
    failures = []
    for block in chosen:
        try:
            given = scene(block.page)
            exec(compile(block.text, str(block), "exec"), names := dict(given), names if type(given) is dict else given)
        except Exception:  # of any kind: the test shows it
            failures.append(f"{block}\n{traceback.format_exc()}")
    return failures


@pytest.mark.machine  # a block with threads that serve
def test_python_blocks_run_on_two_nodes() -> None:
    chosen = of("python")
    assert len(chosen) >= 8
    failures = run_ranks(job_python, 2, chosen, local=1)[0]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("block", of("sh", ""), ids=str)
def test_commands_parse(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(commands(block.text))
    assert found
    for words in found:
        check(words, monkeypatch)


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_jobs_and_clusters_are_valid(block: Block) -> None:
    table = tomllib.loads(block.text)
    if "ranks_per_node" in table:
        cluster_from_dict(table)
    else:
        from_dict(Config, table)


@pytest.mark.parametrize("block", [block for block in ALL if block.mark in ("diff", "part of")], ids=str)
def test_excerpts_are_true(block: Block) -> None:
    files = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in block.about.split()]
    if block.mark == "diff":
        lines = list(difflib.unified_diff(*files, n=0, lineterm=""))[2:]
        assert [line for line in lines if not line.startswith("@@")] == block.text.splitlines()
    else:
        wanted = [line for line in block.text.splitlines() if line.strip() not in ("", "...")]
        rest = iter(line.strip() for line in files[0])
        missing = next((line for line in wanted if line.strip() not in rest), None)  # `in` goes on from the last line
        assert missing is None, f"{block.about} has no such line, or in another order: {missing}"


@pytest.mark.parametrize("block", of("diff"), ids=str)
def test_free_diffs_are_python_on_both_sides(block: Block) -> None:
    """And what the new side imports from laconic is there."""
    for sign in "-+":
        lines = [line[1:] for line in block.text.splitlines() if line[:1] in (sign, " ", "")]
        tree = ast.parse("\n".join(lines), str(block))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("laconic"):
            assert {alias.name for alias in node.names} <= defined(str(node.module))


def defined(name: str) -> set[str]:
    """The names at the top level of a module of laconic. It is not imported: some of them take seconds."""
    path = ROOT / "src" / name.replace(".", "/")
    files = path.glob("__init__.py*") if path.is_dir() else [path.with_suffix(".py")]  # a stub has those of laconic
    tree = ast.parse("\n".join(file.read_text(encoding="utf-8") for file in files))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]  # also those for type checkers
    return names | {alias.asname or alias.name for node in imports for alias in node.names}
