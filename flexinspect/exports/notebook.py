"""A Jupyter notebook that opens the trace and shows what it holds, to continue from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexinspect.exports.exporter import ExportOptions, Progress, clean_text
from flexinspect.trace.query_results import GenerationRow
from flexinspect.trace.reader import TraceReader


class NotebookExporter:
    """Writes a notebook of format 4.5 (https://nbformat.readthedocs.io) without outputs.

    It finds the trace by its path relative to the notebook. Cells are those that the trace has
    something for: tokens and masks, or the curves of a training.
    """

    name = "notebook"
    description = "A Jupyter notebook that opens the trace: findings, tokens, mask, entropy."
    suffix = ".ipynb"
    is_folder = False
    unit = "cells"

    def export(
        self, reader: TraceReader, target: Path, options: ExportOptions, progress: Progress
    ) -> Mapping[str, int]:
        """Write the notebook; see `Exporter`."""
        rows = [reader.generation(number) for number in options.generations(reader)]
        cells = [*_cells(reader, rows, _relative_path(reader.path, options.destination))]
        notebook = {
            "cells": [_cell(number, *cell) for number, cell in enumerate(cells)],
            "metadata": {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        progress(1, 1)
        return {"": len(cells)}


def _relative_path(trace: Path, notebook: Path) -> str:
    """Return the path of the trace from the folder of the notebook, absolute on another drive."""
    try:
        path = os.path.relpath(trace, notebook.resolve().parent)
    except ValueError:
        return str(trace)
    return Path(path).as_posix()


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    lines = clean_text(source.strip()).splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return {**cell, "source": lines}


def _cells(reader: TraceReader, rows: list[GenerationRow], path: str) -> Iterator[tuple[str, str]]:
    """Yield kind and source of each cell."""
    yield "markdown", _INTRODUCTION
    yield "code", _OPEN.format(path=path)
    if not rows:
        return
    yield "code", _FINDINGS
    yield "code", _GENERATION.format(generation=rows[0].generation)
    if any("training" in row.declared for row in rows):
        yield "code", _TRAINING
        return
    yield "code", _TOKENS
    yield "code", _ENTROPY
    if reader.fingerprints():
        yield "code", _MASK
    yield "markdown", _MORE


_INTRODUCTION = """
# A recorded generation

`flexinspect export --to notebook` wrote this notebook. It needs flexinspect, and matplotlib for its
figures: `pip install 'flexinspect[figures]'`. The trace is read only, and needs no model.
"""

_OPEN = """
import html

import flexinspect
from IPython.display import HTML

trace = flexinspect.open_trace({path!r})  # relative to the folder of this notebook
run = trace.run()
model = run.get("model") or {{}}
for row in trace.generations():
    print(f"generation {{row.generation}} ({{row.state}}): {{row.sample_id!r}} → {{row.answer!r}}")
print(f"recording {{run['state']}}, model {{model.get('name')!r}}, level {{run.get('level')!r}}")
"""

_FINDINGS = """
def table(head, rows):
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
    lines = [cells("th", head), *(cells("td", row) for row in rows)]
    return HTML("<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")


findings = trace.findings()
print(f"{len(findings)} findings")
table(
    ("severity", "generation", "step", "layer", "id", "sentence"),
    [(f.severity, f.generation, f.step, f.layer, f.id, f.sentence) for f in findings],
)
"""

_GENERATION = """
GENERATION, BRANCH = {generation}, 0  # what the cells below show

steps = trace.steps(GENERATION, BRANCH)
segments = trace.segments(GENERATION, BRANCH)
shown = [(s.step, s.phase, s.q_len, f"{{s.wall_ms:.1f}}") for s in steps[:20]]
table(("step", "phase", "rows", "ms"), shown)
"""

_TOKENS = """
import math

probability = {s.step: math.exp(s.chosen_logprob) for s in steps if s.chosen_logprob is not None}


def span(token):
    color = f"hsl({40 + 97 * token.segment % 360} 60% 85%)"
    p = probability.get(token.step)
    title = f"position {token.pos}, segment {token.segment}"
    if 0 <= token.segment < len(segments):
        title += f", {segments[token.segment].label!r}"
    title += "" if p is None else f", chosen in step {token.step} with probability {p:.3f}"
    edge = "none" if p is None or p != p else f"3px solid hsl({120 * p:.0f} 70% 40%)"
    style = f"color: black; background: {color}; border-bottom: {edge}; white-space: pre-wrap"
    text = html.escape(token.text or token.token)
    return f'<span style="{style}" title="{html.escape(title)}">{text}</span>'


HTML("".join(map(span, trace.tokens(GENERATION, BRANCH))))  # underlined: green is certain
"""

_ENTROPY = """
import matplotlib.pyplot as plt

known = [s for s in steps if s.entropy is not None]
figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(8, 4))
upper.plot([s.step for s in known], [s.entropy for s in known], marker=".")
upper.set_ylabel("entropy (nats)")
lower.plot([s.step for s in known], [probability[s.step] for s in known], marker=".", color="C2")
lower.set(xlabel="step", ylabel="probability of\\nthe chosen token", ylim=(0, 1.05))
plt.show()
"""

_MASK = """
import matplotlib.pyplot as plt

LAYER, HEAD, LIMIT = 0, 0, 2048  # at most as many rows and keys are drawn


def first_mask(layer):
    for step in steps:
        for call in trace.calls(GENERATION, step.step, BRANCH):
            mask = trace.mask(call.mask) if call.layer == layer and call.mask else None
            if mask is not None and mask.cells is not None:
                return mask
    return None


mask = first_mask(LAYER)
if mask is None:
    print(f"The cells of the masks of layer {LAYER} were not recorded.")
else:
    # bool (rows, keys): True can be attended
    cells = mask.cells[min(HEAD, len(mask.cells) - 1), :LIMIT, :LIMIT]
    figure, axes = plt.subplots(figsize=(6, 6))
    axes.imshow(cells, cmap="Greens", vmin=0, vmax=1.4, interpolation="nearest")
    for segment in segments:
        axes.axvline(segment.start - mask.kv_offset - 0.5, color="red", lw=0.6, ls="--")
        axes.axhline(segment.start - mask.q_offset - 0.5, color="red", lw=0.6, ls="--")
    axes.set(xlim=(-0.5, cells.shape[1] - 0.5), ylim=(cells.shape[0] - 0.5, -0.5))
    axes.set(xlabel="key", ylabel="row", title=f"executed mask {mask.fingerprint}, layer {LAYER}")
    plt.show()
"""

_TRAINING = """
import math

import matplotlib.pyplot as plt

training = trace.training_steps(GENERATION, BRANCH)
figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(8, 4))
upper.plot(training.keys(), [t.loss for t in training.values()], marker=".")
lost = [step for step, t in training.items() if t.loss_source and not math.isfinite(t.loss)]
look = {"colors": "C3", "linestyles": "dotted", "label": "not finite"}
upper.vlines(lost, 0, 1, transform=upper.get_xaxis_transform(), **look)
upper.set_ylabel("loss")
if training:
    upper.set_xlim(min(training) - 0.5, max(training) + 0.5)
if lost:
    upper.legend()
norms = [float("nan") if t.total_norm is None else t.total_norm for t in training.values()]
lower.plot(training.keys(), norms, marker=".", color="C1")
lower.set(xlabel="step", ylabel="gradient norm", yscale="log")
plt.show()
"""

_MORE = """
`trace.frame("calls")` returns any table as a data frame, `trace.array(generation, step, stream)` an
array such as `"attention.mass"`; docs/trace-format.md lists both.
"""
