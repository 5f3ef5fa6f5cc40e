"""Python processes that are forked from one that has torch and transformers loaded.

    done = run([sys.executable, "-m", "flexinspect", "run", "--json"], cwd=folder)

does what `subprocess.run` does, all but the seconds in which each of many processes would import
torch and transformers. `Popen` is `subprocess.Popen`: pipes, signals, exit codes, sessions and
process ids are real. The capture process of such a command is forked too.

What a fresh interpreter loads and flags of Python are for tests that start one with `subprocess`;
so is a command that this module does not know, which `Popen` passes on.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flexinspect.core import plugins
from support.paths import SHARED, TESTS

IMPORTS = (
    "numpy.ma",
    "rich.live",
    "rich.progress_bar",
    "rich.table",
    "torch",
    "torch._dynamo",
    "torch._dynamo.testing",
    "torch._higher_order_ops.flex_attention",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "transformers",
    "transformers.integrations.flex_attention",
    "transformers.masking_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.h11_impl",
    "flexinspect.analysis.summary",
    "flexinspect.cli.live_run",
    "flexinspect.cli.main",
    "flexinspect.cli.run",
    "flexinspect.panels.base",
    "flexinspect.trace.replay",
    "flexinspect_hooks.control.http_app",
    "flexinspect_hooks.ensemble.capture_process",
    "flexinspect_hooks.ensemble.ensemble_run",
    "flexinspect_hooks.gradients.after_generation",
    "flexinspect_hooks.loading.model_loader",
    "flexinspect_hooks.loading.random_weights",
    "flexinspect_hooks.rewind.branching_decoder",
    "flexinspect_hooks.sessions.standalone_calls",
    "flexinspect_hooks.user_code.model_discovery",
    "flexinspect_hooks.user_code.script.script_run",
    "flexinspect_hooks.user_code.watch_trace",
)
"""What most processes import, so that each need not read it again."""
PLUGINS = (plugins.HOOKS, plugins.RULES)
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""No process asks the hub, nor uses models of the user's cache: both are read at import."""
DEBUGGED = ("-X", "frozen_modules=off")
FLAGS = ("-P", "-u", *DEBUGGED)
"""Flags of Python that a forked process can follow; all are forked from one that is debugged."""

_FIRST_FD = 3
_MAX_REQUEST_BYTES = 1 << 17
_MAX_FDS = 16


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended: its exit code (negative: killed by a signal) and what it printed."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines printed on stdout."""
        return self.out.splitlines()


def run_alone(argv: Sequence[str], *, timeout: float = 240, **options: Any) -> Ran:
    """Run `python argv...` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=timeout, **options
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def run_warm(argv: Sequence[str], *, timeout: float = 240, **options: Any) -> Ran:
    """Run `python argv...` in a forked process."""
    done = run([sys.executable, *argv], capture_output=True, text=True, timeout=timeout, **options)
    return Ran(done.returncode, done.stdout, done.stderr)


def run_command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `flexinspect args...` in a folder, without a terminal."""
    command = [sys.executable, "-m", "flexinspect", *args]
    return run(command, cwd=cwd, capture_output=True, text=True)


def run(
    command: Sequence[str],
    *,
    input: str | None = None,  # noqa: A002 - the name that `subprocess.run` has
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Popen(subprocess.Popen[Any]):
    """A forked process; or one of a fresh interpreter, where the command asks for more."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        self._status: socket.socket | None = None
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *given: Any) -> None:
        """Fork the process, given what `subprocess.Popen` gives (Python 3.11 to 3.14)."""
        argv = python_args(args)
        if argv is None or preexec_fn is not None:
            super()._execute_child(args, executable, preexec_fn, *given)  # type: ignore[misc]
            return
        _, pass_fds, cwd, env, _, _, _, *pipes = given[:13]
        new_session, process_group = given[18], given[19]
        assert process_group == -1
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [fd if fd != -1 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "argv": argv,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": {**OFFLINE, **(os.environ if env is None else env)},
            "fds": [0, 1, 2, *pass_fds],
            "new_session": bool(new_session),
        }
        try:
            self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._status.connect(_server_address())
            data = json.dumps(request).encode()
            socket.send_fds(self._status, [data], [*streams, *pass_fds])
            self.pid = int(self._status.recv(64))
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        try:
            data = self._status.recv(64, socket.MSG_DONTWAIT if wait_flags else 0)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, int(data or 1 << 8)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def python_args(command: Any) -> list[str] | None:
    """Return what follows `python` in a command that a forked process can run, None for others."""
    if isinstance(command, (str, bytes)) or os.fspath(command[0]) != sys.executable:
        return None
    args = [os.fspath(word) for word in command[1:]]
    after = next((i for i, word in enumerate(args) if word not in FLAGS), len(args))
    is_known = after < len(args) and (args[after] in ("-m", "-c") or args[after][0] != "-")
    return args if is_known else None


_address = ""


def _server_address() -> str:
    """Return the address of this process's server; in a forked process, that of its own server."""
    return _address or _start_server()


@functools.cache
def _start_server() -> str:
    """Return the address of the server of this run of the tests; the first process starts it."""
    folder = Path(os.environ[SHARED])
    address = folder / "warm.socket"
    with (folder / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(str(address))
            listener.listen()
            _spawn_server(listener, folder)
            listener.close()
    return str(address)


def _spawn_server(listener: socket.socket, folder: Path) -> None:
    code = "from support import warm_python; warm_python.serve()"
    process = subprocess.Popen(
        [sys.executable, *DEBUGGED, "-c", code, str(listener.fileno()), listener.getsockname()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a pipe of the process that starts it would stay open
        pass_fds=[listener.fileno()],
        start_new_session=True,  # it is not the one who started it that ends it
        # One thread, so that there is no thread pool that a fork would lose.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            **OFFLINE,
            "HF_HOME": str(folder / "hugging-face"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # it compiles in the forked process itself
        },
    )
    process.returncode = 0  # nobody here waits for it


# -- the server ------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a process for each request, and report its end, until the run of the tests ends."""
    global _address
    listener = socket.socket(fileno=int(sys.argv[1]))
    _address = sys.argv[2]
    built_in = [place for group in PLUGINS for place in plugins.BUILT_IN[group].values()]
    for name in (*IMPORTS, *(place.partition(":")[0] for place in built_in)):
        importlib.import_module(name)
    _trace_attention()
    _search_modules()
    gc.collect()
    gc.freeze()  # the processes need not search what they were forked with
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a forked process gets its own
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    waiting: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (listener, woken):
            selector.register(source, selectors.EVENT_READ)
        while _are_tests_running():
            for key, _ in selector.select(timeout=1):
                if key.fileobj is listener:
                    _accept(listener, waiting)
                else:
                    woken.recv(4096)
            _report_ended(waiting)
    for child in waiting:  # of a worker that died
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _are_tests_running() -> bool:
    """Tell whether pytest's first process runs and has not removed the shared folder."""
    try:
        os.kill(int((Path(os.environ[SHARED]) / "pid").read_text("utf-8")), 0)
    except OSError:
        return False
    return True


def _trace_attention() -> None:
    """Run FlexAttention uncompiled once, so that dynamo has imported what it traces it with."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(1)
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 4, 4, device="cpu")
    row = torch.zeros(1, 1, 4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flex_attention(row, row, row, block_mask=mask)
    torch._dynamo.reset()


def _search_modules() -> None:
    """Search the modules for references to SDPA, so that forked processes need not.

    They would copy the memory of each value that they look at.
    """
    import torch

    from flexinspect_hooks.observers.attention import kernel_calls

    kernel_calls._rebind(torch.nn.functional.scaled_dot_product_attention)()


def _accept(listener: socket.socket, waiting: dict[int, socket.socket]) -> None:
    client, _ = listener.accept()
    data, fds = b"", list[int]()
    with suppress(OSError):
        data, fds, _, _ = socket.recv_fds(client, _MAX_REQUEST_BYTES, _MAX_FDS)
    if not data:  # the requesting process ended before it asked
        client.close()
        return
    child = os.fork()
    if not child:
        _become(json.loads(data), fds)
    for fd in fds:
        os.close(fd)
    with suppress(OSError):  # it may have ended meanwhile
        client.send(str(child).encode())
    waiting[child] = client


def _report_ended(waiting: dict[int, socket.socket]) -> None:
    for child in list(waiting):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with waiting.pop(child) as client:
                with suppress(OSError):  # the requesting process may have ended
                    client.send(str(status).encode())


# -- the forked process ----------------------------------------------------------------------------


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Become the process of a request; it never returns to the server."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["new_session"]:
            os.setsid()
        _take_fds(fds, request["fds"])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        atexit._clear()  # those are the server's
        code = _run_as_main(request["argv"])
    finally:
        os._exit(code & 0xFF)


def _take_fds(fds: Sequence[int], targets: Sequence[int]) -> None:
    """Give received file descriptors their numbers, and close all others."""
    above = max(*fds, *targets) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    os.closerange(_FIRST_FD, min(moved))
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
    os.closerange(min(moved), max(moved) + 1)
    sys.stdin = _open_stream(0, "r")
    sys.stdout = _open_stream(1, "w", buffering=1 if os.isatty(1) else -1)
    sys.stderr = _open_stream(2, "w", buffering=1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _open_stream(fd: int, mode: str, **options: Any) -> Any:
    return open(fd, mode, encoding="utf-8", closefd=False, **options)


def _run_as_main(argv: Sequence[str]) -> int:
    """Run the program in this process, and return the exit code Python would give it."""
    code: Any = 0
    try:
        _program(list(argv))()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt as error:
        _print_error(error)
        code = -signal.SIGINT
    except BaseException as error:
        _print_error(error)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code if isinstance(code, int) else int(code is not None)


def _program(argv: list[str]) -> Callable[[], object]:
    """Set `sys.argv` and `sys.path` as Python does, and return what runs the program."""
    is_safe = "-P" in argv[: len(FLAGS)]
    argv = argv[next(i for i, word in enumerate(argv) if word not in FLAGS) :]
    sys.orig_argv[1:] = argv
    if argv[0] == "-m":
        if argv[1].split(".")[0] == "flexinspect":
            subprocess.Popen = Popen  # type: ignore[misc]
        first, sys.argv = str(Path.cwd()), argv[1:]
        program = functools.partial(runpy._run_module_as_main, argv[1])  # type: ignore[attr-defined]
    elif argv[0] == "-c":
        first, sys.argv = "", ["-c", *argv[2:]]
        program = functools.partial(exec, argv[1], vars(sys.modules["__main__"]))
    else:
        first, sys.argv = str(Path(argv[0]).parent.absolute()), argv
        program = functools.partial(runpy.run_path, argv[0], run_name="__main__")
    sys.path[0:1] = [] if is_safe else [first]
    return program


def _print_error(error: BaseException) -> None:
    """Print a traceback from the first line of the program, as Python does."""
    here = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
