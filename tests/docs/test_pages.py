"""The pages are complete and true: public names, pages, messages, promises, and ways to install laconic."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

import laconic
import laconic.integrations
import laconic.optim
from tests.docs import methods, strategies
from tests.docs.blocks import PAGES, ROOT
from tests.faults.__main__ import BENCHMARK
from tests.support.record import recorded


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    for module in (laconic, laconic.integrations, laconic.optim):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= listed


def test_every_page_is_in_the_navigation() -> None:
    """`mkdocs build --strict`, which checks links and names, is a step of continuous integration of its own."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"[a-z0-9-]+\.md", navigation)) == pages


def test_each_public_method_and_hook_works_or_raises_as_the_page_says() -> None:
    assert methods.missing() == set()
    found = methods.results()
    assert [each for each in found if each[2] == methods.NO_EFFECT] == []
    page = methods.PAGE.read_text(encoding="utf-8")
    assert page == methods.render(page, found), "run python -m tests.docs.methods"


def test_the_list_of_strategies_is_the_registrys() -> None:
    page = strategies.PAGE.read_text(encoding="utf-8")
    assert page == strategies.render(page), "run python -m tests.docs.strategies"


SEARCHED = (
    "communication-efficient", "gradient compression", "communication compression", "slow networks", "Ethernet",
    "FSDP2", "HSDP", "HFSDP", "DDP", "ZeRO-2", "ZeRO-3", "ZeRO++", "hpZ", "DeepSpeed", "torchtitan", "uneven shard",
    "heterogeneous", "gradient accumulation", "micro-batch", "pipeline parallelism", "context parallelism", "DiLoCo",
    "elastic", "fault tolerance", "silent data corruption", "weight sync", "inference engines", "vLLM", "SGLang",
    "reinforcement learning", "GRPO", "LoRA", "QLoRA", "FP8", "tokens/s", "MFU", "baseline", "Slurm", "Kubernetes",
)  # fmt: skip
"""What people search for who have the problems that laconic solves."""


def test_the_words_that_people_search_for_lead_here() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    shown = "\n".join([texts[ROOT / "README.md"], *re.findall(r"^#+ .*", "\n".join(texts.values()), re.MULTILINE)])
    assert [term for term in SEARCHED if not re.search(re.escape(term), shown, re.IGNORECASE)] == []


# -- messages ----------------------------------------------------------------------------------------------------------


def texts() -> list[str]:
    """Every string of the sources; `...` stands for a value that is put in."""
    found = []
    for path in (ROOT / "src" / "laconic").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_on_the_page_of_errors_exists() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    sources = "\0".join(texts())
    patterns = {text: r"[^\0]*?".join(map(re.escape, filter(None, text.split("...")))) for text in messages}
    assert [text for text, pattern in patterns.items() if not re.search(pattern, sources)] == []


# -- promises ----------------------------------------------------------------------------------------------------------


CAMPAIGNS = BENCHMARK.rows.keys() - BENCHMARK.sections.keys()
"""The campaigns of faults; `mend`, `parity` and `device` have sections of their own."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/promises.md").read_text().splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| promise"))
]


def test_each_promise_names_what_proves_it() -> None:
    named: set[str] = set()
    for promise, _, tests, campaigns in ROWS:
        files, rows = re.findall(r"`([^`]+)`", tests), re.findall(r"`([^`]+)`", campaigns)
        assert files or rows, promise
        for file in files:
            assert "def test_" in (ROOT / file).read_text(), f"{promise}: {file}"
        assert set(rows) <= CAMPAIGNS, promise
        named.update(rows)
    assert named == CAMPAIGNS, "a campaign proves no promise"


# -- figures -----------------------------------------------------------------------------------------------------------


QUOTED = {
    "cyclic.md": {
        "cyclic run": ("68.8 %", "62.5 %"), "cyclic few-bits": ("0.257",),
        "studies fashion": ("85.6 %", "0.2 ± 0.2", "0.7 ± 0.5", "6.3 ± 0.8"),
        "studies warm-up": ("10 %", "21 %", "5 %", "0.5 to 1.1 %"),
    },
    "local-steps.md": {
        "local_steps loss-codecs": ("0.3 %", "0.9 %"), "local_steps loss-top-k": ("2.3 %",),
        "studies sparse": ("22 %", "11 %", "3.6 %"), "studies parity-8": ("0.83 %", "3.80 %"),
        "local_steps slices-mlp-8": ("0.6 %", "0.9 %", "1.4 %"), "local_steps slices-time": ("1.03 to 1.08",),
        "local_steps flops": ("9.8 %", "14.7 %", "17.1 %", "22.0 %", "25.6 %"),
        "local_steps memory": ("19.5 %", "29 %", "34 %", "43 %", "51 %"),
    },
    "../README.md": {
        "placement grid-peers": ("0.95 of", "1.27 of", "LoRA 1.16"), "twins bytes": ("0.058 of", "0.115"),
    },
    "thinner.md": {"twins bytes": ("0.058", "0.115", "0.010", "0.020")},
    "pipeline.md": {
        "pipeline seconds": ("0.31", "0.10", "0.59 and 0.45", "0.95 to 0.99"),
        "pipeline two-boxes": ("1.25 times", "1.21 times", "0.52 times", "0.80, 1.43 and 0.94"),
        "pipeline eager": ("0.83 times", "1.17 times"),
    },
    "which-strategy.md": {"plan seconds": ("8.6 %", "81 %"), "plan bytes-interface": ("0.6 %",)},
}  # fmt: skip
"""Figures of pages, by the file and the row of the record that has them."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.parametrize("page", QUOTED)
def test_figures_of_a_page_are_those_of_the_record(page: str) -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    for place, figures in QUOTED[page].items():
        file, key = place.split()
        row = recorded(file)["rows"][key]
        known = [float(each) for each in NUMBER.findall(f"{row['measured']} {row['note']} {row['tried']}")]
        for figure in figures:
            assert figure in text, f"{page} does not say {figure} any more"
            for number in NUMBER.findall(figure):
                digits = len(number.partition(".")[2])
                assert any(abs(float(number) - each) <= 0.51 * 10**-digits for each in known), (place, number)


# -- install ----------------------------------------------------------------------------------------------------------


def test_extras_in_texts_exist() -> None:
    extras = {
        extra
        for folder in (ROOT, ROOT / "contestants")
        for extra in tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    }
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"how_to_install\(['\"](\w+)['\"]", code))
    assert named
    assert named <= extras


def test_the_wheels_share_out_the_package() -> None:
    """The wheel of laconic leaves out the rooms that the others fill, of the same version."""
    own, tools, contestants = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for folder in (".", "tools", "contestants")
    )
    left_out = own["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    filled = [each["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] for each in (tools, contestants)]
    assert {f"../{room}": room.removeprefix("src/") for room in left_out} == {**filled[0], **filled[1]}
    assert all((ROOT / room).exists() for room in left_out)
    version = own["project"]["version"]
    assert {each["project"]["version"] for each in (own, tools, contestants)} == {version}
    assert tools["project"]["dependencies"] == [f"laconic[train]=={version}"]
    assert contestants["project"]["dependencies"] == [f"laconic-tools=={version}"]
