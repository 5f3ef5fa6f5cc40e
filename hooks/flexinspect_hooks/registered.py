"""The hooks and rules that are registered, made and ready to use."""

from __future__ import annotations

from flexinspect import plugins
from flexinspect.errors import FlexInspectError
from flexinspect.rules.base import Rule
from flexinspect_hooks.hook import Hook


def built_in_hooks() -> tuple[list[Hook], dict[str, str]]:
    """Return the registered hooks, ready to install, and the sentence of each that failed.

    Raises `FlexInspectError` when none is registered, rather than record nothing.
    """
    classes, failed = plugins.load_all("flexinspect.hooks")
    if not classes and not failed:
        raise FlexInspectError(
            "No capture hook is registered, so nothing would be recorded.",
            hint="flexinspect is not installed in this Python: pip install -e . (or make setup).",
        )
    return [classes[name]() for name in sorted(classes)], failed


def built_in_rules() -> tuple[list[Rule], dict[str, str]]:
    """Return the registered rules for steps as they come, and why some could not be made."""
    classes, failed = plugins.load_all("flexinspect.rules")
    rules = []
    for name, make in classes.items():
        try:
            rule = make()
            if not rule.offline_only:
                rules.append(rule)
        except Exception as error:
            failed[name] = f"It could not be made: {type(error).__name__}: {error}"
    return rules, failed
