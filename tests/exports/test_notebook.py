"""The exported notebook runs as it is, and shows what the trace holds."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.earlier_traces import unpack
from support.exporting import export
from support.traces import sample_trace

from flexinspect.exports.base import ExportOptions, load_exporter, write_export
from flexinspect.records.training_step import TrainingStepRecord
from flexinspect.trace.reader import open_trace

ODD_NAME = 'it\'s "odd" {run} \\ 作.flextrace'


def read(file: Path) -> Any:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def sources(file: Path) -> str:
    return "\n".join(cell.source for cell in read(file).cells)


def run_cells(file: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> dict[str, dict[str, str]]:
    """Return what each cell of a notebook showed, by its source: kind of output → text."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # else they lie in the user's home
        monkeypatch.setenv(name, str(home))
    notebook, place = read(file), {"metadata": {"path": str(file.parent)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    shown: dict[str, dict[str, str]] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {output.get("name"): output.get("text")})
            shown.setdefault(cell.source, {}).update(data)
    return shown


def of_cell(outputs: dict[str, dict[str, str]], part: str) -> dict[str, str]:
    (found,) = [shown for source, shown in outputs.items() if part in source]
    return found


def test_the_notebook_shows_findings_tokens_mask_and_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, folder = sample_trace(tmp_path / ODD_NAME), tmp_path / "notebooks"
    folder.mkdir()
    file = Path(shutil.move(export_to(trace, folder / "run.ipynb"), tmp_path / "moved"))
    moved = Path(shutil.move(file, folder / "run.ipynb"))  # the path in it is relative
    outputs = run_cells(moved, monkeypatch, tmp_path)
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


def test_the_notebook_of_a_training_shows_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export(unpack("training", tmp_path), "notebook")
    outputs = run_cells(file, monkeypatch, tmp_path)
    assert of_cell(outputs, "t.total_norm")["image/png"].startswith("iVBORw0KGgo")
    assert "trace.tokens" not in sources(file)


@pytest.mark.parametrize("n_steps", [0, 6])
def test_the_curves_reach_to_the_last_step_and_mark_losses_that_are_not_finite(
    n_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "show", lambda: None)
    cells = read(export(unpack("training", tmp_path), "notebook")).cells
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
    cells = read(export(sample_trace(tmp_path / "run.flextrace"), "notebook")).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 6
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_notebook_begins_with_the_chosen_generation(tmp_path: Path) -> None:
    file = export(sample_trace(tmp_path / "run.flextrace"), "notebook", generation=1)
    assert "GENERATION, BRANCH = 1, 0" in sources(file)


def test_a_trace_without_masks_has_no_cell_for_them(tmp_path: Path) -> None:
    file = export(sample_trace(tmp_path / "run.flextrace", steps=0), "notebook")
    assert "imshow" not in sources(file)
    assert "trace.tokens" in sources(file)
