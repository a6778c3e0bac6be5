"""The list of strategies in docs/compare.md. `python -m tests.docs.strategies` writes it from the registry."""

from pathlib import Path

from laconic import registry
from laconic.registry import Strategy

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
_BEGIN, _END = "<!-- from the registry: python -m tests.docs.strategies -->\n", "<!-- end -->\n"


def table() -> str:
    """A row for each strategy that somebody can name."""
    lines = ["| name | what it is | keys | of | needs |", "|---|---|---|---|---|"]
    lines += [_row(each) for each in registry.strategies().values() if each.in_compare or each.in_plan]
    return "\n".join(lines) + "\n"


def _row(strategy: Strategy) -> str:
    keys = {f"shard.{key}": value for key, value in strategy.shard.items()}
    keys |= {f"sync.{key}": value for key, value in (strategy.sync or {}).items()}
    if strategy.pipeline is not None:
        keys |= {f"pipeline.{key}": value for key, value in {"stages": "nodes", **strategy.pipeline}.items()}
    if strategy.schedule is not None:
        keys = {f"schedule.{key}": value for key, value in {"kind": "cyclic", **strategy.schedule}.items()}
    shown = ", ".join(f"`{key} = {_toml(value)}`" for key, value in keys.items())
    commands = [name for name, has in (("compare", strategy.in_compare), ("plan", strategy.in_plan)) if has]
    needs = [f"`{strategy.package}`"] if strategy.package else []
    needs += ['`sync.mode = "local"`'] if strategy.has_islands else []
    return f"| `{strategy.name}` | {strategy.note} | {shown} | {', '.join(commands)} | {', '.join(needs)} |"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def render(page: str) -> str:
    """The page with the list of today."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
