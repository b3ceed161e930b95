"""Tables as text: aligned for a terminal, and as CSV for a spreadsheet."""

import csv
import io
from collections.abc import Container, Iterable
from typing import Any

from errors import one_line


def aligned(rows: list[list[str]], to_left: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table; columns whose numbers are in `to_left` are aligned to the left, others to the right.

    Trailing spaces are left out.
    """
    rows = [[one_line(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        words = [word.ljust(width) if number in to_left else word.rjust(width) for number, (word, width) in cells]
        lines.append("  ".join(words).rstrip())
    return lines


def as_csv(rows: Iterable[Iterable[Any]]) -> bytes:
    """Return rows as CSV in UTF-8, with the mark by which a spreadsheet knows it.

    Text that a spreadsheet would compute as a formula gets a leading quote, as OWASP advises against CSV injection;
    numbers stay. Control characters are written as escapes.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in rows:
        writer.writerow([_csv_cell(cell) if isinstance(cell, str) else cell for cell in row])
    return stream.getvalue().encode("utf-8-sig")


def _csv_cell(text: str) -> str:
    # The last four are the full-width forms of the first, which spreadsheets take alike.
    is_formula = text.startswith(tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20"))
    return f"'{one_line(text)}" if is_formula else one_line(text)
