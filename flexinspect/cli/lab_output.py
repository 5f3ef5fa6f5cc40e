"""What `flexinspect lab` prints and writes: tables in 80 columns, answers.csv, a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from flexinspect.cli.output import print_json, print_lines, stdout_console
from flexinspect.core.environment import command_path, save_file
from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable, plural, print_message, truncate
from flexinspect.lab.agreement import TokenShares, answer_of, sample_flags
from flexinspect.lab.lab_result import LabResult, MethodAnswer
from flexinspect.lab.method_comparison import FlagCounts, MethodComparison, MethodScore, PairedTest
from flexinspect.lab.scoring import Lemmatizer, is_exact_match
from flexinspect.lab.settings import PER_PROMPT
from flexinspect.lab.significance import Interval

_SIGNIFICANT = 0.05
_MAX_FAILURES = 5


# -- files -----------------------------------------------------------------------------------------


def write_files(
    folder: Path,
    settings: Mapping[str, Any],
    results: Sequence[LabResult],
    comparison: MethodComparison,
    lemmatizer: Lemmatizer,
    figure: str | None,
) -> list[Path]:
    """Write answers, summary and figure into the folder; return the files.

    Without matplotlib there is no figure, unless it was asked for. Raises `UsageError` for a file
    that cannot be written.
    """
    answers = folder / "answers.csv"
    save_file(answers, answers_csv(settings, results, lemmatizer).encode(), UsageError)
    file = folder / "summary.json"
    data = msgspec.json.format(msgspec.json.encode(summary(settings, comparison)), indent=2)
    save_file(file, data + b"\n", UsageError)
    written = [answers, file]
    if not comparison.scores:
        return written
    from flexinspect.figures.accuracy_figure import save_accuracy_figure

    picture = Path(figure) if figure else folder / "accuracy.svg"
    try:
        written.append(save_accuracy_figure(*figure_of(settings, comparison), picture))
    except UsageError as error:
        if figure:
            raise
        print_message(f"no figure: {error.sentence()}")
    return written


def summary(settings: Mapping[str, Any], comparison: MethodComparison) -> dict[str, Any]:
    """Return settings and comparison as plain data."""
    facts: dict[str, Any] = msgspec.to_builtins(comparison)
    return {"settings": settings, **facts}


def figure_of(settings: Mapping[str, Any], comparison: MethodComparison) -> tuple[Any, str]:
    """Return the series of the accuracy figure, and its title."""
    from flexinspect.figures.accuracy_figure import AccuracySeries

    series = []
    for method in settings["methods"]:
        scores = [one for one in comparison.scores if one.method == method]
        points = tuple(
            (one.count, one.exact.value, one.exact.low, one.exact.high) for one in scores
        )
        series.append(AccuracySeries(method, points))
    job = settings["job"]
    title = f"Exact match on {job['dataset']}, {comparison.n_scored} samples, model {job['model']}"
    return tuple(series), f"{title}, mask {job['mask']}"


def answers_csv(
    settings: Mapping[str, Any], results: Sequence[LabResult], lemmatizer: Lemmatizer
) -> str:
    """Return a row for each answer; those to one paraphrase alone have its number from 1."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ("sample", "id", "method", "paraphrases", "alone", "answer", "exact", "lemma", "flags")
    writer.writerow((*names, "expected"))
    for result in results:
        for method, count, alone, text, flags in _answers(settings, result):
            expected = result.expected
            right: tuple[int | str, int | str] = ("", "")
            if expected:
                is_lemma_match = lemmatizer.is_match(text, expected)
                right = (int(is_exact_match(text, expected)), int(is_lemma_match))
            row = (result.index, result.sample_id, method, count, alone, text, *right, flags)
            writer.writerow((*row, " | ".join(expected)))
    return out.getvalue()


def _answers(
    settings: Mapping[str, Any], result: LabResult
) -> Iterator[tuple[str, int, int | str, str, str]]:
    """Yield method, number of paraphrases, paraphrase if alone, answer and flags."""
    for method in settings["methods"]:
        if method == PER_PROMPT:
            for number, one in enumerate(result.alone, start=1):
                yield method, 1, number, one.text, ""
        for count in settings["counts"]:
            text, flags = answer_of(result, method, count), sample_flags(result, method, count)
            if text is not None:
                yield method, count, "", text, "; ".join(flags.texts()) if flags else ""


def print_failures(results: Sequence[LabResult]) -> None:
    """Print the samples that could not be answered."""
    failed = [one for one in results if one.error]
    for one in failed[:_MAX_FAILURES]:
        print_message(escape_unprintable(f"sample {one.index} ({one.sample_id}): {one.error}"))
    if failed:
        more = len(failed) - _MAX_FAILURES
        rest = f"{more} more failed; " if more > 0 else ""
        print_message(f"{rest}the same command tries failed samples again")


def print_files(folder: Path, files: Sequence[Path], results: Sequence[LabResult]) -> None:
    """Print what was written, and what to look at next."""
    where = command_path(folder)
    names = [one.name for one in files if one.parent == folder]
    elsewhere = [command_path(one) for one in files if one.parent != folder]
    print_lines([", ".join([f"written  in {where}: {', '.join(names)}", *elsewhere])])
    traced = [one for one in results if one.trace]
    if traced:
        first = command_path(folder / traced[0].trace)
        print_lines([f"traces   {len(traced)}, such as: flexinspect open {first}"])
    print_lines([f"next     flexinspect lab {where} --sample {_interesting(results)}"])


def _interesting(results: Sequence[LabResult]) -> int:
    """Return a sample whose paraphrases disagree, else the first."""
    for one in results:
        if not one.error and len({each.text for each in one.alone}) > 1:
            return one.index
    return results[0].index


# -- the comparison --------------------------------------------------------------------------------


def print_comparison(comparison: MethodComparison, settings: Mapping[str, Any]) -> None:
    """Print the tables of a comparison."""
    console = stdout_console()
    for line in _heading(comparison, settings):
        console.print(escape_unprintable(line), soft_wrap=True)
    if comparison.scores:
        console.print()
        console.print(_score_table(comparison))
        if len(settings["counts"]) > 1:
            console.print("\nexact match in % by number of paraphrases", style="bold")
            console.print(_count_table(comparison, settings))
    if comparison.tests:
        console.print("\npairs of methods, exact match", style="bold")
        table, equal = _test_table(comparison)
        if table.row_count:
            console.print(table)
        if equal:
            console.print(equal)
    console.print("\nthe answer equals that of paraphrases alone, % of samples", style="bold")
    console.print(_flag_table(comparison.flags))
    if comparison.tokens:
        console.print("\nwhose token won, % of tokens", style="bold")
        console.print(_token_table(comparison.tokens))
    console.print()


def _heading(comparison: MethodComparison, settings: Mapping[str, Any]) -> Iterator[str]:
    job, n = settings["job"], comparison.n
    mask = f"mask {job['mask']}, positions {job['positions']}"
    yield f"{plural(n, 'sample')} of {job['dataset']}, model {job['model']}, {mask}"
    scored = "" if comparison.n_scored == n else f"{comparison.n_scored} with expected answers; "
    scored = "none with expected answers; " if not comparison.n_scored else scored
    failed = f"{comparison.n_failed} could not be answered; " if comparison.n_failed else ""
    lemmas = "by rules" if comparison.lemmatizer == "rules" else f"by spaCy {comparison.lemmatizer}"
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in comparison.seconds)
    yield f"{scored}{failed}lemmas {lemmas}; time: {seconds}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for number, title in enumerate(columns):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def _score_table(comparison: MethodComparison) -> Table:
    table = _table("method", "exact %", "95 % interval", "lemma %", "95 % interval", "made by")
    for one in comparison.scores:
        if one.count == comparison.count:
            cells = (*_cells(one.exact), *_cells(one.lemma), one.interval)
            table.add_row(one.method, *cells)
    return table


def _cells(interval: Interval) -> tuple[str, str]:
    return _percent(interval.value), f"{_percent(interval.low)}–{_percent(interval.high)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _count_table(comparison: MethodComparison, settings: Mapping[str, Any]) -> Table:
    counts = settings["counts"]
    table = _table("method", *(str(count) for count in counts))
    by_key: dict[tuple[str, int], MethodScore] = {
        (one.method, one.count): one for one in comparison.scores
    }
    for method in settings["methods"]:
        cells = (_percent(by_key[method, count].exact.value) for count in counts)
        table.add_row(method, *cells)
    return table


def _test_table(comparison: MethodComparison) -> tuple[Table, str]:
    """Return the pairs that differ, and a line about the others."""
    tests = [one for one in comparison.tests if one.score == "exact"]
    differ = [one for one in tests if one.only_first or one.only_second]
    table = _table("first", "second", "only", "difference in %", "p", "Holm")
    table.columns[1].justify = "left"
    for one in sorted(differ, key=_order_of_tests):
        style = "bold" if (one.p_adjusted or 1.0) < _SIGNIFICANT else ""
        low, high = (f"{100 * end:+.1f}" for end in (one.difference.low, one.difference.high))
        difference = f"{100 * one.difference.value:+.1f} ({low} to {high})"
        only = f"{one.only_first} : {one.only_second}"
        p_values = (_p_value(one.p), _p_value(one.p_adjusted))
        table.add_row(one.first, one.second, only, difference, *p_values, style=style)
    n_equal = len(tests) - len(differ)
    equal = f"{plural(n_equal, 'pair')} right on the same samples" if n_equal else ""
    return table, equal


def _order_of_tests(test: PairedTest) -> tuple[float, float]:
    return (2.0 if test.p is None else test.p, -abs(test.difference.value))


def _p_value(p: float | None) -> str:
    if p is None:
        return "–"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"


def _flag_table(flags: Sequence[FlagCounts]) -> Table:
    table = _table("method", "majority", "some", "none", "order-dependent")
    for one in flags:
        n = one.n or 1
        shares = (_percent(k / n) for k in (one.n_majority, one.n_paraphrase, one.n_none))
        order = _percent(one.n_order_dependent / one.n_ordered) if one.n_ordered else "–"
        table.add_row(one.method, *shares, order)
    return table


def _token_table(tokens: Sequence[tuple[str, TokenShares]]) -> Table:
    n = len(tokens[0][1].wins)
    names = [f"P{number}" for number in range(1, n + 1)]
    table = _table("method", "tokens", "all", "most", "some", "none", *names)
    for method, shares in tokens:
        kinds = (shares.n_unanimous, shares.n_majority, shares.n_minority, shares.n_nobody)
        cells = [_percent(kind / max(shares.n, 1)) for kind in kinds]
        disputed = sum(shares.wins)
        wins = [_percent(win / disputed) if disputed else "–" for win in shares.wins]
        table.add_row(method, str(shares.n), *cells, *wins)
    return table


# -- one sample ------------------------------------------------------------------------------------


def print_sample(result: LabResult, settings: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one sample: its answers, their flags, and each paraphrase's share in each token."""
    methods, count = settings["methods"], settings["counts"][-1]
    flags = {method: sample_flags(result, method, count) for method in methods}
    if as_json:
        told = {name: one.texts() for name, one in flags.items() if one}
        print_json({**msgspec.to_builtins(result), "flags": told, "exit_code": 0})
        return
    console = stdout_console()
    expected = " | ".join(result.expected) or "none"
    head = f"sample {result.index} ({result.sample_id}), expected: {expected}"
    console.print(escape_unprintable(head), style="bold", soft_wrap=True)
    if result.error:
        console.print(escape_unprintable(result.error), soft_wrap=True)
        return
    for number, text in enumerate(result.paraphrases[: len(result.alone)], start=1):
        console.print(escape_unprintable(f"P{number}  {text}"), soft_wrap=True)
    console.print()
    console.print(_alone_table(result))
    console.print()
    console.print(_answer_table(result, methods, count, flags))
    if result.orders:
        n = len(result.orders[0].order)
        console.print(f"\nflex, other orders of {n} paraphrases", style="bold")
        for one in result.orders:
            order = " ".join(str(index + 1) for index in one.order)
            console.print(escape_unprintable(f"{order}  {one.text}"), soft_wrap=True)
    for answer in result.answers:
        if answer.count == count and answer.method in methods:
            console.print(f"\n{answer.method}, token by token", style="bold")
            console.print(_vote_table(answer))
    if result.trace:
        console.print(f"\ntrace  {escape_unprintable(result.trace)}")


def _alone_table(result: LabResult) -> Table:
    table = _table("alone", "answer", "probability", "right")
    table.columns[1].justify = "left"
    table.columns[1].no_wrap = False
    for number, one in enumerate(result.alone, start=1):
        right = _mark(one.text, result)
        answer = Text(escape_unprintable(one.text))
        table.add_row(f"P{number}", answer, f"{_exp(one.log_probability):.3f}", right)
    return table


def _exp(log_probability: float) -> float:
    import math

    return math.exp(log_probability)


def _mark(text: str, result: LabResult) -> str:
    if not result.expected:
        return ""
    return "✓" if is_exact_match(text, result.expected) else "✗"


def _answer_table(
    result: LabResult, methods: Sequence[str], count: int, flags: Mapping[str, Any]
) -> Table:
    table = _table("method", "answer", "right", "flags")
    for column in (1, 3):
        table.columns[column].justify = "left"
        table.columns[column].no_wrap = False
    for method in methods:
        text, flag = answer_of(result, method, count), flags[method]
        if text is not None and flag is not None:
            answer = Text(escape_unprintable(text))
            table.add_row(method, answer, _mark(text, result), ", ".join(flag.texts()))
    return table


def _vote_table(answer: MethodAnswer) -> Table:
    """One row a token: its probability, and each paraphrase's; the winner is marked.

    Where a paraphrase prefers another token, that one stands beside.
    """
    n = len(answer.tokens[0].own) if answer.tokens else 0
    table = _table("token", "fused", *(f"P{number}" for number in range(1, n + 1)))
    for vote in answer.tokens:
        token = Text(truncate(escape_unprintable(vote.text) or "·", 12))
        cells = []
        for index, own in enumerate(vote.own):
            mark = "*" if index == vote.winner else ""
            other = ""
            if own.probability < own.best_probability:
                other = f" {truncate(escape_unprintable(own.best.strip()) or '·', 6)}"
            cells.append(Text(f"{own.probability:.2f}{mark}{other}"))
        table.add_row(token, f"{vote.probability:.2f}", *cells)
    return table
