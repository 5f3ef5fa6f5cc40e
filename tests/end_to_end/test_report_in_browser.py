"""A report opened from the disk in headless Chromium: keys, zoom, words, links, and silence."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support import mask_trace
from support.attention_trace import SyntheticGeneration, write
from support.browser import CHROMIUM, Browser, Page
from support.earlier_traces import unpack
from support.png import read_png
from support.poisoned_traces import poisoned_copies
from support.traces import sample_generation, sample_step, sample_trace

from flexinspect.cli.main import main
from flexinspect.core.errors import TraceError
from flexinspect.records.finding import Finding, Severity
from flexinspect.trace.file.writer import TraceWriter

pytest.importorskip("aiohttp", reason="aiohttp, the client of the DevTools protocol, is missing")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.slow,
]

STEP = "Number(document.getElementById('step').value)"
ZOOM = "Number(document.getElementById('mask-canvas').dataset.zoom)"
CANVAS = "document.getElementById('mask-canvas')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, for all tests of this file."""
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.end()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page; it must have asked for nothing but files, and logged no problem."""
    async with browser.page(Page) as opened:
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await opened.call("Emulation.setEmulatedMedia", features=[still])
        yield opened
        assert opened.problems == []
        assert {url.partition(":")[0] for url in opened.requests} <= {"file", "about"}


def report(trace: Path, *arguments: str) -> str:
    """Make the report of a trace and return its address."""
    file = trace.with_suffix(".html")
    command = ["report", str(trace), "-o", str(file), "--no-review", "--overwrite", *arguments]
    assert main(command) == 0
    return file.as_uri()


async def point_of_mask(page: Page, x: float, y: float) -> tuple[float, float]:
    """Scroll the mask into view, and return a point of it in the window, by its own pixels."""
    await page.value(f"{CANVAS}.scrollIntoView({{block: 'end', behavior: 'instant'}})")
    left, top = await page.value(
        f"(({{left, top}}) => [left, top])({CANVAS}.getBoundingClientRect())"
    )
    return left + x, top + y


async def test_it_steps_by_the_keys_of_the_interface(page: Page, tmp_path: Path) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    await page.open(address)
    assert await page.value(STEP) == 3  # the place of the worst finding
    for key, step in (("ArrowRight", 4), ("l", 5), ("h", 4), ("ArrowLeft", 3), ("End", 5)):
        await page.press(key)
        assert await page.value(STEP) == step, key
    await page.press("Home")
    assert "token 1 of 6 · step 0, prefill" in await page.text("#where")
    assert await page.text("#tokens .current") == "Jane"
    await page.press("j")
    assert await page.value("location.hash") == "#g=0&s=0&layer=3&head=0"
    await page.press("n")
    assert await page.value(STEP) == 3
    assert "Layer 2 made the first NaN." in await page.text("#here")
    await page.press(">")
    assert await page.value("document.getElementById('generation').value") == "1"
    await page.press("Backspace")
    await page.until("document.getElementById('generation').value === '0'")
    await page.press("?")
    assert await page.value("document.getElementById('key-help').open")


async def test_a_link_leads_to_its_place(page: Page, tmp_path: Path) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    await page.open(f"{address}#g=1&s=2&layer=1&head=1&q=7&k=1")
    assert await page.value(STEP) == 2
    assert await page.value("document.getElementById('layer').value") == "1"
    assert await page.text("#mask-words") == (
        "Row 7 “'s” (paraphrase 2) does not attend to key 1 “Who” (paraphrase 1): closed, another "
        "paraphrase, as segment-isolation intends."
    )
    await page.value("document.querySelector('.finding .where a').click()")
    await page.until(f"{STEP} === 3")
    assert await page.value("location.hash") == "#g=0&s=3&layer=2&head=1&q=16&k=16"
    await page.value("location.hash = '#g=99&s=99&layer=99&head=99&q=5&k=99'")
    await page.until(f"{STEP} === 5")  # the nearest place that there is


async def test_the_mask_zooms_and_says_what_is_under_the_pointer(
    page: Page, tmp_path: Path
) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    await page.open(f"{address}#g=0&s=0")
    x, y = await point_of_mask(page, 250, 250)
    assert await page.value(ZOOM) == 1
    named = re.compile(r"Row (\d+) “.+” \(.+\) (?:attends|does not attend) to key (\d+) “")
    found = []
    for down, right in ((0, 0), (60, 0), (60, 60)):
        await page.mouse("mouseMoved", x + right, y + down)
        words = named.match(await page.text("#mask-words"))
        assert words is not None
        found.append((int(words[1]), int(words[2])))
    (row, key), (below, same), (last, beside) = found
    assert below == last > row
    assert key == same < beside
    await page.mouse("mouseMoved", x, y)
    await page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    by_wheel = await page.value(ZOOM)
    assert by_wheel > 1
    before = await page.text("#mask-words")
    for kind, dx in (("mousePressed", 0), ("mouseMoved", 90), ("mouseReleased", 90)):
        await page.mouse(kind, x + 90 - dx, y, button="left", buttons=1, clickCount=1)
    await page.mouse("mouseMoved", x, y)
    assert await page.text("#mask-words") != before  # dragging moved the mask below the pointer
    await page.click(x, y)
    assert "&q=" in await page.value("location.hash")
    await page.press("+")
    assert await page.value(ZOOM) > by_wheel
    for _ in range(5):
        await page.press("-")
    assert await page.value(ZOOM) == 1


async def test_the_arrow_keys_move_the_cursor_of_the_focused_mask(
    page: Page, tmp_path: Path
) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    await page.open(f"{address}#g=0&s=0&q=4&k=4")
    await page.value(f"{CANVAS}.focus()")
    assert (await page.text("#mask-words")).startswith("Row 4 “?” (paraphrase 1) attends to key 4")
    await page.press("ArrowRight")
    assert (await page.text("#mask-words")).endswith("closed, it comes later.")
    await page.press("ArrowDown")
    await page.press("ArrowLeft")
    assert "Row 5 “↵” (separator 1) attends to key 4" in await page.text("#mask-words")
    assert await page.value(STEP) == 0


async def test_leaked_and_lost_cells_are_named_and_found(page: Page, tmp_path: Path) -> None:
    address = report(mask_trace.write(tmp_path / "masks.flextrace"))
    await page.open(f"{address}#g=0&s=0&layer={mask_trace.WRONG}")
    pressed = "document.querySelector('#mask-view [aria-pressed=true]').textContent"
    assert await page.value(pressed) == "what differs"
    await page.value("document.getElementById('mask-difference').click()")
    await page.until("/leaked|lost/.test(document.getElementById('mask-words').textContent)")
    await page.press("m")
    assert await page.value(pressed) == "ran"


async def test_attention_is_shown_by_segment_and_by_token(page: Page, tmp_path: Path) -> None:
    synthetic = SyntheticGeneration()
    trace = tmp_path / "rows.flextrace"
    write(trace, synthetic).reader.close()
    await page.open(f"{report(trace)}#g=0&s=2&layer=1&head=3")
    rows = "[...document.querySelectorAll('#token-bars tbody tr')].map((row) => row.innerText)"
    heaviest = (await page.value(rows))[0]
    weights = synthetic.weights(1, 3, 11)
    assert heaviest.startswith(f"{np.argmax(weights)} ")
    assert f"{100 * weights.max():.1f} %" in heaviest
    await page.value("document.querySelectorAll('#colour button')[2].click()")
    weight = (
        "Number(document.querySelector('[data-pos=\"{}\"]').style.getPropertyValue('--weight'))"
    )
    assert await page.value(weight.format(np.argmax(weights))) == pytest.approx(1, abs=0.01)
    await page.press("]")
    assert await page.value("document.getElementById('head').value") == "3"  # the last head


async def test_a_report_at_level_basic_says_what_is_missing(page: Page, tmp_path: Path) -> None:
    trace = tmp_path / "basic.flextrace"
    write(trace, SyntheticGeneration(level="basic")).reader.close()
    await page.open(report(trace))
    assert "not recorded at this level" in await page.text("#attention-missing")


async def test_steps_whose_attention_was_left_out_link_to_the_nearest(
    page: Page, tmp_path: Path
) -> None:
    trace = tmp_path / "rows.flextrace"
    write(trace, SyntheticGeneration(n_steps=24)).reader.close()
    address = report(trace)
    size = (trace.with_suffix(".html").stat().st_size - 3000) / 1e6
    address = report(trace, f"--max-size={size}")
    await page.open(f"{address}#g=0&s=1")
    words = await page.text("#token-bars")
    assert re.search(r"this report has the attention of every (2nd|3rd|([4-9]|1\d)th) step", words)
    await page.value("document.querySelector('#token-bars a').click()")
    await page.until("document.querySelectorAll('#token-bars tbody tr').length > 0")


async def test_a_finding_behind_a_fork_is_not_one_of_the_branch(page: Page, tmp_path: Path) -> None:
    trace = tmp_path / "forked.flextrace"
    with TraceWriter.create(trace, {}) as writer:
        writer.begin_generation(sample_generation(0))
        for step in (0, 1):
            found = Finding("mask.leak", Severity.ERROR, "It leaks.", step=step)
            writer.write_step(replace(sample_step(step), findings=(found,)))
        writer.begin_branch(0, 1, parent=0, fork_step=1)
        writer.write_step(replace(sample_step(1), branch=1, findings=()))
    address = report(trace)
    shown = []
    for branch, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        await page.open("about:blank", "true")
        await page.open(f"{address}#g=0&b={branch}&s={step}")
        shown.append(await page.value("document.querySelectorAll('#here p').length"))
    assert shown == [1, 1, 1, 0]


async def test_branches_continue_their_parents(page: Page, tmp_path: Path) -> None:
    await page.open(f"{report(unpack('branches', tmp_path))}#g=0&b=1&s=0")
    assert await page.value("document.getElementById('branch').value") == "1"
    n_steps = await page.value("State.run.steps.length")
    for _ in range(n_steps):
        await page.press("ArrowRight")
    assert f"token {n_steps} of {n_steps}" in await page.text("#where")


@pytest.mark.parametrize("n_steps", [None, 0])
async def test_a_run_that_ended_before_its_first_step_opens(
    n_steps: int | None, page: Page, tmp_path: Path
) -> None:
    trace = tmp_path / "empty.flextrace"
    with TraceWriter.create(trace, {}) as writer:
        if n_steps is not None:
            writer.begin_generation(sample_generation(0))
    await page.open(report(trace))
    await page.press("ArrowRight")
    if n_steps is not None:
        assert await page.text("#where") == "No step of this generation is recorded."


async def test_a_training_run_shows_its_losses(page: Page, tmp_path: Path) -> None:
    await page.open(f"{report(unpack('training', tmp_path))}#g=0&s=1")
    assert "Training step 1" in await page.text("#where")
    assert (await page.text("#training-body")).startswith("Loss")
    assert await page.value("document.getElementById('mask').hidden")


async def test_a_browser_that_cannot_inflate_does_it_in_the_script(
    page: Page, tmp_path: Path
) -> None:
    address = report(unpack("extreme", tmp_path))
    await page.open(address)
    run = "JSON.stringify([State.run.contents], (_, v) => ArrayBuffer.isView(v) ? [...v] : v)"
    inflated = await page.value(run)
    await page.call(
        "Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream"
    )
    await page.call("Page.reload")
    await page.until("document.documentElement?.dataset.ready === 'true'")
    assert await page.value("typeof DecompressionStream") == "undefined"
    assert await page.value(run) == inflated


async def test_texts_of_a_hostile_trace_are_texts(page: Page, tmp_path: Path) -> None:
    whole, path = unpack("extreme", tmp_path), tmp_path / "poisoned.flextrace"
    mark = "</script><img src=x onerror=document.title='hit'><!-- \" onclick=1"
    for column in poisoned_copies(whole, path, mark):
        if column not in ("tokens.text", "segments.label", "candidates.text", "findings.sentence"):
            continue
        try:
            address = report(path)
        except TraceError:
            continue
        await page.open(address)
        assert await page.value("document.querySelectorAll('img').length") == 0
        assert await page.value("document.title") == "poisoned"
        await page.press("ArrowRight")


async def test_it_is_drawn_in_light_dark_and_narrow(page: Page, tmp_path: Path) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    backgrounds = []
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await page.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **size)
        await page.open(f"{address}#g=0&s=1")
        fits = "document.documentElement.scrollWidth <= innerWidth"
        assert await page.value(fits), f"{scheme} {width}"
        await page.value(f"{CANVAS}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        pixels = read_png(await page.screenshot(360, 240))[:, :, :3].reshape(-1, 3)
        backgrounds.append(pixels[0].tolist())
        colors = np.unique(pixels.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1]))
        assert len(colors) > 30  # a picture, not an empty page
    assert backgrounds == [[255, 255, 255], [20, 23, 27], [255, 255, 255]]


async def test_all_text_has_enough_contrast(page: Page, tmp_path: Path) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await page.call("Emulation.setEmulatedMedia", features=[feature])
        await page.open(address)
        names = ("ink", "muted", "accent", "error", "warning", "good")
        found = await page.value(f"{[*names, 'paper', 'raised']}.map((name) => Drawing.rgb(name))")
        *inks, paper, raised = map(_luminance, found)
        for name, ink in zip(names, inks, strict=True):
            for background in (paper, raised):
                low, high = sorted((ink, background))
                assert (high + 0.05) / (low + 0.05) >= 4.5, f"{name}, {scheme}"


def _luminance(color: list[int]) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = np.array(color) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


async def test_findings_are_readable_without_a_script(page: Page, tmp_path: Path) -> None:
    address = report(sample_trace(tmp_path / "run.flextrace"))
    await page.call("Emulation.setScriptExecutionDisabled", value=True)
    await page.call("Page.navigate", url=address)
    await page.until("document.querySelector('#run dd')")
    shown = "document.querySelector({!r}).getClientRects().length > 0"
    assert await page.value(shown.format(".finding"))
    assert await page.value(shown.format("#answers .said"))
    assert not await page.value(shown.format("#explorer"))
    assert not await page.value(shown.format("#theme"))
