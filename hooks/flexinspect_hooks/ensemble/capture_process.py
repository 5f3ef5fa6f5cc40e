"""The capture process: reads a job on standard input, runs it, and writes the trace.

`flexinspect run` starts it as `python -m flexinspect_hooks.ensemble.capture_process`. The trace is
opened before torch is imported, so that the viewer shows the progress from the start.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import asdict

from flexinspect.core import signals
from flexinspect.core.environment import git_state
from flexinspect.core.errors import (
    FlexInspectError,
    TraceWriteError,
    is_out_of_memory,
    summarize_error,
)
from flexinspect.core.garbage_collection import no_garbage_collection
from flexinspect.core.text import print_message
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.job_samples import load_samples
from flexinspect.inputs.model_names import ModelSource
from flexinspect.inputs.samples import Sample
from flexinspect.records import protocol
from flexinspect.records.job import Job, parse_layers
from flexinspect_hooks.capture.new_trace import package_versions
from flexinspect_hooks.debugger.debugger_session import DebuggerSession, SendMessage
from flexinspect_hooks.python_internals.threads import available_cores, background_thread
from flexinspect_hooks.sessions.captured_run import CapturedRun, send_error

if TYPE_CHECKING:
    from flexinspect.inputs.hub_download import OnLoadProgress
    from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner, GenerationOutcome
    from flexinspect_hooks.ensemble.recompute_check import CheckCost
    from flexinspect_hooks.loading.model_loader import LoadedModel
    from flexinspect_hooks.sessions.capture_session import CaptureSession

REPORT_EVERY_S = 0.1  # progress of a phase is written at most this often

NOT_IN_MANIFEST = ("argv", "out", "serving")  # stored elsewhere, or secret


def main() -> int:
    """Run the job on standard input; returns the exit code."""
    # A process started in the background inherits an ignored SIGINT; here it must end the run.
    signals.raise_on_signals("SIGINT")
    # Once: a signal to the whole process group reaches us and our parent, which forwards it.
    signals.raise_on_signals("SIGTERM", "SIGHUP", once=True)
    try:
        job = Job.from_json(sys.stdin.readline())
        debugging = DebuggerSession(job.debugger, _send)
        granted = debugging.on_terminal_granted
        background_thread("flexinspect-parent", _end_with_parent, granted).start()
        return CaptureRun(job, debugging).run()
    except FlexInspectError as error:
        return send_error(_send, error)
    except KeyboardInterrupt as error:
        return signals.exit_code_of(error)
    except Exception as error:
        return send_error(_send, _describe_failure(error))


def _end_with_parent(on_terminal_granted: Callable[[], None]) -> None:
    """End the run when the parent process ends, which closes our standard input.

    When the parent writes `protocol.GRANT_TERMINAL`, pdb may use the terminal and
    `on_terminal_granted` is called. When `protocol.DETACH` is the last that it writes, the run
    continues without it, and its output goes to the null device. Reads without Python's buffer,
    whose lock a daemon thread must not hold when the process ends.
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


def _end_now() -> NoReturn:
    """End the process while it imports: nothing has run, so the parent removes the trace."""
    message = protocol.format_message(protocol.FINISHED, path=None, note=None)
    os.write(1, f"{message}\n".encode())  # a print may be interrupted
    os._exit(signals.INTERRUPTED)


def _describe_failure(error: Exception) -> FlexInspectError:
    if is_out_of_memory(summarize_error(error)):
        text = f"Memory ran out while the model ran: {summarize_error(error)}"
        hint = "Use a smaller model, --dtype bfloat16, --device cpu, --level basic, or fewer "
        hint += "paraphrases; flexinspect explain memory.exhausted says more."
        return FlexInspectError(text, hint=hint)
    hint = "The full traceback is in the trace: flexinspect dump TRACE shows it under events."
    return FlexInspectError(f"The run failed: {summarize_error(error)}", hint=hint)


def _send(kind: str, **facts: Any) -> None:
    with suppress(BrokenPipeError, ValueError):
        print(protocol.format_message(kind, **facts), flush=True)


class CaptureRun(CapturedRun):
    """One job from its first check to its closed trace."""

    def __init__(
        self,
        job: Job,
        debugging: DebuggerSession | None = None,
        samples: Sequence[Sample] | None = None,
        send: SendMessage | None = None,
    ) -> None:
        """`samples` are by default those of the job; `send` writes protocol lines to stdout."""
        self.job = job
        self._source = model_names.resolve(job.model, load_config())
        self._samples = load_samples(job) if samples is None else samples
        facts = {
            "job": {k: v for k, v in asdict(job).items() if k not in NOT_IN_MANIFEST},
            "model": {"name": self._source.name, "place": self._source.place},
            "seed": job.seed,
        }
        send = send or _send
        debugging = debugging or DebuggerSession(job.debugger, send)
        name, git = self._source.name, git_state(Path.cwd())
        super().__init__(job, "generation", name, debugging, send, git, facts)
        self._last_report = (0.0, "")
        self._n_generations = 0
        self._check_cost: CheckCost | None = None
        self._unexpected = False
        self._lost_records: TraceWriteError | None = None
        self._write_error: TraceWriteError | None = None  # the disk failed; the model went on

    def run(self) -> int:
        """Run the job and return the exit code; leaves a valid trace or none, also after errors."""
        state = "failed"
        try:
            with self.prepared() as (ensemble, session):
                self._generations(ensemble, session)
            state = "finished"
            return self._exit_code(0)
        except KeyboardInterrupt as error:
            state = "interrupted"
            return self._exit_code(signals.exit_code_of(error))
        except Exception as error:
            if self._n_generations:
                self._debugging.post_mortem(error)
            self.record_failure(error)
            raise
        finally:
            self.close(state)

    def record_failure(self, error: Exception) -> None:
        """Record an exception that ends the run: its sentence, or a foreign one's traceback."""
        if isinstance(error, FlexInspectError):
            facts = {"hint": error.hint, "exit_code": error.exit_code}
            self.record_event("error", error.message, **facts)
        else:
            self._unexpected = True
            self.record_error(error)

    def _exit_code(self, otherwise: int) -> int:
        """The exit code; reports an error if a breakpoint ended the run or records are missing."""
        error = self._breaks.stop_error() or self.write_failure()
        return otherwise if error is None else send_error(self._send, error)

    def write_failure(self) -> TraceWriteError | None:
        """Return why records are missing in the trace, None if it has all of them."""
        return self._lost_records or self._write_error

    @contextmanager
    def prepared(self) -> Iterator[tuple[EnsembleRunner, CaptureSession]]:
        """Load the model, and yield what runs samples; at the end record what capture took."""
        with closing(self.control):
            self._debugging.begin(self.writer.recording_path, self.record_event)
            with self._loaded() as runner_and_session:
                yield runner_and_session

    @contextmanager
    def _loaded(self) -> Iterator[tuple[EnsembleRunner, CaptureSession]]:
        self.control.start()  # before torch, so that the run can be found and paused early
        with signals.defer_interrupts(cut=_end_now), no_garbage_collection():
            self._record_progress("importing torch", {})
            import torch

            threads = self.job.threads or default_threads()
            torch.set_num_threads(threads)
            self._report_devices()
            self._record_progress("importing transformers", {})
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

            from flexinspect_hooks.ensemble.ensemble_run import EnsembleRunner

            self.writer.update_run(versions=package_versions())
        loaded = load_model(self.job, self._source, self._record_progress)
        compiled = is_compiled(self.job, loaded.device)
        self.writer.update_run(model=loaded.facts(), compiled=compiled, threads=threads)
        session = self._make_session(loaded)
        try:
            with session:
                self._debugging.on_flex_attention(self.record_event, compiled=compiled)
                ensemble = EnsembleRunner(loaded, self.job, compiled=compiled)
                self.control.targets.estimate_cost = ensemble.rewind_handler.estimate_cost
                self._check_cost = ensemble.check_cost
                yield ensemble, session
        finally:
            self._record_outcome(session)

    def _report_devices(self) -> None:
        """Record what there is to run on, before anything is loaded."""
        from flexinspect_hooks.loading.placement import choose_device, device_report

        with suppress(FlexInspectError):  # loading reports an unknown device
            opens_gpu = choose_device(self.job.device).startswith("cuda")
            self._record_progress("note", {"text": device_report(opens_gpu=opens_gpu)})

    def _make_session(self, loaded: LoadedModel) -> CaptureSession:
        from flexinspect_hooks.loading.tokenizers import Vocabulary
        from flexinspect_hooks.observers.selected_modules import check_selectors
        from flexinspect_hooks.sessions.capture_session import CaptureSession

        check_selectors(loaded.model, self.job.select)
        session = CaptureSession(
            loaded.model,
            self.writer,
            level=self.job.level,
            layers=parse_layers(self.job.layers, int(loaded.model.config.num_hidden_layers)),
            select=self.job.select,
            text_of=Vocabulary(loaded.tokenizer_or_ids()).text_of,
            copy_logits=False,
        )
        self.attach_recorder(session.recorder)
        self.attach_session(session)
        return session

    def _generations(self, ensemble: EnsembleRunner, session: CaptureSession) -> None:
        self._record_progress("generating", {"samples": len(self._samples)})
        for number, sample in enumerate(self._samples):
            is_held = self.job.hold and number == len(self._samples) - 1
            self.run_sample(sample, ensemble, session, holds=is_held)
            session.pass_breakpoints()

    def run_sample(
        self,
        sample: Sample,
        ensemble: EnsembleRunner,
        session: CaptureSession,
        *,
        holds: bool = False,
    ) -> GenerationOutcome:
        """Run a sample as the next generation of the trace."""
        with signals.defer_interrupts():
            plan = ensemble.plan(sample)
        self.generation = self._n_generations
        self._n_generations += 1
        return ensemble.run(self.generation, plan, session, holds=holds)

    def _record_outcome(self, session: CaptureSession) -> None:
        from flexinspect_hooks.capture.recorder import lost_records

        lost = self._lost_records = lost_records(session.recorder, self.writer)
        if lost is not None:
            self.record_event("error", lost.message, hint=lost.hint)
            self.update_manifest(reason=lost.message)
        else:
            self._write_error = session.recorder.failure
        cost, checks = session.cost(), self._check_cost
        if checks is not None and self.job.check_every is not None:
            cost |= {"checks": checks.n, "checks_s": round(checks.seconds, 6)}
        self.update_manifest(cost=cost)

    def close(self, state: str) -> str | None:
        """Close the trace in a state, and return its file; without a generation it is removed."""
        signals.ignore_end_signals()
        self.end_observation()
        self.report_missing_steps()
        self.update_manifest(ended_at=time.time())
        end = "failed" if self._lost_records is not None else state
        self._write_safely(lambda: self.writer.close(end))
        is_kept = self._n_generations > 0 or self._unexpected
        if not is_kept:
            # No generation ran, and the error message says why: the trace would hold nothing.
            self.writer.discard()
        path = str(self.writer.path) if is_kept else None
        self._send(protocol.FINISHED, path=path, note=self.writer.note)
        return path

    def _write_safely(self, write: Callable[[], object]) -> None:
        try:
            write()
        except TraceWriteError as error:  # raised once; later writes do nothing
            print_message(error.sentence())

    def _record_progress(self, phase: str, data: Mapping[str, Any]) -> None:
        now, (last, last_phase) = time.time(), self._last_report
        is_new = phase != last_phase or data.get("fraction") == 1.0
        if is_new or now - last >= REPORT_EVERY_S:
            self._last_report = (now, phase)
            self.record_event("phase", phase, **data)


def load_model(job: Job, source: ModelSource, report: OnLoadProgress) -> LoadedModel:
    """Load the model of a job. Raises `ModelError`."""
    from flexinspect_hooks.loading.model_loader import load

    names = ("device", "dtype", "weights", "seed", "trust_remote_code")
    return load(source, **{name: getattr(job, name) for name in names}, report=report)


def is_compiled(job: Job, device: str) -> bool:
    """Return whether a job compiles FlexAttention; by default on CUDA only."""
    return device.startswith("cuda") if job.compile is None else job.compile


def default_threads() -> int:
    """All cores but one: a busy process beside torch makes OpenMP barriers wait for ms."""
    return max(available_cores() - 1, 1)


if __name__ == "__main__":
    sys.exit(main())
