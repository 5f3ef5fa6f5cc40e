"""Completion of the condition of a breakpoint while it is typed."""

from __future__ import annotations

from flexinspect.tui.screens.breakpoints_screen import complete


def completions(text: str, cursor: int | None = None, **known: tuple[str, ...]) -> list[str]:
    return [one.text for one in complete(text, len(text) if cursor is None else cursor, **known)]


def test_names_are_completed_from_their_beginning() -> None:
    assert completions("ent") == ["entropy"]
    assert completions("step > 2 and em") == ["empty-row"]
    assert "entropy" in completions("")
    assert completions("not f") == ["fallback", "finding"]


def test_the_word_at_the_cursor_is_replaced() -> None:
    (found,) = complete("entro > 3 and step > 2", 5)
    assert (found.text, found.start, found.stop) == ("entropy", 0, 5)
    assert found.help.startswith("entropy of the newest row")


def test_suggestions_depend_on_the_words_before() -> None:
    assert completions("entropy ") == ["==", "!=", "<", "<=", ">", ">=", "in"]
    assert completions("token ") == ["==", "!=", "in"]
    assert completions("phase == ") == ['"prefill"', '"decode"']
    assert completions('path == "sd') == ['"sdpa"']
    assert completions("rss > 2 ") == ["KiB", "MiB", "GiB", "and", "or"]
    assert completions("entropy > 3 ") == ["and", "or"]
    assert completions("nan ") == ["@", "and", "or"]
    assert "layers.*.self_attn" in completions("nan @ lay")
    assert completions("nan @ ", modules=("lm_head",)) == ["lm_head"]
    assert completions("nan [o") == ["once", "off"]


def test_findings_are_completed_where_their_ids_are_known() -> None:
    ids = ("mask.leak", "mask.future", "numbers.nan")
    assert completions("finding m", finding_ids=ids) == ["mask.*", "mask.leak", "mask.future"]
    assert completions("finding mask.* ", finding_ids=ids) == ["==", ">=", "and", "or"]
    assert completions("finding mask.* >= w", finding_ids=ids) == ["warning"]
