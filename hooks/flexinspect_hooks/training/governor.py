"""How much is measured of a step, and who takes some of it away when it costs too much."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flexinspect.errors import UsageError

WINDOW = 10
"""Steps whose cost is judged together."""

CALM = 50
"""Steps without trouble after which more detail is tried again."""


@dataclass(frozen=True, slots=True)
class Detail:
    """How much is measured, and how often, counted in steps; 0 means never."""

    name: str
    gradients_every: int
    rows_every: int
    maxima: bool = False
    ratios_every: int = 0
    is_fine: bool = False
    keeps_stats: bool = False

    def measures(self, step: int) -> bool:
        """Tell whether the gradients of a step are measured."""
        return step % self.gradients_every == 0

    def says(self) -> str:
        """Return in words what is measured."""
        return _WORDS[self]


EXTREME = Detail("extreme", 1, 1, maxima=True, ratios_every=1, is_fine=True, keeps_stats=True)
ADVANCED = Detail("advanced", 1, 1, maxima=True, ratios_every=10, is_fine=True)
BASIC = Detail("basic", 1, 10)
SPARSE = Detail("sparse", 4, 16)
RARE = Detail("sparse", 16, 64)
LADDER = (EXTREME, ADVANCED, BASIC, SPARSE, RARE)
_WORDS = {
    EXTREME: "everything, with statistics of the layers' outputs and the change of the weights",
    ADVANCED: "gradients of every parameter and every module's output",
    BASIC: "gradients by group and the layers' outputs",
    SPARSE: "gradients of every 4th step",
    RARE: "gradients of every 16th step",
}
_BY_LEVEL = {"extreme": 0, "advanced": 1, "basic": 2}


@dataclass(frozen=True, slots=True)
class Change:
    """The detail changed: what is measured from now on, and a sentence why."""

    kind: str
    text: str


class Governor:
    """Goes down the ladder when the last steps cost more than the band, and comes back.

    `band` is the time of a step with capture over the one without, for instance 1.02; without one
    the level stays as it is.
    """

    def __init__(self, level: str, band: float | None) -> None:
        if band is not None and not (isinstance(band, (int, float)) and 1.0 < band < 10.0):
            raise UsageError(f"band is {band}, and must be a ratio above 1, such as 1.02 for 2 %.")
        self._band = band
        self._costs: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._known: dict[int, float] = {}
        self._calm = 0
        self._patience = CALM
        self._n_thinned = self._lowest = 0
        self.set_level(level)

    @property
    def detail(self) -> Detail:
        """What is measured of the next step."""
        return LADDER[self._at]

    def summary(self) -> str:
        """Return in a sentence what was dropped so far; nothing where nothing was."""
        if self._band is None or not self._n_thinned:
            return ""
        times = "once" if self._n_thinned == 1 else f"{self._n_thinned} times"
        least, now = LADDER[self._lowest].says(), self.detail.says()
        back = f" for a time, now {now}" if self._at < self._lowest else " from then on"
        return (
            f"Above the band of {self._band - 1.0:.1%} detail was dropped {times}, down to "
            f"{least}{back}."
        )

    def set_level(self, level: str) -> None:
        """Begin anew at a level."""
        self._top = self._at = _BY_LEVEL[level]
        self._costs.clear()

    def judge(self, own_s: float, wall_s: float) -> Change | None:
        """Take the cost of a step; returns the change that follows from it."""
        if self._band is None:
            return None
        self._costs.append((own_s, wall_s))
        if len(self._costs) < WINDOW:
            return None
        own, all_ = (sum(column) for column in zip(*self._costs, strict=True))
        # Steps of microseconds may take less than what is estimated of us.
        cost, limit = own / max(all_ - own, own / 100, 1e-9), self._band - 1.0
        self._known[self._at] = cost
        if cost > limit:
            self._calm = 0
            return self._thin(cost, limit) if self._at < len(LADDER) - 1 else None
        self._calm += 1
        if self._at > self._top and self._calm >= self._patience:
            return self._restore(cost, limit)
        return None

    def _thin(self, cost: float, limit: float) -> Change:
        dropped = self.detail.says()
        self._move(self._at + 1)
        self._n_thinned, self._lowest = self._n_thinned + 1, max(self._lowest, self._at)
        return Change(
            "thinned",
            f"Capture took {cost:.1%} of what the last {WINDOW} steps took without it, above the "
            f"band of {limit:.1%}: from now on {self.detail.says()}, instead of {dropped}.",
        )

    def _restore(self, cost: float, limit: float) -> Change:
        self._move(self._at - 1)
        if self._known.get(self._at, 0.0) > limit:
            self._patience *= 2  # it was too dear before: ask less often
        return Change(
            "restored",
            f"Capture took {cost:.1%} of what the last steps took without it, within the band of "
            f"{limit:.1%}: again {self.detail.says()}.",
        )

    def _move(self, at: int) -> None:
        self._at, self._calm = at, 0
        self._costs.clear()
