"""The code panel: the source text of a mask_mod, with the values that open or close a cell."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace
from textual.strip import Strip

from flexinspect.core.text import escape_unprintable
from flexinspect.drawing.text_lines import Pen, visible
from flexinspect.drawing.theme import Theme
from flexinspect.masks.mask_mod_evaluation import (
    CalledFunction,
    DecidingTerm,
    Evaluation,
    SourceText,
    evaluate,
)
from flexinspect.masks.viewport import CLOSED, LEAKED, LOST, OPEN
from flexinspect.panels.base import (
    CURSOR_MOVES,
    Help,
    Missing,
    Panel,
    Picture,
    Request,
    TracePlace,
    import_hint,
)
from flexinspect.panels.mask.cell_states import (
    find_center,
    find_row,
    load_mask_view,
    row_states,
)
from flexinspect.panels.mask.mask_grid import MaskView
from flexinspect.panels.panel_source import Source
from flexinspect.panels.token_window import load_segments, load_token_cells
from flexinspect.records.finding import sort_by_severity
from flexinspect.records.step import INFERRED_MASK, MaskRecord
from flexinspect.trace.queries import n_generations, source_texts

_STATES: Mapping[int, tuple[str, str]] = {
    OPEN: ("open", "text"),
    CLOSED: ("closed", "text"),
    LEAKED: ("leaked: open, but should be closed", "bad"),
    LOST: ("lost: closed, but should be open", "warn"),
}
_MARK = "◀"
_MAX_TERMS = 4
_ABOUT_CELLS = ("mask", "segments", "decode")
"""First words of the ids of findings whose positions are rows of a mask."""


_StyledText = tuple[str, str]


class CodeOptions(Struct, frozen=True):
    """Options of the code panel: the cell, as the positions of its row and key.

    None is a cell of the place: that of its finding, or else one that differs from the declared
    mask, or else the last row of the step.
    """

    q: int | None = None
    kv: int | None = None


class CodeData(Struct, frozen=True):
    """A cell of a mask, and how the mask_mod was evaluated for it.

    `q` and `kv` are positions, `indices` the (b, h, q_idx, kv_idx) that the mask_mod got. `state`
    is that of the executed cell, see `flexinspect.masks.viewport`. `positions` are those of the
    rows, ascending; there are `n_keys` keys.
    """

    layer: int
    head: int
    q: int
    kv: int
    words: tuple[str, str]
    indices: tuple[int, ...]
    state: int
    evaluation: Evaluation
    positions: tuple[int, ...]
    n_keys: int


class CodePanel(Panel[CodeData, CodeOptions]):
    """The mask_mod with the values of one cell below each line."""

    name = "code"
    title = "Code"
    initial_options = CodeOptions()
    needs_tokens = True
    actions = tuple(CURSOR_MOVES)
    help = Help(
        "It shows the source text of the mask_mod that ran, with the values that it had for one "
        "cell, as far as they were recorded.",
        f"Below each line stands what it was computed from; {_MARK} marks the conditions that "
        "opened or closed the cell. Shift and an arrow key move to another cell, as in the mask "
        "panel; the arrow keys alone go to another token or layer. e opens the file.",
        "Look for an index that is off by one, and for a value that is not the one you meant.",
    )

    def load(self, source: Source, request: Request[CodeOptions]) -> CodeData:
        """Read the mask of the cell's row, and evaluate its mask_mod for the cell."""
        place, options = request.place, request.options
        view = load_mask_view(source, place)
        if view is None:
            raise _missing_mask(source)
        row, kv = _find_cell(source, view, place, options)
        step = view.part_of(row).step_at(row)
        mask = None if step.mask is None else source.reader.mask_summary(step.mask)
        q = int(view.positions[row])
        code = _code_of(mask)
        is_local = code.get("indices") == "rows"
        offsets = (step.pos, step.kv_offset) if is_local else (0, 0)
        indices = (0, place.head, q - offsets[0], kv - offsets[1])
        sources = {own[0]: SourceText(*own) for own in source_texts(source.reader)}
        segments = load_segments(source.reader, place)
        tokens = load_token_cells(source, place, segments, {q, kv})
        words = (tokens[at].text.strip() if at in tokens else "" for at in (q, kv))
        return CodeData(
            layer=place.layer,
            head=place.head,
            q=q,
            kv=kv,
            words=(next(words), next(words)),
            indices=indices,
            state=int(row_states(view, row)[kv]),
            evaluation=evaluate(code, sources, indices),
            positions=tuple(view.positions.tolist()),
            n_keys=view.n_keys,
        )

    def describe(self, data: CodeData) -> list[str]:
        """Return the cell, what decided it, and the source text with values."""
        return [text for text, _ in _lines(data)]

    def paint(self, data: CodeData, request: Request[CodeOptions], theme: Theme) -> Picture:
        """Draw the cell, and the lines around the condition that decided it."""
        pen = Pen(theme, request.width)
        head = pen.paragraphs(_head_lines(data))
        lines = [
            [(row, style) for row in _wrap_code(text, request.width)]
            for text, style in _code_lines(data.evaluation)
        ]
        rows = _scroll_to_decided(lines, max(request.height - len(head), 0))
        strips: list[Strip] = [*head, *map(pen.line, rows)]
        note = f"q {data.q} · k {data.kv} · layer {data.layer} head {data.head}"
        return Picture(strips[: request.height], note, data.state in (LEAKED, LOST))

    def on_action(
        self, action: str, data: CodeData, request: Request[CodeOptions]
    ) -> CodeOptions | None:
        """Move to a neighbouring cell."""
        down, across = CURSOR_MOVES[action]
        row = data.positions.index(data.q) + down
        kv = data.kv + across
        if not (0 <= row < len(data.positions) and 0 <= kv < data.n_keys):
            return None
        return replace(request.options, q=data.positions[row], kv=kv)


def _scroll_to_decided(lines: Sequence[Sequence[_StyledText]], room: int) -> list[_StyledText]:
    """Return the rows around the first line that decided, from the beginning of a line on.

    A line has several rows where it is wrapped.
    """
    sizes = [len(rows) for rows in lines]
    decided = (number for number, rows in enumerate(lines) if rows[0][1] == "strong")
    at = next(decided, 0)
    first = visible(sum(sizes[:at]) + 1, room, sum(sizes)).start
    start = next(n for n in range(at + 1) if sum(sizes[:n]) >= first or n == at)
    return list(chain.from_iterable(lines[start:]))[:room]


def _missing_mask(source: Source) -> Missing:
    """Return why there is no mask to show; only level basic records none."""
    reader = source.reader
    if not n_generations(reader):
        return Missing("No step was recorded, so there is no mask_mod to show.")
    is_basic = reader.run().get("level") == "basic"
    hint = "Record with --level advanced or higher." if is_basic else ""
    return Missing("The cells of this layer's mask were not recorded.", import_hint(source, hint))


def _find_cell(
    source: Source, view: MaskView, place: TracePlace, options: CodeOptions
) -> tuple[int, int]:
    """Return the row and the key of the cell that is shown."""
    if options.q is not None:
        row = find_row(view, options.q)
        return view.n_rows - 1 if row is None else row, min(options.kv or 0, view.n_keys - 1)
    pos = _position_of_finding(source, place) if place.pos is None else place.pos
    if pos is None or find_row(view, pos) is None:
        rows = view.rows_of_step(place.step) or range(view.n_rows)
        cell = view.first_difference(rows, range(view.n_keys))
        return cell or (rows[-1], min(int(view.positions[rows[-1]]), view.n_keys - 1))
    row, kv = find_center(view, pos) or (0, 0)
    if kv == pos and kv > 0 and row_states(view, row)[kv - 1] == CLOSED:
        return row, kv - 1  # a row that sees itself explains nothing; a border does
    return row, kv


def _position_of_finding(source: Source, place: TracePlace) -> int | None:
    """Return the first position of the worst finding about a mask in the step of a place."""
    found = source.reader.findings(place.generation, place.step, place.branch)
    about = (one for one in sort_by_severity(found) if one.id.partition(".")[0] in _ABOUT_CELLS)
    return next((one.positions[0] for one in about if one.positions), None)


def _code_of(mask: MaskRecord | None) -> Mapping[str, object]:
    """Return the recorded code of a mask. Raises `Missing`."""
    if mask is None:
        raise Missing("This layer received no mask.")
    if mask.mask_mod_code is not None:
        return mask.mask_mod_code
    if mask.kind == INFERRED_MASK:
        raise Missing("This layer received no mask; the one shown is inferred and has no code.")
    if mask.kind != "block":
        raise Missing(f"This layer received a dense mask ({mask.kind}), which has no code.")
    raise Missing(
        "The code of this mask_mod was not recorded.",
        "Traces of earlier versions have none, and neither has a mask_mod that is no function.",
    )


# -- text -----------------------------------------------------------------------------------------


def _lines(data: CodeData) -> Iterator[_StyledText]:
    yield from _head_lines(data)
    yield from _code_lines(data.evaluation)


def _head_lines(data: CodeData) -> Iterator[_StyledText]:
    """Yield the cell, then what decided it, then what does not agree."""
    state, style = _STATES.get(data.state, ("not recorded", "muted"))
    names = (f" “{escape_unprintable(word)}”" if word else "" for word in data.words)
    yield f"Cell: row {data.q}{next(names)}, key {data.kv}{next(names)}. It is {state}.", style
    evaluation, result = data.evaluation, data.evaluation.is_open
    if result is None:
        yield f"The mask_mod was not evaluated to the end: {evaluation.reason}.", "warn"
        return
    verb = "Open" if result else "Closed"
    for term in evaluation.terms[:_MAX_TERMS]:
        yield f"{verb} because of line {term.number}: {_format_term(term)}", "strong"
    if len(evaluation.terms) > _MAX_TERMS:
        yield f"and {len(evaluation.terms) - _MAX_TERMS} more", "muted"
    if data.state in _STATES and result is not (data.state in (OPEN, LEAKED)):
        yield (
            (
                f"The mask_mod returns {result}, but the cell was {'closed' if result else 'open'} "
                "when it ran: the block tables decide there (b in the mask panel)."
            ),
            "bad",
        )


def _format_term(term: DecidingTerm) -> str:
    text = escape_unprintable(term.text)
    values = escape_unprintable(term.with_values)
    return f"{text}, which is {values}, {term.value}" if values != text else f"{text}, {term.value}"


def _code_lines(evaluation: Evaluation) -> Iterator[_StyledText]:
    """Yield the source texts of the functions that were called, with values below their lines."""
    decided = {(term.source, term.number) for term in evaluation.terms}
    for function in evaluation.functions:
        yield from _function_lines(function, decided)


def _function_lines(
    function: CalledFunction, decided: set[tuple[str, int]]
) -> Iterator[_StyledText]:
    text = function.text
    arguments = ", ".join(f"{name} = {value}" for name, value in function.arguments.items())
    yield f"{escape_unprintable(text.source)}  {escape_unprintable(arguments)}", "muted"
    for number, own in enumerate(text.text.splitlines(), text.line):
        is_decided = (text.source, number) in decided
        mark = f"  {_MARK}" if is_decided else ""
        yield f"{number:5} {escape_unprintable(own)}{mark}", "strong" if is_decided else "text"
        indent = " " * (len(own) - len(own.lstrip()) + 6)
        for line in function.lines:
            if line.number == number:
                if line.lookups:
                    yield f"{indent}  {escape_unprintable(', '.join(line.lookups))}", "muted"
                yield f"{indent}→ {escape_unprintable(' → '.join(line.steps))}", "accent"


def _wrap_code(text: str, width: int) -> list[str]:
    """Wrap a line of code; its continuation is indented more than its beginning."""
    indent = len(text) - len(text.lstrip(" 0123456789→")) + 2
    room = max(width, 24)
    return textwrap.wrap(text, room, subsequent_indent=" " * min(indent, room // 3)) or [""]
