"""Writes the page: findings, texts and manifest as HTML, the rest as packed data and a script.

All texts of a trace are escaped. The Content-Security-Policy allows the page's own script and
style, by their hashes, and nothing else: no request, no other script, no form, no frame.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from flexinspect.analysis.reports.collect import (
    describe_place,
    finding_page,
    format_evidence,
    format_thousands,
)
from flexinspect.core import __version__
from flexinspect.core.conversion import script_json
from flexinspect.core.keyboard import KEYS
from flexinspect.core.text import format_ranges, plural, printable, truncate
from flexinspect.exports.report.contents import (
    BranchHead,
    FindingEntry,
    GenerationHead,
    ReportContents,
)
from flexinspect.exports.report.packing import pack
from flexinspect.records.finding import Finding, Severity

SCRIPTS = (
    *("data.js", "state.js", "drawing.js", "panels.js", "attention.js", "tokens.js", "mask.js"),
    "main.js",
)
"""The parts of the script in the order in which they run; each defines one name for the others."""

FIRST_FACTS = ("state", "command", "started_at", "ended_at", "model", "level", "versions", "cost")
"""The facts of the manifest that are shown openly, by how their names begin."""

SIGNS = {Severity.ERROR: "✖", Severity.WARNING: "▲", Severity.NOTE: "●"}
MAX_EVIDENCE_CHARS = 1000
MAX_ANSWER_CHARS = 600
MAX_OPEN_ANSWERS = 6
"""Answers that are listed openly; of more, the others are behind a click."""


def render(contents: ReportContents) -> str:
    """Return the whole page."""
    script, style = _script(), _style()
    return Template(_asset("report.html")).substitute(
        policy=_policy(script, style),
        version=escape(__version__),
        title=escape(printable(contents.title)),
        subtitle=escape(contents.subtitle),
        trace=escape(printable(contents.trace)),
        style=style,
        script=script,
        notes="\n".join(f'<p class="note-line">{escape(note)}</p>' for note in contents.notes),
        findings="\n".join(_findings(contents)),
        answers="\n".join(_answers(contents.generations)),
        manifest=_manifest(contents.manifest),
        left_out="\n".join(f"  <p>{escape(sentence)}</p>" for sentence in contents.left_out),
        keys=_pairs((key.text, ", ".join(map(_key_label, key.keys))) for key in _page_keys()),
        report=script_json(_head(contents)),
        packed="\n".join(
            f'<script type="text/plain" id="packed-{generation}-{branch}">{pack(data)}</script>'
            for (generation, branch), data in contents.branches.items()
        ),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")


def _script() -> str:
    return '"use strict";\n' + "\n".join(map(_asset, SCRIPTS))


def _style() -> str:
    """Return the style sheet, with its dark palette for systems that choose it as well."""
    style = _asset("report.css")
    start = style.index(':root[data-theme="dark"]')
    end = style.index("}", start) + 1
    palette = style[style.index("{", start) : end]
    chosen = f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {palette} }}'
    return f"{style[:end]}\n\n{chosen}{style[end:]}"


def _policy(script: str, style: str) -> str:
    allowed = [f"script-src '{_hash(script)}'", f"style-src '{_hash(style)}'"]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = (f"  <dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return "\n".join(["<dl>", *rows, "</dl>"])


def _manifest(rows: Sequence[tuple[str, str]]) -> str:
    """Return the most important facts of the run, and all others behind a click."""
    first = [row for row in rows if row[0].startswith(FIRST_FACTS)]
    rest = [row for row in rows if not row[0].startswith(FIRST_FACTS)]
    parts = [_pairs(first)]
    if rest:
        parts += [f"<details><summary>{plural(len(rest), 'more fact')}</summary>", _pairs(rest)]
        parts.append("</details>")
    return "\n".join(parts)


# -- findings -------------------------------------------------------------------------------------


def _findings(contents: ReportContents) -> Iterator[str]:
    if not contents.findings:
        yield '<div class="verified">'
        for sentence, is_detail in contents.verified:
            kind = ' class="legend"' if is_detail else ""
            yield f"  <p{kind}>{escape(sentence)}</p>"
        yield "</div>"
        return
    if contents.verdict:
        yield f"<p>{escape(contents.verdict)}.</p>"
    for number, entry in enumerate(contents.findings):
        yield from _finding(number, entry)


def _finding(number: int, entry: FindingEntry) -> Iterator[str]:
    first = entry.findings[0]
    severity = str(first.severity)
    yield f'<article class="finding {severity}" id="finding-{number}">'
    yield (
        f'  <h3><span class="severity"><span aria-hidden="true">{SIGNS[first.severity]}</span> '
        f"{severity.capitalize()}</span> {_line(first.sentence)}</h3>"
    )
    if first.fix:
        yield f"  <p><b>Fix:</b> {_with_code(first.fix)}</p>"
    yield (
        f'  <p class="where">{_place_link(first)} · {escape(printable(entry.extent))} · '
        f"<code>{_line(first.id)}</code></p>"
    )
    yield "  <details><summary>Why it matters, how to confirm it, evidence</summary>"
    yield _pairs(_explanation(first, entry.tokens))
    yield "  </details>"
    if len(entry.findings) > 1:
        yield f"  <details><summary>{plural(len(entry.findings), 'place')}</summary>"
        places = (f"<li>{_place_link(finding)}</li>" for finding in entry.findings)
        yield f'  <ul class="places">{"".join(places)}</ul></details>'
    yield "</article>"


def _line(text: str) -> str:
    return escape(printable(text))


def _with_code(text: str) -> str:
    """Return text with `code` between backticks as an element."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _line(text))


def _place_link(finding: Finding) -> str:
    place = _place(finding)
    names = ("g", "b", "s", "layer", "head")
    given = {key: place[key] for key in names if place[key] is not None}
    address = "&".join(f"{key}={n}" for key, n in given.items() if n or key != "b")
    if place["q"] is not None:
        address += f"&q={place['q']}&k={place['q']}"
    return f'<a href="#{escape(address)}">{escape(describe_place(finding))}</a>'


def _place(finding: Finding) -> dict[str, int | None]:
    """Return the keys of a place in the page's address; `q` is the first position."""
    return {
        "g": finding.generation,
        "b": finding.branch,
        "s": finding.step,
        "layer": finding.layer,
        "head": finding.head,
        "q": finding.positions[0] if finding.positions else None,
    }


def _explanation(finding: Finding, tokens: Sequence[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    texts = {"why it matters": finding.why, "how to confirm": finding.confirm}
    yield from ((name, printable(text)) for name, text in texts.items() if text)
    if tokens:
        named = ", ".join(f"{pos} “{text}”" if text else str(pos) for pos, text in tokens)
        more = len(finding.positions) - len(tokens)
        rest = f", and {format_thousands(more)} more" if more > 0 else ""
        yield "positions", named + rest
    if len(finding.layers) > 1:
        yield "layers", format_ranges(finding.layers)
    for name, value in finding.evidence.items():
        shown = truncate(printable(format_evidence(value)), MAX_EVIDENCE_CHARS)
        yield printable(name), shown
    if finding.query:
        yield "query", printable(finding.query)
    yield "more", finding_page(printable(finding.id))


# -- answers --------------------------------------------------------------------------------------


def _answers(generations: Sequence[GenerationHead]) -> Iterator[str]:
    shown = [one for one in generations if not one.is_training]
    if not shown:
        return
    title = "Answer" if len(shown) == 1 else "Answers"
    yield '<section id="answers" aria-labelledby="answers-title">'
    yield f'  <h2 id="answers-title">{title}</h2>'
    for number, generation in enumerate(shown):
        if number == MAX_OPEN_ANSWERS:
            more = plural(len(shown) - MAX_OPEN_ANSWERS, "more answer")
            yield f"<details><summary>{more}</summary>"
        yield from _answer(generation)
    if len(shown) > MAX_OPEN_ANSWERS:
        yield "</details>"
    yield "</section>"


def _answer(generation: GenerationHead) -> Iterator[str]:
    yield '<div class="answer">'
    for branch in generation.branches:
        said = escape(truncate(branch.answer, MAX_ANSWER_CHARS))
        yield f'  <p class="said">{said or "(no text)"}</p>'
        if len(branch.answer) > MAX_ANSWER_CHARS:
            yield "  <details><summary>All of the answer</summary>"
            yield f"  <pre>{escape(branch.answer)}</pre></details>"
        yield f'  <p class="about">{" · ".join(_about_answer(generation, branch))}</p>'
    if generation.prompt:
        yield "  <details><summary>The prompt by segment</summary>"
        rows = (
            f"  <dt>{escape(label)} ({start})</dt><dd><pre>{escape(text)}</pre></dd>"
            for label, start, text in generation.prompt
        )
        yield "\n".join(["  <dl>", *rows, "  </dl></details>"])
    yield "</div>"


def _about_answer(generation: GenerationHead, branch: BranchHead) -> Iterator[str]:
    address = f"#g={generation.generation}" + (f"&b={branch.branch}" if branch.branch else "")
    name = f"generation {generation.generation}"
    name += f", branch {branch.branch}" if branch.branch else ""
    yield f'<a href="{escape(address)}">{name}</a>'
    if branch.parent is not None:
        yield escape(f"leaves branch {branch.parent} at step {branch.fork_step}: {branch.change}")
    if branch.is_correct is not None:
        sign = "✓ as expected" if branch.is_correct else "✗ not an expected answer"
        yield f'<span class="{"correct" if branch.is_correct else "incorrect"}">{sign}</span>'
    if generation.expected and not branch.branch:
        yield escape(f"expected: {' | '.join(generation.expected)}")
    yield from (escape(text) for text in (generation.sample_id, generation.mask) if text)
    if branch.state:
        yield escape(branch.state)


# -- the script's facts ---------------------------------------------------------------------------

_KEY_NAMES = {
    **{name: f"Arrow{name.capitalize()}" for name in ("left", "right", "up", "down")},
    "home": "Home",
    "end": "End",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "backspace": "Backspace",
    "greater_than_sign": ">",
    "less_than_sign": "<",
    "right_square_bracket": "]",
    "left_square_bracket": "[",
    "question_mark": "?",
}
"""Textual's names of keys as a browser calls them."""

_PAGE_ACTIONS = (
    *("step.next", "step.previous", "step.first", "step.last", "step.ten_forward", "step.ten_back"),
    *("step.goto", "step.replay", "place.back", "finding.next", "finding.previous"),
    *("generation.next", "generation.previous", "layer.next", "layer.previous"),
    *("head.next", "head.previous", "branch.choose", "zoom.in", "zoom.out", "view.flip"),
    *("view.measure", "cursor.left", "cursor.right", "cursor.up", "cursor.down"),
    *("app.theme", "app.help"),
)
"""The actions of the interface that the page has as well."""


def _page_keys() -> list[Any]:
    return [key for key in KEYS if key.id in _PAGE_ACTIONS]


def browser_key(name: str) -> str:
    """Return what a browser calls a key of Textual: "right" is "ArrowRight"."""
    modifier, _, base = name.rpartition("+")
    named = _KEY_NAMES.get(base, base)
    return f"{modifier.capitalize()}+{named}" if modifier else named


def _key_label(name: str) -> str:
    arrows = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
    modifier, _, base = browser_key(name).rpartition("+")
    label = arrows.get(base, base)
    return f"{modifier}+{label}" if modifier else label


def _last_of_series(finding: Finding) -> int | None:
    """Return the last step of a finding that occurs at every step from its first on, else that."""
    if finding.step is None or finding.last_step is None:
        return finding.step
    is_gapless = finding.times > finding.last_step - finding.step
    return finding.last_step if is_gapless else finding.step


def _head(contents: ReportContents) -> Mapping[str, Any]:
    """Return what the script knows before it unpacks a branch."""
    findings = [
        {
            **_place(finding),
            "number": f"{kind}-{index}",
            "kind": kind,
            "severity": str(finding.severity),
            "sentence": printable(finding.sentence),
            "last": _last_of_series(finding),
        }
        for kind, entry in enumerate(contents.findings)
        for index, finding in enumerate(entry.findings)
    ]
    return {
        "generations": contents.generations,
        "findings": findings,
        "keys": {browser_key(name): key.id for key in _page_keys() for name in key.keys},
    }
