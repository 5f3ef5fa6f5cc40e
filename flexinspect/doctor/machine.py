"""Checks of the machine: memory, disk, compiler, terminal, debuggers. None takes long."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flexinspect.core.environment import command_output, existing_folder
from flexinspect.doctor.check import Check, error, note, ok, warning
from flexinspect.inputs.model_sizes import available_ram, human_bytes
from flexinspect.trace.file.location import network_file_system

MIN_FREE_DISK = 20_000_000_000
"""Bytes for one model of 3 B parameters in bfloat16, a dataset and traces."""

MIN_RAM, SMALL_RAM = 2_000_000_000, 8_000_000_000
"""Bytes below which only the demo model runs, and below which no model of 3 B parameters does."""

_COMPILERS = ("g++", "clang++", "c++")
EARLIEST_CLOCK = 1_700_000_000
"""Seconds since 1970, November 2023: a clock before this is not set."""


def check_machine(folder: Path) -> Iterator[Check]:
    """Check the machine; `folder` is where traces are written."""
    yield check_memory()
    yield check_threads(os.environ)
    yield check_disk(folder)
    yield check_trace_folder(folder)
    yield from check_caches()
    yield check_clock()
    yield check_compiler()
    yield check_attaching()
    yield check_terminal(os.environ)


def check_memory(free: int | None = None) -> Check:
    """Check how much memory is free, container limits included."""
    free = available_ram() if free is None else free
    found = f"{human_bytes(free)} free"
    if free < MIN_RAM:
        fix = "Close other programs. The demo model needs about 1 GB: flexinspect run --model demo."
        return warning("RAM", found, fix)
    if free < SMALL_RAM:
        fix = "A model of 3 B parameters needs 6.5 GB in bfloat16, 13 GB in float32."
        return warning("RAM", found, fix)
    return ok("RAM", found)


def check_threads(environment: Mapping[str, str], cores: int | None = None) -> Check:
    """Check how many threads torch will start on the CPU, from the variable of OpenMP."""
    if cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    given = environment.get("OMP_NUM_THREADS", "")
    if not given.isdecimal() or not int(given):
        found = f"{cores} cores; flexinspect uses one less, your own program all of them"
        return note("threads", found, "", "OMP_NUM_THREADS, or --threads, sets another number")
    found = f"{given} on {cores} cores, by OMP_NUM_THREADS"
    if int(given) > cores:
        fix = f"More threads than cores wait for each other: export OMP_NUM_THREADS={cores}."
        return warning("threads", found, fix)
    return note("threads", found)


def check_disk(folder: Path, free: int | None = None) -> Check:
    """Check how much space is left where models are cached and traces are written."""
    models, traces = existing_folder(hub_cache()), existing_folder(folder)
    uses = {models.stat().st_dev: (models, "models and traces")}
    if traces.stat().st_dev not in uses:
        uses = {models.stat().st_dev: (models, "models"), traces.stat().st_dev: (traces, "traces")}
    sizes = [shutil.disk_usage(at).free if free is None else free for at, _ in uses.values()]
    parts = zip(sizes, uses.values(), strict=True)
    found = ", ".join(f"{human_bytes(size)} free for {use}" for size, (_, use) in parts)
    if min(sizes) < MIN_FREE_DISK:
        fix = "Free some space, or move the cache: export HF_HOME=/path/with/space."
        return warning("disk", found, fix, str(models), str(traces))
    return ok("disk", found, str(models), str(traces))


def hub_cache() -> Path:
    """Return the folder of the hub's cache, as huggingface_hub finds it, without its import."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def check_trace_folder(folder: Path) -> Check:
    """Check that a trace can be written: the folder is writable, and its file system is local."""
    name = "trace folder"
    kind = network_file_system(folder)
    if kind is not None:
        fix = "Write traces to a local disk (--out /tmp/run.flextrace): SQLite's log needs one."
        return warning(name, f"{folder} is on a network file system ({kind})", fix)
    problem = _write_problem(folder)
    if problem:
        return error(name, f"{folder} {problem}", "Choose another folder with --out.")
    return ok(name, f"{folder}, local and writable")


def check_caches() -> Iterator[Check]:
    """Check the permissions of the folders that transformers, torch and Triton write to."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    folders = {"hub cache": hub_cache(), "compiler cache": Path(inductor)}
    for name, folder in folders.items():
        problem = _write_problem(existing_folder(folder))
        variable = "HF_HOME" if name == "hub cache" else "TORCHINDUCTOR_CACHE_DIR"
        if problem:
            yield error(name, f"{folder} {problem}", f"Name another folder: export {variable}=….")
        else:
            yield ok(name, str(folder))


def _write_problem(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as failure:
        return f"is not writable: {failure.strerror}"


def check_clock(now: float | None = None) -> Check:
    """Check that the clock is set: traces are sorted by it, and TLS certificates depend on it."""
    now = time.time() if now is None else now
    found = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if now < EARLIEST_CLOCK:
        return warning("clock", f"{found} is in the past", "Set the clock of this machine.")
    return ok("clock", found)


def check_compiler() -> Check:
    """Check for the C++ compiler that torch.compile needs for FlexAttention on a CPU."""
    name = "C++ compiler"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    version = command_output(compiler, "--version", timeout_s=5.0) if compiler else None
    if version:
        return ok(name, version.splitlines()[0])
    fix = "Debian: apt install g++. Red Hat: dnf install gcc-c++. macOS: xcode-select --install."
    return warning(name, "none, so FlexAttention cannot be compiled for a CPU", fix)


def check_attaching() -> Check:
    """Check whether a debugger may attach to a running process (`flexinspect attach`)."""
    name = "debuggers"
    found = [tool for tool in ("gdb", "lldb") if shutil.which(tool)]
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        level = int(scope.read_text())
    except (OSError, ValueError):
        level = 0
    if level and os.geteuid() != 0:
        fix = "To attach by process id: sudo sysctl kernel.yama.ptrace_scope=0."
        return note(
            name, f"debugpy; the kernel forbids to attach by id (ptrace_scope {level})", fix
        )
    if not found and sys.platform == "linux":
        fix = "apt install gdb, or start the run with --debugpy 5678."
        return note(name, "debugpy; gdb is missing, so none can attach by process id", fix)
    return ok(name, ", ".join(["debugpy", *found]))


def check_terminal(environment: Mapping[str, str]) -> Check:
    """Check what the terminal can show: its size, colours and Unicode."""
    name = "terminal"
    if not sys.stdout.isatty():
        return note(name, "none: the output goes to a file or a pipe")
    width, height = shutil.get_terminal_size()
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    has_colors = environment.get("COLORTERM") in ("truecolor", "24bit")
    kind = environment.get("TERM", "")
    colors = "true colour" if has_colors else "256 colours" if "256" in kind else "16 colours"
    if "NO_COLOR" in environment:
        colors = "no colours (NO_COLOR)"
    found = f"{width}×{height}, {colors}, {sys.stdout.encoding}"
    if width < 80 or height < 24:
        return warning(name, found, "Make the window at least 80×24.", kind)
    if encoding != "utf8":
        return warning(name, found, "Set a UTF-8 locale: export LANG=C.UTF-8.", kind)
    return ok(name, found, kind)
