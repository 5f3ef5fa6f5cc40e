"""Write what `docs/findings/` has from the finding kinds: python -m tools.finding_pages.

The title of a page, its severity, the first paragraph of three of its sections,
and the meaning in the table of all ids come from the kinds, those of proofs included. All else,
such as examples and costs, is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from flexinspect.analysis.proof_results import PROOF_FINDINGS
from flexinspect.rules.engine import FindingKind, load_rules

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
TABLE = "README.md"
_SECTIONS = {"why": "Why it matters", "confirm": "How to confirm", "fix": "Likely fix"}
_NEXT_SECTION = "**How it is found, and what it costs.** "


def finding_kinds() -> dict[str, FindingKind]:
    """Return the kind of each finding of a rule or a proof, by its id."""
    return {**load_rules().finding_kinds, **PROOF_FINDINGS}


def generated_pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Return the text that each page of a folder ought to have.

    A section that a page lacks is added to it. Raises `ValueError` for a page that has a section
    twice, and for one without a severity or without the section after the generated ones.
    """
    kinds = finding_kinds()
    pages = {folder / f"{id_}.md": kind for id_, kind in kinds.items()}
    texts = {page: _page(page, kind) for page, kind in pages.items()}
    texts[folder / TABLE] = _table((folder / TABLE).read_text("utf-8"), kinds)
    return texts


def _page(page: Path, kind: FindingKind) -> str:
    _, _, rest = page.read_text("utf-8").partition("\n")
    rest = _replace_once(r"^Severity: .*$", f"Severity: {kind.severities}.", rest, page)
    for field, heading in _SECTIONS.items():
        text = " ".join(getattr(kind, field).split())
        if not text:
            continue
        if f"**{heading}.**" not in rest:
            rest = _replace_once(
                rf"^{re.escape(_NEXT_SECTION)}", f"**{heading}.** \n\n{_NEXT_SECTION}", rest, page
            )
        rest = _replace_once(rf"^\*\*{heading}\.\*\* .*$", f"**{heading}.** {text}", rest, page)
    return f"# `{page.stem}`\n{rest}"


def _replace_once(pattern: str, new: str, text: str, page: Path) -> str:
    text, n = re.subn(pattern, lambda _: new, text, flags=re.M)
    if n != 1:
        raise ValueError(f"{page.name} has {n} lines like {pattern}.")
    return text


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
