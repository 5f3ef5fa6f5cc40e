"""The exported notebook runs as it is, and shows what the trace holds."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.earlier_traces import unpack
from support.exporting import export
from support.notebooks import assert_without_outputs, of_cell, read_notebook, run_cells
from support.traces import sample_trace

from flexinspect.exports.exporter import ExportOptions, load_exporter, write_export
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.reader import open_trace

ODD_NAME = 'it\'s "odd" {run} \\ 作.flextrace'


def sources(file: Path) -> str:
    return "\n".join(cell.source for cell in read_notebook(file).cells)


def test_the_notebook_shows_findings_tokens_mask_and_entropy(tmp_path: Path) -> None:
    trace, folder = sample_trace(tmp_path / ODD_NAME), tmp_path / "notebooks"
    folder.mkdir()
    file = Path(shutil.move(export_to(trace, folder / "run.ipynb"), tmp_path / "moved"))
    moved = Path(shutil.move(file, folder / "run.ipynb"))  # the path in it is relative
    outputs = run_cells(moved, folder, tmp_path)
    assert "generation 1 (finished): 'sample-1' → ' Jane Austen'" in of_cell(
        outputs, "open_trace"
    ).get("stdout", "")
    assert "Layer 2 made the first NaN." in of_cell(outputs, "trace.findings()")["text/html"]
    tokens = of_cell(outputs, "trace.tokens")["text/html"]
    assert "> 作者<" in tokens
    assert "&lt;s&gt;" in tokens
    assert "chosen in step 0 with probability 0.905" in tokens
    for part in ("s.entropy for s in known", "axes.imshow"):
        assert of_cell(outputs, part)["image/png"].startswith("iVBORw0KGgo")
    assert not [shown for shown in outputs.values() if "stderr" in shown]


def export_to(trace: Path, target: Path) -> Path:
    with open_trace(trace) as reader:
        write_export(load_exporter("notebook"), reader, ExportOptions(target), lambda *_: None)
    return target


def test_the_notebook_of_a_training_shows_its_curves(tmp_path: Path) -> None:
    file = export(unpack("training", tmp_path), "notebook")
    outputs = run_cells(file, file.parent, tmp_path)
    assert of_cell(outputs, "t.total_norm")["image/png"].startswith("iVBORw0KGgo")
    assert "trace.tokens" not in sources(file)


@pytest.mark.parametrize("n_steps", [0, 6])
def test_the_curves_reach_to_the_last_step_and_mark_losses_that_are_not_finite(
    n_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: None)
    cells = read_notebook(export(unpack("training", tmp_path), "notebook")).cells
    (cell,) = [cell.source for cell in cells if "t.total_norm" in cell.source]
    losses = [2.0, 1.5, math.inf, math.nan, math.nan, math.nan][:n_steps]
    steps = {n: TrainingStepRecord(loss, "reported", (0.1,)) for n, loss in enumerate(losses)}
    trace = SimpleNamespace(training_steps=lambda *_: steps)
    names: dict[str, Any] = {"trace": trace, "GENERATION": 0, "BRANCH": 0}
    exec(cell, names)
    assert names["lost"] == [n for n in steps if n >= 2]
    if n_steps:
        assert names["upper"].get_xlim() == (-0.5, 5.5)
    plt.close(names["figure"])


def test_the_notebook_is_stored_without_outputs(tmp_path: Path) -> None:
    assert_without_outputs(export(sample_trace(tmp_path / "run.flextrace"), "notebook"))


def test_the_notebook_begins_with_the_chosen_generation(tmp_path: Path) -> None:
    file = export(sample_trace(tmp_path / "run.flextrace"), "notebook", generation=1)
    assert "GENERATION, BRANCH = 1, 0" in sources(file)


def test_a_trace_without_masks_has_no_cell_for_them(tmp_path: Path) -> None:
    file = export(sample_trace(tmp_path / "run.flextrace", steps=0), "notebook")
    assert "imshow" not in sources(file)
    assert "trace.tokens" in sources(file)
