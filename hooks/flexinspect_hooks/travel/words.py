"""What was done to a generation, as sentences."""

from __future__ import annotations

from flexinspect.rules.words import plural
from flexinspect_hooks.travel.lines import BranchState


def describe_branch(branch: BranchState) -> str:
    """Return what a branch begins with."""
    assert branch.parent is not None
    change = branch.change
    where = (
        f"Branch {branch.number} leaves branch {branch.parent.number} at step {branch.fork_step}"
    )
    if change.get("kind") == "replay":
        return f"{where}, as that step came out differently: {' '.join(change.get('why', ()))}"
    if change.get("kind") == "token":
        instead = change.get("instead_text")
        other = "" if instead is None else f" instead of {instead!r}"
        return f"{where}: it takes {change.get('text', change.get('token_id'))!r}{other}."
    rows = plural(int(change.get("changed_rows", 0)), "row")
    how = "no row computed before is touched, so only the cache is forked"
    if change.get("recomputed") and not change.get("changed_rows"):
        how = "no row computed before is touched, but all keys are computed again at that step"
    elif change.get("recomputed"):
        how = f"{rows} computed before changed, so all keys are computed again"
    elif not branch.fork_step:
        how = "its first step feeds the prompt"
    return f"{where} under an edited mask ({'; '.join(change.get('edits', ()))}): {how}."


def describe_restore(branch: BranchState, step: int, n_rows: int) -> str:
    """Return how a step was restored."""
    how = f"{plural(n_rows, 'row')} computed again" if n_rows else "its cache cropped"
    return f"Step {step} of branch {branch.number} was restored, {how}."
