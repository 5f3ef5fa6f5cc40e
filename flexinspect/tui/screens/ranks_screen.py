"""The screen of the ranks of a distributed run: step by step side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen

from flexinspect.analysis.ranks.rank_comparison import RankComparison
from flexinspect.analysis.ranks.side_by_side import generation_steps, load_steps_of_ranks
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import all_keys
from flexinspect.drawing.text_lines import Pen
from flexinspect.panels.base import TracePlace
from flexinspect.panels.timeline import step_window
from flexinspect.trace.reader import TraceReader
from flexinspect.tui import ranks_view
from flexinspect.tui.key_line import KeyLine
from flexinspect.tui.load_threads import LoadThreads
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PlaceLoadRequest, theme_of
from flexinspect.tui.ranks_view import RanksData
from flexinspect.tui.screens.dialogs import HelpScreen

ACTIONS = (
    *("step.next", "step.previous", "step.first", "step.last", "step.ten_forward", "step.ten_back"),
    *("finding.next", "finding.previous", "layer.next", "layer.previous"),
    *("generation.next", "generation.previous", "view.measure", "cursor.enter", "rail.toggle"),
    "app.help",
)
"""The actions of the screen; here `finding` stands for a difference, and `layer` for a rank."""
LABELS = {
    "step.next": "step",
    "finding.next": "difference",
    "finding.previous": "previous difference",
    "layer.next": "rank",
    "layer.previous": "previous rank",
    "view.measure": "differs/late",
    "cursor.enter": "side by side",
    "rail.toggle": "open trace",
}
HELP = (
    "A row per rank, a column per step: ≠ differs beyond noise in what must be equal on all ranks.",
    "× is where a rank stopped, ✖ a rank that did not finish, ● one that still records.",
    "late: how much later than all others the rank entered collective calls in this step.",
    "Enter shows the chosen rank beside the reference, layer by layer, or opens a training.",
)


def _bindings() -> list[BindingType]:
    keys = {key.id: key for key in all_keys()}
    own = [
        Binding(",".join(keys[id_].keys), f"do('{id_}')", keys[id_].text, id=id_) for id_ in ACTIONS
    ]
    return [*own, Binding("q", "leave", "quit")]


class RanksView(LoadedCanvas):
    """All ranks at the place of the screen."""

    def __init__(
        self, found: RankComparison, readers: tuple[TraceReader, ...], pool: Executor
    ) -> None:
        super().__init__(id="ranks")
        self._found, self._readers = found, readers
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._data: RanksData | str = ""

    def on_mount(self) -> None:
        super().on_mount()
        self.watch(self.screen, "rank_at", self.repaint, init=False)
        self.watch(self.screen, "measure", self.repaint, init=False)
        self.run_worker(self.loader.run(), exclusive=True)

    def on_resize(self, event: events.Resize) -> None:
        """Load again: a wider window shows more steps."""
        self.loader.request_load()

    def _load(self, request: PlaceLoadRequest) -> RanksData | str:
        place = request[0]
        try:
            n_steps = generation_steps(self._readers, place.generation)
            step = min(place.step, max(n_steps - 1, 0))
            width = ranks_view.strip_width(self._found, max(self.app.size.width, 1))
            window = step_window(step, 0, max(n_steps - 1, 0), width)
            radius = self.app.size.height
            bounds = (max(step - radius, 0), min(step + radius + 1, max(n_steps, 1)))
            rows = load_steps_of_ranks(self._found, self._readers, place.generation, *bounds)
        except FlexInspectError as error:
            return error.sentence()
        return RanksData(window, rows)

    def _show_loaded(self, request: PlaceLoadRequest, loaded: RanksData | str) -> None:
        self._data = loaded
        self.repaint()

    def repaint(self) -> None:
        """Draw all ranks, or why there is nothing to draw."""
        width, height = self.size
        if not width:
            return
        pen = Pen(theme_of(self.app), width)
        if isinstance(self._data, str):
            strips = [*ranks_view.head_lines(self._found, pen), *pen.paragraph(self._data)]
        else:
            at, measure = self.trace_screen.rank_at, self.trace_screen.measure
            place = (self._found, self._data, at, measure, pen, height)
            strips = ranks_view.draw_ranks(*place)
        self.show(strips[:height])

    def on_click(self, event: events.Click) -> None:
        """Choose the rank and the step that were clicked."""
        if not isinstance(self._data, RanksData):
            return
        screen, (width, height) = self.trace_screen, self.size
        pen = Pen(theme_of(self.app), width)
        at = ranks_view.rank_at(self._found, screen.rank_at, event.y, height, pen)
        if at is None:
            return
        screen.rank_at = at
        step = ranks_view.step_at(self._found, self._data, event.x, width)
        if step is not None:
            screen.go_to(step)


class RanksScreen(Screen[None]):
    """Shows the ranks of a run with one cursor, from the first place that differs on.

    `open_trace` opens the trace of a rank at a place, `compare` shows two ranks side by side.
    """

    BINDINGS: ClassVar[list[BindingType]] = _bindings()
    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False)
    version: reactive[int] = reactive(0, repaint=False)
    rank_at: reactive[int] = reactive(0, repaint=False)
    measure: reactive[str] = reactive(ranks_view.MEASURES[0], repaint=False)

    def __init__(
        self,
        found: RankComparison,
        readers: tuple[TraceReader, ...],
        open_trace: Callable[[int, TracePlace], None],
        compare: Callable[[int, TracePlace], None],
    ) -> None:
        super().__init__()
        self._found, self._readers = found, readers
        self._open_trace, self._compare = open_trace, compare
        self._pool = LoadThreads(1, "flexinspect-ranks")
        ranks, first = [one.rank for one in found.run.traces], found.first
        place, chosen = TracePlace(), ranks[0]
        if first is not None:
            place, chosen = TracePlace(first.generation, step=first.place.step), first.ranks[0]
        elif found.run.stopped:
            stopped = found.run.stopped[0]
            generation, step = stopped.last or (0, 0)
            place, chosen = TracePlace(generation, step=step), stopped.rank
        self.set_reactive(RanksScreen.place, place)
        self.set_reactive(RanksScreen.rank_at, ranks.index(chosen))

    def compose(self) -> ComposeResult:
        yield RanksView(self._found, self._readers, self._pool)
        yield KeyLine(self.action_do, self._list_actions, ("app.help", "app.quit"), self._labels())

    def on_unmount(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _labels(self) -> dict[str, str]:
        enter = "open trace" if self._found.is_training else LABELS["cursor.enter"]
        return LABELS | {"cursor.enter": enter}

    def _list_actions(self) -> Iterator[str]:
        yield from ("step.next", "layer.next", "finding.next", "view.measure", "cursor.enter")
        if not self._found.is_training:
            yield "rail.toggle"

    def go_to(self, step: int) -> None:
        """Go to a step, or to the nearest one that a rank has."""
        last = generation_steps(self._readers, self.place.generation) - 1
        self.place = replace(self.place, step=max(0, min(step, last)))

    def _go_to_difference(self, direction: int) -> None:
        """Go to the next (1) or the previous (-1) step in which a rank differs."""
        generation, here = self.place.generation, self.place.step
        steps = {
            step
            for rank in self._found.pairs
            for step in self._found.differing_steps(rank, generation)
        }
        ahead = [step for step in steps if (step - here) * direction > 0]
        if not steps:
            self.notify("No step differs beyond noise in what must be equal on all ranks.")
        elif not ahead:
            self.notify("There is no further step that differs.")
        else:
            self.go_to(min(ahead) if direction > 0 else max(ahead))

    def _move_rank(self, by: int) -> None:
        self.rank_at = max(0, min(self.rank_at + by, len(self._readers) - 1))

    def _move_generation(self, by: int) -> None:
        numbers = sorted({row.generation for one in self._readers for row in one.generations()})
        at = numbers.index(self.place.generation) + by if self.place.generation in numbers else 0
        if 0 <= at < len(numbers):
            self.place = TracePlace(numbers[at])

    def _toggle_measure(self) -> None:
        at = ranks_view.MEASURES.index(self.measure) + 1
        self.measure = ranks_view.MEASURES[at % len(ranks_view.MEASURES)]

    def _enter(self) -> None:
        """Show the chosen rank beside the reference; of a training, open its trace."""
        rank = self._found.run.traces[self.rank_at].rank
        if self._found.is_training:
            self._open_trace(rank, self.place)
        elif rank not in self._found.pairs:
            others = [one for one in self._found.pairs if self._found.reference_of(one) == rank]
            if others:
                self._compare(others[0], self.place)
        else:
            self._compare(rank, self.place)

    def action_do(self, name: str) -> None:
        """Run an action of `ACTIONS`, or of the line of keys."""
        step = self.place.step
        rank = self._found.run.traces[self.rank_at].rank
        actions: dict[str, Callable[[], object]] = {
            "step.next": partial(self.go_to, step + 1),
            "step.previous": partial(self.go_to, step - 1),
            "step.first": partial(self.go_to, 0),
            "step.last": partial(self.go_to, 1 << 30),
            "step.ten_forward": partial(self.go_to, step + 10),
            "step.ten_back": partial(self.go_to, step - 10),
            "finding.next": partial(self._go_to_difference, 1),
            "finding.previous": partial(self._go_to_difference, -1),
            "layer.next": partial(self._move_rank, 1),
            "layer.previous": partial(self._move_rank, -1),
            "generation.next": partial(self._move_generation, 1),
            "generation.previous": partial(self._move_generation, -1),
            "view.measure": self._toggle_measure,
            "cursor.enter": self._enter,
            "rail.toggle": partial(self._open_trace, rank, self.place),
            "app.help": self._help,
            "app.quit": self.action_leave,
        }
        try:
            actions.get(name, lambda: None)()
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error")

    def _help(self) -> None:
        app: Any = self.app
        texts = {key.id: key.text for key in all_keys()} | self._labels()
        rows = [(app.keys_of(name), texts[name]) for name in (*ACTIONS, "app.quit")]
        self.app.push_screen(HelpScreen("The ranks of a run", HELP, {"Ranks": rows}))

    def action_leave(self) -> None:
        """Quit."""
        self.app.exit()
