"""`flexinspect mask`: pictures, analysis, verification and files from every source."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import attention_trace, mask_trace

from flexinspect.cli.main import main
from flexinspect.figures import animation
from flexinspect.figures.themes import THEMES

SEED_LINES = [
    "Causal violations: 0",
    "Encoding cross-segment attention: 0",
    "First generated token attends to: 50/50",
    "All tests passed",
]


@pytest.fixture(autouse=True)
def in_empty_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEXINSPECT_LANG", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(mask_trace.write(tmp_path / "run.flextrace"))


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["mask", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["mask", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    return printed.err


def test_a_preset_is_verified_with_the_lines_of_the_notebook(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert out_of(capsys, "small", "--verify") == SEED_LINES
    assert out_of(capsys, "--verify", "--lang", "zh")[-1] == "所有测试通过"


def test_the_language_comes_from_environment_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flexinspect.toml").write_text('[figures]\nlang = "zh"\n')
    assert out_of(capsys, "--verify")[-1] == "所有测试通过"
    monkeypatch.setenv("FLEXINSPECT_LANG", "en")
    assert out_of(capsys, "--verify") == SEED_LINES


def test_a_violation_is_exit_code_1_with_a_counterexample(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = out_of(capsys, "causal", "--verify", code=1)
    assert lines[2] == "  first: row 17 (paraphrase 2) attends to key 0 (paraphrase 1)"
    data = json.loads("\n".join(out_of(capsys, "causal", "--verify", "--json", code=1)))
    assert data["exit_code"] == 1
    assert data["verification"]["checks"]["isolation"]["violations"] == 799
    assert data["verification"]["lines"] == lines
    assert out_of(capsys, "causal", "--verify", "--checks", "causal,rows")[-1] == "All tests passed"


def test_the_picture_without_colours_shows_segments_isolation_and_fusion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = out_of(capsys, "small", "--plain")
    assert lines[:2] == ["segment-isolation", "54 rows × 54 keys"]
    assert lines[3] == "Seg1 ■" + " ·" * 53
    assert "   Seg2    ·    ■    ·  Isolated" in lines
    assert "   Gen2    ■    ■    ■    ■    ■    ·    ·    ·  Fusion" in lines
    assert "\x1b" not in "".join(lines)


def test_a_sampled_preset_is_drawn_in_few_cells(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out_of(capsys, "medium", "--max-display-positions", "30")
    assert lines[1].startswith("143 rows × 143 keys, shown in ")
    data = json.loads("\n".join(out_of(capsys, "medium", "--json")))
    assert len(data["picture"]["states"]) <= 40
    assert data["picture"]["row_edges"][-1] == 143


def test_flags_and_files_change_the_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text("num_paraphrases = 4\ntokens_per_paraphrase = 30\n")
    flags = ("--separator-tokens", "3", "--num_generated_tokens", "2", "--verify")
    assert out_of(capsys, "mine.toml", *flags)[2] == "First generated token attends to: 130/130"


def test_colours_are_used_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = out_of(capsys, "small")
    assert "▀" in "\n".join(lines)
    assert any("\x1b[" in line for line in lines)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(out_of(capsys, "small"))


def test_two_masks_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out_of(capsys, "small", "--against", "causal", "--analysis")
    assert "segment-isolation against causal" in lines[0]
    assert "- lost (declared open)" in "\n".join(lines)
    assert "Compared with causal: 799 cells lost, 0 leaked" in lines
    assert out_of(capsys, "--against", "causal", "--verify", code=1)[-1] == "Tests failed: 1"


def test_heads_are_drawn_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out_of(capsys, "per-head(causal, sliding-window(1))", "--head", "1", "--length", "4")
    assert lines[3:7] == ["■ · · ·", "· ■ · ·", "· · ■ ·", "· · · ■"]
    assert "There is no head 2" in error_of(capsys, "per-head(causal, full)", "--head", "2")


def test_cells_are_written_to_files_and_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("a.npy", "a.csv", "a.txt"):
        assert main(["mask", "small", "-o", name]) == 0
    cells = np.load(tmp_path / "a.npy")
    assert (cells.shape, cells.dtype) == ((54, 54), np.bool_)
    assert (np.loadtxt(tmp_path / "a.csv", delimiter=",") == cells).all()
    assert "Fusion" in (tmp_path / "a.txt").read_text("utf-8")
    capsys.readouterr()
    assert out_of(capsys, "small", "--mask", "a.npy", "--verify") == SEED_LINES
    assert out_of(capsys, "a.npy", "--verify") == [SEED_LINES[0], SEED_LINES[-1]]


def test_a_users_mask_mod_is_verified(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cli_masks.py").write_text("def rule(b, h, q, kv):\n    return kv <= q\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = out_of(capsys, "cli_masks:rule", "--verify", code=1)
    assert lines[1] == "Encoding cross-segment attention: 799"
    assert "cannot be loaded" in error_of(capsys, "cli_masks:absent")


def test_a_prompt_is_drawn_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out_of(capsys, "--prompt", "Who wrote it?", "--prompt", "Its author?")
    names = [line.split("■")[0].strip() for line in lines[3:]]
    assert "author" in "".join(names)
    flags = ("--num-paraphrases", "2", "--num-generated-tokens", "1", "--verify")
    assert out_of(capsys, "--dataset", "demo", *flags)[-1] == "All tests passed"


def test_a_trace_is_verified_against_its_declared_mask(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    assert out_of(capsys, "--trace", trace, "--verify")[-1] == "All tests passed"
    lines = out_of(capsys, "--trace", trace, "--layer", "1", "--verify", code=1)
    assert (
        '  first: row 9 (" this", paraphrase 2) attends to key 2 (" city", paraphrase 1)' in lines
    )
    assert "Cells that differ from segment-isolation: 2 lost, 1 leaked" in lines
    shown = out_of(capsys, "--trace", trace, "--layer", "1", "--view", "difference")
    assert shown[0] == "executed mask, layer 1, head 0 against segment-isolation"
    assert "+ leaked (declared closed)" in "\n".join(shown)
    for view, code in (("received", 0), ("declared", 0)):
        assert out_of(capsys, "--trace", trace, "--view", view, code=code)
    assert "no layer 99" in error_of(capsys, "--trace", trace, "--layer", "99")


def test_the_list_and_the_help_name_every_mask(capsys: pytest.CaptureFixture[str]) -> None:
    assert any(line.startswith("sliding-window(size)") for line in out_of(capsys, "--list"))
    assert "shared-prefix" in json.loads("\n".join(out_of(capsys, "--list", "--json")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("smal", "There is no mask and no preset 'smal'.\nDid you mean small?"),
        ("causal(3)", "causal is written causal"),
        ("small --mask dilatd(2)", "Did you mean dilated?"),
        ("causal --mask full", "'causal' and --mask full are two masks"),
        ("small --num-paraphrases x", "--num-paraphrases x is not a whole number"),
        ("small --num-paraphrases 0", "in num_paraphrases: Expected `int` >= 1"),
        ("small --display-mode half", "in display_mode: Invalid enum value 'half'"),
        ("small --tokens-per-paraphrase 9999", "A picture of all 30006 positions"),
        ("none.toml", "The mask configuration none.toml cannot be read"),
        ("none.npy", "The mask none.npy cannot be read: No such file"),
        ("small --lang xx", "There are no labels in 'xx'"),
        ("small --verify --checks casual", "Did you mean causal?"),
        ("--trace a.flextrace --view received --verify", "--view received shows blocks"),
        ("small --checks causal", "--checks goes with --verify"),
        ("small --layer 3", "--layer goes with --trace"),
        ("small --cue x", "--cue goes with --prompt or --dataset"),
        ("small --trace run.flextrace", "A trace has its own mask"),
        ("--trace none.flextrace", "There is no trace at"),
        ("--prompt a --length 4", "--prompt and --length exclude each other"),
        ("--prompt a --separator-tokens 3", "--prompt decides the sizes, and --separator-tokens"),
        ("small --length 4", "--length decides the sizes, and small does too"),
        ("segment-isolation --length 9", "'segment-isolation' needs segments"),
        ("small -o a.bmp", "a.bmp has no suffix of a format"),
        ("small -o none/a.txt", "There is no folder none"),
        ("--length 9999999 causal", "--length 9999999 is more than 1048576 tokens"),
        ("--length 999999 -o a.csv causal", "a .csv file holds at most"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert message in error_of(capsys, *arguments.split())


def test_an_array_that_is_no_mask_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.array([0.5]))
    assert "is not a mask: bool (rows, keys)" in error_of(capsys, "a.npy")
    (tmp_path / "b.npy").write_bytes(b"no array")
    assert "it is not a NumPy array" in error_of(capsys, "b.npy")
    header = b"{'descr': ('|b1', 'shape'".ljust(117) + b"\n"  # numpy parses it as Python
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header)
    assert "it is not a NumPy array" in error_of(capsys, "b.npy")
    (tmp_path / "sizes.json").write_text('{"\\ud800": 1}')
    assert "half of a surrogate pair" in error_of(capsys, "sizes.json")
    np.save(tmp_path / "c.npy", np.tri(5, dtype=bool))
    for flags in (["small", "--mask"], ["small", "--against"], ["--length", "54", "--mask"]):
        assert "c has 5 × 5 cells, and 54 × 54 are needed" in error_of(capsys, *flags, "c.npy")


# -- figures --------------------------------------------------------------------------------------


def test_a_figure_is_drawn_in_the_format_of_its_suffix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["small", "-o", "a.svg", "--theme", "dark", "--width", "5", "--lang", "zh"]
    assert main(["mask", *arguments]) == 0
    svg = (tmp_path / "a.svg").read_text("utf-8")
    assert 'width="360pt"' in svg
    assert THEMES["dark"].background in svg
    assert ">可以关注<" in svg
    assert "saved a.svg" in capsys.readouterr().err


def test_the_analysis_of_a_figure_is_drawn_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mask", "small", "--analysis", "-o", str(tmp_path / "a.svg")]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["a.svg", "a_analysis.svg"]
    assert "FlexAttention skips" in (tmp_path / "a_analysis.svg").read_text("utf-8")
    assert "saved" in capsys.readouterr().err


@pytest.mark.slow
def test_all_pictures_of_the_presets_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = out_of(capsys, "--all", "--dpi", "40")
    folder = tmp_path / "attention_mask_outputs"
    assert {str(file.relative_to(tmp_path)) for file in folder.iterdir()} == set(lines)
    kinds = ("mask", "encoding", "generation", "analysis")
    names = {f"{size}_{kind}.png" for size in ("small", "medium", "large") for kind in kinds}
    assert {file.name for file in folder.glob("*.png")} == {*names, "flowchart.png"}
    assert "Fusion" in (folder / "medium.txt").read_text("utf-8")
    assert "Blocks of 128 × 128" in (folder / "large.txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("medium", "medium does not go with it"),
        ("--verify", "--verify does not go with it"),
        ("--trace a.flextrace", "--trace does not go with it"),
        ("--num-paraphrases 9", "--num-paraphrases does not go with it"),
        ("-o all.png", "all.png is the name of one"),
        ("--mask dilatd(2)", "Did you mean dilated?"),
        ("--theme pink", "There is no theme 'pink'"),
        ("--width 900", "cannot be 900 inches wide"),
    ],
)
def test_a_wrong_request_for_all_pictures_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, message: str
) -> None:
    before = list(tmp_path.iterdir())
    assert message in error_of(capsys, "--all", *arguments.split())
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("arguments", [["-o", "a.gif"], ["-o", "a.gif", "--animate"]])
def test_a_gif_has_a_frame_per_step(tmp_path: Path, arguments: list[str]) -> None:
    assert main(["mask", "small", "--width", "3", *arguments]) == 0
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 6  # type: ignore[attr-defined]


def test_an_animation_of_a_trace_shows_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_trace.write(tmp_path / "a.flextrace", attention_trace.SyntheticGeneration())
    flags = ["--trace", "a.flextrace", "--layer", "1", "--head", "1", "--width", "3"]
    rows: list[Any] = []
    steps = animation.generation_steps

    def listened(picture: Any, labels: Any, weights: Any) -> Any:
        rows.extend(weights)
        return steps(picture, labels, weights)

    monkeypatch.setattr(animation, "generation_steps", listened)
    for more in (["--against", "causal"], []):
        assert main(["mask", *flags, *more, "--animate", "-o", "a.html"]) == 0
    assert [row is not None for row in rows] == [True] * 8
    assert (tmp_path / "a.html").read_text("utf-8").count("data:image/png") == 5


def test_an_animation_needs_a_file_that_can_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--animate"], ["--animate", "-o", "a.png"]):
        assert "-o generation.gif" in error_of(capsys, "small", *arguments)


def test_an_unknown_theme_is_refused_before_the_mask_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "There is no theme 'pink'" in error_of(capsys, "small", "--theme", "pink")


def test_a_missing_library_is_one_sentence_with_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    err = error_of(capsys, "small", "-o", "a.png")
    assert "A figure needs matplotlib" in err
    assert "pip install 'flexinspect[figures]'" in err
    assert "A figure needs matplotlib" in error_of(capsys, "--all")
    assert not list(tmp_path.glob("a*"))
