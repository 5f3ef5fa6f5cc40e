"""Plug-ins at three grains: list names, load one, load all.

The built-in hooks, panels and rules are named in `BUILT_IN`; other packages register theirs as
entry points of the same groups (https://packaging.python.org/en/latest/specifications/entry-points/).
Listing names imports nothing. A built-in plug-in needs one line here, and no reinstall.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from flexinspect.core.errors import FlexInspectError

HOOKS, PANELS, RULES = "flexinspect.hooks", "flexinspect.panels", "flexinspect.rules"
CAPTURE = "flexinspect.capture"

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    HOOKS: {
        "attention": "flexinspect_hooks.observers.attention.attention_hook:AttentionHook",
        "inputs": "flexinspect_hooks.observers.inputs_hook:InputsHook",
        "modules": "flexinspect_hooks.observers.modules_hook:ModuleHook",
        "logits": "flexinspect_hooks.observers.logits_hook:LogitsHook",
        "memory": "flexinspect_hooks.observers.memory_hook:MemoryHook",
        "weights": "flexinspect_hooks.observers.attention_weights_hook:WeightsHook",
    },
    PANELS: {
        "tokens": "flexinspect.panels.tokens_panel:TokensPanel",
        "mask": "flexinspect.panels.mask.mask_panel:MaskPanel",
        "attention": "flexinspect.panels.attention.attention_panel:AttentionPanel",
        "logits": "flexinspect.panels.logits_panel:LogitsPanel",
        "layers": "flexinspect.panels.layers_panel:LayersPanel",
        "memory": "flexinspect.panels.memory_panel:MemoryPanel",
        "path": "flexinspect.panels.path_panel:PathPanel",
        "findings": "flexinspect.panels.findings_panel:FindingsPanel",
        "run": "flexinspect.panels.run_panel:RunPanel",
        "output": "flexinspect.panels.output_panel:OutputPanel",
        "branches": "flexinspect.panels.branches_panel:BranchesPanel",
        "gradients": "flexinspect.panels.gradients_panel:GradientsPanel",
        "training": "flexinspect.panels.training_panel:TrainingPanel",
        "gradstrip": "flexinspect.panels.gradient_strip_panel:GradientStripPanel",
    },
    RULES: {
        "fed": "flexinspect.rules.prompt.segments:PromptRule",
        "failures": "flexinspect.rules.attention.kernel_failures:FailuresRule",
        "gradients": "flexinspect.rules.training.token_gradient_rule:GradientsRule",
        "graphs": "flexinspect.rules.attention.compile_graphs:GraphsRule",
        "memory": "flexinspect.rules.numerics.memory_growth:MemoryRule",
        "masks": "flexinspect.rules.masks.declared_vs_executed:MasksRule",
        "numbers": "flexinspect.rules.numerics.nan_and_inf:NumbersRule",
        "observer": "flexinspect.rules.attention.capture_checks:ObserverRule",
        "path": "flexinspect.rules.attention.kernel_path:KernelPathRule",
        "rows": "flexinspect.rules.masks.empty_rows:EmptyRowsRule",
        "ranges": "flexinspect.rules.numerics.output_ranges:OutputRangeRule",
        "attentionshape": "flexinspect.rules.attention.attention_shape:AttentionShapeRule",
        "callfacts": "flexinspect.rules.attention.call_arguments:CallFactsRule",
        "text": "flexinspect.rules.text.degenerate_text:TextRule",
        "choice": "flexinspect.rules.text.token_choice:TokenChoiceRule",
        "lengths": "flexinspect.rules.masks.mask_lengths:LengthsRule",
        "caches": "flexinspect.rules.cache.kv_cache:CacheRule",
        "positions": "flexinspect.rules.prompt.position_ids:PositionsRule",
        "columns": "flexinspect.rules.masks.unread_keys:UnreadKeysRule",
        "decoding": "flexinspect.rules.masks.decode_rows:DecodingRule",
        "roles": "flexinspect.rules.masks.row_roles:RowRolesRule",
        "reach": "flexinspect.rules.masks.transitive_reach:TransitiveReachRule",
        "tables": "flexinspect.rules.masks.block_tables:BlockTablesRule",
        "heads": "flexinspect.rules.masks.heads_and_batches:HeadsRule",
        "batches": "flexinspect.rules.masks.heads_and_batches:BatchRowsRule",
        "paddings": "flexinspect.rules.masks.heads_and_batches:BatchPaddingRule",
        "windows": "flexinspect.rules.masks.sliding_windows:SlidingWindowRule",
        "twins": "flexinspect.rules.text.same_prompt:SamePromptRule",
        "trainingsteps": "flexinspect.rules.training.training_steps:TrainingRule",
    },
    CAPTURE: {
        "training_debuggers": "flexinspect_hooks.training_debuggers",
        "prove": "flexinspect_hooks:prove",
        "prove-run": "flexinspect_hooks.proofs.prove_generation:prove_run",
        "prove-script": "flexinspect_hooks.proofs.prove_program:prove_script",
        "watch": "flexinspect_hooks:watch",
        "watch_training": "flexinspect_hooks:watch_training",
        "TrainerCallback": "flexinspect_hooks:TrainerCallback",
    },
}
"""Group, then name, then `module:attribute`. The order of panels is the order of their list."""


def names(group: str) -> tuple[str, ...]:
    """Return the names registered in a group, sorted, without importing any of them."""
    return tuple(sorted(point.name for point in registered(group)))


def load(group: str, name: str) -> Any:
    """Load one plug-in. Raises `FlexInspectError` when it is unknown or its import fails."""
    for point in registered(group):
        if point.name == name:
            return _import(point)
    known = ", ".join(names(group)) or "none"
    raise FlexInspectError(
        f"No plug-in '{name}' is registered in {group} (registered: {known}).",
        hint="Install the package that offers it.",
    )


def load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Load every plug-in of a group: (name to object, name to the sentence of its failure)."""
    loaded: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for point in sorted(registered(group), key=lambda point: point.name):
        try:
            loaded[point.name] = _import(point)
        except FlexInspectError as error:
            failed[point.name] = error.message
    return loaded, failed


def registered(group: str) -> list[EntryPoint]:
    """Return the plug-ins of a group, the built-in ones first; one of their names is theirs."""
    built_in = BUILT_IN.get(group, {})
    ours = [EntryPoint(name, value, group) for name, value in built_in.items()]
    return ours + [point for point in entry_points(group=group) if point.name not in built_in]


def _import(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise FlexInspectError(
            f"The plug-in '{point.name}' ({point.value}) did not load: "
            f"{type(error).__name__}: {error}"
        ) from error
