"""The way of a training run as boxes: what is trained, by what, where, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.panels.parts.pipeline import Box, RunFacts, generation_stages, make_box
from flexinspect.sizes import human_count


def run_stages(facts: RunFacts) -> list[Box]:
    """Return the stages of a generation, or of a training run, in order, with printable text."""
    about = facts.generation.declared.get("training") if facts.generation else None
    if not isinstance(about, Mapping):
        return generation_stages(facts)
    return [
        make_box("model", _model_lines(facts, about)),
        make_box("optimizer", [str(about.get("optimizer") or "none: steps are told")]),
        make_box("training loop ↻", _loop_lines(facts)),
        make_box("outcome", _outcome_lines(facts)),
    ]


def format_placement(about: Mapping[str, Any]) -> str:
    """Return on which devices the weights of a training run are, and what share on each."""
    placement = about.get("placement")
    named = placement if isinstance(placement, Mapping) else {}
    sizes = {name: n for name, n in named.items() if _is_count(n)}
    whole = sum(sizes.values())
    if len(sizes) < 2 or not whole:
        return "".join(map(str, sizes))
    return ", ".join(f"{name} ({n / whole:.0%})" for name, n in sizes.items())


def _model_lines(facts: RunFacts, about: Mapping[str, Any]) -> list[str]:
    values, parameters = about.get("values"), about.get("parameters")
    named = about.get("groups")
    groups = f" in {len(named)} groups" if isinstance(named, list) else ""
    return [
        str(facts.fact("model", "class") or ""),
        f"{human_count(values)} weights are trained" if _is_count(values) else "",
        f"{parameters} parameters{groups}" if _is_count(parameters) else "",
        f"on {format_placement(about)}" if format_placement(about) else "",
    ]


def _loop_lines(facts: RunFacts) -> list[str]:
    ratio = facts.fact("cost", "ratio")
    return [
        f"{facts.n_steps} step{'' if facts.n_steps == 1 else 's'}",
        f"level {facts.fact('level')}" if facts.fact("level") else "",
        f"capture {100 * ratio:.1f} % of it" if isinstance(ratio, int | float) else "",
    ]


def _outcome_lines(facts: RunFacts) -> list[str]:
    branch, wrong = facts.branch, facts.fact("training", "anomaly_steps")
    reason = f", {branch.stop_reason}" if branch is not None and branch.stop_reason else ""
    return [
        f"{branch.state}{reason}" if branch is not None else "",
        f"{wrong} wrong step{'' if wrong == 1 else 's'}" if _is_count(wrong) else "",
    ]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0
