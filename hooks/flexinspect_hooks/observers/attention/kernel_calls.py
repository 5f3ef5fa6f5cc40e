"""Intercepts the attention kernels in the whole process, and assigns their calls to layers.

`flex_attention` and `create_block_mask` are Python functions: while there are observers, their code
is replaced by a detour, so that every name, closure and compiled wrapper that refers to the
function takes it. `scaled_dot_product_attention` is a built-in, so every module that refers to it
gets a wrapper under that name. Without observers everything is restored.

A call inside a compiled graph runs no Python and is not observed. A call of
`torch.compile(flex_attention)` is: dynamo skips the detour and compiles the function's own code, or
finds it compiled.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as functional
from msgspec import Struct, field
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from flexinspect.core.errors import summarize_error
from flexinspect.records.step import BuildRecord
from flexinspect.rules.numerics.memory_growth import MAX_BYTES_PER_CELL, MIN_BUILD_BYTES
from flexinspect.trace.file.side_files import NO_PLACE
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.capture.failure_facts import rule_facts
from flexinspect_hooks.capture.hook import CaptureContext, Remove
from flexinspect_hooks.capture.step_clock import StepContext
from flexinspect_hooks.debugger.python_mods import on_compiled_call, with_python_mods
from flexinspect_hooks.observers.memory_hook import peak_bytes
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.python_internals.mask_mod_identity import mask_mod_name
from flexinspect_hooks.python_internals.patching import patch

FLEX, BUILD, SDPA = "flex_attention", "create_block_mask", "scaled_dot_product_attention"


SAME_MASK: Any = object()
"""Value of `mask_passed_to_layer` if it is the call's own mask, or in no known layer."""


class KernelCall(Struct, eq=False):
    """A call of a kernel: its name, its arguments by name, whether a compiled wrapper called it.

    Past dynamo's recompile limit a compiled wrapper runs plain Python; see `_track_uncompiled`.

    The observer adds the rest. `layer` is None in no known layer, `module` is the layer's attention
    module and `mask_passed_to_layer` the mask that it received. `suppressed_exception` names the
    exception in whose handler the call was made, or which a kernel raised earlier in the same
    layer. `began`, `started` and `returned` are times of `time.perf_counter`: when the observer
    was asked, when the kernel began and when it returned. `peak` is the peak memory in bytes before
    a mask is built.
    """

    name: str
    arguments: dict[str, Any]
    compiled: bool
    layer: int | None = None
    module: nn.Module | None = None
    mask_passed_to_layer: Any = SAME_MASK
    suppressed_exception: str | None = None
    began: float = 0.0
    started: float = 0.0
    returned: float = 0.0
    peak: int = 0
    output: Any = None
    output_version: int | None = None
    """How often the output had been modified in place when the call returned; None if unknown."""

    @property
    def is_output_modified(self) -> bool:
        """Whether the program has modified the output in place since the call returned."""
        known = self.output_version
        return known is not None and _version_of(self.output) != known

    @property
    def path(self) -> str:
        """The path that ran: "flex compiled", "flex uncompiled" or "sdpa"."""
        if self.name == FLEX:
            return "flex compiled" if self.compiled else "flex uncompiled"
        return "sdpa"

    def repeat(self, value: Tensor) -> Any:
        """Repeat the call of an attention kernel with another `value`, (B, kv heads, keys, D)."""
        arguments = {**self.arguments, "value": value}
        if self.name == SDPA:
            return functional.scaled_dot_product_attention(**arguments)
        kernel = flex_module.flex_attention
        return torch.compile(kernel)(**arguments) if self.compiled else kernel(**arguments)


def _version_of(output: Any) -> int | None:
    tensor = output[0] if isinstance(output, tuple) and output else output
    return torch_private.tensor_version(tensor) if isinstance(tensor, Tensor) else None


_observers: list[KernelCalls] = []
"""The newest comes first, and only the first that takes a call receives it."""
_restores: list[Remove] = []


def observe_kernels(observer: KernelCalls) -> Remove:
    """Pass every kernel call to `observer` from now on; returns a function that stops it.

    `accepts` is called before a call is described, because describing it costs time. If an observer
    raises, the exception is ignored and the call continues.
    """
    if not _observers:
        for name in (FLEX, BUILD):
            _restores.append(_detour(getattr(flex_module, name)))
        _restores.append(_rebind(functional.scaled_dot_product_attention))
        if hasattr(flex_module, _UNCOMPILED_ONLY):
            _restores.append(_track_uncompiled(getattr(flex_module, _UNCOMPILED_ONLY)))
    _observers.append(observer)

    def remove() -> None:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                unassigned_builds.clear()
            while _restores and not _observers:
                _restores.pop()()

    return remove


_UNCOMPILED_ONLY = "setup_compilation_env"
"""A function that `flex_attention` calls only when it runs as plain Python."""


class _ThreadState(threading.local):
    """What holds for the calls of one thread.

    `ran_plain`: the last call of FlexAttention ran as plain Python. `is_quiet`: kernel calls are
    not recorded, because their caller is. `is_unrecorded`: a forward of a watched model runs that
    is not recorded. `layer` and `module` are those of the attention layer whose function runs, if
    it is one of transformers; otherwise they are read from the stack.
    """

    ran_plain = is_quiet = is_unrecorded = False
    layer: int | None = None
    module: nn.Module | None = None


this_thread = _ThreadState()


def _track_uncompiled(function: Callable[..., Any]) -> Remove:
    """Note when a compiled wrapper runs plain Python."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        this_thread.ran_plain = True
        return function(*args, **kwargs)

    torch_private.skip_code(cast(FunctionType, noted).__code__)
    return patch(flex_module, _UNCOMPILED_ONLY, noted)


# -- a call ------------------------------------------------------------------------------------


def _observed_call(name: str, own: Any, names: tuple[str, ...], args: Any, kw: Any) -> Any:
    """Make the call and pass it to an observer; dynamo compiles nothing but the kernel's own code.

    `own` is the kernel and `names` are those of its parameters.
    """
    began = time.perf_counter()
    compiled = callable(_eval_frame_callback())
    if name == FLEX and not compiled:
        own = with_python_mods(own, args[3] if len(args) > 3 else kw.get("score_mod"))
    apply = _apply_uncompiled if compiled else _apply
    if not apply(_has_observer, name):
        return own(*args, **kw)
    call = KernelCall(name, {**dict(zip(names, args, strict=False)), **kw}, compiled)
    observer = apply(_begin, call)
    if observer is None:
        return own(*args, **kw)
    this_thread.ran_plain = False
    call.began = began
    try:
        output = own(*args, **kw)
    except BaseException as error:
        apply(_end, observer.failed, call, error)
        raise
    call.returned = time.perf_counter()
    apply(_end, observer.after, call, output)
    return output


def _has_observer(name: str) -> bool:
    for observer in _observers:
        with suppress(Exception):
            if observer.accepts(name):
                return True
    return False


def _begin(call: KernelCall) -> KernelCalls | None:
    for observer in reversed(_observers):
        with suppress(Exception):
            if observer.accepts(call.name) and observer.before(call):
                return observer
    return None


def _end(callback: Callable[[KernelCall, Any], None], call: KernelCall, result: Any) -> None:
    with suppress(Exception):
        callback(call, result)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_apply_uncompiled: Callable[..., Any] = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]
"""Calls a function that dynamo would compile otherwise."""

_eval_frame_callback = torch_private.eval_frame_callback_getter()

torch_private.skip_code(_observed_call.__code__)


# -- Python functions --------------------------------------------------------------------------


def _detour(function: FunctionType) -> Remove:
    """Replace a function's code by one that calls `_observed_call`, with the same signature.

    Dynamo caches how arguments are bound per function, not per code, so a detour that took
    (*args, **kwargs) would break later compilations.
    """
    code, hidden = function.__code__, f"_flexinspect_{function.__name__}"
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    name, names = function.__name__, tuple(inspect.signature(function).parameters)

    def observe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        return _observed_call(name, own, names, args, kwargs)

    torch_private.skip_code(observe.__code__)
    function.__globals__[hidden] = observe
    function.__code__ = _detour_code(function, hidden)

    def restore() -> None:
        function.__code__ = code
        function.__globals__.pop(hidden, None)

    return restore


def _detour_code(function: FunctionType, hidden: str) -> CodeType:
    """Return code with the function's own parameters that passes their values to `hidden`."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in parameters
    ]
    head = signature.replace(parameters=bare, return_annotation=signature.empty)
    args = "".join(f"{p.name}, " for p in parameters if p.kind is not p.KEYWORD_ONLY)
    kwargs = ", ".join(f"{p.name!r}: {p.name}" for p in parameters if p.kind is p.KEYWORD_ONLY)
    namespace: dict[str, Any] = {}
    exec(f"def {function.__name__}{head}:\n    return {hidden}(({args}), {{{kwargs}}})", namespace)
    own = function.__code__
    # Dynamo decides by the file name how to treat a function, so the detour keeps the original's.
    code: CodeType = namespace[function.__name__].__code__.replace(
        co_filename=own.co_filename, co_firstlineno=own.co_firstlineno
    )
    torch_private.skip_code(code)
    return code


# -- the built-in function ---------------------------------------------------------------------

_CAUSAL_BIAS = "torch.nn.attention.bias"
"""The module of `CausalBias`; it takes a second to import, so only what it made is looked for."""
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _rebind(function: Callable[..., Any]) -> Remove:
    """Replace the function by a wrapper in every module that refers to it."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        kind: Any = type(mask)
        if kind.__module__ == _CAUSAL_BIAS:
            # It computes the attention itself where the function is that of torch.nn.functional,
            # which is this wrapper now, and calls it with a plain mask.
            return kind.__torch_function__(scaled_dot_product_attention, (kind,), args, kwargs)
        # No observer accepts this kernel in a quiet call. The first question costs less.
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced or this_thread.is_quiet or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _observed_call(SDPA, function, _SDPA_NAMES, args, kwargs)

    torch_private.skip_code(scaled_dot_product_attention.__code__)
    functools.update_wrapper(scaled_dot_product_attention, function)
    n_own_references = sys.getrefcount(scaled_dot_product_attention)
    places = list(_references(function))
    for module, name in places:
        setattr(module, name, scaled_dot_product_attention)

    def restore() -> None:
        bound = [each for each in places if getattr(*each, None) is scaled_dot_product_attention]
        if sys.getrefcount(scaled_dot_product_attention) != n_own_references + len(bound):
            # Something else refers to the wrapper: maybe a module that was imported meanwhile.
            bound = list(_references(scaled_dot_product_attention))
        for module, name in bound:
            setattr(module, name, function)

    return restore


def _references(target: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, name) for each global variable of a module that refers to an object.

    A module of Python or of an installed package that had none before, and has as many variables as
    then, is not searched again: programs replace variables of their own modules, and hardly those.
    """
    for full_name, module in [*sys.modules.items()]:
        # The module that holds torch's own functions keeps them.
        if not isinstance(module, ModuleType) or module is torch._C._nn:
            continue
        variables = vars(module)
        if _without_reference.get(full_name) == (id(target), len(variables)):
            continue
        # 100,000 values are compared in 9 ms like this, and in 15 ms together with their names.
        for value in [*variables.values()]:
            if value is target:
                yield from ((module, name) for name in _names_of(target, module))
                break
        else:
            if _is_library(full_name.partition(".")[0]):
                _without_reference[full_name] = id(target), len(variables)


@functools.cache
def _is_library(package: str) -> bool:
    """Whether an imported package belongs to Python or is installed, but not as editable.

    torch is a library also where it was built from source.
    """
    if package in sys.stdlib_module_names or package == "torch":
        return True
    parts = Path(str(getattr(sys.modules.get(package), "__file__", ""))).parts
    return package != "__main__" and not {"site-packages", "dist-packages"}.isdisjoint(parts)


_without_reference: dict[str, tuple[int, int]] = {}
"""The object and the number of variables of modules without a reference to it, by name."""


def _names_of(target: object, module: ModuleType) -> list[str]:
    return [name for name, value in [*vars(module).items()] if value is target]


# -- the calls of one model -----------------------------------------------------------------------


def is_forward_running() -> bool:
    """Whether this thread runs a forward of a watched model, recorded or not."""
    return this_thread.is_unrecorded or any(calls.context.is_open for calls in _observers)


def set_unrecorded(*, is_unrecorded: bool) -> None:
    """Set whether this thread runs a forward of a watched model that is not recorded."""
    this_thread.is_unrecorded = is_unrecorded


def set_current_layer(layer: int | None, module: nn.Module | None) -> None:
    """Set the layer and attention module of kernel calls from now on; None to read the stack."""
    this_thread.layer, this_thread.module = layer, module


unassigned_builds: deque[BuildRecord] = deque(maxlen=1000)
"""Masks that were built outside of a step; the next recorded step of any model takes them."""


class KernelCalls(Struct, eq=False):
    """Observes kernels in the model's forward, and masks built outside; `done` are the calls."""

    context: CaptureContext
    done: list[KernelCall] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    """What kernels have raised in this step, by layer."""
    outer_exception: BaseException | None = None
    """The exception that was handled when the step began."""
    _builds: list[BuildRecord] = field(default_factory=list)
    _reported: set[tuple[Any, ...]] = field(default_factory=set)
    _step: StepContext | None = None
    _root: int = 0

    def install(self) -> Iterable[Remove]:
        """Observe the kernels, whose layer is read from the stack, and failed forwards."""
        if self.context.is_standalone:
            return [observe_kernels(self)]
        self._root = id(self.context.model)

        def close(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            set_unrecorded(is_unrecorded=False)
            # The forward raised. Of a forward that returned, other hooks still need `is_open`.
            if output is None and self.context.is_open:
                error = sys.exception()
                self.context.exit_reason = summarize_error(error) if error is not None else ""
                self.context.is_open = False

        # A function: a copy of the model copies its hooks, and with a method this object too.
        hook = self.context.model.register_forward_hook(close, always_call=True)
        return [observe_kernels(self), hook.remove]

    def open(self, step: StepContext) -> None:
        """Drop the state of the step before."""
        self._step = step
        self.done.clear()
        self._builds.clear()
        self.errors.clear()
        self.outer_exception = sys.exception()

    @staticmethod
    def call_in_layer(call: Any) -> Any:
        """Make an `AttentionCall`, whose kernel calls are those of its layer."""
        this_thread.layer, this_thread.module = call.layer, call.module
        try:
            return call.run(call.value)
        finally:
            this_thread.layer = this_thread.module = None

    def take_since(self, mark: int) -> list[KernelCall]:
        """Return the calls after the first `mark`, and drop them."""
        calls = self.done[mark:]
        del self.done[mark:]
        return calls

    def take_builds(self) -> tuple[BuildRecord, ...]:
        """Return the masks that were built for the step, before it and in it, and drop them."""
        if not unassigned_builds and not self._builds:
            return ()
        builds = (*unassigned_builds, *self._builds)
        unassigned_builds.clear()
        self._builds.clear()
        return builds

    # -- the observer ----------------------------------------------------------------------------

    def accepts(self, name: str) -> bool:
        """Accept the calls of the open step, and masks that are built outside of any forward.

        Of standalone calls, accept FlexAttention and such masks.
        """
        if self.context.is_standalone:
            return name in (FLEX, BUILD) and not is_forward_running()
        if self.context.is_open:
            return not this_thread.is_quiet
        return name == BUILD and not is_forward_running()

    def before(self, call: KernelCall) -> bool:
        """Read what must be read before the call is made; return whether the call is observed."""
        is_open, step, arguments = self.context.is_open, self._step, call.arguments
        if call.name == BUILD and _may_use_memory(call):
            call.peak = peak_bytes(self._device_of(call))
        if is_open:
            call.layer, call.module = this_thread.layer, this_thread.module
            if call.layer is None:
                place = _current_layer(self.context.layer_of, self._root)
                call.layer, call.module, call.mask_passed_to_layer = place
        if call.compiled and call.name == FLEX:
            called_in = NO_PLACE
            if is_open and step is not None:
                called_in = step.generation, step.step, -1 if call.layer is None else call.layer
            tensors = arguments["query"], arguments["key"]
            mods = arguments.get("score_mod"), arguments.get("block_mask")
            last_kernel_call.begin_kernel_call(called_in, *tensors, *mods)
            on_compiled_call()
        call.suppressed_exception = self.suppressed_exception(call.layer)
        call.started = time.perf_counter()
        return True

    def after(self, call: KernelCall, output: Any) -> None:
        """Keep a call that returned, or the record of a mask that was built."""
        if call.compiled:
            last_kernel_call.end_kernel_call()
        if call.name == BUILD:
            builds = self._builds if self.context.is_open else unassigned_builds
            builds.append(self._build_record(call))
            return
        if call.compiled and call.name == FLEX and this_thread.ran_plain:
            call.compiled = False
        call.output, call.output_version = output, _version_of(output)
        self.done.append(call)
        own_s = call.started - call.began + time.perf_counter() - call.returned
        self.context.layers_s += own_s
        if self.context.on_kernel is not None:
            self.context.on_kernel(call)

    def failed(self, call: KernelCall, error: BaseException) -> None:
        """Record an event at once, once per message and layer; the step may never be recorded."""
        if self.context.is_standalone:  # drop the masks that were built for it
            self.take_builds()
        if call.compiled:
            last_kernel_call.end_kernel_call()
        message = summarize_error(error)
        if call.layer is not None:
            self.errors[call.layer] = message
        key = (call.layer, call.name, message)
        if key in self._reported:
            return
        self._reported.add(key)
        where = "" if call.layer is None else f"Layer {call.layer}: "
        facts = _call_facts(call)
        lengths = ", ".join(f"{name} {value}" for name, value in facts.items())
        text = f"{where}{call.name} raised {message} ({lengths})"
        data = {"layer": call.layer, "kernel": call.name, "error": message, **facts}
        if (rule := rule_facts(error)) is not None:
            data["rule"] = rule
        self.context.record_event("kernel-failed", text, data)

    def has_failed_with(self, errors: Iterable[str]) -> bool:
        """Whether a call has raised one of these exceptions."""
        return not {message for _, _, message in self._reported}.isdisjoint(errors)

    def suppressed_exception(self, layer: int | None) -> str | None:
        """Return the exception that is handled now, or that a kernel of the layer raised before."""
        error = sys.exception()
        if error is not None and error is not self.outer_exception:
            return summarize_error(error)
        return self.errors.get(layer) if layer is not None else None

    def _build_record(self, call: KernelCall) -> BuildRecord:
        arguments = call.arguments
        return BuildRecord(
            layer=call.layer,
            batch=arguments.get("B"),
            heads=arguments.get("H"),
            q_len=int(arguments["Q_LEN"]),
            kv_len=int(arguments["KV_LEN"]),
            mask_mod=mask_mod_name(arguments["mask_mod"]),
            wall_ms=(time.perf_counter() - call.started) * 1e3,
            peak_growth=max(peak_bytes(self._device_of(call)) - call.peak, 0) if call.peak else 0,
        )

    def _device_of(self, build: KernelCall) -> torch.device:
        """Return the device on which a mask is built."""
        return torch.device(build.arguments.get("device") or self.context.device)


def _may_use_memory(call: KernelCall) -> bool:
    """Whether building a mask may use memory that a rule reports: reading the peak takes 0.1 ms."""
    sizes = [call.arguments.get(name) for name in ("B", "H", "Q_LEN", "KV_LEN")]
    n_cells = math.prod(size for size in sizes if isinstance(size, int))
    return n_cells * MAX_BYTES_PER_CELL >= MIN_BUILD_BYTES


_MODULE_CALL = torch_private.module_call_code()


def _current_layer(layer_of: Mapping[int, int], root: int) -> tuple[int | None, Any, Any]:
    """Return number, module and mask of the innermost attention layer on the stack below `root`."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is not _MODULE_CALL:
            continue
        variables = frame.f_locals
        module = variables["self"]
        layer = layer_of.get(id(module))
        if layer is not None:
            return layer, module, _mask_argument(variables["args"], variables["kwargs"])
        if id(module) == root:
            break
    return None, None, SAME_MASK


def _mask_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an attention module's mask: `attention_mask`, else the first argument like a mask."""
    if "attention_mask" in kwargs:
        return kwargs["attention_mask"]
    tensors = (value for value in args[1:] if isinstance(value, BlockMask | Tensor))
    return next((mask for mask in tensors if isinstance(mask, BlockMask) or mask.dim() == 4), None)


def _call_facts(call: KernelCall) -> dict[str, Any]:
    """Return the sizes of a call's tensors, which may explain why it failed."""
    arguments = call.arguments
    if call.name == BUILD:
        sizes = {"batch": arguments.get("B"), "heads": arguments.get("H")}
        known = {name: size for name, size in sizes.items() if size is not None}
        return {"q_len": arguments.get("Q_LEN"), "kv_len": arguments.get("KV_LEN"), **known}
    query, key = arguments.get("query"), arguments.get("key")
    facts: dict[str, Any] = {
        name: int(tensor.shape[-2]) if isinstance(tensor, Tensor) and tensor.dim() > 1 else None
        for name, tensor in (("q_len", query), ("kv_len", key))
    }
    if isinstance(query, Tensor) and query.dim() == 4:
        facts |= {"batch": int(query.shape[0]), "heads": int(query.shape[1])}
    mask = arguments.get("block_mask" if call.name == FLEX else "attn_mask")
    if isinstance(mask, BlockMask):
        batch, heads, q_len, kv_len = mask.shape
        facts |= {"mask_batch": batch, "mask_heads": heads, "mask_q": q_len, "mask_kv": kv_len}
    elif isinstance(mask, Tensor):
        facts |= {"mask": tuple(mask.shape)}
    return facts
