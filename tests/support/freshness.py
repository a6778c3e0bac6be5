"""Which recorded figures are older than the code that they measure.

python -m tests.support.freshness    prints them, and how to measure them again
"""

from __future__ import annotations

import sys

from tests.support.code_digest import code_digest
from tests.support.record import Row, recorded_rows

_OLD_NAMES = dict.fromkeys(("trust", "mend", "parity"), "python -m tests.faults")
"""The command of sections whose rows may name a module that is gone."""
_ONCE = "measured-once"
"""The section of rows whose scripts are gone: they stay as they are."""


def _is_old(row: Row) -> bool:
    try:
        return not row.code or row.code != code_digest(row.measures)
    except ValueError:  # a module is gone that it measured
        return True


def main() -> int:
    """Print the rows that are older than the code they measure."""
    rows = recorded_rows()
    old: dict[tuple[str, str], list[str]] = {}
    for (section, key), row in rows.items():
        if section != _ONCE and _is_old(row):
            old.setdefault((_OLD_NAMES.get(section, row.command.partition(" --rows")[0]), row.date), []).append(key)
    count = sum(map(len, old.values()))
    print(
        f"{count} of {len(rows)} recorded rows are older than the code that they measure:" if count else "no row is old"
    )
    for (command, date), keys in sorted(old.items(), key=lambda each: each[0][1]):
        print(f"  {date}  {command} --rows {','.join(keys)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
