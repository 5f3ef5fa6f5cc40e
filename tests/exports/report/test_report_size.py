"""A report keeps its size: attention of some steps is left out, and it says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.attention_trace import SyntheticGeneration, write
from support.traces import sample_trace

from flexinspect.core.errors import UsageError
from flexinspect.exports.report.contents import BranchContents
from flexinspect.exports.report.packing import packed_size
from flexinspect.exports.report.report_file import make_page
from flexinspect.exports.report.size_budget import essential_size, fit_size
from flexinspect.exports.report.trace_contents import ReportRequest, collect_contents
from flexinspect.trace.reader import open_trace


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> BranchContents:
    path = tmp_path_factory.mktemp("size") / "rows.flextrace"
    source = write(path, SyntheticGeneration(layers=4, heads=8, n_steps=24))
    return collect_contents(source, ReportRequest(), lambda *_: None).branches[0, 0]


def test_what_fits_is_left_as_it_is(branch: BranchContents) -> None:
    fitted, left_out = fit_size({(0, 0): branch}, packed_size(branch) + 1000)
    assert fitted[0, 0] is branch
    assert left_out == []


def test_attention_by_token_is_thinned_first(branch: BranchContents) -> None:
    size = packed_size(branch) - packed_size(branch.token_attention) // 2
    fitted, left_out = fit_size({(0, 0): branch}, size)
    kept, all_of_it = fitted[0, 0].token_attention, branch.token_attention
    assert kept is not None
    assert all_of_it is not None
    assert packed_size(fitted[0, 0]) <= size
    assert kept.step.tolist() == all_of_it.step[:: kept.every].tolist()
    np.testing.assert_array_equal(kept.share[1], all_of_it.share[kept.every])
    assert fitted[0, 0].attention == branch.attention
    assert left_out[0].startswith("The attention by token is included for every ")


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_any_size_above_the_essential_one_is_reached(branch: BranchContents, share: float) -> None:
    least, whole = essential_size(branch), packed_size(branch)
    size = int(least + share * (whole - least))
    fitted, left_out = fit_size({(0, 0): branch}, size)
    assert packed_size(fitted[0, 0]) <= size
    assert left_out
    assert fitted[0, 0].steps == branch.steps
    assert fitted[0, 0].tokens == branch.tokens


def test_a_part_that_cannot_fit_is_dropped_with_its_reason(branch: BranchContents) -> None:
    fitted, left_out = fit_size({(0, 0): branch}, essential_size(branch) + 200)
    assert fitted[0, 0].attention is None
    assert "does not fit" in fitted[0, 0].missing["attention"]
    assert any("The attention by segment is left out" in sentence for sentence in left_out)


def test_a_size_that_nothing_fits_is_refused(branch: BranchContents) -> None:
    with pytest.raises(UsageError, match=r"more than the 0\.0001 MB of --max-size"):
        fit_size({(0, 0): branch}, 100)


def test_reading_stops_at_the_attention_that_can_fit(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.flextrace", SyntheticGeneration(layers=4, heads=8, n_steps=24))
    found = collect_contents(source, ReportRequest(max_bytes=4000), lambda *_: None).branches[0, 0]
    assert found.token_attention is not None
    assert found.token_attention.every > 1
    assert len(found.token_attention.step) == len(range(0, 24, found.token_attention.every))


def test_the_whole_page_keeps_its_size_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.flextrace"
    source = write(path, SyntheticGeneration(layers=4, heads=8, n_steps=24))
    page, whole = make_page(source.reader, ReportRequest(), lambda *_: None)
    assert whole.left_out == ()
    size = len(page.encode()) - 3000
    small, less = make_page(source.reader, ReportRequest(max_bytes=size), lambda *_: None)
    assert len(small.encode()) <= size
    assert less.left_out[0] in small


def test_a_size_below_the_page_itself_is_refused(tmp_path: Path) -> None:
    with open_trace(sample_trace(tmp_path / "sample.flextrace")) as reader:
        with pytest.raises(
            UsageError, match=r"MB without attention and masks, more than the 0\.05 MB"
        ):
            make_page(reader, ReportRequest(max_bytes=50_000), lambda *_: None)
