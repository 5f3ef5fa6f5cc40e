"""The examples and the page about own code match what runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.notebooks import assert_without_outputs, of_cell, run_cells
from support.pages import run_python
from support.paths import DOCS
from support.warm_python import Ran as Ended
from support.warm_python import run_warm

from flexinspect.trace.reader import open_trace

EXAMPLES = DOCS / "examples"
NOTEBOOK = EXAMPLES / "watch.ipynb"
PAGE = (DOCS / "own-code.md").read_text("utf-8")
DYNAMIC = ("--cache", "dynamic")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "patched forward": ("patched_forward.py", ()),
    "registered name": ("registered_attention.py", ()),
    "masks for generate": ("generate_segments.py", ()),
    "masks passed over": ("generate_segments.py", DYNAMIC),
}
NAMES = [
    "watch.ipynb",
    "watch_generate.py",
    "one_token_off.py",
    *{script for script, _ in CASES.values()},
]


def python(arguments: Sequence[str], folder: Path) -> Ended:
    folder.mkdir(exist_ok=True)
    done = run_warm(arguments, cwd=folder)
    assert done.code == 0, done.err
    return done


def show(path: Path, panel: str) -> str:
    return python(["-m", "flexinspect", "show", path.name, "--panel", panel], path.parent).out


class Ran:
    """What an example printed by itself and under watch, and the trace that this left."""

    def __init__(self, case: str, folder: Path) -> None:
        script, options = CASES[case]
        command = [str(EXAMPLES / script), *options]
        self.folder, self.path = folder / "plain", folder / "watched" / "odd.flextrace"
        self.plain = python(command, self.folder).out
        self.watched = python([*command, "--watch", self.path.name], self.path.parent).out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Ran] = {}

    def get(case: str) -> Ran:
        if case not in done:
            done[case] = Ran(case, tmp_path_factory.mktemp("example"))
        return done[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_an_example_answers_the_same_with_and_without_watch(ran: Any, case: str) -> None:
    answer = "Czech koruna" if case == "masks passed over" else ".cz"
    assert ran(case).plain == f"answer: {answer}\n"
    assert list(ran(case).folder.iterdir()) == []
    assert ran(case).watched.startswith(
        f"answer: {answer}\nodd.flextrace (finished): 1 generation, 3 steps, "
    )
    assert ran(case).watched.endswith(f"flexinspect open {ran(case).path}\n")


@pytest.mark.parametrize("case", CASES)
def test_its_trace_holds_what_was_generated_and_meant(ran: Any, case: str) -> None:
    with open_trace(ran(case).path) as trace:
        chosen = [token.text for token in trace.tokens(0) if token.step is not None]
        assert "".join(chosen).strip().startswith("Czech koruna" if "passed" in case else ".cz")
        assert [step.phase for step in trace.steps(0)][:1] == ["prefill"]
        labels = [segment.label for segment in trace.segments(0)]
        assert labels == ["bos", "question 1", "question 2", "question 3", "cue", "generated"]
        assert trace.generation(0).declared["preset"] == "segment-isolation"


@pytest.mark.parametrize("case", ["patched forward", "registered name", "masks for generate"])
def test_the_mask_that_ran_is_the_one_that_was_meant(ran: Any, case: str) -> None:
    shown = show(ran(case).path, "mask")
    assert "The declared mask is segment-isolation; the executed mask is the same." in shown


@pytest.mark.parametrize("case", ["patched forward", "registered name"])
def test_every_layer_ran_flex_attention_and_passes_its_lse_check(ran: Any, case: str) -> None:
    with open_trace(ran(case).path) as trace:
        calls = [call for step in trace.steps(0) for call in trace.calls(0, step.step)]
    assert {call.path for call in calls} == {"flex uncompiled"}
    assert [call.layer for call in calls] == [0, 1, 2, 3] * 3
    assert all(call.lse_error is not None and call.lse_error < 1e-4 for call in calls)


def test_the_page_describes_the_odd_answer_as_it_is_shown(ran: Any) -> None:
    odd = ran("masks passed over")
    assert re.search(r"answer: .*", PAGE)[0] + "\n" == odd.plain  # type: ignore[index]
    (block,) = re.findall(r"--panel mask\n(.*?)```", PAGE, re.DOTALL)
    shown = show(odd.path, "mask")
    assert len(block.splitlines()) == 4
    for line in block.splitlines():
        assert line in shown
    assert "Step 0 ran sdpa, not FlexAttention" in show(odd.path, "path")


def variant(old: str, new: str, folder: Path) -> Path:
    """Return the trace of the registered example with one fault built into it."""
    source = (EXAMPLES / "registered_attention.py").read_text("utf-8")
    assert source.count(old) == 1
    (folder / "faulty.py").write_text(source.replace(old, new), "utf-8")
    python(["faulty.py", "--watch", "odd.flextrace"], folder)
    return folder / "odd.flextrace"


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        (
            "    AttentionMaskInterface.register(NAME, mask_",
            "    print(NAME, mask_",
            ["received no mask (every key is open)", "leaked 3811"],
        ),
        (
            "q_idx + q_offset, kv_idx + kv_offset",
            "q_idx, kv_idx",
            ["lost 511 · leaked 0", 'row 70 "." (generated)'],
        ),
    ],
    ids=["no mask function", "no offset"],
)
def test_the_page_names_the_reason_of_what_the_panel_says(
    old: str, new: str, parts: list[str], tmp_path: Path
) -> None:
    shown = show(variant(old, new, tmp_path), "mask")
    assert all(part in shown for part in parts)


def test_the_shortest_example_names_its_trace_and_shows_what_differs(tmp_path: Path) -> None:
    done = python([str(EXAMPLES / "watch_generate.py")], tmp_path)
    assert "Nairobi" in done.out
    (path,) = tmp_path.glob("watch-*.flextrace")
    assert f"flexinspect open {path}" in done.out
    assert "1 generation, " in done.out
    assert "The declared mask is segment-isolation; the executed mask differs" in show(path, "mask")


def test_borders_that_are_one_token_early_are_named_without_a_declaration(tmp_path: Path) -> None:
    script = str(EXAMPLES / "one_token_off.py")
    options = ("--no-ui", "--out", "own.flextrace")
    done = python(["-m", "flexinspect", "run", *options, script], tmp_path)
    assert done.out == "answer: yen\n"
    sentence = re.search(r"(warning: Every segment border .*?)  \[", PAGE)
    assert sentence is not None
    assert sentence[1] in done.err
    command = ["-m", "flexinspect", "findings", "own.flextrace", "--fail-on", "warning"]
    done = run_warm(command, cwd=tmp_path)
    assert done.code == 1
    assert "warning  segments.suspect-border" in done.out


def test_the_python_of_the_page_reads_a_trace(
    ran: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ran("masks passed over").path.parent)
    section = PAGE.split("## Reading a trace from Python\n")[1].split("\n## ")[0]
    names = run_python(section)
    assert section.count("```python") == 3
    printed = capsys.readouterr().out
    assert "[' Czech', ' koruna', '<eos>']" in printed
    assert "'question 1'" in printed
    assert names["mass"].shape == (3, 4, 8, len(names["labels"]))
    assert names["mass"].sum(-1) == pytest.approx(1, abs=1e-3)
    assert bool(names["cells"][0, 31, 1])
    assert np.array_equal(names["cells"][0], np.tri(70, dtype=bool))
    assert names["losing"].height > 3
    assert set(names["calls"]["path"]) == {"sdpa"}


def test_the_page_lists_every_example() -> None:
    on_disk = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    on_disk -= {"train.py", "flowchart_and_attention_mask_visualization.ipynb"}  # of other pages
    assert on_disk == set(NAMES)
    assert set(re.findall(r"\(examples/(\S+?)\)", PAGE)) == on_disk


# -- the notebook ---------------------------------------------------------------------------------


def test_the_notebook_is_stored_without_outputs() -> None:
    assert_without_outputs(NOTEBOOK)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each cell of the notebook showed, by its source: kind of output → text."""
    folders = [tmp_path_factory.mktemp(name) for name in ("notebook", "home")]
    return run_cells(NOTEBOOK, *folders)


def test_the_notebook_shows_the_summary_of_the_handle(outputs: dict[str, dict[str, str]]) -> None:
    assert outputs["trace"]["text/html"].startswith(
        '<div style="color: inherit"><div><strong>watch-'
    )
    assert "(finished): 1 generation, 3 steps, " in outputs["trace"]["text/html"]
    assert "<code>flexinspect open /" in outputs["trace"]["text/html"]
    assert "\nflexinspect open /" in outputs["trace"]["text/plain"]


def test_the_notebook_reads_tokens_masks_arrays_and_a_frame(
    outputs: dict[str, dict[str, str]],
) -> None:
    assert of_cell(outputs, "flexinspect.watch(")["text/plain"] == "' Czech koruna'"
    assert "step 0: ' Czech', entropy " in of_cell(outputs, "step.entropy")["stdout"]
    rows = of_cell(outputs, "seen = np.array")["stdout"].splitlines()
    assert rows[3].startswith("What follows the final …")
    assert rows[3].split()[-8:-4] == ["1.00", "1.00", "1.00", "0.52"]
    assert of_cell(outputs, "np.stack")["text/plain"].startswith("((3, 4, 8, 9),")
    assert "<table" in of_cell(outputs, "reader.frame")["text/html"]
    assert of_cell(outputs, "reader.frame")["text/plain"].count("sdpa") == 4
