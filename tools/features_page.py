"""Writes docs/features.md from tools/features.toml: python -m tools.features_page."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct, field

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
DATA = Path(__file__).with_suffix("").parent / "features.toml"
_HEAD = """# Features

Each feature with the command or the call that has it, and how it is checked.
`tests/docs/test_features_page.py` runs each command and each call, and looks for the text that the
last column gives. Where a run needs hardware, a network or minutes, the column names the test that
proves the feature.

The commands run in a folder with a trace, `run.flextrace`, and the files of a user that they name.
"""


class Feature(Struct, frozen=True, forbid_unknown_fields=True):
    """One row: what it is, what a user types, and what proves it.

    `use` is shown. The lines of `run`, or else those of `use` that begin with `flexinspect` or
    `python`, are executed and must end with `code`; so is the code of `python`. Their output must
    hold all of `prints`. `reads` are lines that files must hold, by path; `tests` are node ids.
    """

    what: str
    use: tuple[str, ...]
    run: tuple[str, ...] | None = None
    python: str = ""
    prints: tuple[str, ...] = ()
    code: int = 0
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tests: tuple[str, ...] = ()
    note: str = ""

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that are executed."""
        if self.run is not None:
            return self.run
        return tuple(line for line in self.use if line.startswith(("flexinspect ", "python ")))


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the page."""

    title: str
    feature: tuple[Feature, ...]


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    section: tuple[Section, ...]


def read_features() -> tuple[Section, ...]:
    """Return the sections of the page. Raises `msgspec.ValidationError` for a wrong key."""
    return msgspec.toml.decode(DATA.read_bytes(), type=_File).section


def page() -> str:
    """Return the text of the page."""
    sections = read_features()
    n = sum(len(section.feature) for section in sections)
    parts = [_HEAD, f"{n} features in {len(sections)} tables.\n"]
    for section in sections:
        rows = [
            f"## {section.title}\n",
            "| feature | command or call | checked by |",
            "|---|---|---|",
        ]
        rows += [_row(feature) for feature in section.feature]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(feature: Feature) -> str:
    what = f"{feature.what} ({feature.note})" if feature.note else feature.what
    use = "<br>".join(_code(line) for line in feature.use)
    return f"| {what} | {use} | {'; '.join(_evidence(feature))} |"


def _evidence(feature: Feature) -> list[str]:
    found = []
    if feature.prints:
        found.append("prints " + ", ".join(_code(text) for text in feature.prints))
    found += [f"[{path}]({_link(path)})" for path in feature.reads]
    for node in feature.tests:
        file, _, name = node.partition("::")
        sentence = name.partition("[")[0].removeprefix("test_").replace("_", " ")
        found.append(f"[{sentence}]({_link(file)})")
    return found


def _link(path: str) -> str:
    """Return a path of the repository as a link from the folder `docs`."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
