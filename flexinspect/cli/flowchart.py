"""`flexinspect flowchart`: the way from a question to an answer, in seven boxes."""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexinspect.cli.flags import add_number_flags, positive_int
from flexinspect.cli.output import errors_as_json, print_json, print_lines
from flexinspect.core.conversion import read_data
from flexinspect.core.environment import save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import LANGUAGE_VARIABLE, Labels
from flexinspect.core.text import print_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexinspect.figures.flowchart_boxes import FlowBox, FlowchartConfig, RunNumbers
    from flexinspect.trace.reader import TraceReader

DESCRIPTION = """Draw the seven steps from a question to an answer: input, concatenation, mask,
patch, encoding, generation loop, output. With --trace, with the numbers of a recorded run: tokens,
mask, the kernels that its layers called, times and the answer. Without --out it is printed as
text."""

EXAMPLES = f"""examples:
  flexinspect flowchart
  flexinspect flowchart --trace run.flextrace
  flexinspect flowchart --out flowchart.svg --out flowchart.png --theme grayscale
  flexinspect flowchart --trace run.flextrace --lang zh --width 3.3 --out column.pdf
  flexinspect flowchart --trace run.flextrace --out flowchart.md      (Mermaid, for a README)
  flexinspect flowchart --config flowchart.toml --out flowchart.png

the file of --config (TOML or JSON) has any of these keys: figure_size, box_width, box_height,
vertical_spacing, color_input, color_processing, color_attention, color_generation, color_output

{LANGUAGE_VARIABLE} sets the language of all figures.
exit codes: 0 success, 2 invalid request
"""

FIGURES = (".svg", ".png", ".pdf", ".html")
TEXTS = (".mmd", ".md", ".txt")
_TEXT_WIDTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", metavar="RUN", type=Path, help="draw the numbers of this trace")
    add_number_flags(
        parser,
        generation="the generation of the trace, from 0 (default: 0)",
        branch="the branch of it (default: 0)",
    )
    formats = ", ".join((*FIGURES, *TEXTS))
    add(
        "--out",
        "-o",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help=f"write a file, by its suffix: {formats} (may be repeated)",
    )
    add(
        "--lang",
        metavar="CODE",
        help=f"the language (default: {LANGUAGE_VARIABLE}, or the settings)",
    )
    add("--theme", metavar="NAME", default="light", help="light, dark, colorblind or grayscale")
    add("--width", metavar="INCHES", type=float, help="the width; the height follows from it")
    add("--dpi", metavar="N", type=positive_int, default=300, help="of a PNG (default: 300)")
    add("--config", metavar="FILE", type=Path, help="sizes and colours, see below")
    add("--json", action="store_true", help="print the boxes and numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Draw the flowchart. Raises `UsageError` and `FlexInspectError` as the figures do."""
    from flexinspect.figures.flowchart_boxes import flow_boxes, flowchart_lines, flowchart_title
    from flexinspect.inputs.config import figure_labels

    with errors_as_json(args.json, boxes=[]):
        labels, config = figure_labels(args.lang), _read_config(args.config, args.width)
        numbers = None if args.trace is None else _read_numbers(args)
        boxes, title = flow_boxes(labels, numbers), flowchart_title(labels, numbers)
        _write_files(args, boxes, title, labels, config)
    if args.json:
        print_json({"title": title, "boxes": boxes, "run": numbers, "files": args.out})
    elif not args.out:
        width = min(shutil.get_terminal_size((_TEXT_WIDTH, 24)).columns, _TEXT_WIDTH)
        print_lines([title, "", *flowchart_lines(boxes, labels, width)])
    for file in () if args.json else args.out:
        print_message(f"saved {file}")
    return 0


def _read_config(file: Path | None, width: float | None) -> FlowchartConfig:
    """Return the configuration of a file; `width` scales its figure."""
    from msgspec.structs import replace

    from flexinspect.figures.flowchart_boxes import FlowchartConfig, flowchart_config

    config = FlowchartConfig()
    if file is not None:
        config = flowchart_config(read_data(file, "flowchart configuration"), str(file))
    if width is None:
        return config
    from flexinspect.figures.sheet import check_size

    check_size(width, None)
    old_width, height = config.figure_size
    return replace(config, figure_size=(width, height * width / old_width))


def _write_files(
    args: argparse.Namespace,
    boxes: Sequence[FlowBox],
    title: str,
    labels: Labels,
    config: FlowchartConfig,
) -> None:
    """Write each file of --out; a path that cannot be is refused before the first one."""
    from flexinspect.figures.figure_files import check_figure_path, save_figure
    from flexinspect.figures.flowchart_boxes import flowchart_lines, mermaid, mermaid_page
    from flexinspect.figures.flowchart_figure import draw_flowchart_figure
    from flexinspect.figures.themes import find_theme

    theme = find_theme(args.theme)
    targets = [check_figure_path(file, (*FIGURES, *TEXTS)) for file in args.out]
    texts: Mapping[str, Callable[[], str]] = {
        ".mmd": lambda: mermaid(boxes, labels, config),
        ".md": lambda: mermaid_page(title, mermaid(boxes, labels, config)),
        ".txt": lambda: "\n".join((title, "", *flowchart_lines(boxes, labels, _TEXT_WIDTH), "")),
    }
    figure: Any = None
    for target in targets:
        suffix = target.suffix.lower()
        if suffix in texts:
            save_file(target, texts[suffix]().encode(), UsageError)
            continue
        if figure is None:
            figure = draw_flowchart_figure(boxes, config, labels=labels, title=title, theme=theme)
        save_figure(figure, target, title=title, language=labels.language, dpi=args.dpi)


# -- the numbers of a run --------------------------------------------------------------------------


def _read_numbers(args: argparse.Namespace) -> RunNumbers:
    from flexinspect.trace.reader import open_trace

    with open_trace(args.trace) as reader, reader.snapshot():
        generation, branch = args.generation or 0, args.branch or 0
        if not any(row.branch == branch for row in reader.branches(generation)):
            what = f"{args.trace} has no branch {branch} of generation {generation}."
            raise UsageError(what, hint="flexinspect dump lists the generations and branches.")
        return run_numbers(reader, generation, branch)


def run_numbers(reader: TraceReader, generation: int, branch: int = 0) -> RunNumbers:
    """Return the numbers of a recorded generation. Raises `TraceError` when there is none."""
    from flexinspect.figures.flowchart_boxes import RunNumbers
    from flexinspect.records.prompt import SegmentKind

    row = reader.generation(generation)
    end = next((each for each in reader.branches(generation) if each.branch == branch), None)
    segments = reader.segments(generation, branch) or reader.segments(generation)
    prompt = [segment for segment in segments if segment.kind is not SegmentKind.GENERATED]
    first = reader.step(generation, 0)
    prefill = first if first is not None and first.phase == "prefill" else None
    calls = reader.calls(generation, 0) if prefill is not None else []
    decode = [step for step in reader.steps(generation, branch) if step.phase == "decode"]
    model = reader.model(generation)
    n_layers = model.get("layers")
    return RunNumbers(
        name=reader.path.name,
        model=str(model.get("name") or row.model),
        paraphrase_lengths=tuple(len(s) for s in prompt if s.kind is SegmentKind.PARAPHRASE),
        n_prompt_tokens=max((s.stop for s in prompt), default=prefill.q_len if prefill else 0),
        n_segments=len(prompt),
        mask=row.mask,
        n_layers=n_layers if isinstance(n_layers, int) else len({c.layer for c in calls}),
        paths=dict(Counter(call.path for call in calls)),
        prefill_rows=None if prefill is None else prefill.q_len,
        prefill_keys=None if prefill is None else prefill.kv_after,
        prefill_ms=None if prefill is None else prefill.wall_ms,
        n_steps=reader.n_steps(generation, branch),
        n_generated=sum(1 for t in reader.tokens(generation, branch) if t.step is not None),
        step_ms=statistics.median(step.wall_ms for step in decode) if decode else None,
        stop_reason=end.stop_reason if end else row.stop_reason,
        answer=end.answer if end else row.answer,
    )
