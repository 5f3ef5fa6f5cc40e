"""The breakpoint language: what is parsed, what is refused and how, and the text form."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flexinspect.breakpoints.grammar import (
    COMPARISONS,
    MAX_EXPRESSION_LENGTH,
    OBSERVATIONS,
    SEVERITIES,
    UNITS,
    VALUE_NAMES,
    And,
    Compare,
    Expression,
    ExpressionError,
    FindingCondition,
    Name,
    Not,
    Number,
    ObservationCondition,
    Or,
    Text,
    ValueKind,
    parse,
    to_text,
)
from flexinspect.breakpoints.store import split_options
from flexinspect.core.errors import UsageError

FORMS = {
    "entropy > 3 and step > 2": And(
        (Compare(Name("entropy"), ">", Number(3)), Compare(Name("step"), ">", Number(2)))
    ),
    'token == "\\n"': Compare(Name("token"), "==", Text("\n")),
    "nan @ layers.*.self_attn": ObservationCondition("nan", "layers.*.self_attn"),
    "finding mask.*": FindingCondition("mask.*"),
    "empty-row": ObservationCondition("empty-row"),
    "fallback": ObservationCondition("fallback"),
    "prob < 0.1": Compare(Name("prob"), "<", Number(0.1)),
    "step == 12": Compare(Name("step"), "==", Number(12)),
    "finding * >= warning": FindingCondition("*", ">=", "warning"),
    "rss > 2 GiB": Compare(Name("rss"), ">", Number(2, "GiB")),
    "layer in (0, 3) or inf": Or(
        (Compare(Name("layer"), "in", (Number(0), Number(3))), ObservationCondition("inf"))
    ),
    '"un" in token': Compare(Text("un"), "in", Name("token")),
    "not (nan or inf)": Not(Or((ObservationCondition("nan"), ObservationCondition("inf")))),
}


@pytest.mark.parametrize("text", FORMS)
def test_every_form_round_trips_through_text(text: str) -> None:
    tree = parse(text)
    assert tree == FORMS[text]
    assert to_text(tree) == text


def test_and_binds_closer_than_or_and_not_closest() -> None:
    assert parse("nan or inf and not fallback") == Or(
        (
            ObservationCondition("nan"),
            And((ObservationCondition("inf"), Not(ObservationCondition("fallback")))),
        )
    )


def test_a_chain_of_comparisons_is_both_of_them() -> None:
    assert to_text(parse("0.1 < prob <= .5")) == "0.1 < prob and prob <= 0.5"


def test_a_finding_is_compared_with_a_severity_by_every_sign_with_and_without_spaces() -> None:
    for sign in COMPARISONS:
        assert parse(f"finding {sign} note") == FindingCondition("*", sign, "note")
        assert parse(f"finding mask.*{sign}note") == FindingCondition("mask.*", sign, "note")


def test_escapes_are_those_of_python() -> None:
    tree = parse(r'token == "\t\x41\u00e9\U0001F600\"\\"')
    assert isinstance(tree, Compare)
    assert tree.right == Text('\tAé\U0001f600"\\')


REFUSED = {
    # text: (what the mark is under, a piece of the sentence, a piece of the hint)
    "entropi > 3": ("entropi", "not a known name", "Did you mean entropy?"),
    "step = 3": ("=", "two signs: ==", ""),
    "nan && inf": ("&&", "the word and", ""),
    "!nan": ("!", "the word not", ""),
    "entropy": ("entropy", "not a condition", "entropy > 3"),
    'step > "a"': ('step > "a"', "step is a number", ""),
    "step > 2 GiB": ("step > 2", "an amount of memory", ""),
    "rss > 2 GiX": ("GiX", "not a unit", "Did you mean GiB?"),
    'path == "spda"': ('"spda"', "path is never this", 'Did you mean "sdpa"?'),
    "phase == decode": ("decode", "not a known name", 'Did you mean "decode", in quotes?'),
    "nan > 3": ("nan", "a complete condition", ""),
    "(step > 2": ("(", "not closed", ""),
    "step > 2)": (")", "never opened", ""),
    'token == "ab': ('"ab', "no end", ""),
    r'token == "\q"': (r"\q", "escape is unknown", r"\xHH"),
    r'token == "\ud800"': (r"\ud800", "does not exist", ""),
    "step == 3 nan": ("nan", "is complete", ""),
    "finding x > bad": ("bad", "severity", ""),
    "finding mask.* >= eror": ("eror", "severity", "Did you mean error?"),
    "empty_row": ("empty_row", "not a known name", "Did you mean empty-row?"),
    'token < "a"': ('token < "a"', "only be compared with", ""),
    "1 < 2": ("1 < 2", "Neither side", ""),
    "step in (1 2)": ("2", "commas", ""),
    "step not 3": ("3", "expected after a value and not", ""),
    "prob @ layers": ("prob", "not a condition", ""),
    "step == 3 @ layers": ("@", "can be followed by @", ""),
    "__import__('os')": ("__import__", "not a known name", ""),
    "step ** 2 > 3": ("*", "no meaning", ""),
    "nan @ a.*.*.*.*.*.*.*.*.*": ("a.*.*.*.*.*.*.*.*.*", "at most 8 wildcards", ""),
    "prob < 1e999": ("1e999", "not a number", ""),
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_invalid_expression_is_refused_with_its_place_underlined(text: str) -> None:
    under, message, hint = REFUSED[text]
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    error = caught.value
    assert message in error.reason
    assert text[error.start : error.stop] == under
    assert hint in (error.hint or "")
    _, shown, mark = error.message.splitlines()
    assert shown[mark.index("^") : len(mark)] == under


@pytest.mark.parametrize("text", ["", "   ", "not", "step >", "nan @", "finding", "step in"])
def test_an_incomplete_expression_is_underlined_after_its_end(text: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert caught.value.start == len(text.rstrip())


def test_the_underline_accounts_for_wide_and_invisible_characters() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse('token == "日本\t" and entropi > 3')
    _, shown, mark = caught.value.message.splitlines()
    assert "\t" not in shown
    # Two columns for each of the two wide characters.
    assert mark.index("^") == shown.index("entropi") + 2


def test_a_finding_that_no_rule_has_is_refused_where_the_ids_are_known() -> None:
    ids = ("mask.leak", "mask.future", "numbers.nan")
    assert parse("finding mask.*", finding_ids=ids) == FindingCondition("mask.*")
    with pytest.raises(ExpressionError) as caught:
        parse("nan and finding mask.leek", finding_ids=ids)
    assert caught.value.hint == "Did you mean mask.leak?"


def test_nesting_and_length_are_limited() -> None:
    for text in ("(" * 10_000 + "nan", "not " * 450 + "nan", "nan or " * MAX_EXPRESSION_LENGTH):
        with pytest.raises(ExpressionError):
            parse(text)


@settings(max_examples=400, deadline=None)
@example("'\\n'")
@given(st.text(max_size=60) | st.text("entropy ><=()\"'@.*not andorfiding0123[]\\x", max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        tree = parse(split_options(text)[0])
    except UsageError as error:
        assert isinstance(error, ExpressionError)
        assert 0 <= error.start <= error.stop <= max(len(text), 61) + 1
        assert len(error.message.splitlines()) == 3
    else:
        assert parse(to_text(tree)) == tree


_OTHERS = ["finding", "mask.*", "and", "or", "not", "in", "layers.*", "1", "-2.5e3", "error"]
_pieces = st.sampled_from(
    [*VALUE_NAMES, *OBSERVATIONS, *COMPARISONS, *UNITS, *"()[],@", "'\\n'", '"a"', *_OTHERS]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(_pieces, max_size=12).map(" ".join))
def test_any_sequence_of_words_is_parsed_or_refused(text: str) -> None:
    try:
        tree = parse(text)
    except ExpressionError as error:
        assert error.stop <= len(text) + 1
    else:
        assert parse(to_text(tree)) == tree


_whole = st.integers(-(10**14), 10**14)
_numbers = _whole | st.floats(allow_nan=False, allow_infinity=False)
_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8).map(Text)


@st.composite
def _relations(draw: st.DrawFn) -> Expression:
    word = draw(st.sampled_from(list(VALUE_NAMES.values())))
    name = Name(word.name)
    if word.kind is ValueKind.TEXT:
        texts = st.sampled_from(word.choices).map(Text) if word.choices else _texts
        if draw(st.booleans()):
            return Compare(name, "in", tuple(draw(st.lists(texts, min_size=1, max_size=3))))
        if draw(st.booleans()):
            return Compare(draw(_texts), "in", name)
        return Compare(name, draw(st.sampled_from(COMPARISONS[:2])), draw(texts))
    unit = draw(st.sampled_from(["", *UNITS])) if word.kind is ValueKind.BYTES else ""
    return Compare(name, draw(st.sampled_from(COMPARISONS)), Number(draw(_numbers), unit))


_seen = st.builds(
    ObservationCondition,
    st.sampled_from(list(OBSERVATIONS)),
    st.sampled_from([None, "layers.*.mlp", "lm_head", "**"]),
)
_found = st.builds(FindingCondition, st.sampled_from(["*", "mask.*", "numbers.nan"])) | st.builds(
    FindingCondition, st.just("mask.*"), st.sampled_from(COMPARISONS), st.sampled_from(SEVERITIES)
)


def _grown(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    def several(other: type) -> st.SearchStrategy[tuple[Expression, ...]]:
        parts = inner.filter(lambda tree: not isinstance(tree, other))
        return st.lists(parts, min_size=2, max_size=3).map(tuple)

    return inner.map(Not) | several(And).map(And) | several(Or).map(Or)


@settings(max_examples=300, deadline=None)
@given(st.recursive(_relations() | _seen | _found, _grown, max_leaves=8))
def test_every_tree_round_trips_through_text(tree: Expression) -> None:
    assert parse(to_text(tree)) == tree


# -- options -----------------------------------------------------------------------------------


def test_options_are_in_brackets_at_the_end() -> None:
    assert split_options("nan [hits=3 once, log]") == (
        "nan",
        {"hits": 3, "once": True, "log_only": True},
    )
    assert split_options("nan [ignore=2 off]") == ("nan", {"hits": 3, "is_enabled": False})
    assert split_options("nan @ layers.[0-3].mlp") == (
        "nan @ layers.[0-3].mlp",
        {},
    )
    assert split_options('token == "[once]"') == ('token == "[once]"', {})


@pytest.mark.parametrize(
    ("text", "under"),
    [
        ("nan [onec]", "onec"),
        ("nan [hits=x]", "hits=x"),
        ("nan [hits]", "hits"),
        ("nan [a b]", "a"),
    ],
)
def test_an_unknown_option_is_refused_and_underlined(text: str, under: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        split_options(text)
    assert text[caught.value.start : caught.value.stop] == under
