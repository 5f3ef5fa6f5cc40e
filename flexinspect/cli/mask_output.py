"""What `flexinspect mask` writes: the terminal's picture, text, arrays, and figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from textual.strip import Strip

from flexinspect.cli.mask_sources import MaskInput
from flexinspect.core.environment import save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import Labels
from flexinspect.drawing.heatmap import Levels, heat
from flexinspect.drawing.text_lines import Pen, join_strips
from flexinspect.drawing.theme import Theme
from flexinspect.figures.mask_figure import FigureStyle
from flexinspect.masks.census import Report
from flexinspect.masks.known_masks import dense
from flexinspect.masks.mask_analysis import MaskAnalysis
from flexinspect.masks.mask_picture import MaskPicture
from flexinspect.masks.mask_presets import Segments
from flexinspect.masks.mask_reduction import reduce_mask
from flexinspect.masks.picture_text import (
    LEGEND,
    mark_meanings,
    phase_lines,
    phase_table,
    picture_lines,
    row_names,
    size_line,
)
from flexinspect.masks.viewport import CLOSED, N_STATES, OPEN
from flexinspect.panels.mask.mask_pixels import (
    EVEN,
    GENERATED,
    ODD,
    mask_palette,
    swatch,
    wrap_legend,
)
from flexinspect.records.prompt import SegmentKind

FIGURE_SUFFIXES = (".png", ".svg", ".pdf", ".html", ".gif")
DATA_SUFFIXES = (".txt", ".npy", ".csv")
SUFFIXES = (*FIGURE_SUFFIXES, *DATA_SUFFIXES)
MAX_ARRAY_CELLS, MAX_CSV_CELLS = 1 << 30, 1 << 26


def draw(
    source: MaskInput,
    labels: Labels,
    *,
    head: int = 0,
    limit: int | None = None,
    report: Report | None = None,
) -> MaskPicture:
    """Return the picture of a mask in at most `limit` rows and keys (default: as configured)."""
    most, title = min(source.limit, limit or source.limit), source.mask.name
    declared = source.declared if source.shows_difference else None
    if declared is not None:
        title = labels("text_against", name=title, declared=declared.name)
    return reduce_mask(
        source.mask,
        source.n_rows,
        source.n_keys,
        most,
        most,
        segments=source.segments,
        words=source.words,
        title=title,
        head=head,
        declared=declared,
        report=report,
    )


# -- text -----------------------------------------------------------------------------------------


def text_lines(source: MaskInput, picture: MaskPicture, labels: Labels, head: int) -> list[str]:
    """Return a picture in characters, with the phases below it."""
    phases = phase_lines(phase_table(source.mask, source.segments, head=head), labels)
    lines = [picture.title, size_line(picture, labels), "", *picture_lines(picture, labels)]
    return [*lines, "", *phases] if phases else lines


def print_picture(
    source: MaskInput, picture: MaskPicture, labels: Labels, head: int, console: Console
) -> None:
    """Print a picture in colours, two rows per line, with legend and phases."""
    theme = Theme("truecolor" if console.color_system == "truecolor" else "256")
    pen = Pen(theme, console.width)
    console.print(picture.title, style="bold", soft_wrap=True)
    console.print(f"{size_line(picture, labels)}\n", soft_wrap=True)
    for strip in color_strips(picture, theme):
        print(strip.render(console))
    print()
    for entries in wrap_legend(_legend(picture, labels, pen), pen):
        print(entries.render(console).rstrip())
    phases = phase_lines(phase_table(source.mask, source.segments, head=head), labels)
    for line in [*mark_meanings(picture, labels), "", *phases]:
        console.print(line, soft_wrap=True)


def color_strips(picture: MaskPicture, theme: Theme) -> list[Strip]:
    """Draw a picture as half blocks, with the names of its rows and marks at empty ones."""
    names = row_names(picture)
    names += [""] * (len(names) % 2)
    empty = [*picture.empty_rows.tolist(), False]
    width = max(map(cell_len, names), default=0) + 1
    levels = _tints(picture) * np.uint8(N_STATES) + picture.states
    strips = []
    for number, cells in enumerate(heat(levels, mask_palette(), theme)):
        upper, lower = names[2 * number : 2 * number + 2]
        name = upper or lower
        pen = Pen(theme, width)
        margin = pen.line((" " * (width - 1 - cell_len(name)), "text"), (name, "muted"))
        mark = " ∅" if any(empty[2 * number : 2 * number + 2]) else ""
        strips.append(join_strips(margin, cells, Pen(theme, 2).line((mark, "bad"))))
    return strips


def _tints(picture: MaskPicture) -> Levels:
    """Return the tint of each cell: neighbouring segments differ, generated text has its own."""
    starts = [0, *(segment.start for segment in picture.segments)]
    numbers, generated, owner = [0], [False], -1
    for segment in picture.segments:
        numbers.append(numbers[-1] + (segment.owner != owner))
        generated.append(segment.kind is SegmentKind.GENERATED)
        owner = segment.owner
    of_row, of_key = (
        np.searchsorted(starts, edges[:-1], side="right") - 1
        for edges in (picture.row_edges, picture.key_edges)
    )
    number, is_generated = np.array(numbers), np.array(generated)
    odd = (number[of_row][:, None] + number[of_key]) % 2
    tints: Levels = np.where(odd, np.uint8(ODD), np.uint8(EVEN))
    tints[is_generated[of_row]] = GENERATED
    tints[:, is_generated[of_key]] = GENERATED
    return tints


def _legend(picture: MaskPicture, labels: Labels, pen: Pen) -> list[Any]:
    """Return swatches of the states that occur, with their meaning."""

    found = {3 if CLOSED < state < OPEN else state for state in np.unique(picture.states).tolist()}
    spans: list[Any] = []
    for state, name in LEGEND.items():
        if state in found:
            spans += [swatch(state, EVEN, pen), (f" {labels(f'text_{name}')}  ", "text")]
    return spans


# -- files ----------------------------------------------------------------------------------------


def save(
    source: MaskInput,
    picture: Callable[[], MaskPicture],
    file: Path,
    style: FigureStyle,
    *,
    head: int,
    more_lines: Sequence[str] = (),
) -> None:
    """Write a mask in the format of the file's suffix: its cells (.npy, .csv) or a picture.

    Raises `UsageError` for a mask of too many cells, and for a file that cannot be written.
    """
    suffix = file.suffix.lower()
    if suffix in FIGURE_SUFFIXES:
        save_figure(picture(), file, style)
    elif suffix == ".txt":
        lines = [*text_lines(source, picture(), style.labels, head), *more_lines]
        save_file(file, "".join(f"{line}\n" for line in lines).encode(), UsageError)
    else:
        save_file(file, _encode_cells(source, suffix, head), UsageError)


def _encode_cells(source: MaskInput, suffix: str, head: int) -> bytes:
    n_cells, most = (
        source.n_rows * source.n_keys,
        MAX_CSV_CELLS if suffix == ".csv" else MAX_ARRAY_CELLS,
    )
    if n_cells > most:
        what = f"The mask has {n_cells} cells; a {suffix} file holds at most {most}."
        raise UsageError(what, hint="Write a picture, or a shorter sequence.")
    cells = dense(source.mask, source.n_rows, source.n_keys, head)
    out = io.BytesIO()
    if suffix == ".npy":
        np.save(out, cells, allow_pickle=False)
    else:
        np.savetxt(out, cells, fmt="%d", delimiter=",")
    return out.getvalue()


def save_figure(picture: MaskPicture, file: Path, style: FigureStyle) -> None:
    """Write a picture as a figure. Raises `UsageError` without the library."""
    from flexinspect.figures.mask_figure import save_mask_figure

    options: dict[str, Any] = {"theme": style.theme, "width": style.width, "dpi": style.dpi}
    save_mask_figure(picture, file, labels=style.labels, **options)


def save_steps(
    source: MaskInput, picture: MaskPicture, file: Path, style: FigureStyle, report: Report
) -> None:
    """Write the generation step by step, with the attention of a trace where it has it."""
    from flexinspect.figures import animation

    weights = None
    if source.newest_rows is not None:
        weights = source.newest_rows(lambda share: report(share / 2))
    steps = animation.generation_steps(picture, style.labels, weights)

    def progress(n_done: int, n_frames: int) -> None:
        done = n_done / n_frames
        report(done if weights is None else (1 + done) / 2)

    animation.save_animation(picture, file, style=style, steps=steps, progress=progress)


def save_analysis(facts: MaskAnalysis, segments: Segments, file: Path, style: FigureStyle) -> None:
    """Write the facts about a mask as a figure. Raises `UsageError` without the library."""
    from flexinspect.figures.analysis_figure import save_analysis_figure

    options: dict[str, Any] = {"theme": style.theme, "width": style.width, "dpi": style.dpi}
    save_analysis_figure(facts, file, segments, labels=style.labels, **options)
