"""The flowchart of a generation under a mask: seven boxes, as data, Mermaid and terminal text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import asdict
from rich.cells import cell_len

from flexinspect.core.conversion import convert
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import Labels
from flexinspect.core.text import escape_unprintable, printable, truncate
from flexinspect.figures.themes import sign_color

BOXES = ("input", "concatenation", "mask", "patch", "encoding", "generation", "output")
"""The boxes in their order; labels of languages have `flowchart_NAME` and `flowchart_NAME_text`."""

BOX_COLORS: Mapping[str, str] = {
    "input": "color_input",
    "concatenation": "color_processing",
    "mask": "color_attention",
    "patch": "color_processing",
    "encoding": "color_attention",
    "generation": "color_generation",
    "output": "color_output",
}
"""The key of `FlowchartConfig` with the colour of a box."""

MAX_ANSWER = 120
"""Characters of an answer in its box."""

_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")
Size = Annotated[float, Meta(gt=0, le=1000)]


class FlowchartConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the flowchart looks; keys and values of the self-ensemble project's notebook.

    `figure_size` is (width, height) in inches. The other sizes are units: the figure is 10 wide,
    and as high as seven boxes with a distance of `vertical_spacing` from top to top.
    """

    figure_size: tuple[Size, Size] = (14, 16)
    box_width: Size = 3.5
    box_height: Size = 0.6
    vertical_spacing: Size = 1.2
    color_input: str = "#E3F2FD"
    color_processing: str = "#FFF3E0"
    color_attention: str = "#F3E5F5"
    color_generation: str = "#E8F5E9"
    color_output: str = "#FCE4EC"

    def color(self, box: str) -> str:
        """Return the colour of a box."""
        return str(getattr(self, BOX_COLORS[box]))


def flowchart_config(
    values: Mapping[str, Any], where: str = "The configuration"
) -> FlowchartConfig:
    """Return a checked configuration from its keys; missing ones have their defaults.

    Raises `UsageError` with one sentence for an unknown key, a wrong type, a colour that is not
    `#rrggbb`, and boxes that do not fit; `where` names the source.
    """
    config = convert(FlowchartConfig, values, where)
    for key, value in asdict(config).items():
        if key.startswith("color_") and not _COLOR.fullmatch(value):
            what = f"{where}: {key} is not a colour: {value!r}."
            raise UsageError(what, hint="Write colours as #rrggbb, such as #E3F2FD.")
    if config.box_height >= config.vertical_spacing:
        what = f"{where}: boxes of height {config.box_height:g} overlap."
        raise UsageError(what, hint="Make vertical_spacing larger than box_height.")
    if config.box_width > 8:
        what = f"{where}: a box_width of {config.box_width:g} leaves no room for text beside it."
        raise UsageError(what, hint="The figure is 10 units wide; choose 8 or less.")
    return config


class RunNumbers(Struct, frozen=True, kw_only=True):
    """The numbers of a recorded generation, None where nothing was recorded.

    `paths` maps kernel paths of the prefill to their number of layers. `prefill_ms` and `step_ms`
    are milliseconds, the latter the median of the decode steps.
    """

    name: str
    model: str
    paraphrase_lengths: tuple[int, ...]
    n_prompt_tokens: int
    n_segments: int
    mask: str
    n_layers: int
    paths: Mapping[str, int] = field(default_factory=dict)
    prefill_rows: int | None = None
    prefill_keys: int | None = None
    prefill_ms: float | None = None
    n_steps: int = 0
    n_generated: int = 0
    step_ms: float | None = None
    stop_reason: str = ""
    answer: str = ""


class FlowBox(Struct, frozen=True):
    """A box: `name` is one of `BOXES`, `text` a sentence about it."""

    name: str
    title: str
    text: str


def flow_boxes(labels: Labels, run: RunNumbers | None = None) -> tuple[FlowBox, ...]:
    """Return the boxes, in general or with the numbers of a run."""
    texts = {name: labels(f"flowchart_{name}_text") for name in BOXES}
    if run is not None:
        texts |= _run_texts(labels, run)
    return tuple(FlowBox(name, labels(f"flowchart_{name}"), texts[name]) for name in BOXES)


def flowchart_title(labels: Labels, run: RunNumbers | None = None) -> str:
    """Return the title of the flowchart."""
    if run is None:
        return labels("flowchart_title")
    return labels("flowchart_run_title", name=printable(run.name), model=printable(run.model))


def _run_texts(labels: Labels, run: RunNumbers) -> dict[str, str]:
    n, sizes = len(run.paraphrase_lengths), sorted(set(run.paraphrase_lengths))
    lengths = "–".join(str(size) for size in sizes[:1] + sizes[1:][-1:])
    paths = ", ".join(f"{count} × {path}" for path, count in run.paths.items())
    texts = {
        "input": labels("flowchart_input_run", n=n, lengths=lengths) if n else "",
        "concatenation": labels(
            "flowchart_concatenation_run", tokens=run.n_prompt_tokens, segments=run.n_segments
        ),
        "mask": labels("flowchart_mask_run", mask=printable(run.mask)) if run.mask else "",
        "patch": labels("flowchart_patch_run", layers=run.n_layers, paths=paths) if paths else "",
        "encoding": "",
        "generation": labels("flowchart_generation_run", tokens=run.n_generated, steps=run.n_steps),
        "output": labels("flowchart_output_run", answer=_shortened(run.answer)),
    }
    if run.prefill_rows is not None and run.prefill_ms is not None:
        texts["encoding"] = labels(
            "flowchart_encoding_run",
            rows=run.prefill_rows,
            keys=run.prefill_keys,
            ms=f"{run.prefill_ms:.1f}",
        )
    if run.step_ms is not None:
        texts["generation"] += labels("flowchart_generation_time", ms=f"{run.step_ms:.1f}")
    if run.stop_reason:
        texts["generation"] += labels("flowchart_generation_end", reason=printable(run.stop_reason))
    unknown = labels("figure_unknown")
    return {name: text or unknown for name, text in texts.items()}


def _shortened(answer: str) -> str:
    return truncate(printable(answer.strip()), MAX_ANSWER)


# -- Mermaid ---------------------------------------------------------------------------------------


def mermaid(boxes: Sequence[FlowBox], labels: Labels, config: FlowchartConfig | None = None) -> str:
    """Return the flowchart in the syntax of Mermaid (https://mermaid.js.org/syntax/flowchart)."""
    config = config or FlowchartConfig()
    lines = ["flowchart TD"]
    for box in boxes:
        title, text = _mermaid_text(box.title), _mermaid_text(box.text)
        lines.append(f'    {box.name}_["<b>{title}</b><br/>{text}"]')
    for one, other in itertools.pairwise(boxes):
        lines.append(f"    {one.name}_ --> {other.name}_")
    again = _mermaid_text(labels("flowchart_repeat"))
    lines.append(f'    generation_ -->|"{again}"| generation_')
    for box in boxes:
        color = config.color(box.name)
        style = f"fill:{color},stroke:#5c636b,color:{sign_color(color)}"
        lines.append(f"    style {box.name}_ {style}")
    return "\n".join(lines) + "\n"


def mermaid_page(title: str, diagram: str) -> str:
    """Return a Markdown page with a diagram, as GitHub and GitLab draw it."""
    heading = escape_unprintable(title).replace("<", "&lt;")
    return f"# {heading}\n\n```mermaid\n{diagram}```\n"


def _mermaid_text(text: str) -> str:
    """Escape text for a quoted string of Mermaid, whose entities are `#NUMBER;`."""
    return "".join(f"#{ord(c)};" if c in '"#<>&`;\\' else c for c in printable(text))


# -- terminal --------------------------------------------------------------------------------------


def flowchart_lines(boxes: Sequence[FlowBox], labels: Labels, width: int) -> list[str]:
    """Return the flowchart as lines of text of at most `width` cells, at least 40."""
    width = max(width, 40)
    titles = [f"{number} {box.title}" for number, box in enumerate(boxes, start=1)]
    inner = max(cell_len(title) for title in titles) + 2
    room = width - inner - 7
    middle = 3 + inner // 2
    lines: list[str] = []
    for number, (box, title) in enumerate(zip(boxes, titles, strict=True)):
        texts = _wrap_cells(printable(box.text), room) or [""]
        is_loop, is_last = box.name == "generation", number == len(boxes) - 1
        left = ("┌▶┌", "│ │", "└─┴") if is_loop else ("  ┌", "  │", "  └")
        bottom = "─" * inner
        if not is_last:
            bottom = bottom[: middle - 3] + "┬" + bottom[middle - 2 :]
        again = f"  ({labels('flowchart_repeat')})" if is_loop else ""
        body = f" {title}" + " " * (inner - 1 - cell_len(title))
        lines += [f"{left[0]}{'─' * inner}┐", f"{left[1]}{body}│  {texts[0]}"]
        lines += [f"{left[1]}{' ' * inner}│  {text}" for text in texts[1:]]
        lines.append(f"{left[2]}{bottom}┘{again}")
        if not is_last:
            lines.append(" " * middle + "▼")
    return lines


def _wrap_cells(text: str, width: int) -> list[str]:
    """Wrap text at words, in words that are too long, and between Chinese characters."""
    lines = [""]
    pattern = rf"[\u2e80-\uffef][，。；：、）”]*|\s+|[^\s\u2e80-\uffef]{{1,{width}}}"
    for word in re.findall(pattern, text):
        if cell_len(lines[-1] + word) > width and lines[-1]:
            lines.append("")
        if not (word.isspace() and not lines[-1]):
            lines[-1] += word
    return [line.rstrip() for line in lines if line.strip()]
