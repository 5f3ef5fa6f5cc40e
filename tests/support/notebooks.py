"""Running Jupyter notebooks, and what their cells show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient


def read_notebook(file: Path) -> Any:
    """Return a valid notebook."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run_cells(file: Path, folder: Path, home: Path) -> dict[str, dict[str, str]]:
    """Run a notebook in a folder; return what each cell showed, by its source: kind → text.

    `home` gets the files that IPython and Jupyter would write to the user's home.
    """
    notebook, place = read_notebook(file), {"metadata": {"path": str(folder)}}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(home))
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    shown: dict[str, dict[str, str]] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {output.get("name"): output.get("text")})
            shown.setdefault(cell.source, {}).update(data)
    return shown


def of_cell(outputs: dict[str, dict[str, str]], part: str) -> dict[str, str]:
    """Return what the one cell with a part of source showed."""
    (found,) = [shown for source, shown in outputs.items() if part in source]
    return found


def assert_without_outputs(file: Path) -> None:
    """Check that a notebook is stored as it is before it runs."""
    cells = [cell for cell in read_notebook(file).cells if cell.cell_type == "code"]
    assert len(cells) >= 6
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
