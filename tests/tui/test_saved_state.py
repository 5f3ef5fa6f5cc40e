"""The saved state of the interface: an invalid file or folder never causes an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traces import sample_trace

from flexinspect.tui import saved_state


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_without_a_file_there_are_defaults() -> None:
    assert saved_state.load_state() == saved_state.InterfaceState()


def test_saved_values_are_loaded_and_the_others_are_kept() -> None:
    layout = saved_state.Layout(("run", "mask"), 3)
    saved_state.save_layout("generation", layout)
    saved_state.save_layout("training", saved_state.Layout(("training",)))
    saved_state.save_state(theme="nord")
    state = saved_state.load_state()
    assert state.layouts == {"generation": layout, "training": saved_state.Layout(("training",))}
    assert (state.theme, state.recent) == ("nord", ())


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"layouts": 3}', '{"layouts": {"generation": ["run"]}}', "[" * 100_000),
        '{"layouts": {"generation": {"panels": ["run"], "slots": 99}}}',
        '{"layouts": {"generation": {"panels": [], "slots": 1}}}',
        '{"panels": ["run", "mask"], "slots": 2}',
    ],
)
def test_an_invalid_file_gives_valid_settings(text: str) -> None:
    file = saved_state.state_file()
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert saved_state.load_state() == saved_state.InterfaceState()
    saved_state.save_state(theme="nord")
    assert saved_state.load_state().theme == "nord"


def test_a_folder_that_cannot_be_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    saved_state.save_state(theme="nord")
    assert saved_state.load_state() == saved_state.InterfaceState()


def test_recent_traces_are_newest_first_and_once(tmp_path: Path) -> None:
    names = [tmp_path / f"{n}.flextrace" for n in range(saved_state.N_RECENT + 3)]
    for path in [*names, names[0]]:
        saved_state.add_recent_trace(path)
    recent = saved_state.load_state().recent
    assert recent[:2] == (str(names[0]), str(names[-1]))
    assert len(recent) == saved_state.N_RECENT


def test_known_traces_are_traces_that_exist_and_come_once(tmp_path: Path) -> None:
    here, gone = tmp_path / "here.flextrace", tmp_path / "gone.flextrace"
    other = tmp_path / "other.flextrace"
    sample_trace(here)
    other.write_text("not a trace")
    saved_state.add_recent_trace(other)
    saved_state.add_recent_trace(here)
    saved_state.add_recent_trace(gone)
    assert saved_state.known_traces(tmp_path) == [here]


def test_a_trace_that_is_cut_short_is_known(tmp_path: Path) -> None:
    trace = sample_trace(tmp_path / "short.flextrace")
    whole = trace.read_bytes()
    trace.write_bytes(whole[: len(whole) // 2])
    assert saved_state.known_traces(tmp_path) == [trace]
