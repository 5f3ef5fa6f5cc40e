"""All that rules can say: the registered rules, and the kinds of findings by id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexinspect import plugins
from flexinspect.rules.base import FindingKind, Rule

RULES_GROUP = "flexinspect.rules"


@dataclass(frozen=True, slots=True)
class LoadedRules:
    """The registered rules, by name; `failed` says why some of them could not be made."""

    rules: tuple[Rule, ...]
    failed: dict[str, str]

    @property
    def finding_kinds(self) -> dict[str, FindingKind]:
        """What each id stands for, ids in order."""
        return finding_kinds_of(self.rules)


def load_rules() -> LoadedRules:
    """Return new objects of all registered rules, in the order of their plug-in names."""
    classes, failed = plugins.load_all(RULES_GROUP)
    rules: list[Rule] = []
    for name, make in classes.items():
        try:
            rules.append(make())
        except Exception as error:
            failed[name] = f"It could not be made: {type(error).__name__}: {error}"
    return LoadedRules(tuple(rules), failed)


def finding_kinds_of(rules: Iterable[Rule]) -> dict[str, FindingKind]:
    """Return what the ids of some rules stand for, ids in order."""
    found = {id_: kind for rule in rules for id_, kind in rule.findings.items()}
    return dict(sorted(found.items()))
