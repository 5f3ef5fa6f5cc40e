"""The hook protocol, what a hook gets to work with, and the registered hooks and rules.

A hook is a plug-in of the group `flexinspect.hooks`: a class that takes no arguments. Its methods
run in this order for each step, and the session catches whatever they raise:

1. `open` when the root forward starts, in the model's thread;
2. its own module or call hooks during the forward, which only keep references;
3. `reduce` when the step's token is known: a few batched operations on the model's device, the
   results `put` into the buffer, the references dropped;
4. `record` in the writer thread: numpy in, records out. Built-in hooks have an object of
   `step_writer` for this, which does not depend on torch.

A hook with a true `own_code_only` is used for code of the user only. flexinspect's own generation
loop controls the inputs that such a hook would record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from flexinspect.core import plugins
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.module_selectors import ModuleSelector
from flexinspect.records.prompt import Segment
from flexinspect.rules.engine import Rule
from flexinspect_hooks.capture.buffer import StepBuffer
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.step_writer.step_draft import StepDraft, StepFacts, StepRecords
from flexinspect_hooks.step_writer.values import Values

Remove = Callable[[], None]


# a proxy of a deleted model cannot be compared
class CaptureContext(Struct, eq=False):
    """The run as hooks see it: the model, its layers, the segments of this generation."""

    model: nn.Module
    device: torch.device
    layer_of: Mapping[int, int]
    """`id` of each attention module to its layer index."""
    blocks: Mapping[int, tuple[str, nn.Module]]
    """Layer index to (name, decoder layer)."""
    layers: tuple[int, ...]
    """Layers whose activations are stored at level extreme."""
    text_of: Callable[[int], str]
    """Decodes a token id; a program's tokenizer may be known later than its model: see `decode`."""
    selectors: tuple[ModuleSelector, ...] = ()
    """Which further modules store their outputs at level extreme."""
    segments: tuple[Segment, ...] = ()
    thread: int = 0
    """The identifier of the thread whose forward is running, 0 for none."""
    layers_s: float = 0.0
    """Seconds that capture has taken in the layers of the open step."""
    exit_reason: str = ""
    """The exception that the last failed forward raised, as "Type: message"; empty if unknown."""
    sees_kernels: bool = False
    """Whether the kernel functions themselves are intercepted: for code of the user."""
    is_standalone: bool = False
    """Whether calls outside of any model are recorded: their number of filled keys is unknown."""
    on_call: Callable[[Any], None] | None = None
    """Called with each `AttentionCall` when it returns, while a breakpoint needs it."""
    on_kernel: Callable[[Any], None] | None = None
    """Called with each `KernelCall`, while a breakpoint needs it and kernels are intercepted."""
    evidence: Any = None
    """The `EvidenceStore` of an audit; None if the run is not audited."""
    keep_calls: Callable[[Sequence[Any]], None] | None = None
    """Called with the `AttentionCall`s of each step when it is reduced, if the run is audited."""
    keep_hidden: Callable[[int, torch.Tensor], None] | None = None
    """Called with the hidden states after a layer that is not called itself, but in parts."""
    is_in_parts: bool = False
    """Whether the program calls the parts of the layers, and so keeps keys by itself."""
    layer_outputs: Callable[[], Sequence[tuple[int, Any, int | None]]] = tuple
    """Returns (layer, output, version) of the decoder layers that have returned in this step."""
    record_event: Callable[[str, str, Mapping[str, Any]], None] = field(default=lambda *_: None)
    """Records an event (kind, text, facts) at once, at the step that is open."""

    def decode(self, token_id: int) -> str:
        """Return the text of a token, by the tokenizer that is known by now."""
        return self.text_of(token_id)

    @property
    def is_open(self) -> bool:
        """Whether a step's forward is running in the current thread."""
        return self.thread != 0 and self.thread == get_ident()

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self.thread = get_ident() if value else 0

    def on_output(self, module: nn.Module, keep: Callable[[Any], None]) -> Remove:
        """Call `keep` with each output of a module in a step's forward, until it is removed."""
        watched, is_dynamo_compiling = id(module), torch.compiler.is_dynamo_compiling

        # A function, because a copy of the model would copy a bound method, and its object. It
        # compares ids: a reference to the module would keep it alive.
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # A compiled graph must not contain this hook: more outputs may change its results.
            if not is_dynamo_compiling() and self.thread == get_ident() and id(module) == watched:
                started = perf_counter()
                keep(output)
                self.layers_s += perf_counter() - started

        return module.register_forward_hook(hook).remove


class Hook:
    """One source of records; see the module for its methods. A plug-in need not derive from it."""

    name: str
    records: StepRecords | None = None
    """What makes the records of this hook's values, set when the hook is installed."""

    def install(self, context: CaptureContext) -> Iterable[Remove]:
        """Install hooks and return the functions that remove them."""
        return ()

    def begin(self, context: CaptureContext) -> None:
        """A generation begins; `context.segments` are its segments."""

    def open(self, step: StepContext) -> None:
        """A step opens: drop references that an aborted step may have left."""

    def reduce(self, step: StepContext, buffer: StepBuffer) -> Any:
        """Reduce the kept references; the return value goes to `record` (no tensors in it)."""

    def record(self, step: StepFacts, kept: Any, values: Values, draft: StepDraft) -> None:
        """Turn the reduced values into records (writer thread)."""
        if self.records is not None:
            self.records.record(step, kept, values, draft)

    def stop_deferring(self) -> None:
        """Tensors were modified before the writer thread read them: reduce at once from now on."""


def built_in_hooks() -> tuple[list[Hook], dict[str, str]]:
    """Return an instance of each registered hook, and for each that failed to load its error.

    Raises `FlexInspectError` if no hook is registered, because nothing would be recorded.
    """
    classes, failed = plugins.load_all(plugins.HOOKS)
    if not classes and not failed:
        raise FlexInspectError(
            "No capture hook is registered, so nothing would be recorded.",
            hint="flexinspect is not installed in this Python: pip install -e . (or make setup).",
        )
    hooks = []
    for name in sorted(classes):
        try:
            hooks.append(plugins.make(plugins.HOOKS, name, classes[name]))
        except Exception as error:
            failed[name] = f"It could not be made: {type(error).__name__}: {error}"
    return hooks, failed


def built_in_rules() -> tuple[list[Rule], dict[str, str]]:
    """Return the registered rules that run live, and for each that failed its error."""
    classes, failed = plugins.load_all(plugins.RULES)
    rules = []
    for name, rule_class in classes.items():
        try:
            rule = plugins.make(plugins.RULES, name, rule_class)
            if not rule.offline_only:
                rules.append(rule)
        except Exception as error:
            failed[name] = f"It could not be made: {type(error).__name__}: {error}"
    return rules, failed
