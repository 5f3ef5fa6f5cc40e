"""The flowchart: the same seven boxes as data, figure, Mermaid and text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from support.traces import sample_trace

from flexinspect.cli.flowchart import run_numbers
from flexinspect.cli.main import main
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import languages, load_labels
from flexinspect.figures.flowchart_boxes import (
    BOXES,
    FlowchartConfig,
    RunNumbers,
    flow_boxes,
    flowchart_config,
    flowchart_lines,
    flowchart_title,
    mermaid,
)
from flexinspect.figures.flowchart_figure import draw_flowchart_figure
from flexinspect.figures.sheet import MIN_FONT_SIZE
from flexinspect.figures.themes import THEMES
from flexinspect.trace.reader import open_trace

ENGLISH = load_labels("en")
RUN = RunNumbers(
    name="run.flextrace",
    model="demo",
    paraphrase_lengths=(9, 11, 8),
    n_prompt_tokens=63,
    n_segments=8,
    mask="segment-isolation",
    n_layers=4,
    paths={"flex compiled": 3, "sdpa": 1},
    prefill_rows=63,
    prefill_keys=63,
    prefill_ms=31.25,
    n_steps=26,
    n_generated=25,
    step_ms=5.25,
    stop_reason="eos",
    answer='It is "Paris" <b>&;#`\n\x1b[31m',
)


def test_the_boxes_are_those_of_the_seed_in_its_order_and_colours() -> None:
    titles = [box.title for box in flow_boxes(ENGLISH)]
    assert titles == [
        *("Input", "Concatenation", "Mask", "Patch", "Encoding", "Generation loop", "Output")
    ]
    config = flowchart_config({})
    assert (config.figure_size, config.box_width, config.box_height) == ((14, 16), 3.5, 0.6)
    assert config.vertical_spacing == 1.2
    assert [config.color(name) for name in BOXES] == [
        *("#E3F2FD", "#FFF3E0", "#F3E5F5", "#FFF3E0", "#F3E5F5", "#E8F5E9", "#FCE4EC")
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"box_widht": 3}, "unknown field `box_widht`"),
        ({"box_width": "wide"}, "in box_width"),
        ({"color_input": "red"}, "color_input is not a colour: 'red'"),
        ({"box_height": 2}, "boxes of height 2 overlap"),
        ({"box_width": 9}, "leaves no room for text"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        flowchart_config(values, "flow.toml")
    assert error.value.message.startswith("flow.toml")


def test_the_numbers_are_those_of_the_trace(tmp_path: Path) -> None:
    with open_trace(sample_trace(tmp_path / "a.flextrace")) as reader:
        numbers = run_numbers(reader, 0)
        steps = reader.steps(0)
    assert (numbers.paraphrase_lengths, numbers.n_prompt_tokens) == ((4, 4), 13)
    assert (numbers.n_layers, numbers.n_steps, numbers.n_generated) == (4, 6, 6)
    assert numbers.paths == {"flex uncompiled": 4}
    assert numbers.prefill_ms == steps[0].wall_ms
    texts = {box.name: box.text for box in flow_boxes(ENGLISH, numbers)}
    assert texts["input"] == "2 paraphrases, 4 tokens each."
    assert texts["encoding"] == "One forward pass: 13 queries × 13 keys, 12.5 ms."


def test_lengths_that_differ_are_a_range() -> None:
    assert flow_boxes(ENGLISH, RUN)[0].text == "3 paraphrases, 8–11 tokens each."


def test_what_a_run_did_not_record_is_said_so() -> None:
    nothing = replace(RUN, paths={}, prefill_ms=None, paraphrase_lengths=(), mask="")
    texts = {box.name: box.text for box in flow_boxes(ENGLISH, nothing)}
    unknown = [name for name, text in texts.items() if text == "not recorded"]
    assert unknown == ["input", "mask", "patch", "encoding"]


@pytest.mark.parametrize("language", languages())
@pytest.mark.parametrize("size", [(3.3, 4.2), (6.5, 7), (14, 16)])
@pytest.mark.parametrize("run", [None, RUN])
def test_texts_of_the_figure_neither_overlap_nor_leave_the_sheet(
    language: str, size: tuple[float, float], run: RunNumbers | None
) -> None:
    labels = load_labels(language)
    figure = draw_flowchart_figure(
        flow_boxes(labels, run),
        FlowchartConfig(figure_size=size),
        labels=labels,
        title=flowchart_title(labels, run),
        theme=THEMES["dark"],
    )
    figure.draw_without_rendering()
    texts = figure.axes[0].texts
    boxes = [text.get_window_extent() for text in texts]
    assert min(text.get_fontsize() for text in texts) >= MIN_FONT_SIZE
    for box in boxes:
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y0 >= -1
        assert box.y1 <= figure.bbox.y1 + 1
    for a, b in itertools.combinations(boxes, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) <= 1 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 1


def test_a_size_in_which_text_would_be_too_small_is_refused() -> None:
    config = FlowchartConfig(figure_size=(3, 2))
    with pytest.raises(UsageError, match="does not fit into 3 by 2 inches"):
        draw_flowchart_figure(flow_boxes(ENGLISH, RUN), config, labels=ENGLISH, title="a")


def test_mermaid_escapes_text_of_the_run() -> None:
    diagram = mermaid(flow_boxes(ENGLISH, RUN), ENGLISH)
    line = next(each for each in diagram.splitlines() if each.startswith("    output_["))
    assert "It is #34;Paris#34; #60;b#62;#38;#59;#35;#96;" in line
    assert "\x1b" not in diagram
    assert line.count('"') == 2
    assert diagram.count("-->") == 7
    assert "style input_ fill:#E3F2FD" in diagram


@pytest.mark.parametrize("language", languages())
@pytest.mark.parametrize("width", [40, 73, 100])
def test_lines_are_within_the_width_and_boxes_are_closed(language: str, width: int) -> None:
    labels = load_labels(language)
    lines = flowchart_lines(flow_boxes(labels, RUN), labels, width)
    assert max(map(cell_len, lines)) <= width
    edges = {cell_len(line[: line.rindex("┐") + 1]) for line in lines if "┐" in line}
    assert len(edges) == 1
    assert sum("┐" in line for line in lines) == sum("┘" in line for line in lines) == 7


def test_the_command_writes_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = sample_trace(tmp_path / "a.flextrace")
    names = ("a.svg", "a.png", "a.pdf", "a.html", "a.mmd", "a.md", "a.txt")
    outs = [word for name in names for word in ("--out", str(tmp_path / name))]
    monkeypatch.setenv("FLEXINSPECT_LANG", "zh")
    assert main(["flowchart", "--trace", str(trace), "--dpi", "60", *outs]) == 0
    written = capsys.readouterr()
    assert written.out == ""
    assert [line.rpartition("/")[2] for line in written.err.splitlines()] == list(names)
    assert "生成循环" in (tmp_path / "a.svg").read_text("utf-8")
    page = (tmp_path / "a.md").read_text("utf-8")
    assert page.count("```") == 2
    assert (tmp_path / "a.mmd").read_text("utf-8") in page
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_text_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flowchart", "--lang", "zh"]) == 0
    assert "7 输出" in capsys.readouterr().out
    trace = sample_trace(tmp_path / "a.flextrace")
    assert main(["flowchart", "--trace", str(trace), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [box["name"] for box in shown["boxes"]] == list(BOXES)
    assert shown["run"]["n_prompt_tokens"] == 13


def test_a_configuration_file_sets_sizes_and_colours(tmp_path: Path) -> None:
    config, out = tmp_path / "flow.toml", tmp_path / "a.svg"
    config.write_text('figure_size = [7, 8]\ncolor_input = "#123456"\n', "utf-8")
    assert main(["flowchart", "--config", str(config), "--out", str(out)]) == 0
    svg = out.read_text("utf-8")
    assert 'width="504pt" height="576pt"' in svg
    assert "#123456" in svg


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.svg", "--out", "a.bmp"], "a.bmp has no suffix of a format"),
        (["--theme", "pink", "--out", "a.svg"], "There is no theme 'pink'"),
        (["--width", "0.1"], "A figure cannot be 0.1 inches wide."),
        (["--config", "none.toml"], "The flowchart configuration none.toml cannot be read"),
        (["--config", "list.json"], "list.json is not valid: Expected `object`, got `array`"),
        (["--config", "bad.toml"], "bad.toml is not valid TOML"),
        (["--trace", "a.flextrace", "--generation", "9"], "has no branch 0 of generation 9"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1]", "utf-8")
    (tmp_path / "bad.toml").write_text("= 3", "utf-8")
    if "a.flextrace" in arguments:
        sample_trace(tmp_path / "a.flextrace")
    assert main(["flowchart", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("a.svg"))
