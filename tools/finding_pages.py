"""Write what `docs/findings/` has from the finding kinds: python -m tools.finding_pages.

The title of a page, the first paragraph of three of its sections, and the meaning in the table of
all ids come from the kinds. All else, such as examples and costs, is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from flexinspect.rules.engine import FindingKind, load_rules

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
TABLE = "README.md"
_SECTIONS = {"why": "Why it matters", "confirm": "How to confirm", "fix": "Likely fix"}


def generated_pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Return the text that each page of a folder ought to have.

    Raises `ValueError` for a page without one of the generated sections.
    """
    kinds = load_rules().finding_kinds
    pages = {folder / f"{id_}.md": kind for id_, kind in kinds.items()}
    texts = {page: _page(page, kind) for page, kind in pages.items()}
    texts[folder / TABLE] = _table((folder / TABLE).read_text("utf-8"), kinds)
    return texts


def _page(page: Path, kind: FindingKind) -> str:
    _, _, rest = page.read_text("utf-8").partition("\n")
    for field, heading in _SECTIONS.items():
        line = f"**{heading}.** {' '.join(getattr(kind, field).split())}".replace("\\", r"\\")
        rest, n = re.subn(rf"^\*\*{heading}\.\*\* .*$", line, rest, flags=re.M)
        if n != 1:
            raise ValueError(f"{page.name} has no section '{heading}'.")
    return f"# `{page.stem}`\n{rest}"


def _table(text: str, kinds: dict[str, FindingKind]) -> str:
    rows = text.splitlines()
    for number, row in enumerate(rows):
        cells = row.split(" | ")
        match = re.match(r"\| \[`(.+)`\]", row)
        if match and match[1] in kinds:
            rows[number] = " | ".join([cells[0], kinds[match[1]].meaning, *cells[2:]])
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    for path, text in generated_pages().items():
        path.write_text(text, "utf-8")
