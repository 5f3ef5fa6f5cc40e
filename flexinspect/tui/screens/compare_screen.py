"""The screen of two branches side by side, of one trace or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen

from flexinspect.analysis.run_diff.difference_text import place_text
from flexinspect.analysis.run_diff.generations import GenerationDifference
from flexinspect.core.errors import FlexInspectError
from flexinspect.core.keyboard import all_keys
from flexinspect.drawing.text_lines import Pen
from flexinspect.panels.base import Missing, TracePlace
from flexinspect.tui.comparison_data import (
    PairData,
    Side,
    load_pair,
    next_difference,
    step_bounds_of,
)
from flexinspect.tui.comparison_view import (
    KL_LINE,
    LAYER_LINE,
    cells_that_fit,
    draw_pair,
    layer_at,
    step_at,
)
from flexinspect.tui.key_line import KeyLine
from flexinspect.tui.load_threads import LoadThreads
from flexinspect.tui.panel_view import LoadedCanvas, Loader, PlaceLoadRequest, theme_of
from flexinspect.tui.screens.dialogs import HelpScreen, call_in_thread

ACTIONS = (
    *("step.next", "step.previous", "step.first", "step.last", "finding.next", "finding.previous"),
    *("layer.next", "layer.previous", "head.next", "head.previous", "cursor.enter", "app.help"),
)
"""The actions of the screen; in this one, `finding` stands for a difference."""
LABELS = {
    "finding.next": "next difference",
    "finding.previous": "previous difference",
    "layer.next": "layer",
    "head.next": "head",
    "cursor.enter": "open A here",
}
HELP = (
    "Tokens of one position stand below each other; ≠ marks those that differ.",
    "KL is how far both distributions are apart at a step. Red steps chose another token.",
    "layers: how far each one is apart in this step; · equal, red and ≠ beyond noise.",
    "Δ: by how much the logit of a candidate is larger on the other side.",
    "Look for the first token that differs, and for cells of the masks that only one side opens.",
)


def _bindings() -> list[BindingType]:
    keys = {key.id: key for key in all_keys()}
    own = [
        Binding(",".join(keys[id_].keys), f"do('{id_}')", keys[id_].text, id=id_) for id_ in ACTIONS
    ]
    return [*own, Binding("q", "leave", "back"), Binding("escape", "back", "back")]


class PairView(LoadedCanvas):
    """Everything about both sides at the place of the screen."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        verdict: str,
        pool: Executor,
        found: GenerationDifference | None,
    ) -> None:
        super().__init__(id="pair")
        self._sides, self._verdict = sides, verdict
        self._found = found
        self.loader = Loader(pool, self.place_request, self._load, self._show_loaded)
        self._data: PairData | str = ""

    def on_mount(self) -> None:
        super().on_mount()
        self.run_worker(self.loader.run(), exclusive=True)

    def on_resize(self, event: events.Resize) -> None:
        """Load again: a larger window shows more cells of the masks."""
        self.loader.request_load()

    def _load(self, request: PlaceLoadRequest) -> PairData | str:
        try:
            width, height = self.app.size
            room = max(width, 1), cells_that_fit(width, height)
            if (found := self._found) is None:
                return load_pair(self._sides, request[0], *room)
            skipped = tuple(found.not_compared)
            return load_pair(
                self._sides, request[0], *room, found.noise, found.layers, skipped=skipped
            )
        except Missing as missing:
            return " ".join(missing.lines())
        except FlexInspectError as error:
            return error.sentence()

    def _show_loaded(self, request: PlaceLoadRequest, loaded: PairData | str) -> None:
        self._data = loaded
        self.repaint()

    def repaint(self) -> None:
        """Draw both sides, or why there is nothing to draw."""
        width, height = self.size
        if not width:
            return
        pen = Pen(theme_of(self.app), width)
        if isinstance(self._data, str):
            strips = [pen.line((self._verdict, "strong")), *pen.paragraph(self._data)]
        else:
            strips = draw_pair(self._data, self._sides, self._verdict, pen)
        self.show(strips[:height])

    def on_click(self, event: events.Click) -> None:
        """Go to a step of the KL line, or to a layer of the line of layers."""
        if not isinstance(self._data, PairData):
            return
        if event.y == KL_LINE:
            step = step_at(self._data, event.x, self.size.width)
            if step is not None:
                self.trace_screen.go_to(step)
        elif event.y == LAYER_LINE:
            layer = layer_at(self._data, event.x, self.size.width)
            if layer is not None:
                self.trace_screen.place = replace(self.trace_screen.place, layer=layer)


class CompareScreen(Screen[None]):
    """Shows two sides with one cursor, from the first difference on.

    `open_place` opens the first side in the screen of its trace. `found` is the comparison of two
    traces: its noise and its alignment hold here too.
    """

    BINDINGS: ClassVar[list[BindingType]] = _bindings()
    place: reactive[TracePlace] = reactive(TracePlace(), repaint=False)
    version: reactive[int] = reactive(0, repaint=False)

    def __init__(
        self,
        sides: tuple[Side, Side],
        verdict: str,
        place: TracePlace,
        open_place: Callable[[TracePlace], None] | None = None,
        found: GenerationDifference | None = None,
    ) -> None:
        super().__init__()
        self._sides, self._verdict, self._open_place = sides, verdict, open_place
        self._found = found
        self._pool = LoadThreads(1, "flexinspect-compare")
        self.set_reactive(CompareScreen.place, place)

    def compose(self) -> ComposeResult:
        yield PairView(self._sides, self._verdict, self._pool, self._found)
        yield KeyLine(self.action_do, self._list_actions, ("app.help", "app.quit"), LABELS)

    def on_unmount(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _list_actions(self) -> Iterator[str]:
        yield from ("step.next", "finding.next", "layer.next", "head.next")
        if self._open_place is not None:
            yield "cursor.enter"

    def go_to(self, step: int) -> None:
        """Go to a step, or to the nearest one that a side has."""
        bounds = [step_bounds_of(side, self.place.generation) for side in self._sides]
        last = max(high for _, high in bounds)
        self.place = replace(self.place, step=max(0, min(step, last)))

    @work(exclusive=True, group="difference")
    async def _go_to_difference(self, direction: int) -> None:
        """Go to the next (1) or the previous (-1) step that differs; see `next_difference`."""
        where = (self._sides, self.place.generation, self.place.step, direction)
        found = await call_in_thread(self.app, lambda: (next_difference(*where),))
        if found is None:
            return
        first = None if self._found is None else self._found.first
        if found[0] is None and first is not None:
            self.go_to(first.step)
            self.place = replace(self.place, layer=first.layer or 0)
            self.notify(f"All tokens and masks are the same; {place_text(first)}")
            return
        if found[0] is None:
            self.notify("All tokens and masks are the same.")
            return
        step, layer = found[0]
        self.go_to(step)
        if layer is not None:
            self.place = replace(self.place, layer=layer)
            self.notify(f"All tokens are the same; layer {layer} ran other masks here.")

    def _move(self, name: str, by: int) -> None:
        limits = {"layer": "layers", "head": "heads"}
        model = self._sides[0].source.reader.model(self.place.generation)
        count = model.get(limits[name])
        value = getattr(self.place, name) + by
        if isinstance(count, int) and 0 <= value < count:
            self.place = replace(self.place, **{name: value})

    def action_do(self, name: str) -> None:
        """Run an action of `ACTIONS`, or of the line of keys."""
        step = self.place.step
        actions: dict[str, Callable[[], object]] = {
            "step.next": partial(self.go_to, step + 1),
            "step.previous": partial(self.go_to, step - 1),
            "step.first": partial(self.go_to, 0),
            "step.last": partial(self.go_to, 1 << 30),
            "finding.next": partial(self._go_to_difference, 1),
            "finding.previous": partial(self._go_to_difference, -1),
            "layer.next": partial(self._move, "layer", 1),
            "layer.previous": partial(self._move, "layer", -1),
            "head.next": partial(self._move, "head", 1),
            "head.previous": partial(self._move, "head", -1),
            "cursor.enter": self._open,
            "app.help": self._help,
            "app.quit": self.action_leave,
        }
        try:
            actions.get(name, lambda: None)()
        except FlexInspectError as error:
            self.notify(error.sentence(), severity="error")

    def _open(self) -> None:
        if self._open_place is not None:
            self._open_place(self._sides[0].place(self.place))

    def _help(self) -> None:
        app: Any = self.app
        texts = {key.id: key.text for key in all_keys()} | LABELS
        rows = [(app.keys_of(name), texts[name]) for name in (*ACTIONS, "app.quit")]
        self.app.push_screen(HelpScreen("Two runs side by side", HELP, {"Compare": rows}))

    def action_back(self) -> None:
        """Go back to the screen below; without one, say how to quit."""
        app: Any = self.app
        if self._open_place is None:
            self.dismiss()
        else:
            self.notify(f"{app.keys_of('app.quit').split()[0]} quits.")

    def action_leave(self) -> None:
        """Go back to the screen below, or quit."""
        app: Any = self.app
        if self._open_place is None:
            self.dismiss()
        else:
            app.exit()
