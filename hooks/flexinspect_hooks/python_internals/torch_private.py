"""Private names of torch and transformers that capture uses, one function each.

Checked on torch 2.13 and transformers 5.23. If a version lacks a name, its function returns a
neutral value, so that one feature switches itself off and the rest works. `missing_names` lists
them, and `tests/hooks/python_internals/test_torch_private.py` fails for each one by its name.

Nothing here imports torch when the module is imported, because code that runs before torch uses it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from flexinspect_hooks.python_internals.patching import patch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_DYNAMO_UTILS = "torch._dynamo.utils"
_DDP = "torch.nn.parallel"
_FLEX = "torch.nn.attention.flex_attention"

_numbers = itertools.count()

NAMES = {
    (_EVAL_FRAME, "get_eval_frame_callback"): "compiled kernel calls are told from uncompiled ones",
    (_EVAL_FRAME, "set_eval_frame"): "models are found without being compiled into the program",
    (_EVAL_FRAME, "set_code_exec_strategy"): "dynamo skips the wrapper of models that are found",
    (_EVAL_FRAME, "_FrameAction.SKIP"): "dynamo skips the wrapper of models that are found",
    (_EVAL_FRAME, "_FrameExecStrategy"): "dynamo skips the wrapper of models that are found",
    ("torch._dynamo.eval_frame", "skip_code"): "dynamo compiles no interceptor of kernels",
    (_DYNAMO_UTILS, "counters"): "graphs and refused compilations are counted",
    (_DYNAMO_UTILS, "get_compilation_metrics"): "recompilations have functions and reasons",
    ("torch.nn.utils.clip_grad", "_get_total_norm"): "clipping of gradients is recorded",
    ("torch.nn.utils.clip_grad", "_clip_grads_with_norm_"): "clipping of gradients is recorded",
    ("torch.nn", "Module._call_impl"): "kernel calls are assigned to layers",
    ("torch", "Tensor._version"): "tensors that were modified in place are detected",
    (_FLEX, "setup_compilation_env"): "calls past the recompile limit are recorded as uncompiled",
    (_FLEX, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"): "FlexAttention itself is differentiated",
    ("torch._C", "_current_graph_task_id"): "a backward pass through several forwards counts once",
    ("torch.autograd", "Variable._execution_engine.queue_callback"): "backward passes are timed",
    (_DDP, "DistributedDataParallel._get_active_ddp_module"): "reductions of gradients are timed",
    (_DDP, "DistributedDataParallel._get_ddp_logging_data"): "reductions of gradients are timed",
    (_DDP, "DistributedDataParallel._set_ddp_runtime_logging_sample_rate"): (
        "reductions of gradients are timed"
    ),
    ("torch.distributed.distributed_c10d", "_get_default_store"): "ranks are compared",
    ("transformers", "PreTrainedModel._init_weights"): "norms and rotary tables are initialised",
}
"""Module and name of each private name, and the feature that needs it."""

MODULE_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""The attributes of `nn.Module` that hold hooks, and those that hold flags of the same hooks.

A missing attribute is skipped: then a model with flexinspect hooks may not be picklable.
"""


def missing_names() -> list[str]:
    """Return the full names of `NAMES` that the installed versions lack; imports torch."""
    return [f"{module}.{name}" for module, name in NAMES if _find(module, name) is None]


def _find(module: str, name: str) -> Any:
    """Return a name of a module, dotted for an attribute of a class; None if it is missing."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def eval_frame_callback_getter() -> Callable[[], Any]:
    """Return dynamo's `get_eval_frame_callback`: its result is callable in compiled calls only."""
    return _find(_EVAL_FRAME, "get_eval_frame_callback") or (lambda: None)


def frame_compiler_setter() -> Callable[[Any], Any]:
    """Return a function that sets this thread's frame compiler and returns the one before.

    `torch.compiler.disable` uses it, too, but imports all of dynamo. If missing, the compiler is
    not changed.
    """
    return _find(_EVAL_FRAME, "set_eval_frame") or (lambda compiler: compiler)


def skip_frame(function: Any) -> None:
    """Let torch.compile skip a function's own frame, and compile the functions it calls.

    `torch.compiler.disable(recursive=False)` does the same, but imports all of dynamo. If a name is
    missing, nothing is done: a compiled model that is found may have a graph break.
    """
    set_strategy = _find(_EVAL_FRAME, "set_code_exec_strategy")
    skip = _find(_EVAL_FRAME, "_FrameAction.SKIP")
    default = _find(_EVAL_FRAME, "_FrameAction.DEFAULT")
    strategy = _find(_EVAL_FRAME, "_FrameExecStrategy")
    if None not in (set_strategy, skip, default, strategy):
        set_strategy(function.__code__, strategy(skip, default))


def hide_from_compiler(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does the same, and that torch.compile neither traces nor compiles.

    `torch.compiler.disable` does the same, but imports all of dynamo. For hooks that a compiled
    program calls, as it does those of an optimizer whose `step` it compiles.
    """
    set_compiler = frame_compiler_setter()

    @functools.wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> None:
        compiler = set_compiler(None)
        try:
            function(*args, **kwargs)
        finally:
            set_compiler(compiler)

    hidden._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip_frame(hidden)
    return hidden


def skip_code(code: CodeType) -> None:
    """Let dynamo skip a code object; imports dynamo. If missing, nothing is done."""
    skip = _find("torch._dynamo.eval_frame", "skip_code")
    if skip is not None:
        skip(code)


def dynamo_counters() -> Mapping[str, Mapping[str, int]]:
    """Return dynamo's counters by group; empty if missing, or if dynamo is not imported."""
    return getattr(sys.modules.get(_DYNAMO_UTILS), "counters", None) or {}


def compilation_metrics() -> Sequence[Any]:
    """Return dynamo's records of compilations, oldest first; empty if missing or not imported."""
    read = getattr(sys.modules.get(_DYNAMO_UTILS), "get_compilation_metrics", None)
    return () if read is None else read()


def module_call_code() -> CodeType | None:
    """Return the code that runs a module's forward; None if missing: calls have no layer then."""
    code: CodeType | None = getattr(_find("torch.nn", "Module._call_impl"), "__code__", None)
    return code


def tensor_version(tensor: Tensor) -> int | None:
    """Return how often a tensor was modified in place; None if unknown, as in inference mode."""
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def backward_number() -> int:
    """Return the number of the backward pass that runs. If missing, each call is a new one."""
    current = _find("torch._C", "_current_graph_task_id")
    return next(_numbers) if current is None else int(current())


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs has ended. If missing, it is not called."""
    queue = _find("torch.autograd", "Variable._execution_engine.queue_callback")
    if queue is not None:
        queue(call)


def has_made_optimizer() -> bool:
    """Whether an optimizer was made, which marks the `step` of its class; False if missing."""
    classes = [_find("torch.optim", "Optimizer")]
    while classes:
        one = classes.pop()
        if getattr(getattr(one, "step", None), "hooked", False):
            return True
        classes += one.__subclasses__() if one is not None else ()
    return False


def optimizer_step_depth(optimizer: Any) -> int:
    """Return how many steps of an optimizer run in this thread, one inside the other.

    The `step` of a subclass that calls `super().step()` runs the hooks of both. If torch names its
    wrapper of `step` otherwise, each counts as the first.
    """
    if not _may_nest(type(optimizer)):  # type: ignore[arg-type]  # types are hashable
        return 1
    file, n = sys.modules["torch.optim.optimizer"].__file__, 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == file:
            n += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return n


@functools.cache
def _may_nest(optimizer: type) -> bool:
    """Whether more than one class of an optimizer has a `step`, that of the base class aside.

    Torch wraps the `step` of an optimizer's class, also if another class defines it.
    """
    steps = [one.__dict__["step"] for one in optimizer.__mro__ if "step" in one.__dict__]
    return len({inspect.unwrap(step) for step in steps if callable(step)}) > 2


def default_store() -> Any:
    """Return the store of the default process group; None if missing: ranks are not compared."""
    get = _find("torch.distributed.distributed_c10d", "_get_default_store")
    return None if get is None else get()


def set_flex_debug(enabled: bool) -> None:
    """Let uncompiled FlexAttention run without dynamo, as plain Python, or with it."""
    sys.modules[_FLEX]._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = enabled  # type: ignore[attr-defined]


def module_tables(module: Module) -> tuple[dict[str, Any], ...]:
    """Return the tables of a module's children and parameters, which change with them."""
    return module._modules, module._parameters


def is_compiled_in_place(model: Module) -> bool:
    """Whether `model.compile()` was called: then its hooks would be compiled with it."""
    return getattr(model, "_compiled_call_impl", None) is not None


def wrap_compiled(
    model: Any, begin: Callable[..., None], end: Callable[..., None]
) -> Callable[[], None]:
    """Call `begin` and `end` around the call that `model.compile()` set; returns the undo."""
    compiled = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        begin(model, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            end(model, args, output)
        return output

    def restore() -> None:
        if model._compiled_call_impl is call:
            model._compiled_call_impl = compiled

    model._compiled_call_impl = call
    return restore


def is_hook_installed(handle: RemovableHandle) -> bool:
    """Whether a hook is still in the dict of its module. If missing, it counts as installed."""
    try:
        hooks = handle.hooks_dict_ref()
    except AttributeError:
        return True
    return hooks is not None and handle.id in hooks


def init_weights(model: Any, module: Any) -> None:
    """Let a transformers model initialise one of its modules.

    If missing, norms are 1, biases 0, and buffers such as rotary frequencies 0.
    """
    if has_init_weights(model):
        model._init_weights(module)


def has_init_weights(module: Any) -> bool:
    """Whether a module initialises its submodules itself, as transformers models do."""
    return hasattr(module, "_init_weights")


def hide_hooks() -> Callable[[], None]:
    """Leave flexinspect hooks out of every module that is pickled or copied.

    They refer to threads and files, which cannot be pickled. A class that defines its own
    `__getstate__` keeps it. Returns a function that restores `nn.Module.__getstate__`.
    """
    from torch import nn

    original: Any = nn.Module.__getstate__

    def getstate(module: Module) -> Any:
        state = original(module)
        return _without_own_hooks(state) if isinstance(state, dict) else state

    return patch(nn.Module, "__getstate__", getstate)


def _without_own_hooks(state: dict[str, Any]) -> dict[str, Any]:
    for attribute, flag_attributes in MODULE_HOOKS.items():
        own_ids = {
            key
            for key, hook in state.get(attribute, {}).items()
            if str(getattr(hook, "__module__", "")).startswith("flexinspect_hooks.")
        }
        for name in (attribute, *flag_attributes) if own_ids else ():
            hooks = state.get(name, {})
            others = {key: hook for key, hook in hooks.items() if key not in own_ids}
            state = {**state, name: type(hooks)(others)}
    return state


def active_data_parallel() -> Module | None:
    """Return the DistributedDataParallel model whose forward is running; None without one."""
    parallel: Any = getattr(sys.modules.get(_DDP), "DistributedDataParallel", None)
    get_active = getattr(parallel, "_get_active_ddp_module", None)
    return None if get_active is None else get_active()


def gradient_reduction_times(model: Module) -> Callable[[], tuple[float, float] | None] | None:
    """Let a DistributedDataParallel model time each reduction of gradients; None for other models.

    The function returned gives when that of the newest backward pass began and ended, in seconds
    since the epoch; None before the first. On CUDA it waits for the backward pass.
    """
    set_rate = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    read = getattr(model, "_get_ddp_logging_data", None)
    update = getattr(getattr(model, "logger", None), "set_runtime_stats_and_log", None)
    if set_rate is None or read is None or update is None:
        return None
    set_rate(1)  # by default torch times each 100th

    def times() -> tuple[float, float] | None:
        update()  # torch does so when the next forward begins
        facts = read()
        began, ended = (facts.get(f"backward_comm_time_{end}", 0) for end in ("start", "end"))
        return (began / 1e9, ended / 1e9) if began and ended else None

    return times
