"""Fills the tables of docs/interface.md from the tables in the code: keys and panels."""

from __future__ import annotations

import re
from pathlib import Path

from flexinspect.core.keyboard import all_keys
from flexinspect.panels.panel_registry import load_panel, panel_names

PAGE = Path(__file__).parents[1] / "docs" / "interface.md"
_NAMES = {
    "slash": "/",
    "asterisk": "*",
    "greater_than_sign": ">",
    "less_than_sign": "<",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "question_mark": "?",
    "left": "←",
    "right": "→",
    "space": "space",
    "full_stop": ".",
    "up": "↑",
    "down": "↓",
}


def keys_table() -> str:
    """Return the table of keys as Markdown."""
    rows = ["| keys | action | id |", "|---|---|---|"]
    for key in all_keys():
        names = " ".join(f"`{_shown(name)}`" for name in key.keys)
        rows.append(f"| {names} | {key.text} | `{key.id}` |")
    return "\n".join(rows)


def _shown(key: str) -> str:
    return "+".join(_NAMES.get(part, part) for part in key.split("+"))


def panels_text() -> str:
    """Return the help of each panel as Markdown."""
    parts = []
    for number, name in enumerate(panel_names(), start=1):
        panel = load_panel(name)
        parts.append(f"**{number} {panel.title}** (`{name}`). " + " ".join(panel.help))
    return "\n\n".join(parts)


def section(title: str, body: str, text: str) -> str:
    """Put a generated body at the beginning of a section of the page, up to its marker."""
    pattern = rf"(## {title}\n\n)(?:@\w+@|<!-- made -->.*?<!-- end -->)"
    block = f"<!-- made -->\n{body}\n<!-- end -->"
    made, n = re.subn(pattern, lambda match: match[1] + block, text, flags=re.DOTALL)
    if n != 1:
        raise SystemExit(f"{PAGE} has no place for the section {title}")
    return made


def page(text: str) -> str:
    """Return the page with both tables as the code has them now."""
    return section("Panels", panels_text(), section("Keys", keys_table(), text))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
