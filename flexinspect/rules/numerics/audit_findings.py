"""The rule for the audit: steps whose numbers differ from those of the untouched implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from flexinspect.core.text import format_layers, plural
from flexinspect.records import imported
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.step import EventRecord
from flexinspect.rules.engine import Findings, Rule, as_consequence, finding_kinds

AUDIT_EVENT = "audit"
"""The kind of the event of an audited generation; docs/trace-format.md describes its `data`."""
AUDIT_SKIPPED_EVENT = "audit-skipped"
AUDITED_EVENT = "audited"
"""The kind of the event that sums up the audit of a model."""
CHOICE_EVENT = "audit-choice"
"""The kind of the event that says by which rule a program chose its tokens."""
SCORE_MOD_EVENT, TRAINING_EVENT = "score-mod", "training-mode"
"""Kinds of events of steps: their attention had a score_mod; their model was in training mode."""

REPRODUCED, UNEXPLAINED, TRAINING = "audit.reproduced", "audit.unexplained", "audit.training-mode"
SCORE_MOD_HEADS = "audit.score-mod-heads"
HOOK, HOOK_ROWS = "audit.hook", "audit.hook-rows"
SWITCHED = "audit.switched-module"
_MAX_NAMES = 12
_MAX_TIES = 3


def finding_id(data: Mapping[str, Any]) -> str:
    """Return the id of the finding of a divergence, from the data of its event."""
    facts = data.get("facts") or {}
    if data.get("explanation") is not None:
        return REPRODUCED
    return TRAINING if facts.get("training") and facts.get("dropout") else UNEXPLAINED


class AuditRule(Rule):
    """Reports the first divergence of a generation, and the fault that gives the same numbers."""

    name = "audit"
    needs = (imported.EVENTS,)
    findings = finding_kinds(
        REPRODUCED, UNEXPLAINED, TRAINING, SCORE_MOD_HEADS, HOOK, HOOK_ROWS, SWITCHED
    )

    def on_event(self, event: EventRecord) -> Findings:
        """Judge an audited generation."""
        if event.kind == AUDIT_EVENT and "by_kv_head" in event.data and not event.data["batch"]:
            yield self._by_kv_head(event, event.data["by_kv_head"])
        for hook in event.data.get("hooks", ()) if event.kind == AUDIT_EVENT else ():
            yield self._hook(event, hook)
        if event.kind == AUDIT_EVENT and "switched" in event.data:
            yield self._switched(event, event.data["switched"])
        if event.kind == AUDIT_EVENT and "quantity" in event.data:
            yield self._linked(self._finding(event), event.data)

    def _linked(self, found: Finding, data: Mapping[str, Any]) -> Finding:
        """Return a note where a rule, or another batch row, has shown the cause already."""
        if causes := data.get("causes"):
            return as_consequence(found, causes[0])
        if follows := data.get("follows"):
            return as_consequence(found, follows["id"], f" of batch row {follows['batch']}")
        facts = data.get("facts") or {}
        if facts.get("adapter") or (facts.get("quantized") and not data.get("explanation")):
            return replace(found, severity=Severity.NOTE)
        explanation = data.get("explanation") or {}
        names = explanation.get("names", ())
        if names == [PROMPT_WINDOW]:
            # A sparse attention of prompts alone may be meant, but seldom is.
            return replace(found, severity=Severity.WARNING)
        if names == [OWN_WINDOW] and _is_certain(explanation):
            return replace(found, severity=Severity.NOTE, sentence=found.sentence + _IS_OWN)
        return found

    def _finding(self, event: EventRecord) -> Finding:
        data, facts, id_ = event.data, event.data.get("facts") or {}, finding_id(event.data)
        if id_ == REPRODUCED:
            sentence = _reproduced(data, data["explanation"])
            if facts.get("mask_change"):
                sentence += f" {facts['mask_change']}"
            return self._report(event, id_, sentence)
        describe = self._training if id_ == TRAINING else self._unexplained
        return self._report(event, id_, describe(data, facts))

    def _by_kv_head(self, event: EventRecord, facts: Mapping[str, Any]) -> Finding:
        wrong, layers = facts["heads"], tuple(facts["layers"])
        n_kv, size = int(facts["kv_heads"]), int(facts["total"]) // int(facts["kv_heads"])
        listed = ", ".join(map(str, wrong[:_MAX_NAMES]))
        more = f" and {len(wrong) - _MAX_NAMES} more" if len(wrong) > _MAX_NAMES else ""
        sentence = (
            f"The score_mod of {format_layers(list(layers), 1 << 20)} repeats its values with "
            f"h % {n_kv} over the {facts['total']} query heads, but query head h reads key head "
            f"h // {size}: heads {listed}{more} have the values of another group of heads."
        )
        evidence = {"heads": wrong, "kv_heads": n_kv, "group": size}
        return self.finding(event, SCORE_MOD_HEADS, sentence, layers, evidence, series="heads")

    def _hook(self, event: EventRecord, hook: Mapping[str, Any]) -> Finding:
        rows, n_batch = list(hook["batch_rows"]), int(hook["n_batch"])
        is_partial = len(rows) < n_batch
        where = f"{hook['kind']} {hook['where']} on {hook['module']}"
        what = "input" if "pre" in hook["kind"] else "output"
        first, step = self.context.format_position(hook["positions"][0]), hook["step"]
        n = len(hook["positions"])
        place = first if n == 1 else f"{plural(n, 'position')} from {first} on"
        size = f"by up to {hook['size']:.2g} of the row's norm"
        more = int(hook["n_steps"]) - 1
        later = f", and in {plural(more, 'later step')}" if more else ""
        if is_partial:
            sentence = (
                f"The {where} changes only {_batch_rows(rows)} of {n_batch} in its {what}, {size} "
                f"(step {step}: {place}{later}). It leaves {_batch_rows(_others(rows, n_batch))} "
                "exactly as given, whatever the values are."
            )
            if rows == [0] and hook["returns_tensor"]:
                sentence += " The module returns a tensor, whose [0] is batch row 0."
        else:
            every = "" if n_batch == 1 else f" of all {n_batch} batch rows"
            sentence = (
                f"The {where} changes its {what}, {size}{every} (step {step}: {place}{later}). The "
                "audit takes the hook as it is and judges what follows with it."
            )
        if hook.get("shape"):
            layer = "" if hook["layer"] is None else f" of layer {hook['layer']}"
            shape = AND_THERE.join(hook["shape"])
            sentence += f" Through it the {hook['quantity']}{layer} {shape}."
        evidence = dict(hook)
        id_ = HOOK_ROWS if is_partial else HOOK
        positions, series = tuple(hook["positions"]), f"{hook['module']} {hook['where']}"
        return self.finding(event, id_, sentence, (), evidence, positions=positions, series=series)

    def _switched(self, event: EventRecord, facts: Mapping[str, Any]) -> Finding:
        names, (first, last) = facts["modules"], facts["before"]
        more = f" and {len(names) - _MAX_TIES} more" if len(names) > _MAX_TIES else ""
        which = f"{' and '.join(facts['classes'])} ({', '.join(names[:_MAX_TIES])}{more})"
        before = f"the positions {first} to {last}" if first < last else f"position {first}"
        sentence = {
            "off": f"The adapter {which} is used at {before} and not after.",
            "on": f"The adapter {which} is not used at {before}, but after.",
        }.get(
            facts["use"],
            f"The program's {which} computes something else from position {facts['pos']} on than "
            f"at {before}.",
        )
        values = [f"`{name}` was {old} and is {new}" for name, old, new in facts["values"]]
        if values:
            sentence += f" {', '.join(values[:_MAX_TIES])} from step {facts['step']} on."
        sentence += (
            " So the later rows read keys and values that another state of the module gave. The "
            "audit judges each step with the state that it had."
        )
        if n := facts["n_later"]:
            sentence += f" Its state changes {plural(n, 'more time')} later."
        return self.finding(
            event, SWITCHED, sentence, (), dict(facts), positions=(int(facts["pos"]),)
        )

    def _report(self, event: EventRecord, id_: str, sentence: str) -> Finding:
        data = event.data
        layer, explanation = data.get("layer"), data.get("explanation") or {}
        layers = () if layer is None else tuple(explanation.get("layers") or (layer,))
        evidence = {
            "quantity": data["quantity"],
            "difference": data["difference"],
            "limit": data["limit"],
            "hypothesis": ", ".join(explanation.get("names", ())),
            "with_hypothesis": explanation.get("difference"),
            "mask": data["mask"],
        }
        positions = (int(data["pos"]),)
        series = f"{data['batch']}"
        return self.finding(
            event, id_, sentence, layers, evidence, positions=positions, series=series
        )

    def _row(self, data: Mapping[str, Any]) -> str:
        where = self.context.format_position(int(data["pos"]))
        return where if not data["batch"] else f"batch row {data['batch']}, {where}"

    def _training(self, data: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        return (
            f"{_place(data)}: the model is in training mode, so that dropout "
            f"({facts['dropout']:g}) changes every forward: the {data['quantity']} of "
            f"{self._row(data)} differs by {data['difference']:.2g} from a forward without it."
        )

    def _unexplained(self, data: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
        verb = "differ" if data["quantity"] == "logits" else "differs"
        sentence = (
            f"{_place(data)}: from {self._row(data)} on the {data['quantity']} {verb} from the "
            f"untouched implementation by {data['difference']:.2g} of the row's norm, where "
            f"rounding explains {data['limit']:.1g}."
        )
        if data.get("nonfinite"):
            sentence = (
                f"{_place(data)}: from {self._row(data)} on the {data['quantity']} has NaN or Inf, "
                "and the untouched implementation has none there."
            )
        reading = facts.get("reading", "")
        sentence += f" {reading}" if reading else _shape_text(data, facts)
        if part := data.get("part"):
            sentence += (
                f" The queries, keys and values are those of a forward {part}; the attention over "
                "them differs, too."
            )
        if heads := data.get("heads"):
            sentence += _heads_text(heads)
        if facts.get("mask_change"):
            sentence += f" {facts['mask_change']}"
        if cache := facts.get("cache"):
            sentence += f" {' '.join(cache)}"
        graph = facts.get("graph")
        sentence += _modules_text(data, facts) if graph is None else _graph_text(graph)
        if replaced := facts.get("replaced"):
            sentence += f" The program replaced {', '.join(replaced)}."
        if facts.get("quantized"):
            sentence += (
                " That is all: each value is the nearest step, as a quantized cache has it. What "
                "follows from the rounding is not judged."
            )
        if facts.get("adapter"):
            sentence += " Its own hooks on these modules add that, as those of an adapter do."
        if hooks := facts.get("hooks"):
            sentence += f" {'; '.join(hooks)}."
        tried = plural(int(data.get("n_tried", 0)), "fault")
        is_cut = " before the time was used up" if data.get("cut") else ""
        return f"{sentence} None of {tried} that were tried{is_cut} gives these numbers."


def _others(rows: Sequence[int], n_batch: int) -> list[int]:
    return [row for row in range(n_batch) if row not in rows]


def _batch_rows(rows: Sequence[int]) -> str:
    listed = ", ".join(map(str, rows[:_MAX_NAMES])) + (", …" if len(rows) > _MAX_NAMES else "")
    return f"batch row {listed}" if len(rows) == 1 else f"the batch rows {listed}"


def _shape_text(data: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Say how the quantity of the program differs from the right one."""
    if not (shape := facts.get("shape")):
        return ""
    return f" The {data['quantity']} of the program {AND_THERE.join(shape)}."


def _graph_text(graph: Mapping[str, Any]) -> str:
    """Say what the cache shows of a step whose layers ran inside a compiled graph."""
    right, wrong, suspects = list(graph["right"]), graph["wrong"], list(graph["suspects"])
    places = [f"right in {format_layers(right, 1 << 20)}"] if right else []
    places += [f"wrong in layer {wrong}"] if wrong is not None else []
    text = f" The new keys and values in the cache are {' and '.join(places)}." if places else ""
    if suspects:
        text += f" So the error is in {format_layers(suspects, 1 << 20)}, or outside of the layers."
    return (
        f"{text} The layers ran inside a compiled graph and were not seen: with "
        "TORCH_COMPILE_DISABLE=1 the audit names the layer."
    )


def _modules_text(data: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Say which modules of the program differ by themselves, and which agree."""
    differing, agreeing = facts.get("modules") or (), list(facts.get("agreeing") or ())
    same: dict[str, list[Mapping[str, Any]]] = {}
    for one in differing:
        same.setdefault(f"{one['class']} {one['shape']} {one['inside']}", []).append(one)
    text = "".join(_module_text(group, agreeing) for group in list(same.values())[:3])
    if not differing and agreeing:
        between = _BETWEEN.get(data["quantity"], "the code between them")
        text = f" Each module of it alone is right, so the error is in {between}, or in a hook."
        if untested := list(facts.get("untested") or ()):
            listed = ", ".join(untested[:_MAX_TIES]) + (", …" if len(untested) > _MAX_TIES else "")
            text = (
                f" Its other modules are right alone. Not compared alone: {listed}. So the error "
                f"is there, in {between}, or in a hook."
            )
        if function := facts.get("function"):
            text += f" The attention function is {function}."
    return text


def _module_text(group: Sequence[Mapping[str, Any]], agreeing: Sequence[str]) -> str:
    """Say how modules that are wrong in the same way are wrong."""
    first, names = group[0], ", ".join(one["name"] for one in group)
    how = f": its output {AND_THERE.join(first['shape'])}" if first["shape"] else ""
    verb = "is" if len(group) == 1 else "are each"
    text = f" Alone, on the right input, {names} ({first['class']}) {verb} wrong{how}."
    inner = [n.rpartition(".")[2] for n in agreeing if n.startswith(f"{first['name']}.")]
    if not inner:
        return text
    text += f" Its {', '.join(inner)} are right, so the error is in its forward"
    if first["inside"] is not None:
        last, shape = first["inside"]
        text += f": the input of {last} {AND_THERE.join(shape) or 'is wrong'}"
    return f"{text}."


def _is_certain(explanation: Mapping[str, Any]) -> bool:
    """Whether everything that was compared in the step and in later ones agrees."""
    is_later = explanation["later"] == explanation["n_later"]
    return bool(explanation["agree"] == explanation["total"] and is_later)


OWN_WINDOW, PROMPT_WINDOW = "mask.own-window", "mask.prompt-window"
"""Names of faults of an attention function of the program: a window that the configuration has
not, in all rows, and in those of the prompt alone."""
_IS_OWN = " The configuration has no such window, so the program's attention may mean it."
AND_THERE = ", and there "
_BETWEEN = {
    "query": "the code between the projections and the attention (reshaping, norms, RoPE)",
    "key": "the code between the projections and the attention (reshaping, norms, RoPE, cache)",
    "value": "the code between the projections and the attention (reshaping, cache)",
    "attention of the heads": "the attention itself (heads, scores, mask, softmax, cached rows)",
    "attention output": "the end of the attention's forward",
    "hidden state": "the forward of the layer (residuals, order of modules)",
    "logits": "what follows the last layer",
}
"""The code that makes a quantity from modules that are right."""


def _heads_text(heads: Mapping[str, Any]) -> str:
    agree, total = heads["agree"], int(heads["total"])
    others = [f"{head}" for head in range(total) if head not in agree]
    listed = ", ".join(others[:_MAX_NAMES]) + (", …" if len(others) > _MAX_NAMES else "")
    which = f"head {listed} does" if len(others) == 1 else f"heads {listed} do"
    forward = f"a forward {heads['sentence']}" if heads["sentence"] else "the correct forward"
    return f" But {len(agree)} of {total} heads agree with {forward}; {which} not."


def _place(data: Mapping[str, Any]) -> str:
    layer = data.get("layer")
    step = f"step {data['step']}"
    return step.capitalize() if layer is None else f"Layer {layer}, {step}"


def _reproduced(data: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    what = ", and ".join(found["sentences"])
    where = _layers_text(data, found.get("layers"))
    row = f" of batch row {data['batch']}" if data["batch"] else ""
    sentence = (
        f"{_place(data)}: the numbers{row} are those of a forward {what}{where} (difference "
        f"{found['difference']:.1g}; the correct forward differs by {data['difference']:.2g})."
    )
    agree, total, n = found["agree"], found["total"], found["n_later"]
    if agree < total:
        sentence += (
            f" Of the step's {total} quantities {agree} agree with it; the rest has another cause."
        )
    elif n and found["later"] == n:
        sentence += f" So are those of the {plural(n, 'later step')}."
    elif found["later"]:
        sentence += f" So are those of {found['later']} of the {plural(n, 'later step')}."
    return sentence + _ties_text(found.get("ties") or ())


def _ties_text(ties: Sequence[str]) -> str:
    """Say which other faults explain the numbers as well."""
    if not ties:
        return ""
    listed = ", or ".join(ties[:_MAX_TIES]) + (", …" if len(ties) > _MAX_TIES else "")
    n = len(ties) + 1
    return f" It is one of {n} faults that give these numbers: a forward {listed} gives them, too."


def _layers_text(data: Mapping[str, Any], layers: Sequence[int] | None) -> str:
    if layers is None:
        return ""
    if len(layers) == 1 and data.get("layer") is not None:
        return " in this layer only"
    return f" in {format_layers(list(layers), 1 << 20)}"
