"""Tables in Markdown."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int) -> str:
    """Return a Markdown table with padded cells. The first `num_text_columns` are aligned left, the others right."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (width + 1) + ("-" if index < num_text_columns else ":") for index, width in enumerate(widths))
    return "\n".join([line(columns), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])
