"""The notebook of flowchart and masks: all of its cells run, in both languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.paths import DOCS

NOTEBOOK = DOCS / "examples" / "flowchart_and_attention_mask_visualization.ipynb"


def read_notebook() -> Any:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_the_notebook_is_stored_without_outputs_and_in_two_languages() -> None:
    notebook = read_notebook()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
        else:
            assert any("\u4e00" <= char <= "\u9fff" for char in cell.source), cell.source


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_all_cells_run_and_the_figures_and_verdicts_are_there(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = read_notebook()
    for cell in notebook.cells:
        cell.source = cell.source.replace('LANGUAGE = "en"', f'LANGUAGE = "{language}"')
        cell.source = cell.source.replace("dpi=300", "dpi=60")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # else they lie in the user's home
        monkeypatch.setenv(name, str(tmp_path / name))
    work = tmp_path / "work"
    work.mkdir()
    place = {"metadata": {"path": str(work)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "(54, 54)" in text
    verdicts = {
        "en": (
            "Causal violations: 0",
            "First generated token attends to: 50/50",
            "Tests failed: 1",
        ),
        "zh": ("因果性违规：0", "第一个生成的 token 关注：50/50", "行 17（改写 2）"),
    }
    for verdict in verdicts[language]:
        assert verdict in text
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 6
    files = sorted(file.name for file in (work / "attention_mask_outputs").iterdir())
    assert files == ["flowchart.png", "large.png", "medium.png", "small.png"]
