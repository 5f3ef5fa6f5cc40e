"""What is shown on stderr while a capture runs: on a terminal, and anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flexinspect.records import EventRecord, TokenRecord
from flexinspect.sizes import human_bytes, human_count
from flexinspect.text import escape_unprintable
from flexinspect.trace.reader import TraceReader
from flexinspect.trace.rows import GenerationRow, StepRow


class RunProgress:
    """Takes the news of a run. This base class notes; the two below show."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self.console = console
        self.verbose = verbose
        self.phase = ""
        self.fraction: float | None = None
        self.text = ""
        self.n_tokens = 0
        self.wall_ms = 0.0
        self.capture_ms = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to put back."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While entered, nothing is drawn: somebody else has the terminal."""
        yield

    def print_line(self, text: str) -> None:
        """Print a line of its own."""
        self.console.print(escape_unprintable(text))

    def on_event(self, event: EventRecord) -> None:
        """Take an event: a phase moves the bar, anything else is said."""
        if event.kind != "phase":
            if event.kind == "breakpoint" and not event.text.startswith("paused"):
                self.print_line(event.text)
            elif event.kind not in ("error", "breakpoint"):
                self.print_line(f"{event.kind}: {event.text}")
            return
        fraction = event.data.get("fraction")
        self.fraction = float(fraction) if isinstance(fraction, (int, float)) else None
        if event.text == "plan":
            self.print_line(plan_line(event))
        elif event.text == "note":
            self.print_line(str(event.data.get("text", "")))
        elif event.text != self.phase:
            self.phase = event.text
            self.on_phase()

    def on_phase(self) -> None:
        """The phase changed."""

    def on_generation_start(self, generation: GenerationRow, reader: TraceReader) -> None:
        """A generation began."""
        self.text, self.n_tokens, self.wall_ms, self.capture_ms = "", 0, 0.0, 0.0
        question = first_question(generation, reader)
        self.print_line(f"generation {generation.generation}: {question}")

    def on_step(self, step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> None:
        """A step is in the trace."""
        self.n_tokens += len(tokens)
        self.text += "".join(token.text for token in tokens if not token.special)
        self.capture_ms += step.capture_ms
        if step.step:
            self.wall_ms += step.wall_ms
        if self.verbose:
            for line in step_lines(step, tokens, reader):
                self.print_line(line)

    def on_generation_end(self, generation: GenerationRow) -> None:
        """A generation ended."""

    def rate(self) -> str:
        """Return "12.3 tokens/s, capture 0.4 ms/step" for the decode steps so far."""
        if self.n_tokens < 2 or not self.wall_ms:
            return ""
        speed = (self.n_tokens - 1) / (self.wall_ms / 1e3)
        return f"{speed:.1f} tokens/s, capture {self.capture_ms / self.n_tokens:.2f} ms/step"


class PlainProgress(RunProgress):
    """Lines for a pipe or a file: phases and questions, no bars; nothing at all when quiet."""

    def __init__(self, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
        super().__init__(console, verbose=verbose)
        self._quiet = quiet

    def print_line(self, text: str) -> None:
        """Print a line unless quiet."""
        if not self._quiet:
            self.console.print(escape_unprintable(text), soft_wrap=True)

    def on_phase(self) -> None:
        """Name the phase."""
        self.print_line(f"{self.phase} …")


class TerminalProgress(RunProgress):
    """A few live lines on a terminal, redrawn only when something changed."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        super().__init__(console, verbose=verbose)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While entered, the live lines are gone."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def on_event(self, event: EventRecord) -> None:
        """Take the event and redraw."""
        super().on_event(event)
        self._draw(now=True)

    def on_step(self, step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> None:
        """Take the step and redraw, at most ten times a second."""
        super().on_step(step, tokens, reader)
        self._draw()

    def on_generation_end(self, generation: GenerationRow) -> None:
        """Draw the last tokens."""
        self._draw(now=True)

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn_at > 0.1:
            self._drawn_at = time.monotonic()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = []
        bar = Table.grid(padding=(0, 1))
        row: list[RenderableType] = [Text(self.phase, style="bold")]
        if self.fraction is not None:
            row.append(ProgressBar(total=1.0, completed=self.fraction, width=30))
        bar.add_row(*row)
        lines.append(bar)
        if self.n_tokens:
            # The end of it: a picture taller than the window cannot be redrawn in place.
            newest = escape_unprintable(self.text)[-2 * self.console.width :]
            lines.append(Text("  " + newest, style="green", overflow="fold"))
            lines.append(Text(f"  token {self.n_tokens}  {self.rate()}", style="dim"))
        return Group(*lines)


def plan_line(event: EventRecord) -> str:
    """Say what is about to be loaded, from where, and what memory it needs of what there is."""
    data = event.data
    count = human_count(data.get("parameters"))
    needs = human_bytes(data.get("total"))
    free = human_bytes(data.get("available"))
    return (
        f"{data.get('name')}: {count} parameters in {data.get('dtype')} on {data.get('device')}, "
        f"from {data.get('place')}; needs {needs} of {free} free"
    )


def first_question(generation: GenerationRow, reader: TraceReader) -> str:
    """Return the first paraphrase of a prompt, as its tokens spell it."""
    segments = reader.segments(generation.generation)
    first = next((s for s in segments if s.kind == "paraphrase"), next(iter(segments), None))
    if first is None:
        return ""
    tokens = reader.tokens(generation.generation, start=first.start, stop=first.stop)
    return "".join(token.text for token in tokens).strip()


def step_lines(step: StepRow, tokens: list[TokenRecord], reader: TraceReader) -> list[str]:
    """Return a step in words: lengths, path, mask, shapes, candidates."""
    calls = reader.calls(step.generation, step.step)
    lengths = f"q {step.q_len}, kv {step.kv_before} → {step.kv_after}"
    lines = [f"  step {step.step} {step.phase}: {lengths}, {step.wall_ms:.1f} ms"]
    if calls:
        call = calls[0]
        paths = ", ".join(sorted({call.path for call in calls}))
        masks = ", ".join(sorted({call.mask or "none" for call in calls}))
        shape = f"q {call.batch}×{call.q_heads}×{call.q_len}×{call.head_dim}"
        shape += f", k {call.batch}×{call.kv_heads}×{call.kv_len}×{call.head_dim}"
        lines.append(f"    {len(calls)} layers {paths}; {shape} {call.dtype}; mask {masks}")
    logits = reader.logits(step.generation, step.step)
    if logits is not None:
        best = "  ".join(f"{c.text!r} {c.logprob:.2f}" for c in logits.candidates[:4])
        lines.append(f"    entropy {logits.entropy:.3f}, margin {logits.margin:.2f}: {best}")
    return lines
