"""Finds the trainings of a program that `flexinspect run` runs: each optimizer with its model.

An optimizer is seen when it is made. Its model is what the program calls next that has some of its
parameters; calls of modules are observed only until each optimizer has made its first step. Each
optimizer is one training: a generation of the trace, with its own steps.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from flexinspect.core.errors import TraceWriteError
from flexinspect_hooks.capture.model_layers import model_facts
from flexinspect_hooks.capture.rank_facts import parallel_facts
from flexinspect_hooks.control.step_barrier import StepBarrier
from flexinspect_hooks.python_internals import torch_private
from flexinspect_hooks.python_internals.live_objects import live_objects
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.training import torch_calls
from flexinspect_hooks.training.cost_governor import Governor
from flexinspect_hooks.training.loop_calls import LoadedBatch
from flexinspect_hooks.training.remade_optimizers import RemadeOptimizers
from flexinspect_hooks.training.training_session import SharedRun, TrainingSession

if TYPE_CHECKING:
    from flexinspect.trace.file.writer import TraceWriter
    from flexinspect_hooks.capture.recorder import Recorder
    from flexinspect_hooks.control.control_protocols import SessionLevels

MAX_EARLY_BATCHES = 4
MAX_OPEN = 16  # trainings that are recorded at a time; more end the one that was idle longest
PATIENCE = 200  # root calls after which an optimizer that never steps is given up


class FoundTraining(Struct, eq=False):
    """An optimizer of the program, and the session of its model once that was called."""

    optimizer: weakref.ref[Optimizer]
    parameters: frozenset[int]
    session: TrainingSession | None = None
    n_calls: int = 0
    is_settled: bool = False  # its model is known, or it is not recorded


class TrainingFinder:
    """Records every training of a program into the trace of its run."""

    def __init__(
        self,
        writer: TraceWriter,
        recorder: Recorder,
        numbers: Iterator[int],
        levels: SessionLevels,
        on_problem: Callable[[str], object],
    ) -> None:
        self._writer, self._recorder, self._numbers = writer, recorder, numbers
        self._levels, self._on_problem = levels, on_problem
        self._found: list[FoundTraining] = []
        self._open: list[FoundTraining] = []  # those whose session records, the last step last
        self.sessions: list[TrainingSession] = []
        self._names: set[str] = set()
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._local = threading.local()
        self._lock = threading.RLock()
        self._restore_call: Callable[[], None] | None = None
        self._restores = ExitStack()
        self._batches: deque[LoadedBatch] = deque(maxlen=MAX_EARLY_BATCHES)
        """Those that were loaded before the first session, which are told to it."""
        self._called: weakref.ref[nn.Module] | None = None
        """The last module that was called with gradients while an optimizer had no model."""
        self._remade = RemadeOptimizers()
        self._is_over = False
        self.is_generating: Callable[[], bool] = lambda: False
        """Whether a model generates now: its forward passes are no evaluation of a training."""
        self.on_step_end: Callable[[int, int], object] | None = None
        """Called with the generation and number of each training step that ends."""
        self.barrier = StepBarrier()
        """Where the first forward pass of a step waits; by default no command ever reaches it."""

    def watch(self) -> None:
        """Observe the steps of all optimizers."""
        hide = torch_private.hide_from_compiler
        before = torch_optimizer.register_optimizer_step_pre_hook(hide(self._before_step))
        after = torch_optimizer.register_optimizer_step_post_hook(hide(self._after_step))
        self._restores.callback(before.remove)
        self._restores.callback(after.remove)
        self._restores.enter_context(torch_calls.observe_training(self))

    def on_batch(self, batch: LoadedBatch) -> None:
        """A `DataLoader` returned a batch."""
        if not self.sessions:
            self._batches.append(batch)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Record what an optimizer trains, from the next call of its model on."""
        if self._is_over:
            return
        self._remade.on_made(optimizer)
        groups = optimizer.param_groups
        ids = frozenset(id(one) for group in groups for one in group["params"])
        self._found.append(FoundTraining(weakref.ref(optimizer), ids))
        self._watch_calls()

    def trains(self, model: nn.Module) -> bool:
        """Whether a module is called by a training, as itself or inside of another."""
        if getattr(self._local, "depth", 0) == 0:
            self._on_root_call(model)
        return model in self._trained

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded."""
        return any(session.summary.summary.total_steps for session in self.sessions)

    # -- calls of modules --------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        if self._restore_call is not None:
            return
        original, local, finder = nn.Module.__call__, self._local, self
        set_compiler = torch_private.frame_compiler_setter()

        @functools.wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(local, "depth", 0) > 0:
                return original(module, *args, **kwargs)
            local.depth = 1
            try:
                compiler = set_compiler(None)  # dynamo must not compile the search
                try:
                    finder._on_root_call(module)
                finally:
                    set_compiler(compiler)
                return original(module, *args, **kwargs)
            finally:
                local.depth = 0

        torch_private.skip_frame(call)
        self._restore_call = patch(nn.Module, "__call__", call)

    def _stop_watching_calls(self) -> None:
        if self._restore_call is not None:
            self._restore_call()
            self._restore_call = None

    def _on_root_call(self, module: nn.Module) -> None:
        """A module is called that is not inside of another one."""
        waiting = [one for one in self._found if not one.is_settled]
        if not waiting or self._is_over:
            return
        part = _unwrapped(module)
        if torch.is_grad_enabled():
            self._called = weakref.ref(part)
        ids = {id(one) for one in part.parameters()}
        for one in waiting:
            one.n_calls += 1
            if one.n_calls > PATIENCE:
                self._settle(one)
            elif not one.parameters.isdisjoint(ids):
                self._add_part(one, part)

    def _add_part(self, one: FoundTraining, part: nn.Module) -> None:
        optimizer = one.optimizer()
        if optimizer is None or _is_watched(part):
            self._settle(one)
            return
        session = one.session
        try:
            if session is None:
                self._begin(one, optimizer, part)
            elif not any(part in parts.modules() for parts in session.parts):
                first = session.parts[0]
                session.add_part(part, _name_of(part), _name_of(first))
                self._note_trained(part)
        except Exception as error:
            self._settle(one)
            self._on_problem(
                f"A training by {type(optimizer).__name__} is not recorded: "
                f"{type(error).__name__}: {error}"
            )

    def _begin(self, one: FoundTraining, optimizer: Optimizer, part: nn.Module) -> None:
        with self._lock:
            if len(self._open) >= MAX_OPEN:
                self._end(self._open[0], "finished")
            name = _name_of(part)
            names = (f"{name}{f' ({n})' if n > 1 else ''}" for n in count(1))
            name = next(name for name in names if name not in self._names)
            self._names.add(name)
            shared = SharedRun(self._recorder, next(self._numbers), name)
            governor = Governor(self._levels.level, None)
            session = TrainingSession(part, optimizer, self._writer, governor, shared)
            session.is_paused, session.on_step_end = self.is_generating, self.on_step_end
            session.barrier = self.barrier
            session.begin()
            one.session = session
            self._open.append(one)
            self.sessions.append(session)
            self._note_trained(part)
            while self._batches:
                session.on_batch(self._batches.popleft())
            if len(self.sessions) == 1:
                self._update_manifest(watch_training=True)
            if shared.generation == 0:  # else a model that generated has given its facts
                facts = model_facts(part)
                self._update_manifest(model=facts, **parallel_facts(facts))

    def _note_trained(self, part: nn.Module) -> None:
        self._trained.add(part)
        models = sys.modules.get("transformers.modeling_utils")
        if models is not None:
            self._trained.update(m for m in part.modules() if isinstance(m, models.PreTrainedModel))

    def _settle(self, one: FoundTraining) -> None:
        one.is_settled = True
        if all(other.is_settled for other in self._found):
            self._stop_watching_calls()
            self._found = [other for other in self._found if other.session is not None]

    # -- steps -------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Find the model of an optimizer whose model was never called as a module.

        The hooks of its session are registered while torch calls this one, and are called next.
        """
        for one in self._found:
            if one.optimizer() is optimizer and not one.is_settled and one.session is None:
                for module in _owners(one.parameters) or self._called_instead(optimizer):
                    self._add_part(one, module)
        if failures := self._remade.before_step(optimizer):
            found = (one.session for one in self._found if one.optimizer() is optimizer)
            if (session := next(found, None)) is not None:
                session.report(failures)

    def _called_instead(self, optimizer: Optimizer) -> list[nn.Module]:
        """The module that was trained, of an optimizer whose parameters no module has any more."""
        held = [one for group in optimizer.param_groups for one in group["params"]]
        module = None if self._called is None else self._called()
        if module is None or any(one.grad is not None for one in held):
            return []
        return [module] if any(one.grad is not None for one in module.parameters()) else []

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._remade.after_step(optimizer)
        found = next((one for one in self._found if one.optimizer() is optimizer), None)
        if found is None:
            return
        if not found.is_settled:
            self._settle(found)
        session = found.session
        if session is not None and found in self._open:
            if session.level != self._levels.level:
                session.level = self._levels.level
            if self._open[-1] is not found:
                self._open.remove(found)
                self._open.append(found)

    # -- the end -----------------------------------------------------------------------------------

    def _end(self, one: FoundTraining, state: str, reason: str = "") -> None:
        self._open.remove(one)
        if one.session is not None:
            try:
                one.session.end(state, reason)
            except Exception as error:
                self._on_problem(f"A training could not be ended properly: {error!r}")

    def close(self, state: str, reason: str) -> None:
        """End all trainings and remove everything from torch."""
        self._is_over = True
        self._remove()
        with self._lock:
            for one in reversed(list(self._open)):
                self._end(one, state, reason)
        if self.sessions:
            summary = self.sessions[0].summary.summary.as_dict()
            self._update_manifest(training=summary)

    def discard(self) -> None:
        """Remove everything from torch and write nothing, in a forked child."""
        self._is_over = True
        self._remove()
        for session in reversed(self.sessions):
            session.discard()

    def _remove(self) -> None:
        self._stop_watching_calls()
        self._restores.close()

    def _update_manifest(self, **facts: Any) -> None:
        try:
            self._writer.update_run(**facts)
        except TraceWriteError as error:
            self._on_problem(error.sentence())


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of `DistributedDataParallel`, which the program may also call itself."""
    if type(module).__name__ == "DistributedDataParallel" and isinstance(module.module, nn.Module):
        return module.module
    return module


def _is_watched(part: nn.Module) -> bool:
    """Whether the program itself records the training of a module."""
    watch = sys.modules.get("flexinspect_hooks.training.watch_training")
    watched: set[int] = set() if watch is None else watch.TrainingWatch._watched
    return bool(watched) and any(id(one) in watched for one in part.modules())


def _name_of(module: nn.Module) -> str:
    """The name of a module in the program's main module, else that of its class."""
    inner = getattr(module, "_orig_mod", module)
    main = vars(sys.modules["__main__"])
    for name, value in [*main.items()]:
        if value is module or value is inner:
            return name.replace(".", "_")
    return type(inner).__name__


def _owners(parameters: frozenset[int]) -> list[nn.Module]:
    """The outermost modules that have some of these parameters, in the order of their size."""
    modules = live_objects(nn.Module)
    inner = {id(child) for one in modules for child in one.children()}
    roots = (one for one in modules if id(one) not in inner)
    owners = [
        one
        for one in roots
        if not parameters.isdisjoint(id(parameter) for parameter in one.parameters())
    ]
    return sorted(owners, key=lambda one: -sum(1 for _ in one.parameters()))
