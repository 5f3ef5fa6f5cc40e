"""The result of `diff --bisect`: which module makes a difference, and which layers carry it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, to_builtins

from flexinspect.analysis.run_diff.generations import GenerationDifference
from flexinspect.analysis.run_diff.traces import Comparison
from flexinspect.core.errors import UsageError
from flexinspect.core.text import format_layers, join_labels, plural


class BisectRequest(Struct, frozen=True):
    """Which step of which generations (of A, of B) is run again, in which traces.

    `pairs` are the aligned layers, `limits` the noise of each aligned layer's output, by the number
    in A, and `logits_limit` that of the logits. `other_masks` are layers of A whose masks differ.
    """

    a: str
    b: str
    generations: tuple[int, int]
    step: int
    pairs: tuple[tuple[int, int], ...]
    limits: Mapping[int, float]
    logits_limit: float
    other_masks: tuple[int, ...] = ()


class LayerResult(Struct, frozen=True):
    """One aligned layer of B: relative differences of its output from A's.

    `carried` is that of the plain run of B, `made` that of a run in which the layer received A's
    tensor; `name` is the module, or those from the layer before it that A has.
    """

    layer: int
    partner: int
    name: str
    carried: float
    made: float
    limit: float

    @property
    def makes(self) -> bool:
        """Whether the layer makes a difference beyond noise out of A's input."""
        return not self.made <= self.limit

    @property
    def carries(self) -> bool:
        """Whether the layer's output differs beyond noise, and only because its input does."""
        return not self.makes and not self.carried <= self.limit


class ModuleResult(Struct, frozen=True):
    """A module within a layer: the difference that it makes out of the tensors of A."""

    name: str
    made: float
    limit: float
    text: str = ""

    @property
    def makes(self) -> bool:
        """Whether it makes a difference beyond noise."""
        return not self.made <= self.limit


class Bisection(Struct, frozen=True):
    """What came of running B again with tensors of A.

    `logits` is the difference of B's logits from A's, `put_in` what remains of it if A's output is
    put in at a layer (numbers of A), in the order of the search. `modules` are those of the layers
    that make a difference. `notes` say what could not be done.
    """

    step: int
    logits: float
    logits_limit: float
    put_in: tuple[tuple[int, float], ...]
    layers: tuple[LayerResult, ...]
    modules: tuple[ModuleResult, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def makers(self) -> tuple[str, ...]:
        """Names of the modules that make the difference; layers where no module is known."""
        names = [module.name for module in self.modules if module.makes]
        for layer in self.layers:
            if layer.makes and not any(name.startswith(f"{layer.name}.") for name in names):
                names.append(layer.name)
        last = min((value for _, value in self.put_in), default=0.0)
        if self.put_in and not last <= self.logits_limit:
            names.append("the final norm or the output head")
        return tuple(names)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values, with the makers and the layers that carry."""
        carriers = [layer.layer for layer in self.layers if layer.carries]
        return {"makers": list(self.makers), "carriers": carriers, **to_builtins(self)}


def bisect_request(comparison: Comparison) -> BisectRequest:
    """Return what to run again: the step of the first place, else of the first difference.

    Raises `UsageError` where nothing differs in a step that both runs have.
    """
    if comparison.trainings:
        raise UsageError("--bisect runs generations of tokens again, and A and B are trainings.")
    for one in comparison.generations:
        place = one.first if one.first is not None and one.first.quantity != "step" else one.begins
        if place is not None and one.prompt is None and not one.missing:
            return _request(comparison, one, place.step)
    raise UsageError("There is nothing to bisect: no compared number of a step differs.")


def _request(comparison: Comparison, one: GenerationDifference, step: int) -> BisectRequest:
    assert one.noise is not None
    noise = one.noise
    found = next(each for each in one.steps if each.step == step)
    limits = {layer: noise.limit("hidden", layer) for layer, _ in one.layers.pairs}
    logits_limit = noise.limit("logits", None)
    if noise.first is not None and noise.first_key:
        # A layer with A's input makes a first difference, and B runs under the same conditions.
        limits = {layer: min(limit, noise.first) for layer, limit in limits.items()}
        logits_limit = min(logits_limit, noise.first)
    masks = sorted({layer for mask in found.masks for layer in mask.layers})
    return BisectRequest(
        a=comparison.a,
        b=comparison.b,
        generations=(one.generation, one.partner),
        step=step,
        pairs=one.layers.pairs,
        limits=limits,
        logits_limit=logits_limit,
        other_masks=tuple(masks),
    )


def bisection_lines(found: Bisection) -> Iterator[str]:
    """Yield the text of a bisection."""
    yield f"bisection: B runs again up to step {found.step}, with A's outputs of layers put in"
    noise = f"noise up to {found.logits_limit:.3g}"
    yield f"  nothing put in: the logits differ by {found.logits:.3g}, {noise}"
    for layer, value in found.put_in:
        state = "within noise" if value <= found.logits_limit else "remains"
        yield f"  output of layer {layer} put in: {value:.3g}, {state}"
    yield "  layer  carried    made       (with A's input)"
    for one in found.layers:
        role = "makes it" if one.makes else "carries it" if one.carries else ""
        row = f"  {one.layer:5}  {one.carried:<9.3g}  {one.made:<9.3g}  {role}"
        yield row.rstrip()
    if found.modules:
        yield "  modules of the layers that make it, with A's inputs"
    for module in found.modules:
        if module.makes:
            text = f" ({module.text})" if module.text else ""
            yield f"    {module.name}: {module.made:.3g}{text}"
    others = [module.made for module in found.modules if not module.makes]
    if others:
        yield f"    {plural(len(others), 'other module')}: at most {max(others):.3g}"
    for note in found.notes:
        yield f"  {note}"
    yield _conclusion(found)


def _conclusion(found: Bisection) -> str:
    if not found.makers:
        return "No module makes a difference beyond noise out of A's tensors."
    carriers = [layer.layer for layer in found.layers if layer.carries]
    verb = "carries" if len(carriers) == 1 else "carry"
    carried = f"; {format_layers(carriers, 0)} {verb} it" if carriers else ""
    return f"The difference is made by {join_labels(found.makers)}{carried}."
