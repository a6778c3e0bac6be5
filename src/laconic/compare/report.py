"""The report of a comparison: one page of plain HTML, with the picture in it, that needs no network and no script."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from laconic.compare.case import STRATEGIES
from laconic.compare.result import Result
from laconic.compare.table import COLUMNS, NUM_TEXT_COLUMNS, table_rows

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ margin: 1rem auto; padding: 0 1rem; max-width: 76rem; font-family: system-ui, sans-serif; }}
body {{ background: Canvas; color: CanvasText; }}
code {{ overflow-wrap: anywhere; }}
img {{ max-width: 100%; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.2rem 0.5rem; border-bottom: 1px solid; text-align: right; }}
.text {{ text-align: left; white-space: nowrap; }}
</style>
<h1>{title}</h1>
<p>{machine}</p>
<p><code>{command}</code></p>
{picture}
<div role="region" aria-label="measurements" tabindex="0">
<table>
<thead>{head}</thead>
<tbody>
{body}
</tbody>
</table>
</div>
<p>{legend}</p>
<h2>The strategies</h2>
<dl>
{notes}
</dl>
</html>
"""


def render_report(
    results: Sequence[Result], *, title: str, machine: str, command: str, legend: str, picture: Path | None = None
) -> str:
    """Return the page: the picture, a PNG, if there is one, the table, and a note on each strategy."""
    image = ""
    if picture is not None:
        data = b64encode(picture.read_bytes()).decode()
        image = f'<p><img alt="seconds and bytes as bars" src="data:image/png;base64,{data}"></p>'
    shown = [each for name, each in STRATEGIES.items() if any(result.strategy == name for result in results)]
    return _PAGE.format(
        title=escape(title),
        machine=escape(machine),
        command=escape(command),
        picture=image,
        head=_row(COLUMNS, "th"),
        body="\n".join(_row(row, "td") for row in table_rows(results)),
        legend=escape(legend),
        notes="\n".join(f"<dt>{escape(each.label)}</dt><dd>{escape(each.note)}</dd>" for each in shown),
    )


def _row(cells: Sequence[str], tag: str) -> str:
    kinds = [' class="text"' if index < NUM_TEXT_COLUMNS else "" for index in range(len(cells))]
    found = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{found}</tr>"
