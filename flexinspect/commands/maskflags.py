"""The flags of `flexinspect ctl edit`: changes of the mask, applied in the order they are given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinspect.control.messages import MaskEdit


def add_edit_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per kind of change."""
    flags = {
        "--preset": ("NAME", "use this mask instead"),
        "--drop": ("SEGMENT", "nobody sees this segment any more"),
        "--join": ("A,B", "these segments see each other"),
        "--see": ("A:B", "segment A sees segment B"),
        "--unsee": ("A:B", "segment A no longer sees segment B"),
        "--open": ("ROW:KEY", "this row sees this key; without a key: all keys up to itself"),
        "--close": ("ROW:KEY", "this row no longer sees this key; without a key: only itself"),
    }
    for name, (metavar, text) in flags.items():
        parser.add_argument(name, action=_EditAction, metavar=metavar, help=text, dest="edits")


def edits_of(args: argparse.Namespace) -> Sequence[MaskEdit]:
    """Return the changes that were given, in order."""
    return tuple(args.edits or ())


class _EditAction(argparse.Action):
    """Reads one flag into a `MaskEdit` and appends it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append what the flag says, or end with how it is written."""
        try:
            edit = _parse_edit(str(option_string).removeprefix("--"), str(values))
        except ValueError:
            parser.error(f"{option_string} {values} is not {self.metavar} in numbers")
        namespace.edits = [*(namespace.edits or ()), edit]


def _parse_edit(flag: str, text: str) -> MaskEdit:
    from flexinspect.control.messages import MaskEdit

    if flag == "preset":
        return MaskEdit("preset", name=text)
    if flag in ("drop", "join"):
        return MaskEdit("drop" if flag == "drop" else "join", segments=_parse_numbers(text, ","))
    if flag in ("see", "unsee"):
        first, second = _parse_numbers(text, ":")
        return MaskEdit("see", segments=(first, second), is_open=flag == "see")
    row, *rest = _parse_numbers(text, ":")
    if not rest:
        return MaskEdit("row", row=row, is_open=flag == "open")
    (key,) = rest
    return MaskEdit("cell", row=row, key=key, is_open=flag == "open")


def _parse_numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))
