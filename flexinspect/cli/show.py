"""`flexinspect show`: print a panel for one place of a trace, as text or as a picture."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.cli.flags import add_number_flags, add_switches
from flexinspect.cli.output import print_json, print_strips, terminal_theme
from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.core.text import ensure_printable, print_message

if TYPE_CHECKING:
    from flexinspect.drawing.theme import Theme
    from flexinspect.panels.base import Panel, Picture, Request, TracePlace
    from flexinspect.panels.panel_source import Source
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Print the panels of the interface for one place of a trace: all of them, or
those named. Without --generation and --step the place is the prefill (step 0) of generation 0,
layer 0, head 0. Works on a finished trace and on one that is being recorded."""

EXAMPLES = """examples:
  flexinspect show run.flextrace
  flexinspect show run.flextrace --panel mask --step 3 --layer 2
  flexinspect show run.flextrace --panel tokens --option colour=entropy --picture
  flexinspect show run.flextrace --panel attention --step 3 --export attention.png
  flexinspect show run.flextrace --panel logits --json | jq -r '.lines[]'
  flexinspect show --list

exit codes: 0 success, 1 the only panel has nothing to show, or a panel failed,
            2 unknown place or option
"""

_DEFAULT_WIDTH, _DEFAULT_HEIGHT = 100, 30
_MAX_SIZE = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", type=Path, nargs="?", help="the trace file")
    add("--panel", metavar="NAME", action="append", help="only this panel (may be repeated)")
    add_number_flags(
        parser,
        generation="the generation, from 0 (default: 0)",
        branch="the branch of it (default: 0)",
        step="the step; 0 is the prefill (default: the branch's first)",
        layer="the layer (default: 0)",
        head="the query head (default: 0)",
        width=f"cells (default: the terminal's, or {_DEFAULT_WIDTH})",
        height=f"lines of a picture (default: {_DEFAULT_HEIGHT})",
    )
    add_switches(
        parser,
        picture="print the picture instead of the text",
        json="print JSON: an object, or a list for several panels",
        list="list the panels, what they show and their options",
    )
    add("--export", metavar="FILE", type=Path, help="save the picture as FILE.svg or FILE.png")
    add("--option", metavar="KEY=VALUE", action="append", default=[], help="set a panel's option")


def run(args: argparse.Namespace) -> int:
    """Print the panels, or save the picture of one, and return the exit code.

    Raises `UsageError` for a panel, place or option that does not exist, and `TraceError`.
    """
    if args.list:
        return _list(as_json=args.json)
    _check(args)
    from flexinspect.panels.panel_registry import load_panel, panel_names
    from flexinspect.panels.panel_source import Source
    from flexinspect.trace.reader import open_trace

    named = tuple(dict.fromkeys(args.panel or ()))
    options, panels = _parse_options(args.option), []
    for name in named or panel_names():
        # Without --panel, a panel that cannot be loaded is reported when it is printed.
        with nullcontext() if named else suppress(FlexInspectError):
            panels.append(load_panel(name))
    _check_options(options, panels)
    with open_trace(args.trace) as reader, reader.snapshot():
        view = _PanelPrinter(args, requested_place(args, reader), Source(reader), options)
        return view.show(named or panel_names(), named=bool(named))


def _check(args: argparse.Namespace) -> None:
    if args.trace is None:
        raise UsageError("No trace is named.", hint="For instance: flexinspect show run.flextrace")
    if args.picture and args.json:
        raise UsageError("--picture and --json exclude each other.")
    for name in ("width", "height"):
        size = getattr(args, name)
        if size is not None and not 1 <= size <= _MAX_SIZE:
            raise UsageError(f"--{name} {size} is not between 1 and {_MAX_SIZE}.")
    if args.export is None:
        return
    if len(set(args.panel or ())) != 1:
        raise UsageError("--export saves the picture of one panel.", hint="Name it: --panel NAME.")
    if args.export.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--export {args.export} is neither .svg nor .png.")


def _parse_options(texts: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text} is not KEY=VALUE.")
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def _check_options(options: dict[str, str], panels: Sequence[Panel[Any, Any]]) -> None:
    """Raise `UsageError` for an option that no panel has, and for an invalid value."""
    from flexinspect.panels.panel_registry import option_names, with_options

    known = {name: panel.name for panel in panels for name in option_names(panel)}
    if unknown := [key for key in options if key not in known]:
        subject = f"The panel {panels[0].name} has" if len(panels) == 1 else "The panels have"
        listed = ", ".join(known) or "none"
        raise UsageError(f"{subject} no option '{unknown[0]}'; known: {listed}.")
    for panel in panels:
        with_options(panel, options)


def requested_place(args: argparse.Namespace, reader: TraceReader) -> TracePlace:
    """Return the requested place; what was not requested is the first one in the trace."""
    from flexinspect.panels.base import TracePlace
    from flexinspect.trace.queries import branch_of_step, lineage, step_bounds

    generations = [row.generation for row in reader.generations()]
    generation = _choose_number("generation", args.generation, generations, "The trace")
    owner_name = f"Generation {generation}"
    branches = [row.branch for row in reader.branches(generation)]
    branch = _choose_number("branch", args.branch, branches, owner_name)
    if branch:
        owner_name = f"Branch {branch} of generation {generation}"
    first, last = step_bounds(reader, generation, branch) or (0, -1)
    steps = range(first, last + 1)
    fork = (lineage(reader, generation, branch) or [(branch, 0, None)])[0][1]
    requested = fork if args.step is None and fork in steps else args.step
    step = _choose_number("step", requested, steps, owner_name)
    owner = branch_of_step(reader, generation, step, branch)
    layers, heads = _layers_and_heads(reader, (generation, step, owner))
    layer = _choose_number("layer", args.layer, layers, f"Step {step}", unknown=True)
    head = _choose_number("head", args.head, heads, f"Layer {layer}", unknown=True)
    return TracePlace(generation, branch, step, layer, head)


def _choose_number(
    what: str, requested: int | None, known: Sequence[int], owner: str, *, unknown: bool = False
) -> int:
    """Return the requested number or the first. Raises `UsageError` if it is not one of `known`.

    `unknown` accepts any number if none is known.
    """
    if requested is None:
        return known[0] if known else 0
    if requested in known or (unknown and not known):
        return requested
    raise UsageError(f"{owner} has no {what} {requested}; it has {_format_numbers(what, known)}.")


def _format_numbers(what: str, known: Sequence[int]) -> str:
    if not known:
        return f"no {what} at all"
    if len(known) == 1:
        return f"{what} {known[0]} only"
    if len(known) == known[-1] - known[0] + 1:  # they are in order
        return f"{what}s {known[0]} to {known[-1]}"
    return f"the {what}s {', '.join(map(str, known))}"


def _layers_and_heads(
    reader: TraceReader, key: tuple[int, int, int]
) -> tuple[Sequence[int], Sequence[int]]:
    if calls := reader.calls(*key):
        heads = range(max(call.q_heads for call in calls))
        return sorted({call.layer for call in calls}), heads
    counts = [reader.model(key[0]).get(name) for name in ("layers", "heads")]
    layers, heads = (range(count if isinstance(count, int) else 0) for count in counts)
    return layers, heads


class _PanelPrinter(Struct, frozen=True):
    """Prints panels: holds the command line, the place, and the options of panels."""

    args: argparse.Namespace
    place: TracePlace
    source: Source
    options: dict[str, str]

    def show(self, names: Sequence[str], *, named: bool) -> int:
        """Print the panels; one that was not `named` and fails is reported on stderr."""
        results: list[dict[str, Any]] = []
        failed, alone = False, len(names) == 1
        if not alone and not self.args.json:
            print(self._location())
        for name in names:
            try:
                results.append(self._show_panel(name, alone=alone))
            except FlexInspectError as error:
                if named:
                    raise
                failed = True
                print_message(ensure_printable(error.message))
        if self.args.json:
            print_json(results[0] if alone else results)
        return 1 if failed or (alone and results[0]["missing"]) else 0

    def _show_panel(self, name: str, *, alone: bool) -> dict[str, Any]:
        from flexinspect.panels.base import Missing, check_panel_applies
        from flexinspect.panels.panel_registry import load_panel

        panel, picture, missing = load_panel(name), None, False
        try:
            request = self._request(panel)
            check_panel_applies(panel, self.source, self.place)
            data = panel.load(self.source, request)
            lines = panel.describe(data)
            if self.args.picture or self.args.export:
                picture = panel.paint(data, request, self._theme())
        except Missing as reason:
            lines, missing = reason.lines(), True
        except FlexInspectError:
            raise
        except (Exception, SystemExit) as error:  # a panel may be a plug-in
            what = f"The panel {name} failed: {type(error).__name__}: {error}"
            hint = "This is a bug in the panel; the other panels still work."
            raise FlexInspectError(what, hint=hint) from error
        lines = [ensure_printable(line) for line in lines]
        if self.args.export:
            if picture is None:
                raise FlexInspectError(lines[0], hint="\n".join(lines[1:]) or None)
            self._save(panel.title, picture)
        if not (self.args.json or (self.args.export and not self.args.picture)):
            if not alone:
                print(f"\n{ensure_printable(f'{panel.title} ({name})')}")
            _print_panel(lines, picture, indent="" if alone else "  ")
        return {
            "trace": str(self.args.trace),
            "place": asdict(self.place),
            "panel": name,
            "title": panel.title,
            "missing": missing,
            "lines": lines,
        }

    def _request(self, panel: Panel[Any, Any]) -> Request[Any]:
        from flexinspect.panels.base import Request
        from flexinspect.panels.panel_registry import with_options

        width = self.args.width or _DEFAULT_WIDTH
        if self.args.width is None and sys.stdout.isatty() and not self.args.export:
            width = shutil.get_terminal_size((_DEFAULT_WIDTH, _DEFAULT_HEIGHT)).columns
        options = with_options(panel, self.options)
        return Request(self.place, options, width, self.args.height or _DEFAULT_HEIGHT)

    def _theme(self) -> Theme:
        """Return the theme: all colours for a file, those of the terminal otherwise."""
        from flexinspect.drawing.theme import Theme

        if self.args.export:
            return Theme()
        return terminal_theme()

    def _save(self, title: str, picture: Picture) -> None:
        from flexinspect.drawing.picture_files import save

        options = {"title": f"{title}: {self._location()}", "note": picture.note}
        file = save(self.args.export, picture.strips, theme=self._theme(), **options)
        print_message(f"saved {ensure_printable(str(file))}")

    def _location(self) -> str:
        place = asdict(self.place)
        hidden = {"branch": 0, "pos": None}
        parts = [f"{name} {place[name]}" for name in place if place[name] != hidden.get(name, "")]
        return ensure_printable(", ".join([self.args.trace.name, *parts]))


def _print_panel(lines: Sequence[str], picture: Picture | None, *, indent: str) -> None:
    if picture is None:
        for line in lines:
            print(f"{indent}{line}".rstrip())
        return
    print_strips(picture.strips)
    if picture.note:
        print(ensure_printable(picture.note))


def _list(*, as_json: bool) -> int:
    from flexinspect.panels.panel_registry import panel_names

    entries = [_panel_entry(name) for name in panel_names()]
    if as_json:
        print_json(entries)
        return 0
    for entry in entries:
        options = [f"--option {key}={value}" for key, value in entry["options"].items()]
        print(ensure_printable(f"{entry['name']}: {entry['title']}"))
        for line in (*entry["help"], *options):
            print(ensure_printable(f"  {line}"))
    return 0


def _panel_entry(name: str) -> dict[str, Any]:
    from flexinspect.panels.panel_registry import load_panel, option_names

    try:
        panel = load_panel(name)
    except FlexInspectError as error:
        return {"name": name, "title": "not available", "help": [error.message], "options": {}}
    options = {key: getattr(panel.initial_options, key) for key in option_names(panel)}
    return {"name": name, "title": panel.title, "help": panel.help, "options": options}
