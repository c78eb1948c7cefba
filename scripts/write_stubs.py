"""Write the type stub of every family from the catalogue, so that type checkers and editors see what is imported late.

A family imports its methods when they are asked for, which no type checker can follow. Its stub,
`src/assay/<family>/__init__.pyi`, imports the same names plainly.

    python scripts/write_stubs.py            writes the stubs
    python scripts/write_stubs.py --check    writes nothing, names the stubs that differ and exits with 1 if any does
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from assay.core.catalogue import FAMILIES, catalogue

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "assay"


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest, each by the alphabet: the order that ruff asks for."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def stub(family: str) -> str:
    """The text of one family's stub."""
    rows = sorted((m for m in catalogue().values() if m.family == family), key=lambda m: m.module)
    about = FAMILIES[family]
    lines = [f'"""{about[0].upper()}{about[1:]}."""', ""]
    for row in rows:
        names = sorted(row.exports, key=lambda n: (_order(n)[0], n.lower()))
        lines += [f"from {row.module} import (", *(f"    {name}," for name in names), ")"]
    public = sorted((name for row in rows for name in row.exports), key=_order)
    if public:
        lines += ["", "__all__ = [", *(f'    "{name}",' for name in public), "]"]
    else:
        lines += ["__all__: list[str] = []"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the stubs, or check them."""
    parser = argparse.ArgumentParser(description="Write src/assay/<family>/__init__.pyi from the catalogue.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a stub is not current")
    check = parser.parse_args().check
    stale = []
    for family in FAMILIES:
        path, text = PACKAGE / family / "__init__.pyi", stub(family)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'not current, run `make stubs`' if check else 'written'}: {path.relative_to(PACKAGE.parents[1])}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
