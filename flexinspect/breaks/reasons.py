"""Why a breakpoint was met, in words: the place, and the values that decided it."""

from __future__ import annotations

from flexinspect.breaks.evaluate import Unknown, Verdict, evidence
from flexinspect.breaks.facts import Facts, Value
from flexinspect.breaks.tree import Expression, Found, Seen, leaves, names_in, quoted, to_text
from flexinspect.breaks.words import WORDS, Kind

_PLACE = ("step", "generation", "branch", "layer")
"""Names that say where; they are told before the values."""


def reason(expression: Expression, facts: Facts, verdict: Verdict) -> str:
    """Say where an expression holds, and why."""
    said = [*_seen(expression, facts, verdict.layer), *_values(expression, facts, verdict.layer)]
    token = facts.values.get("token")
    if token is not None and "token" not in names_in(expression):
        said.append(f"it chose {quoted(str(token))}")
    where = place_words(facts, verdict.layer)
    return f"{to_text(expression)}: {where}" + (f": {'; '.join(said)}" if said else "")


def place_words(facts: Facts, layer: int | None = None) -> str:
    """Return "step 7 (decode) of generation 1, layer 3"."""
    values = facts.values
    if "step" in values:
        phase = values.get("phase")
        text = f"step {values['step']}" + (f" ({phase})" if phase else "")
        if values.get("generation"):
            text += f" of generation {values['generation']}"
    else:
        text = f"the end of generation {values.get('generation', 0)}"
    text += f", branch {values['branch']}" if values.get("branch") else ""
    return text if layer is None else f"{text}, layer {layer}"


def missing_words(text: str, unknown: Unknown, facts: Facts) -> str:
    """Say that a breakpoint could not be judged, and what would help."""
    names = ", ".join(unknown.missing)
    verb = "is" if len(unknown.missing) == 1 else "are"
    where = place_words(facts)
    return (
        f"The breakpoint {text} could not be judged in {where}: {names} {verb} not known there. "
        "It may not be recorded at this level, or not be seen in this kind of run."
    )


def _seen(expression: Expression, facts: Facts, layer: int | None) -> list[str]:
    wanted = [leaf for leaf in leaves(expression) if isinstance(leaf, Seen | Found)]
    found = (evidence(leaf, facts, layer).rstrip(".") for leaf in wanted)
    return list(dict.fromkeys(text for text in found if text))


def _values(expression: Expression, facts: Facts, layer: int | None) -> list[str]:
    own = facts.layers.get(layer, {}) if layer is not None else {}
    known = {**facts.values, **own}
    names = [name for name in names_in(expression) if name not in _PLACE and name in known]
    return [f"{name} {_written(name, known[name])}" for name in names if name != "phase"]


def _written(name: str, value: Value) -> str:
    if isinstance(value, str):
        return quoted(value)
    if WORDS[name].kind is Kind.BYTES:
        return f"{value / (1 << 20):.1f} MiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
