"""Files of figures: the suffix decides, text stays text, and nothing is half-written."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.mask_pictures import isolation_picture

from flexinspect.core.errors import UsageError
from flexinspect.core.languages import load_labels
from flexinspect.figures import fonts
from flexinspect.figures.figure_files import save_figure
from flexinspect.figures.mask_figure import draw_mask_figure, save_mask_figure

PICTURE = isolation_picture(2, 4, 1, 2, words={0: "<s>", 1: " a&b", 2: " 法国", 3: "$x$"})
CHINESE = load_labels("zh")


def texts_of_svg(text: str) -> set[str]:
    root = ET.fromstring(text)
    return {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}


def test_a_png_has_its_size_times_dots_per_inch(tmp_path: Path) -> None:
    file = save_mask_figure(PICTURE, tmp_path / "a.PNG", labels=CHINESE, width=3, dpi=200)
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20]) == (600,)
    assert [each.name for each in tmp_path.iterdir()] == ["a.PNG"]


def test_text_of_svg_and_html_stays_text(tmp_path: Path) -> None:
    svg = save_mask_figure(PICTURE, tmp_path / "a.svg", labels=CHINESE).read_text("utf-8")
    assert {"<s>", "a&b", "法国", "$x$", "段1", "可以关注", "键位置（被关注）"} <= texts_of_svg(svg)
    page = save_mask_figure(PICTURE, tmp_path / "a.html", labels=CHINESE).read_text("utf-8")
    assert '<html lang="zh">' in page
    assert page.count("<svg") == 1
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    for suffix in (".svg", ".pdf"):
        one, other = (
            save_mask_figure(PICTURE, tmp_path / f"{n}{suffix}", labels=CHINESE).read_bytes()
            for n in range(2)
        )
        assert one == other, suffix


def test_a_pdf_embeds_its_fonts_as_truetype_and_can_be_searched(tmp_path: Path) -> None:
    data = save_mask_figure(PICTURE, tmp_path / "a.pdf", labels=CHINESE).read_bytes()
    assert data.startswith(b"%PDF-")
    assert b"/Subtype /Type3" not in data
    assert b"/FontFile2" in data
    assert b"/ToUnicode" in data


def test_an_unknown_suffix_and_a_resolution_nobody_prints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no suffix of a format") as error:
        save_mask_figure(PICTURE, tmp_path / "a.bmp", labels=CHINESE)
    assert error.value.hint == "Name a file .png, .svg, .pdf or .html."
    with pytest.raises(UsageError, match="cannot have 5 dots per inch"):
        save_mask_figure(PICTURE, tmp_path / "a.png", labels=CHINESE, dpi=5)
    with pytest.raises(UsageError, match=r"96,000 by .* pixels are too many"):
        save_mask_figure(PICTURE, tmp_path / "a.png", labels=CHINESE, width=40, dpi=2400)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(UsageError, match=r"a\.svg is a folder"):
        save_mask_figure(PICTURE, tmp_path / "a.svg", labels=CHINESE)
    with pytest.raises(UsageError, match=r"There is no folder .*no for a\.svg"):
        save_mask_figure(PICTURE, tmp_path / "no" / "a.svg", labels=CHINESE)
    name = f"{'a' * 300}.svg"
    with pytest.raises(UsageError, match=r"cannot be written: File name too long\."):
        save_mask_figure(PICTURE, tmp_path / name, labels=CHINESE)
    assert [each.name for each in tmp_path.iterdir()] == ["a.svg"]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    target.write_bytes(b"old")
    figure = draw_mask_figure(PICTURE, labels=CHINESE)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_figure(figure, target, title="a")
    assert target.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="A figure needs matplotlib") as error:
        draw_mask_figure(PICTURE, labels=CHINESE)
    assert error.value.hint == "pip install 'flexinspect[figures]'"
    assert error.value.exit_code == 2


# -- fonts -----------------------------------------------------------------------------------------


def has_no_chinese_font(monkeypatch: pytest.MonkeyPatch) -> None:
    latin = tuple(e for e in fonts._entries() if e.name == fonts.BASE_FAMILY)
    monkeypatch.setattr(fonts, "_entries", lambda: latin)


def test_chinese_text_has_a_font_with_its_characters() -> None:
    found = fonts.find_fonts(["键位置", "key"])
    assert found.families[0] == fonts.BASE_FAMILY
    assert len(found.families) > 1
    assert found.missing == frozenset()
    assert fonts.find_fonts(["key × ↵ ␣ …"]).families == (fonts.BASE_FAMILY,)


def test_without_a_chinese_font_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    has_no_chinese_font(monkeypatch)
    with pytest.raises(UsageError, match="No font on this machine has the characters '") as error:
        draw_mask_figure(isolation_picture(2, 3), labels=CHINESE)
    assert "fonts-noto-cjk or fonts-wqy-microhei" in (error.value.hint or "")
    draw_mask_figure(isolation_picture(2, 3), labels=load_labels("en"))


def test_no_warning_is_logged_about_a_face_that_a_font_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figure = draw_mask_figure(isolation_picture(2, 3), labels=CHINESE)
    replaced = replace(isolation_picture(2, 3), title="掩码 mask")
    draw_mask_figure(replaced, labels=CHINESE, figure=figure.__class__()).draw_without_rendering()
    assert caplog.records == []


def test_a_character_without_any_font_is_written_as_its_code() -> None:
    found = fonts.find_fonts(["a\U0001f5fc"])
    assert found.safe("a\U0001f5fcb") == "a<U+1F5FC>b"
