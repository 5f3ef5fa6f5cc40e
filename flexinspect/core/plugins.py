"""Plug-ins: list their names, load one, load all of a group.

The built-in hooks, panels, rules and exports are named in `BUILT_IN`; other packages register
theirs as entry points of the same groups
(https://packaging.python.org/en/latest/specifications/entry-points/). Listing names imports no
plug-in. A new built-in plug-in is one line in the table; the package need not be installed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flexinspect.core.errors import FlexInspectError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

MAX_START_S = 10.0
"""Seconds that a plug-in of another package may take to be imported, or to be made."""

HOOKS, PANELS, RULES = "flexinspect.hooks", "flexinspect.panels", "flexinspect.rules"
CAPTURE = "flexinspect.capture"
EXPORTS, IMPORTERS = "flexinspect.exports", "flexinspect.importers"
HYPOTHESES = "flexinspect.hypotheses"

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    HOOKS: {
        "attention": "flexinspect_hooks.observers.attention.attention_hook:AttentionHook",
        "collectives": "flexinspect_hooks.observers.collectives_hook:CollectivesHook",
        "gpu": "flexinspect_hooks.observers.gpu_hook:GpuHook",
        "audit": "flexinspect_hooks.audit.evidence.step_evidence:EvidenceHook",
        "inputs": "flexinspect_hooks.observers.inputs_hook:InputsHook",
        "modules": "flexinspect_hooks.observers.modules_hook:ModuleHook",
        "logits": "flexinspect_hooks.observers.logits_hook:LogitsHook",
        "memory": "flexinspect_hooks.observers.memory_hook:MemoryHook",
        "selected": "flexinspect_hooks.observers.selected_modules:SelectedModulesHook",
        "weights": "flexinspect_hooks.observers.modules_hook:WeightsHook",
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
        "gradstrip": "flexinspect.panels.training_panel:GradientStripPanel",
        "code": "flexinspect.panels.code_panel:CodePanel",
        "tensors": "flexinspect.panels.tensors_panel:TensorsPanel",
        "lens": "flexinspect.panels.lens_panel:LensPanel",
        "gpu": "flexinspect.panels.gpu_panel:GpuPanel",
    },
    RULES: {
        "prompt": "flexinspect.rules.prompt.segments:PromptRule",
        "inferred_segments": "flexinspect.rules.prompt.inferred_segments:InferredSegmentsRule",
        "failures": "flexinspect.rules.attention.kernel_failures:FailuresRule",
        "gradients": "flexinspect.rules.training.token_gradient_rule:GradientsRule",
        "graphs": "flexinspect.rules.attention.kernel_failures:GraphsRule",
        "generate_options": "flexinspect.rules.text.generate_options:GenerateOptionsRule",
        "kernel_options": "flexinspect.rules.masks.kernel_options:KernelOptionsRule",
        "logits_changed": "flexinspect.rules.text.changed_logits:LogitsChangedRule",
        "other_prompt": "flexinspect.rules.masks.other_prompt:OtherPromptRule",
        "padding_as_text": "flexinspect.rules.masks.padding_as_text:PaddingAsTextRule",
        "text_as_padding": "flexinspect.rules.masks.text_as_padding:TextAsPaddingRule",
        "memory": "flexinspect.rules.numerics.memory_growth:MemoryRule",
        "masks": "flexinspect.rules.masks.declared_vs_executed:MasksRule",
        "numbers": "flexinspect.rules.numerics.nan_and_inf:NumbersRule",
        "observer": "flexinspect.rules.attention.capture_checks:ObserverRule",
        "path": "flexinspect.rules.attention.kernel_path:KernelPathRule",
        "rows": "flexinspect.rules.masks.empty_rows:EmptyRowsRule",
        "ranges": "flexinspect.rules.numerics.output_ranges:OutputRangeRule",
        "attention_shape": "flexinspect.rules.attention.attention_shape:AttentionShapeRule",
        "call_facts": "flexinspect.rules.attention.attention_shape:CallFactsRule",
        "text": "flexinspect.rules.text.chosen_tokens:TextRule",
        "choice": "flexinspect.rules.text.chosen_tokens:TokenChoiceRule",
        "lengths": "flexinspect.rules.masks.block_tables:LengthsRule",
        "caches": "flexinspect.rules.cache.kv_cache:CacheRule",
        "positions": "flexinspect.rules.prompt.position_ids:PositionsRule",
        "tree_positions": "flexinspect.rules.prompt.tree_positions:TreePositionsRule",
        "shrinking_prefix": "flexinspect.rules.cache.shrinking_prefix:ShrinkingPrefixRule",
        "open_turn": "flexinspect.rules.prompt.open_turn:OpenTurnRule",
        "raw_embeddings": "flexinspect.rules.prompt.raw_embeddings:RawEmbeddingsRule",
        "unread_keys": "flexinspect.rules.masks.unread_keys:UnreadKeysRule",
        "decoding": "flexinspect.rules.masks.decode_rows:DecodingRule",
        "decode_segment": "flexinspect.rules.masks.decode_segment:DecodeSegmentRule",
        "row_roles": "flexinspect.rules.masks.decode_rows:RowRolesRule",
        "reach": "flexinspect.rules.masks.transitive_reach:TransitiveReachRule",
        "tables": "flexinspect.rules.masks.block_tables:BlockTablesRule",
        "repeated_kv_heads": "flexinspect.rules.attention.repeated_kv_heads:RepeatedKVHeadsRule",
        "heads": "flexinspect.rules.masks.heads_and_batches:HeadsRule",
        "hidden_keys": "flexinspect.rules.masks.hidden_keys:HiddenKeysRule",
        "weak_exclusion": "flexinspect.rules.masks.weak_exclusion:WeakExclusionRule",
        "late_binding": "flexinspect.rules.masks.late_binding:LateBindingRule",
        "batches": "flexinspect.rules.masks.heads_and_batches:BatchRowsRule",
        "batch_padding": "flexinspect.rules.masks.heads_and_batches:BatchPaddingRule",
        "cut_rows": "flexinspect.rules.prompt.cut_rows:CutRowRule",
        "decode_window": "flexinspect.rules.masks.decode_window:DecodeWindowRule",
        "mask_values": "flexinspect.rules.masks.mask_values:MaskValuesRule",
        "packed_documents": "flexinspect.rules.masks.packed_documents:PackedDocumentsRule",
        "unused_window": "flexinspect.rules.masks.unused_window:UnusedWindowRule",
        "window_slots": "flexinspect.rules.masks.window_slots:WindowSlotsRule",
        "windows": "flexinspect.rules.masks.declared_vs_executed:SlidingWindowRule",
        "audit": "flexinspect.rules.numerics.audit_findings:AuditRule",
        "changed_weights": "flexinspect.rules.numerics.changed_weights:ChangedWeightsRule",
        "unmet_configuration": (
            "flexinspect.rules.numerics.unmet_configuration:UnmetConfigurationRule"
        ),
        "choice_pattern": "flexinspect.rules.text.choice_pattern:ChoicePatternRule",
        "recompute": "flexinspect.rules.numerics.recompute_checks:RecomputeRule",
        "same_prompt": "flexinspect.rules.text.same_prompt:SamePromptRule",
        "generated_length": "flexinspect.rules.text.generated_length:GeneratedLengthRule",
        "kept_state": "flexinspect.rules.text.kept_state:KeptStateRule",
        "stops_at_prompt": "flexinspect.rules.text.stops_at_prompt:StopsAtPromptRule",
        "stopping_rows": "flexinspect.rules.text.stopping_rows:StoppingRowsRule",
        "penalty_sign": "flexinspect.rules.text.penalty_sign:PenaltySignRule",
        "assembled_cache": "flexinspect.rules.cache.assembled_cache:AssembledCacheRule",
        "sampled_otherwise": "flexinspect.rules.text.sampled_otherwise:SampledOtherwiseRule",
        "processor_rows": "flexinspect.rules.text.processor_rows:ProcessorRowsRule",
        "training_steps": "flexinspect.rules.training.training_steps:TrainingRule",
        "invariants": "flexinspect.rules.training.invariants:InvariantRule",
        "training_checks": "flexinspect.rules.training.training_checks:TrainingChecksRule",
    },
    EXPORTS: {
        "perfetto": "flexinspect.exports.perfetto:PerfettoExporter",
        "tensorboard": "flexinspect.exports.tensorboard:TensorBoardExporter",
        "parquet": "flexinspect.exports.parquet:ParquetExporter",
        "csv": "flexinspect.exports.csv:CsvExporter",
        "notebook": "flexinspect.exports.notebook:NotebookExporter",
    },
    IMPORTERS: {
        "described": "flexinspect.importers.described_folder:DescribedFolderImporter",
        "sglang-dumper": "flexinspect.importers.sglang:DumperImporter",
        "sglang-passes": "flexinspect.importers.sglang:TensorDumpImporter",
        "transformers-debugger": (
            "flexinspect.importers.transformers_debugger:TransformersDebuggerImporter"
        ),
    },
    HYPOTHESES: {
        "attention": "flexinspect_hooks.audit.hypotheses.attention:HYPOTHESES",
        "cache": "flexinspect_hooks.audit.hypotheses.cache_faults:HYPOTHESES",
        "cached-rotation": "flexinspect_hooks.audit.hypotheses.cached_rotation:HYPOTHESES",
        "encoders": "flexinspect_hooks.audit.hypotheses.encoder_faults:HYPOTHESES",
        "masks": "flexinspect_hooks.audit.hypotheses.mask_faults:HYPOTHESES",
        "modules": "flexinspect_hooks.audit.hypotheses.modules:HYPOTHESES",
        "positions": "flexinspect_hooks.audit.hypotheses.positions:HYPOTHESES",
        "score-mods": "flexinspect_hooks.audit.hypotheses.score_mod_faults:HYPOTHESES",
        "projections": "flexinspect_hooks.audit.hypotheses.projections:HYPOTHESES",
        "feed-forward": "flexinspect_hooks.audit.hypotheses.feed_forward:HYPOTHESES",
    },
    CAPTURE: {
        "training_debuggers": "flexinspect_hooks.training_debuggers",
        "audit-trace": "flexinspect_hooks.audit.trace_audit:audit_trace",
        "evaluate_kernel": "flexinspect_hooks:evaluate_kernel",
        "kernels": "flexinspect_hooks.kernels.comparison",
        "dataset-worker": "flexinspect_hooks.ensemble.dataset_worker:DatasetWorker",
        "prove": "flexinspect_hooks:prove",
        "bisect-runs": "flexinspect_hooks.proofs.bisect_runs:bisect_runs",
        "prove-run": "flexinspect_hooks.proofs.prove_generation:prove_run",
        "prove-script": "flexinspect_hooks.proofs.prove_program:prove_script",
        "mask-mod": "flexinspect_hooks.ensemble.mask_laboratory:load_mask_mod_cells",
        "prompt-tokens": "flexinspect_hooks.ensemble.mask_laboratory:compose_prompts",
        "lab-worker": "flexinspect_hooks.lab.lab_worker:LabWorker",
        "training-finder": "flexinspect_hooks.training.training_finder:TrainingFinder",
        "watch": "flexinspect_hooks:watch",
        "watch_training": "flexinspect_hooks:watch_training",
        "TrainerCallback": "flexinspect_hooks:TrainerCallback",
    },
}
"""Group, then name, then `module:attribute`. The order of panels is the order of their list."""


class BuiltInPlugin(NamedTuple):
    """An entry of `BUILT_IN`, with the part of the `EntryPoint` interface that is used here."""

    name: str
    value: str

    def load(self) -> Any:
        """Import the module and return the attribute, or the module without one."""
        module, _, attribute = self.value.partition(":")
        loaded = import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


def names(group: str) -> tuple[str, ...]:
    """Return the names registered in a group, sorted, without importing the plug-ins."""
    return tuple(sorted(point.name for point in registered(group)))


def load(group: str, name: str) -> Any:
    """Load a plug-in. Raises `FlexInspectError` for an unknown name or a failed import."""
    for point in registered(group):
        if point.name == name:
            return _import(point)
    known = ", ".join(names(group)) or "none"
    what = f"No plug-in '{name}' is registered in {group} (registered: {known})."
    raise FlexInspectError(what, hint="Install the package that provides it.")


def load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Load all plug-ins of a group: objects by name, and messages of failed imports by name."""
    loaded: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for point in sorted(registered(group), key=lambda point: point.name):
        try:
            loaded[point.name] = _import(point)
        except FlexInspectError as error:
            failed[point.name] = error.message
    return loaded, failed


def registered(group: str) -> Iterator[BuiltInPlugin | EntryPoint]:
    """Yield the plug-ins of a group, the built-in ones first. Their names are reserved."""
    built_in = BUILT_IN.get(group, {})
    for name, value in built_in.items():
        yield BuiltInPlugin(name, value)
    for point in _entry_points(group):
        if point.name not in built_in:
            yield point


@cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(_all_entry_points().select(group=group))


@cache  # a search through all installed packages takes milliseconds
def _all_entry_points() -> Any:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return entry_points()


def _import(point: BuiltInPlugin | EntryPoint) -> Any:
    try:
        if isinstance(point, BuiltInPlugin):
            return point.load()
        return _bounded(point.load, f"import {point.value}")
    except (Exception, SystemExit) as error:
        what = f"The plug-in '{point.name}' ({point.value}) could not be loaded"
        raise FlexInspectError(f"{what}: {type(error).__name__}: {error}") from error


def make(group: str, name: str, factory: Callable[[], T]) -> T:
    """Return what the factory of a plug-in makes.

    Raises what it raises, and `TimeoutError` if it is one of another package and hangs.
    """
    if name in BUILT_IN.get(group, {}):
        return factory()
    return _bounded(factory, f"make {group}:{name}")


_hanging: set[str] = set()


def _bounded(call: Callable[[], T], key: str) -> T:
    """Return what code of another package returns, or raise `TimeoutError` after `MAX_START_S`.

    It runs in a thread, which is left alone if it hangs: the interface cannot be left while its own
    thread does. The same code is not tried again.
    """
    import threading
    from concurrent.futures import Future, wait  # slow to import, and rarely needed
    from contextvars import copy_context

    late = f"it did not end within {MAX_START_S:.0f} s"
    if key in _hanging:
        raise TimeoutError(late)
    future: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="flexinspect-plug-in", daemon=True).start()
    if not wait([future], MAX_START_S).done:
        _hanging.add(key)
        raise TimeoutError(late)
    return future.result()
