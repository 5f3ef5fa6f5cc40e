"""Completion of the condition of a breakpoint while it is typed."""

from __future__ import annotations

from flexinspect.tui.screens.breakpoints_screen import complete


def words(text: str, cursor: int | None = None, **known: tuple[str, ...]) -> list[str]:
    return [one.text for one in complete(text, len(text) if cursor is None else cursor, **known)]


def test_names_are_completed_from_their_beginning() -> None:
    assert words("ent") == ["entropy"]
    assert words("step > 2 and em") == ["empty-row"]
    assert "entropy" in words("")
    assert words("not f") == ["fallback", "finding"]


def test_the_word_at_the_cursor_is_replaced() -> None:
    (found,) = complete("entro > 3 and step > 2", 5)
    assert (found.text, found.start, found.stop) == ("entropy", 0, 5)
    assert found.help.startswith("entropy of the newest row")


def test_suggestions_depend_on_the_words_before() -> None:
    assert words("entropy ") == ["==", "!=", "<", "<=", ">", ">=", "in"]
    assert words("token ") == ["==", "!=", "in"]
    assert words("phase == ") == ['"prefill"', '"decode"']
    assert words('path == "sd') == ['"sdpa"']
    assert words("rss > 2 ") == ["KiB", "MiB", "GiB", "and", "or"]
    assert words("entropy > 3 ") == ["and", "or"]
    assert words("nan ") == ["@", "and", "or"]
    assert "layers.*.self_attn" in words("nan @ lay")
    assert words("nan @ ", modules=("lm_head",)) == ["lm_head"]
    assert words("nan [o") == ["once", "off"]


def test_findings_are_completed_where_their_ids_are_known() -> None:
    ids = ("mask.leak", "mask.future", "numbers.nan")
    assert words("finding m", finding_ids=ids) == ["mask.*", "mask.leak", "mask.future"]
    assert words("finding mask.* ", finding_ids=ids) == ["==", ">=", "and", "or"]
    assert words("finding mask.* >= w", finding_ids=ids) == ["warning"]
