"""How much is measured of a training step, and the governor that reduces it to limit the cost."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect_hooks.training.state_checks import SWEEP_END, SWEEP_INTERVAL

WINDOW = 10  # steps over which the cost is averaged
RECOVERY_STEPS = 50  # steps within the band after which more detail is tried again
MEASURED_IN_SUCCESSION = 4  # steps: a check of states needs three, and the end of the one before


class Detail(Struct, frozen=True):
    """How much is measured, and how often, counted in steps; 0 means never.

    Of each `period` the first steps are measured. With `is_screened`, a few values of the gradients
    of the others are looked at, and a step is measured if they stand out.
    """

    name: str
    text: str  # a phrase for what is measured
    period: int = 1
    rows_every: int = 1
    is_screened: bool = False
    maxima: bool = False
    ratios_every: int = 0
    watches_leaves: bool = False
    keeps_stats: bool = False

    def measures(self, step: int) -> bool:
        """Whether the gradients of a step are measured, and its checks are made."""
        if self.is_screened and step % SWEEP_INTERVAL < SWEEP_END:
            return True
        return step % self.period < MEASURED_IN_SUCCESSION

    def compares_weights(self, step: int) -> bool:
        """Whether it is measured how much a step changes the weights."""
        return self.ratios_every > 0 and step % self.ratios_every == 0


_EVERYTHING = "everything, with statistics of the layers' outputs and the change of the weights"
EXTREME = Detail(
    "extreme", _EVERYTHING, maxima=True, ratios_every=1, watches_leaves=True, keeps_stats=True
)
_EVERY_GRADIENT = "gradients of every parameter and every module's output"
ADVANCED = Detail("advanced", _EVERY_GRADIENT, maxima=True, ratios_every=10, watches_leaves=True)
BASIC = Detail("basic", "gradients by group and the layers' outputs", 1, 10)
_SOME = f"gradients of {MEASURED_IN_SUCCESSION} of every {{}} steps"
SCREENED = Detail(
    "screened", f"{_SOME.format(32)}, and of others that stand out", 32, 32, is_screened=True
)
SPARSE = Detail("sparse", _SOME.format(64), 64, 64)
SPARSEST = Detail("sparse", _SOME.format(256), 256, 256)
DETAIL_LEVELS = (EXTREME, ADVANCED, BASIC, SCREENED, SPARSE, SPARSEST)
_LEVEL_INDEX = {"extreme": 0, "advanced": 1, "basic": 2}
_LIMIT_OF_BASIC = 0.02


class Governor:
    """Reduces the detail if the last steps cost more than the band, and restores it later.

    `band` is the time of a step with capture relative to one without, for instance 1.02. Without a
    band the detail is that of the level, but `basic` becomes `SCREENED` while it costs more than
    2 %. Raises `UsageError` for a band outside of (1, 10).
    """

    def __init__(self, level: str, band: float | None) -> None:
        if band is not None and not (isinstance(band, (int, float)) and 1.0 < band < 10.0):
            raise UsageError(f"band is {band}, but must be a ratio above 1, such as 1.02 for 2 %.")
        self._band_limit = None if band is None else band - 1.0
        self._costs: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._sums = 0.0, 0.0
        self._known_costs: dict[int, float] = {}
        self._n_within_band = 0
        self._patience = RECOVERY_STEPS
        self._n_reduced = self._lowest_index = 0
        self.set_level(level)

    @property
    def detail(self) -> Detail:
        """The detail of the next step."""
        return DETAIL_LEVELS[self._index]

    def summary(self) -> str:
        """A sentence on the detail that was dropped so far, "" if none was."""
        if not self._n_reduced:
            return ""
        times = "once" if self._n_reduced == 1 else f"{self._n_reduced} times"
        least, now = DETAIL_LEVELS[self._lowest_index].text, self.detail.text
        back = f" for a time, now {now}" if self._index < self._lowest_index else " from then on"
        limit = f"{self._limit or 0.0:.1%}"
        return f"Above the band of {limit} detail was dropped {times}, down to {least}{back}."

    def set_level(self, level: str) -> None:
        """Start again at the detail of a level."""
        self.level = level
        self._level_index = self._index = _LEVEL_INDEX[level]
        self._limit, self._last_index = self._band_limit, len(DETAIL_LEVELS) - 1
        if self._limit is None and level == "basic":
            self._limit, self._last_index = _LIMIT_OF_BASIC, DETAIL_LEVELS.index(SCREENED)
        self._clear()

    def on_step(self, own_s: float, wall_s: float) -> tuple[str, str] | None:
        """Add the cost of a step; returns the event of a change of the detail: kind and text."""
        if self._limit is None:
            return None
        self._add(own_s, wall_s)
        if len(self._costs) < WINDOW:
            return None
        own, wall = self._sums
        # Steps of microseconds may take less time than the estimated cost of capture.
        cost = own / max(wall - own, own / 100, 1e-9)
        self._known_costs[self._index] = cost
        is_above = cost > self._limit
        self._n_within_band = 0 if is_above else self._n_within_band + 1
        if is_above and self._index < self._last_index:
            dropped = self.detail.text
            self._set_index(self._index + 1)
            self._n_reduced += 1
            self._lowest_index = max(self._lowest_index, self._index)
            text = f"Capture took {cost:.1%} of what the last {WINDOW} steps took without it, "
            now = self.detail.text
            text += f"above the band of {self._limit:.1%}: from now on {now}, instead of {dropped}."
            return "detail-reduced", text
        if self._index > self._level_index and self._n_within_band >= self._patience:
            self._set_index(self._index - 1)
            if self._known_costs.get(self._index, 0.0) > self._limit:
                self._patience *= 2  # it was too expensive before: try less often
            text = f"Capture took {cost:.1%} of what the last steps took without it, within the "
            text += f"band of {self._limit:.1%}: again {self.detail.text}."
            return "detail-restored", text
        return None

    def _add(self, own_s: float, wall_s: float) -> None:
        own, wall = self._sums
        if len(self._costs) == WINDOW:
            own, wall = own - self._costs[0][0], wall - self._costs[0][1]
        self._costs.append((own_s, wall_s))
        self._sums = own + own_s, wall + wall_s

    def _set_index(self, at: int) -> None:
        self._index, self._n_within_band = at, 0
        self._clear()

    def _clear(self) -> None:
        self._costs.clear()
        self._sums = 0.0, 0.0
