"""`flexinspect mask`: draw, analyse and verify a mask."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.flags import add_number_flags, add_switches, positive_int
from flexinspect.cli.output import (
    errors_as_json,
    print_json,
    print_lines,
    stdout_console,
)
from flexinspect.cli.progress import share_bar
from flexinspect.core.errors import UsageError
from flexinspect.core.text import print_message

if TYPE_CHECKING:
    from flexinspect.cli.mask_sources import MaskInput
    from flexinspect.core.languages import Labels
    from flexinspect.figures.mask_figure import FigureStyle
    from flexinspect.masks.mask_analysis import MaskAnalysis
    from flexinspect.masks.mask_picture import MaskPicture
    from flexinspect.masks.picture_text import Places
    from flexinspect.masks.verification import Verification

DESCRIPTION = """Draw a mask in the terminal or as a figure, analyse it, and verify it cell by cell.
MASK is a preset of sizes (small, medium, large), a file with sizes (.toml, .json), an expression of
masks, your own module:mask_mod, or the cells in a .npy file. Presets of sizes draw the mask
segment-isolation unless --mask names another one. No model is needed."""

EXAMPLES = """examples:
  flexinspect mask small
  flexinspect mask small --verify
  flexinspect mask medium --mask "segment-isolation and sliding-window(16)" -o mask.pdf
  flexinspect mask "per-head(causal, sliding-window(8))" --head 1 --length 32
  flexinspect mask my_masks:mask_mod --verify --against segment-isolation --device cuda
  flexinspect mask --prompt "Who wrote Emma?" --prompt "Emma's author?" -o words.png
  flexinspect mask --trace run.flextrace --layer 2 --view difference
  flexinspect mask small --analysis --json
  flexinspect mask small --animate -o generation.gif
  flexinspect mask --all --dpi 300 --lang zh
  flexinspect mask --list

docs/masks.md describes expressions, sizes and checks.

exit codes: 0 success, 1 the mask violates a check (--verify), 2 invalid request or unwritable file,
            130 interrupted
"""
OUTPUT_FOLDER = "attention_mask_outputs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MASK", nargs="?", help="default: small")
    parser.add_argument("--mask", metavar="MASK", help="the mask over the sizes that MASK names")
    _add_shape_flags(parser)
    _add_source_flags(parser)
    group = parser.add_argument_group("what to do (default: draw)")
    checks = "only these checks: causal, isolation, fusion, rows, keys, declared"
    add_switches(
        group,
        verify="check every cell; exit code 1 on a violation",
        analysis="density, segments, blocks and phases; with a figure of -o, also as FILE_analysis",
        animate="write the generation step by step (-o FILE.gif or FILE.html)",
        all=f"write every picture of the presets into {OUTPUT_FOLDER}/ (or the folder of -o)",
        list="list the masks of expressions, and how they are written",
    )
    group.add_argument("--checks", metavar="A,B", help=checks)
    group.add_argument("--against", metavar="MASK", help="the mask that it should be")
    size = "tokens per block of the analysis (default: 128, as create_block_mask)"
    group.add_argument("--block-size", type=positive_int, default=128, metavar="N", help=size)
    group = parser.add_argument_group("output")
    formats = "the suffix decides: .png .svg .pdf .html .gif .txt .npy .csv"
    group.add_argument("-o", "--out", dest="output", metavar="FILE", type=Path, help=formats)
    lang = "language of labels, such as en or zh (default: FLEXINSPECT_LANG, or the settings)"
    group.add_argument("--lang", metavar="CODE", help=lang)
    group.add_argument("--theme", default="light", metavar="NAME", help="colours of a figure")
    dpi = "dots per inch of a PNG (default: 300)"
    group.add_argument("--dpi", type=positive_int, default=300, metavar="N", help=dpi)
    width = "inches of a figure: 3.3 for a column of a paper (default: 6.5)"
    group.add_argument("--width", type=float, default=6.5, metavar="INCHES", help=width)
    add_switches(group, plain="print characters, without colours", json="print JSON")


def _add_shape_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sizes").add_argument
    for name, text in (
        ("num-paraphrases", "paraphrases (of a prompt: the first ones)"),
        ("tokens-per-paraphrase", "tokens of each paraphrase"),
        ("separator-tokens", "tokens between two paraphrases"),
        ("num-generated-tokens", "generated tokens"),
    ):
        add(f"--{name}", f"--{name.replace('-', '_')}", metavar="N", help=text)
    modes = "full: a cell per position; sampled: at most --max-display-positions"
    add("--display-mode", "--display_mode", metavar="full|sampled", help=modes)
    most = "rows and keys of a sampled picture"
    add("--max-display-positions", "--max_display_positions", metavar="N", help=most)
    add("--length", type=positive_int, metavar="N", help="a sequence of N tokens without segments")


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("your own mask_mod")
    group.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:N, mps or auto")
    heads = "heads of a mask_mod that depends on the head (default: 1)"
    group.add_argument("--heads", type=positive_int, default=1, metavar="N", help=heads)
    add = parser.add_argument_group("a real prompt (only the tokenizer is loaded)").add_argument
    add("--prompt", action="append", metavar="TEXT", help="a paraphrase (may be repeated)")
    add("--dataset", metavar="NAME", help="the first sample of it: demo, FILE.jsonl, ...")
    add("--model", metavar="NAME", help="whose tokenizer (default: demo)")
    for name in ("instruction", "separator", "cue", "indices"):
        add(f"--{name}", metavar="TEXT", help="as flexinspect run")
    group = parser.add_argument_group("a trace")
    group.add_argument("--trace", metavar="RUN", type=Path, help="a trace file")
    views = ("executed", "received", "declared", "difference")
    group.add_argument("--view", choices=views, help="which mask (default: executed)")
    add_number_flags(
        group,
        layer="the layer (default: 0)",
        head="the head, of any mask (default: 0)",
        step="rows up to this step (default: all)",
        generation="the generation (default: 0)",
        branch="the branch (default: 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Do what the flags ask for, and return the exit code. Raises `FlexInspectError`."""
    from flexinspect.inputs.config import figure_labels

    with errors_as_json(args.json):
        if args.list:
            return _list(as_json=args.json)
        labels = figure_labels(args.lang)
        if args.all:
            from flexinspect.cli.all_mask_figures import write_all_figures

            folder = args.output or Path(OUTPUT_FOLDER)
            return write_all_figures(args, folder, _style(args, labels))
        return _Laboratory(args, labels).run()


def _list(*, as_json: bool) -> int:
    from flexinspect.masks.mask_expressions import mask_usages

    usages = dict(mask_usages())
    if as_json:
        print_json(usages)
        return 0
    width = max(map(len, usages))
    print_lines(f"{usage:<{width}}  {text}" for usage, text in usages.items())
    return 0


def _is_animated(args: argparse.Namespace) -> bool:
    """Return whether the output is an animation. Raises `UsageError` for another suffix."""
    suffix = "" if args.output is None else args.output.suffix.lower()
    if args.animate and suffix not in (".gif", ".html"):
        what = "--animate writes a file, and none is named that can hold an animation."
        raise UsageError(what, hint="Name one: -o generation.gif or -o generation.html.")
    return bool(args.animate) or suffix == ".gif"


def _style(args: argparse.Namespace, labels: Labels) -> FigureStyle:
    """Return how figures look. Raises `UsageError` for an unknown theme."""
    from flexinspect.figures.mask_figure import FigureStyle
    from flexinspect.figures.themes import find_theme

    theme = find_theme(args.theme)
    return FigureStyle(labels=labels, theme=theme, dpi=args.dpi, width=args.width)


class _Laboratory:
    """Does what the flags ask for with one mask."""

    def __init__(self, args: argparse.Namespace, labels: Labels) -> None:
        from flexinspect.cli.mask_output import SUFFIXES
        from flexinspect.cli.mask_sources import load_input
        from flexinspect.figures.figure_files import check_figure_path
        from flexinspect.masks.picture_text import Places

        self.is_animated = _is_animated(args)
        if args.output is not None:
            check_figure_path(args.output, SUFFIXES)
        self.args, self.labels = args, labels
        self.style: FigureStyle = _style(args, labels)
        self.source: MaskInput = load_input(args, labels)
        self.head = args.head or 0
        if args.trace is None and self.head >= self.source.mask.n_heads:
            n_heads = self.source.mask.n_heads
            raise UsageError(f"There is no head {self.head}: the mask has {n_heads}.")
        if args.trace is not None:
            self.head = 0  # its mask is that of the head already
        self.places: Places = Places(labels, self.source.segments, self.source.words)

    def run(self) -> int:
        """Draw, analyse and verify; return the exit code."""
        args, source = self.args, self.source
        if source.note:
            print_message(source.note)
        analysis = self._analyse() if args.analysis else None
        verification = self._verify() if args.verify else None
        if args.output is not None:
            self._save(analysis)
        exit_code = int(verification is not None and not verification.passed)
        if args.json:
            print_json(self._json(analysis, verification, exit_code))
            return exit_code
        if not (args.verify or args.output is not None):
            self._print_picture()
        blocks = [part.lines(self.places) for part in (analysis, verification) if part is not None]
        for number, lines in enumerate(blocks):
            is_first = number == 0 and (args.verify or args.output is not None)
            print_lines(lines if is_first else ["", *lines])
        return exit_code

    def _draw(self, limit: int | None = None) -> MaskPicture:
        from flexinspect.cli.mask_output import draw

        with share_bar("reducing the mask") as report:
            return draw(self.source, self.labels, head=self.head, limit=limit, report=report)

    def _analyse(self) -> MaskAnalysis:
        from flexinspect.masks.mask_analysis import analyse_mask

        source = self.source
        with share_bar("counting cells") as report:
            return analyse_mask(
                source.mask,
                source.n_rows,
                source.n_keys,
                segments=source.segments,
                block_size=self.args.block_size,
                head=self.head,
                against=source.declared,
                report=report,
            )

    def _verify(self) -> Verification:
        from flexinspect.masks.verification import CHECKS, verify_mask

        source, checks = self.source, CHECKS
        if self.args.checks is not None:
            checks = tuple(name.strip() for name in self.args.checks.split(","))
        with share_bar("verifying cells") as report:
            return verify_mask(
                source.mask,
                source.segments,
                n_rows=source.n_rows,
                n_keys=source.n_keys,
                declared=source.declared,
                checks=checks,
                report=report,
            )

    def _save(self, analysis: MaskAnalysis | None) -> None:
        from flexinspect.cli.mask_output import FIGURE_SUFFIXES, save, save_analysis, save_steps

        file = self.args.output
        if self.is_animated:
            picture = self._draw()
            with share_bar("drawing steps") as report:
                save_steps(self.source, picture, file, self.style, report)
            print_message(f"saved {file}")
            return
        more = [] if analysis is None else ["", *analysis.lines(self.places)]
        save(self.source, self._draw, file, self.style, head=self.head, more_lines=more)
        print_message(f"saved {file}")
        if analysis is not None and file.suffix.lower() in FIGURE_SUFFIXES:
            beside = file.with_stem(f"{file.stem}_analysis")
            save_analysis(analysis, self.source.segments, beside, self.style)
            print_message(f"saved {beside}")

    def _print_picture(self) -> None:
        from flexinspect.cli.mask_output import print_picture, text_lines
        from flexinspect.masks.picture_text import MAX_NAME

        console = stdout_console()
        is_plain = self.args.plain or console.no_color or console.color_system is None
        limit = None
        if console.is_terminal:
            room = max(console.width - MAX_NAME - 3, 8)
            limit = room // 2 if is_plain else room
        picture = self._draw(limit)
        if is_plain:
            print_lines(text_lines(self.source, picture, self.labels, self.head))
        else:
            print_picture(self.source, picture, self.labels, self.head, console)

    def _json(
        self,
        analysis: MaskAnalysis | None,
        verification: Verification | None,
        exit_code: int,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"mask": self.source.mask.name, "head": self.args.head or 0}
        if verification is not None:
            lines = verification.lines(self.places)
            found["verification"] = {**verification.as_json(), "lines": lines}
        if analysis is not None:
            found["analysis"] = analysis.as_json()
        if verification is None and analysis is None:
            picture = self._draw()
            columns = ("states", "row_edges", "key_edges", "empty_rows", "unseen_keys")
            found["picture"] = {name: getattr(picture, name).tolist() for name in columns}
        return {**found, "exit_code": exit_code}
