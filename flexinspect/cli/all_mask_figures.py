"""`flexinspect mask --all`: writes every figure of the mask presets into one folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec.structs import replace

from flexinspect.cli.mask_output import SUFFIXES, draw, save_analysis, save_figure, text_lines
from flexinspect.cli.mask_sources import MaskInput, preset_inputs
from flexinspect.cli.output import print_json, print_lines
from flexinspect.cli.progress import share_bar
from flexinspect.core.environment import save_file
from flexinspect.core.errors import UsageError
from flexinspect.figures.mask_figure import FigureStyle
from flexinspect.figures.sheet import check_size, require_matplotlib
from flexinspect.masks.mask_analysis import analyse_mask
from flexinspect.masks.mask_reduction import reduce_phases
from flexinspect.masks.picture_text import Places


def write_all_figures(args: argparse.Namespace, folder: Path, style: FigureStyle) -> int:
    """Write the figures of all presets, of their phases, and the flowchart; print the files' names.

    Raises `UsageError` without the library, and for a folder that cannot be made.
    """
    saved = list[str]()
    if folder.suffix.lower() in SUFFIXES:
        what = f"--all writes many files, and {folder} is the name of one."
        raise UsageError(what, hint="Name a folder.")
    require_matplotlib()
    check_size(style.width, None)
    sources = preset_inputs(args)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    with share_bar("writing figures") as report:
        for number, (name, source) in enumerate(sources.items()):
            saved += _save_preset(name, source, folder, style, args.block_size)
            report((number + 1) / (len(sources) + 1))
        _save_flowchart(folder / "flowchart.png", style)
    files = [str(folder / name) for name in (*saved, "flowchart.png")]
    if args.json:
        print_json({"files": files, "exit_code": 0})
    else:
        print_lines(files)
    return 0


def _save_preset(
    name: str, source: MaskInput, folder: Path, style: FigureStyle, block_size: int
) -> list[str]:
    """Write text, mask, phases and analysis of a preset into a folder; return the files' names."""
    labels, segments, n = style.labels, source.segments, source.n_rows
    facts = analyse_mask(source.mask, n, n, segments=segments, block_size=block_size)
    picture = draw(source, labels)
    lines = [*text_lines(source, picture, labels, 0), "", *facts.lines(Places(labels, segments))]
    text = "".join(f"{line}\n" for line in lines).encode()
    save_file(folder / f"{name}.txt", text, UsageError)
    pictures = {"mask": picture}
    phases = reduce_phases(source.mask, segments, source.limit)
    for kind, phase in zip(("encoding", "generation"), phases, strict=True):
        if phase is not None:
            title = f"{phase.title}: {labels(f'figure_phase_{kind}')}"
            pictures[kind] = replace(phase, title=title)
    for kind, each in pictures.items():
        save_figure(each, folder / f"{name}_{kind}.png", style)
    save_analysis(facts, segments, folder / f"{name}_analysis.png", style)
    return [f"{name}.txt", *(f"{name}_{kind}.png" for kind in (*pictures, "analysis"))]


def _save_flowchart(file: Path, style: FigureStyle) -> None:
    """Write the flowchart as a figure. Raises `UsageError` without the library."""
    from flexinspect.figures.flowchart_figure import save_flowchart

    save_flowchart(file, labels=style.labels, theme=style.theme, dpi=style.dpi)
