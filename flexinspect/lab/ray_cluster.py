"""The connection to a Ray cluster (https://docs.ray.io): one of its own on this machine, or any.

Ray is imported when a connection is opened. A local cluster listens on the loopback interface only,
asks each connection for a random token, has no dashboard, reports no usage, and ends with the
connection, whatever ends that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from msgspec import Struct

from flexinspect.core import signals
from flexinspect.core.environment import require_library
from flexinspect.core.errors import UsageError, summarize_error

LOCAL = "local"
OBJECT_STORE_BYTES = 100_000_000
"""Shared memory of a local cluster; jobs and results are some kilobytes each."""

_CONNECT_S = 5.0
_END_WITHIN_S = 3.0


class RayOptions(Struct, frozen=True, kw_only=True):
    """Where the workers run: `address` is "local", "auto", "HOST:PORT" or "ray://HOST:PORT".

    `workers` is None for one per GPU, or per `threads` cores where the workers use no GPU.
    """

    address: str = LOCAL
    workers: int | None = None
    threads: int = 1
    device: str = "auto"


class WorkerSlots(Struct, frozen=True):
    """How many workers run, and what the cluster reserves for each."""

    n_workers: int
    cpus: int
    gpus: float


class Interrupts:
    """Raises `SignalInterrupt` for Ctrl-C, SIGTERM and SIGHUP in the main thread.

    Signals that are ignored stay so. Ray installs a handler of its own and makes a plain
    `KeyboardInterrupt` of what is raised while it waits, so `last` keeps the signal's number.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._pending: int | None = None
        self._raised: int | None = None
        self._n_deferrals = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals while the body runs."""
        before = {
            number: handler
            for name in ("SIGINT", "SIGTERM", "SIGHUP")
            if (number := getattr(signal, name, None)) is not None
            and (handler := signal.getsignal(number)) != signal.SIG_IGN
        }
        self._signals = tuple(before)
        self.install()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)

    def install(self) -> None:
        """Set the handlers, also in place of those that Ray has set."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the body, then raise `SignalInterrupt` if a signal came meanwhile."""
        self._n_deferrals += 1
        try:
            yield
        finally:
            self._n_deferrals -= 1
        if (number := self._pending) is not None and not self._n_deferrals:
            self._pending, self._raised = None, number
            raise signals.SignalInterrupt(number)

    def check(self) -> None:
        """Raise `SignalInterrupt` if one was raised since the last `take` and arrived nowhere.

        Python drops an exception that a signal handler raises within `__del__` or a callback of the
        garbage collector.
        """
        if (number := self._raised) is not None:
            self._raised = None
            raise signals.SignalInterrupt(number)

    def take(self) -> None:
        """An interrupt has arrived."""
        self._raised = None

    def _on_signal(self, number: int, _frame: object) -> None:
        self.last = number
        if not self._n_deferrals:
            self._raised = number
            raise signals.SignalInterrupt(number)
        self._pending = number


class Connection(NamedTuple):
    """The module `ray`, connected to a cluster, and what handles signals meanwhile."""

    ray: Any
    interrupts: Interrupts


@contextlib.contextmanager
def connected(options: RayOptions) -> Iterator[Connection]:
    """Connect to the cluster; a local one is started, and ended whatever ends the body.

    Ctrl-C, SIGTERM and SIGHUP raise `SignalInterrupt`. Raises `UsageError` without Ray, for a
    cluster that cannot be reached, and in a process that is connected already.
    """
    is_local, interrupts = options.address == LOCAL, Interrupts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.handled())
        if is_local:
            stack.enter_context(_variables(_LOCAL_VARIABLES, RAY_AUTH_TOKEN=_TOKEN))
        ray = require_library("ray", "ray", "--ray")
        if is_local:
            stack.enter_context(_variables_read_again(ray))
        if ray.is_initialized():
            raise UsageError("This process is connected to a Ray cluster already.")
        stack.enter_context(_without_messages_on_stdout())
        folder = stack.enter_context(_short_folder()) if is_local else None
        stack.callback(_shut_down, ray, _children() if is_local else None)
        try:
            _start(ray, options, folder)
            interrupts.install()
            yield Connection(ray, interrupts)
        except KeyboardInterrupt as error:
            if interrupts.last in (None, signals.interrupt_signal(error)):
                raise
            raise signals.SignalInterrupt(interrupts.last) from error


def _start(ray: Any, options: RayOptions, folder: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if folder is not None:
        n_cpus = max((options.workers or 0) * options.threads, os.cpu_count() or 1)
        try:
            ray.init(
                address=LOCAL,
                num_cpus=n_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **quiet,
            )
        except SystemExit as error:  # Ray's handler of SIGTERM, which it has just set
            raise signals.SignalInterrupt(signal.SIGTERM) from error
        return
    failures = (ConnectionError, RuntimeError, ValueError, ImportError, AssertionError)
    try:
        _check_answers(options.address)
        ray.init(address=options.address, **quiet)
    except (*failures, OSError, ray.exceptions.RayError) as error:
        reason = summarize_error(error).rstrip(".")
        what = f"No Ray cluster can be used at {options.address}: {reason}."
        hint = "Run ray status on a node of the cluster, or use --ray local."
        raise UsageError(what, hint=hint) from error


def _check_answers(address: str) -> None:
    """Raise `OSError` if nothing listens at an address; Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            pass


def _shut_down(ray: Any, others: set[psutil.Process] | None) -> None:
    """End the connection without an interruption.

    Of a local cluster, all processes are ended: those below this one but `others`, which it had
    before. A cluster whose start was interrupted would keep some for a minute.
    """
    started = set() if others is None else _children() - others
    with _without_ctrl_c():
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=_END_WITHIN_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_END_WITHIN_S)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C while the body runs, in the main thread, which alone gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _children() -> set[psutil.Process]:
    """Return all processes below this one."""
    return {*psutil.Process().children(recursive=True)}


def slots_of(ray: Any, options: RayOptions, n_jobs: int) -> WorkerSlots:
    """Return the workers that the cluster has room for: one per GPU, or per `threads` cores.

    More workers than GPUs share them. No more than `n_jobs` are started.
    """
    resources = ray.cluster_resources()
    n_gpus, n_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    uses_gpu = n_gpus > 0 and (options.device == "auto" or options.device.startswith("cuda"))
    if options.device.startswith("cuda") and not n_gpus:
        what = f"--device {options.device}: the Ray cluster has no GPU."
        raise UsageError(what, hint="Use --device cpu, or a cluster with GPUs.")
    room = n_gpus if uses_gpu else n_cpus // options.threads
    n_workers = max(min(options.workers or room, n_jobs), 1)
    share = math.floor(1e4 / math.ceil(n_workers / n_gpus)) / 1e4 if uses_gpu else 0.0
    return WorkerSlots(n_workers, options.threads, share)


_TOKEN = secrets.token_hex(32)
"""What connections to a local cluster must know; Ray keeps the first one of a process."""

_LOCAL_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray clusters of several machines are experimental on macOS and Windows, where a local one
    # therefore listens on the loopback interface. This makes it do so everywhere.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Else a SIGTERM during the start would abort this process.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Workers without a GPU: the new behaviour, which Ray otherwise announces in a warning.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextlib.contextmanager
def _variables(variables: dict[str, str], **more: str) -> Iterator[None]:
    """Set environment variables while the body runs."""
    names = {**variables, **more}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _variables_read_again(ray: Any) -> Iterator[None]:
    """Let Ray know the variables of a local cluster, although it may have been imported before."""
    ray._raylet.Config.initialize("")
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _short_folder() -> Iterator[str]:
    """Make a folder for sockets and logs, whose path must be short, and remove it at the end."""
    system = Path("/tmp")
    folder = tempfile.mkdtemp(prefix="fi-ray-", dir=system if system.is_dir() else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _WithoutRayMessages:
    """A stream that drops what Ray's thread for errors of the cluster prints.

    Ray prints them on stdout, which has the results; `RayExecutor` reports lost workers itself.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _without_messages_on_stdout() -> Iterator[None]:
    before = sys.stdout
    with contextlib.redirect_stdout(_WithoutRayMessages(before)):
        yield
