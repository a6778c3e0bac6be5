"""RESULTS.md, and the digests that tell which of its figures are older than the code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import code_digest as digests
from tests.support.code_digest import code_digest
from tests.support.record import RESULTS, write_head

CODE = '"""About."""\n\ndef twice(x: int) -> int:\n    """Say it."""\n    return 2 * x  # why\n'


def digest(folder: Path, code: str) -> str:
    (folder / "room").mkdir(exist_ok=True)
    (folder / "room" / "file.py").write_text(code)
    digests._digest_of_file.cache_clear()
    return code_digest(["room"], folder)


def test_a_digest_changes_with_code_and_not_with_words(tmp_path: Path) -> None:
    first = digest(tmp_path, CODE)
    assert digest(tmp_path, CODE.replace("# why", "").replace("Say it", "Say it twice").replace("About", "A")) == first
    assert digest(tmp_path, CODE.replace("2 * x", "x * 2")) != first
    assert digest(tmp_path, CODE) == first
    (tmp_path / "room" / "more.py").write_text("")
    assert digest(tmp_path, CODE) != first
    assert code_digest([], tmp_path) == ""
    with pytest.raises(ValueError, match=r"no module 'laconic\.nothing' below"):
        code_digest(["laconic.shard", "laconic.nothing"])


def test_the_head_is_of_the_rows_that_are_on_record(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    shutil.copy(RESULTS, page)
    write_head(page)
    assert page.read_text() == RESULTS.read_text(), "python -c 'from tests.support.record import *; write_head()'"
