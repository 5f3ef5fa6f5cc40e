"""What was done to a generation, as sentences."""

from __future__ import annotations

from flexinspect.rules.words import counted
from flexinspect_hooks.travel.lines import Line


def branch_words(line: Line) -> str:
    """Return what a branch begins with."""
    assert line.parent is not None
    change = line.change
    where = f"Branch {line.branch} leaves branch {line.parent.branch} at step {line.fork_step}"
    if change.get("kind") == "replay":
        return f"{where}, as that step came out differently: {' '.join(change.get('why', ()))}"
    if change.get("kind") == "token":
        instead = change.get("instead_text")
        other = "" if instead is None else f" instead of {instead!r}"
        return f"{where}: it takes {change.get('text', change.get('token_id'))!r}{other}."
    rows = counted(int(change.get("changed_rows", 0)), "row")
    how = "no row computed before is touched, so only the cache is forked"
    if change.get("recomputed") and not change.get("changed_rows"):
        how = "no row computed before is touched, but all keys are computed again at that step"
    elif change.get("recomputed"):
        how = f"{rows} computed before changed, so all keys are computed again"
    elif not line.fork_step:
        how = "its first step feeds the prompt"
    return f"{where} under an edited mask ({'; '.join(change.get('edits', ()))}): {how}."


def restored_words(line: Line, step: int, n_rows: int) -> str:
    """Return how a step was restored."""
    how = f"{counted(n_rows, 'row')} computed again" if n_rows else "its cache cropped"
    return f"Step {step} of branch {line.branch} was restored, {how}."
