"""The capture process: reads a job on standard input, runs it, and writes the trace.

`flexinspect run` starts it as `python -m flexinspect_hooks.ensemble.capture_process`. The trace is
opened before torch is imported, so that the viewer shows the progress from the start.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from flexinspect.core.environment import git_state
from flexinspect.core.errors import (
    DatasetError,
    FlexInspectError,
    TraceWriteError,
    summarize_error,
)
from flexinspect.core.signals import (
    defer_interrupts,
    exit_code_of,
    ignore_end_signals,
    raise_on_signals,
)
from flexinspect.inputs import datasets, model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.datasets import Sample
from flexinspect.inputs.model_names import ModelSource
from flexinspect.records import protocol
from flexinspect.records.job import Job, parse_layers
from flexinspect.records.step import EventRecord
from flexinspect_hooks.breakpoints.actions import RunBreakpoints
from flexinspect_hooks.capture import last_kernel_call
from flexinspect_hooks.capture.new_trace import new_writer, package_versions, run_manifest
from flexinspect_hooks.control.handlers import CaptureInfo
from flexinspect_hooks.debugger.debugger_session import DebuggerSession
from flexinspect_hooks.python_internals.threads import available_cores, keep_running_when_stopped

if TYPE_CHECKING:
    from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
    from flexinspect_hooks.loading.model_loader import LoadedModel
    from flexinspect_hooks.sessions.capture_session import CaptureSession

DEFAULT_PARAPHRASES = 5

REPORT_EVERY_S = 0.1
"""Progress of a phase is written at most this often."""

_NOT_IN_MANIFEST = ("argv", "out", "serving")
"""Fields of a job that the manifest leaves out: stored elsewhere, or secret."""


def main() -> int:
    """Run the job on standard input; returns the exit code."""
    # A process started in the background inherits an ignored SIGINT; here it must end the run.
    raise_on_signals("SIGINT")
    # Once: a signal to the whole process group reaches us and our parent, which forwards it.
    raise_on_signals("SIGTERM", "SIGHUP", once=True)
    try:
        job = Job.from_json(sys.stdin.readline())
        debugging = DebuggerSession(job.debugger, _send)
        watcher = threading.Thread(
            target=_end_with_parent,
            name="flexinspect-parent",
            args=(debugging.on_terminal_granted,),
            daemon=True,
        )
        keep_running_when_stopped(watcher).start()
        return CaptureRun(job, debugging).run()
    except FlexInspectError as error:
        return _send_error(error)
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    except Exception as error:
        return _send_error(_describe_failure(error))


def _end_with_parent(on_terminal_granted: Callable[[], None]) -> None:
    """End the run when the parent process ends, which closes our standard input.

    When the parent writes `protocol.GRANT_TERMINAL`, pdb may use the terminal and
    `on_terminal_granted` is called. When `protocol.DETACH` is the last that it writes, the run
    continues without it, and its output goes to the null device.
    Reads without Python's buffer, whose lock a daemon thread must not hold when the process ends.
    """
    received = b""
    while chunk := os.read(0, 64):
        received = (received + chunk)[-len(protocol.DETACH) :]
        if chunk.endswith(protocol.GRANT_TERMINAL):
            on_terminal_granted()
    if received != protocol.DETACH:
        os.kill(os.getpid(), signal.SIGINT)
        return
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)


def _describe_failure(error: Exception) -> FlexInspectError:
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return FlexInspectError(
            f"Memory ran out while the model ran: {summarize_error(error)}",
            hint="Use a smaller model, --dtype bfloat16, --level basic, or fewer paraphrases.",
        )
    return FlexInspectError(
        f"The run failed: {summarize_error(error)}",
        hint="The full traceback is in the trace: flexinspect dump TRACE shows it under events.",
    )


def _send(kind: str, **facts: Any) -> None:
    with suppress(BrokenPipeError, ValueError):
        print(protocol.format_message(kind, **facts), flush=True)


def _send_error(error: FlexInspectError) -> int:
    """Send an error, and return its exit code."""
    _send(protocol.ERROR, message=error.message, hint=error.hint, exit_code=error.exit_code)
    return error.exit_code


class CaptureRun:
    """One job from its first check to its closed trace."""

    def __init__(self, job: Job, debugging: DebuggerSession | None = None) -> None:
        self.job = job
        self._debugging = debugging or DebuggerSession(job.debugger, _send)
        self._last_report = (0.0, "")
        self._n_generations = 0
        self._unexpected = False
        self._breaks: RunBreakpoints | None = None
        self._lost_records: TraceWriteError | None = None
        self._write_error: TraceWriteError | None = None  # the disk failed; the model went on

    def run(self) -> int:
        """Run the job and return the exit code; leaves a valid trace or none, also after errors."""
        source = model_names.resolve(self.job.model, load_config())
        samples = load_samples(self.job)
        facts = {
            "job": {k: v for k, v in asdict(self.job).items() if k not in _NOT_IN_MANIFEST},
            "model": {"name": source.name, "place": source.place},
            "graphs_counted": True,
            "seed": self.job.seed,
        }
        manifest = run_manifest(self.job.argv, self.job.level, git_state(Path.cwd()), **facts)
        self.writer = new_writer(self.job.out, manifest, overwrite=self.job.overwrite)
        last_kernel_call.start_recording_calls(self.writer.recording_path)
        _send(
            protocol.TRACE,
            path=str(self.writer.path),
            recording=str(self.writer.recording_path),
            note=self.writer.note,
        )
        state = "failed"
        try:
            self._debugging.begin(self.writer.recording_path, self._record_event)
            self._run_job(source, samples)
            state = "finished"
            return self._exit_code(0)
        except KeyboardInterrupt as error:
            state = "interrupted"
            return self._exit_code(exit_code_of(error))
        except FlexInspectError as error:
            self._post_mortem(error)
            self._record_event("error", error.message, hint=error.hint, exit_code=error.exit_code)
            raise
        except Exception as error:
            self._post_mortem(error)
            self._unexpected = True
            self._record_event(
                "error",
                f"{type(error).__name__}: {error}",
                traceback="".join(format_exception(error)),
            )
            raise
        finally:
            self._close(state)

    def _post_mortem(self, error: Exception) -> None:
        """Start the post-mortem debugger if the error comes from a generation."""
        if self._n_generations:
            self._debugging.post_mortem(error)

    def _exit_code(self, otherwise: int) -> int:
        """The exit code; reports an error if a breakpoint ended the run or records are missing."""
        stopped = self._breaks.stop_error() if self._breaks is not None else None
        error = stopped or self._lost_records or self._write_error
        return otherwise if error is None else _send_error(error)

    def _run_job(self, source: ModelSource, samples: Sequence[Sample]) -> None:
        from flexinspect_hooks.control.server import job_control
        from flexinspect_hooks.sessions.session_levels import SessionLevels

        levels = SessionLevels(self.job.level, self.job.layers)
        info = CaptureInfo("generation", source.name, str(self.writer.recording_path))
        report = partial(self._record_event, "control-server")
        control = job_control(self.job, info, levels, report)
        self._breaks = RunBreakpoints(
            self.job, control, lambda text: _send(protocol.STOPPED, text=text)
        )
        try:
            control.start()  # before torch, so that the run can be found and paused from the start
            with defer_interrupts(may_cut=False):
                threads = self._import_torch()
            from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner
            from flexinspect_hooks.loading.model_facts import loaded_facts

            loaded = load_model(self.job, source, self._record_progress)
            compiled = is_compiled(self.job, loaded.device)
            self.writer.update_run(model=loaded_facts(loaded), compiled=compiled, threads=threads)
            session = self._make_session(loaded)
            session.barrier = control.barrier
            control.barrier.stop_debugger = self._debugging.stop_between_steps
            levels.attach(session)
            control.attach_recorder(session.recorder)
            session.break_on(self._breaks.begin(session.recorder))
            try:
                with session:
                    self._debugging.on_flex_attention(self._record_event, compiled=compiled)
                    ensemble = EnsembleRunner(loaded, self.job, compiled=compiled)
                    control.targets.estimate_cost = ensemble.rewind_handler.estimate_cost
                    self._generations(ensemble, samples, session)
            finally:
                self._record_outcome(session)
        finally:
            control.close()

    def _import_torch(self) -> int:
        self._record_progress("importing torch", {})
        import torch

        threads = self.job.threads or default_threads()
        torch.set_num_threads(threads)
        self._record_progress("importing transformers", {})
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        self.writer.update_run(versions=package_versions())
        return threads

    def _make_session(self, loaded: LoadedModel) -> CaptureSession:
        from flexinspect_hooks.loading.tokenizers import Vocabulary
        from flexinspect_hooks.sessions.capture_session import CaptureSession

        n_layers = int(loaded.model.config.num_hidden_layers)
        return CaptureSession(
            loaded.model,
            self.writer,
            level=self.job.level,
            layers=parse_layers(self.job.layers, n_layers),
            text_of=Vocabulary(loaded.tokenizer_or_ids()).text_of,
            copy_logits=False,
        )

    def _generations(
        self, ensemble: EnsembleRunner, samples: Sequence[Sample], session: CaptureSession
    ) -> None:
        self._record_progress("generating", {"samples": len(samples)})
        for number, sample in enumerate(samples):
            with defer_interrupts():
                plan = ensemble.plan(sample)
            self._n_generations += 1
            is_held = self.job.hold and number == len(samples) - 1
            ensemble.run(number, plan, session, holds=is_held)
            session.pass_breakpoints()

    def _record_outcome(self, session: CaptureSession) -> None:
        """Record what capture cost, and why recording stopped if it did."""
        from flexinspect_hooks.capture.recorder import lost_records

        lost = self._lost_records = lost_records(session.recorder, self.writer)
        if lost is not None:
            self._record_event("error", lost.message, hint=lost.hint)
            self._write_safely(lambda: self.writer.update_run(reason=lost.message))
        else:
            self._write_error = session.recorder.failure
        self._write_safely(lambda: self.writer.update_run(cost=session.cost()))

    def _close(self, state: str) -> None:
        ignore_end_signals()
        last_kernel_call.stop_recording_calls()
        self._debugging.end()
        self._write_safely(lambda: self.writer.update_run(ended_at=time.time()))
        self._write_safely(
            lambda: self.writer.close("failed" if self._lost_records is not None else state)
        )
        path: str | None = str(self.writer.path)
        if not self._n_generations and not self._unexpected:
            # No generation ran, and the error message says why: the trace would hold nothing.
            self.writer.discard()
            path = None
        _send(protocol.FINISHED, path=path, note=self.writer.note)

    def _write_safely(self, write: Callable[[], object]) -> None:
        try:
            write()
        except TraceWriteError as error:  # raised once; later writes do nothing
            print(f"flexinspect: {error.sentence()}", file=sys.stderr)

    def _record_progress(self, phase: str, data: Mapping[str, Any]) -> None:
        now = time.time()
        fraction = data.get("fraction")
        last, last_phase = self._last_report
        if phase == last_phase and fraction != 1.0 and now - last < REPORT_EVERY_S:
            return
        self._last_report = (now, phase)
        self._record_event("phase", phase, **data)

    def _record_event(self, kind: str, text: str, /, **data: Any) -> None:
        record = EventRecord(kind, text, time.time(), data=data)
        self._write_safely(lambda: self.writer.write_event(record))


def load_model(
    job: Job, source: ModelSource, report: Callable[[str, Mapping[str, Any]], None]
) -> LoadedModel:
    """Load the model of a job. Raises `ModelError`."""
    from flexinspect_hooks.loading.model_loader import load

    return load(
        source,
        device=job.device,
        dtype=job.dtype,
        weights=job.weights,
        seed=job.seed,
        trust_remote_code=job.trust_remote_code,
        report=report,
    )


def is_compiled(job: Job, device: str) -> bool:
    """Return whether a job compiles FlexAttention; by default on CUDA only."""
    return device.startswith("cuda") if job.compile is None else job.compile


def load_samples(job: Job) -> list[Sample]:
    """The samples of a job with the chosen paraphrases. Raises `DatasetError` if there are none."""
    if job.prompts:
        samples = [datasets.from_prompts(job.prompts)]
    else:
        samples = datasets.load(job.dataset, max_samples=job.max_samples)
    if not samples:
        raise DatasetError(f"The dataset {job.dataset} has no samples.")
    return [datasets.choose_paraphrases(s, _n_paraphrases(job, s), job.indices) for s in samples]


def _n_paraphrases(job: Job, sample: Sample) -> int | None:
    """How many paraphrases to use: by default 5 of a dataset's sample, all of the user's prompt."""
    if job.num_paraphrases or job.indices or job.prompts:
        return job.num_paraphrases
    return min(DEFAULT_PARAPHRASES, len(sample.paraphrases))


def default_threads() -> int:
    """All cores but one: a busy process beside torch makes OpenMP barriers wait for ms."""
    return max(available_cores() - 1, 1)


if __name__ == "__main__":
    sys.exit(main())
