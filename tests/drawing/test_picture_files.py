"""Pictures: SVG that is exact, safe and always the same, PNG without seams, files whole or not."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from rich.segment import Segment
from rich.style import Style
from support.png import read_png
from textual.strip import Strip

from flexinspect.core.errors import FlexInspectError, UsageError
from flexinspect.drawing import picture_files
from flexinspect.drawing import picture_files as fonts
from flexinspect.drawing.heatmap import CIVIDIS, heat
from flexinspect.drawing.text_lines import line
from flexinspect.drawing.theme import Theme

LOOK = Theme()
RED, BLUE = "#ff0000", "#0000ff"
SVG = "{http://www.w3.org/2000/svg}"


def row(*spans: tuple[str, str], width: int | None = None) -> Strip:
    pieces = [(text, Style.parse(style)) for text, style in spans]
    return line(pieces, width or sum(len(text) for text, _ in spans))


def drawn(*strips: Strip, title: str = "t", note: str = "") -> ET.Element:
    return ET.fromstring(picture_files.to_svg(strips, title=title, look=LOOK, note=note))


def texts(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def fills(root: ET.Element) -> dict[str, str]:
    return {path.attrib["fill"]: path.attrib["d"] for path in root.iter(f"{SVG}path")}


def test_text_keeps_its_place_colour_and_length() -> None:
    root = drawn(row(("ab", RED), ("  cd", f"bold {BLUE}")))
    title, first, second = root.iter(f"{SVG}text")
    assert title.text == "t"
    assert (first.text, first.attrib["x"], first.attrib["fill"]) == ("ab", "0", RED)
    assert (second.text, second.attrib["x"], second.attrib["textLength"]) == ("cd", "32", "16")
    assert second.attrib["font-weight"] == "bold"
    assert first.attrib["y"] == second.attrib["y"] == "44.5"


def test_each_word_has_its_own_place_as_renderers_without_text_length_need() -> None:
    found = drawn(row(("  tab panel  日本 x", "none"), width=30)).findall(f".//{SVG}text")[1:]
    places = [(text.text, text.attrib["x"], text.attrib["textLength"]) for text in found]
    assert places == [
        *(("tab", "16", "24"), ("panel", "48", "40"), ("日", "104", "16"), ("本", "120", "16")),
        ("x", "144", "8"),
    ]


def test_a_background_covers_exactly_its_cells() -> None:
    assert fills(drawn(row(("a", "white"), ("bc", f"white on {RED}"), ("d", "white")))) == {
        RED: "M8 32h16v16h-16z"
    }


def test_half_blocks_are_areas_of_half_a_cell() -> None:
    assert fills(drawn(row(("▀▀", f"{RED} on {BLUE}"), ("▄", RED)))) == {
        BLUE: "M0 32h16v16h-16z",
        RED: "M0 32h16v8h-16zM16 40h8v8h-8z",
    }


def test_a_mark_on_a_block_does_not_change_its_width() -> None:
    assert fills(drawn(row(("█\u0301█ x", RED)))) == {RED: "M0 32h16v16h-16z"}


@pytest.mark.parametrize(
    ("char", "path"),
    [
        ("█", "M0 32h8v16h-8z"),
        ("▂", "M0 44h8v4h-8z"),
        ("▎", "M0 32h2v16h-2z"),
        ("▐", "M4 32h4v16h-4z"),
        ("▚", "M0 32h4v8h-4zM4 40h4v8h-4z"),
        ("▙", "M0 32h4v8h-4zM0 40h4v8h-4zM4 40h4v8h-4z"),
        ("─", "M0 39h4v1h-4zM3 39h5v1h-5z"),
        ("└", "M3 32h1v8h-1zM3 39h5v1h-5z"),
    ],
)
def test_block_and_line_characters_are_areas(char: str, path: str) -> None:
    root = drawn(row((char, RED)))
    assert fills(root) == {RED: path}
    assert texts(root) == ["t"]


def test_shades_are_mixed_of_both_colours() -> None:
    assert list(fills(drawn(row(("▒", "#ff0000 on #000000"))))) == ["#000000", "#7f0000"]


def test_reverse_and_dim_are_colours_and_lines_are_decoration() -> None:
    root = drawn(row(("a", f"reverse {RED} on {BLUE}"), (" ", "none"), ("b", "dim #ffffff")))
    _, first, second = root.iter(f"{SVG}text")
    assert first.attrib["fill"] == BLUE
    assert list(fills(root)) == [RED]
    assert second.attrib["fill"] == "#888888"  # half way to the background #121212
    both = drawn(row(("c ", "underline strike"))).findall(f".//{SVG}text")[1]
    assert (both.text, both.attrib["text-decoration"]) == ("c\xa0", "underline line-through")


def test_a_wide_character_is_drawn_alone_in_two_cells() -> None:
    root = drawn(line([("a日本b", Style.parse(RED))], 6))
    found = [
        (text.text, text.attrib["x"], text.attrib["textLength"]) for text in root.iter(f"{SVG}text")
    ]
    assert found[1:] == [("a", "0", "8"), ("日", "8", "16"), ("本", "24", "16"), ("b", "40", "8")]


def test_text_of_the_trace_is_escaped() -> None:
    evil = "</text><script>alert(1)</script>&\"'"
    root = drawn(row((evil, "white")), title=evil, note=evil)
    assert texts(root) == [evil, evil, evil]
    assert root.find(f"{SVG}title") is not None
    assert not list(root.iter(f"{SVG}script"))


def test_characters_that_xml_forbids_are_replaced() -> None:
    unescaped = Strip([Segment("a\x1b\x00\ud800b", Style.parse("white"))], 5)
    root = drawn(unescaped, title="x\x07y")
    assert texts(root) == ["x�y", "a���b"]


def test_the_same_strips_give_the_same_bytes_without_external_references() -> None:
    levels = np.arange(60, dtype=np.uint8).reshape(6, 10) % 32
    one, two = (
        picture_files.to_svg(heat(levels, CIVIDIS, LOOK), title="t", look=LOOK, note="n")
        for _ in "ab"
    )
    assert one == two
    assert "http" not in one.replace("http://www.w3.org/2000/svg", "")
    assert 'shape-rendering="crispEdges"' in one


def test_title_and_note_frame_the_picture_and_an_empty_one_is_a_picture_too() -> None:
    root = drawn(row(("abc", "white"), width=20), title="Mask", note="error 1e-6")
    assert texts(root) == ["Mask", "abc", "error", "1e-6"]
    assert root.attrib["width"] == str(20 * 8 + 24)
    assert root.attrib["height"] == str(5 * 16 + 24)
    assert texts(drawn(title="Nothing here")) == ["Nothing", "here"]
    assert texts(drawn(title="")) == []


def test_the_page_has_the_background_of_the_theme() -> None:
    look = Theme(colors={**LOOK.colors, "background": "#fafafa", "foreground": "#101010"})
    root = ET.fromstring(picture_files.to_svg([row(("a", "none"))], title="t", look=look))
    page = root.find(f"{SVG}rect")
    assert page is not None
    assert page.attrib["fill"] == "#fafafa"
    assert root.findall(f".//{SVG}text")[1].attrib["fill"] == "#101010"


def test_a_png_of_half_blocks_has_no_seams() -> None:
    pytest.importorskip("resvg_py")
    _needs_font()
    yellow = np.full((12, 10), 31, np.uint8)
    pixels = read_png(
        picture_files.to_png(picture_files.to_svg(heat(yellow, CIVIDIS, LOOK), title="", look=LOOK))
    )
    assert pixels.shape[:2] == ((8 * 16 + 24) * 2, (10 * 8 + 24) * 2)
    inside = pixels[(12 + 32) * 2 : -24, 24:-24, :3]
    assert {tuple(color) for color in inside.reshape(-1, 3).tolist()} == {CIVIDIS.rgb[31]}
    checks = (np.indices((12, 10)).sum(axis=0) % 2 * 31).astype(np.uint8)
    pixels = read_png(
        picture_files.to_png(picture_files.to_svg(heat(checks, CIVIDIS, LOOK), title="", look=LOOK))
    )
    found = pixels[(12 + 32) * 2 : -24, 24:-24, :3]
    wanted = np.array(CIVIDIS.rgb)[checks].repeat(16, axis=0).repeat(16, axis=1)
    assert np.array_equal(found, wanted)


def test_a_png_shows_its_text() -> None:
    pytest.importorskip("resvg_py")
    _needs_font()
    pixels = read_png(picture_files.to_png(picture_files.to_svg([], title="WWWW", look=LOOK)))
    assert len(np.unique(pixels[24:56, 24:88, :3].reshape(-1, 3), axis=0)) > 4


def test_a_png_without_the_extra_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(FlexInspectError) as caught:
        picture_files.save(tmp_path / "a.png", [row(("a", "red"))], title="t", theme=LOOK)
    assert "flexinspect[png]" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    assert picture_files.save(tmp_path / "a.svg", [], title="t", theme=LOOK).exists()


def test_a_png_without_a_monospace_font_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    monkeypatch.setattr(picture_files, "find_monospace", lambda: None)
    with pytest.raises(FlexInspectError, match="monospace font"):
        picture_files.to_png(picture_files.to_svg([], title="t", look=LOOK))


def test_the_best_known_font_is_found_with_its_styles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("Menlo.ttc", "sub/DejaVuSansMono.ttf", "sub/DejaVuSansMono-Bold.ttf", "Arial.ttf"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    monkeypatch.setattr(fonts, "_font_folders", lambda: iter([tmp_path / "absent", tmp_path]))
    fonts.find_monospace.cache_clear()
    try:
        font = fonts.find_monospace()
    finally:
        fonts.find_monospace.cache_clear()
    assert font is not None
    family, files = font
    assert family == "DejaVu Sans Mono"
    assert [Path(file).name for file in files] == [
        "DejaVuSansMono-Bold.ttf",
        "DejaVuSansMono.ttf",
    ]


def test_save_replaces_an_existing_picture(tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    file.write_text("old")
    assert picture_files.save(str(file), [row(("new", "red"))], title="t", theme=LOOK) == file
    assert ">new</text>" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_a_failed_write_leaves_only_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.svg"
    file.write_text("old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FlexInspectError, match="No space left on device"):
        picture_files.save(file, [], title="t", theme=LOOK)
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_a_missing_folder_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(FlexInspectError, match="cannot be written") as caught:
        picture_files.save(tmp_path / "none" / "a.svg", [], title="t", theme=LOOK)
    assert caught.value.hint is not None


def test_another_suffix_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither SVG nor PNG"):
        picture_files.save(tmp_path / "a.gif", [], title="t", theme=LOOK)


def _needs_font() -> None:
    if fonts.find_monospace() is None:
        pytest.skip("no monospace font on this machine")


def test_without_a_home_folder_there_are_no_fonts_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    folders = list(fonts._font_folders())
    assert folders[0] == Path("/usr/share/fonts")
