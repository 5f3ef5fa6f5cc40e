"""The machine of a run: git state, access to the Hugging Face hub, files, live processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexinspect.core.errors import FlexInspectError, OutputFileError, UsageError
from flexinspect.core.text import escape_unprintable

_GIT_TIMEOUT_S = 2.0


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether files have changed; None without a repository."""
    head = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if head is None:
        return None
    commit, branch = head.split("\n")
    return {
        "commit": commit,
        "branch": branch,
        "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    return command_output("git", "-C", str(folder), *arguments, timeout_s=_GIT_TIMEOUT_S)


def command_output(*command: str, timeout_s: float) -> str | None:
    """Return what a command prints on stdout; None if it is missing, fails or takes too long."""
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


_CONNECT_TIMEOUT_S = 5.0


def hub_endpoint() -> str:
    """Return the URL of the hub: `HF_ENDPOINT`, or the public one."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_is_offline() -> bool:
    """Return whether the user disabled the network (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_answers() -> bool:
    """Return whether the hub accepts a connection; True, unchecked, with a configured proxy."""
    import urllib.parse
    import urllib.request  # loads http and email: only for the hub

    if urllib.request.getproxies().keys() & {"http", "https", "all"}:
        return True
    parts = urllib.parse.urlsplit(hub_endpoint())
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        addresses = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    one_per_family = {family: str(address[0]) for family, _, _, _, address in reversed(addresses)}
    for address in one_per_family.values():
        with contextlib.suppress(OSError):
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
            return True
    return False


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Make the hub client use only its cache while the hub does not answer.

    The client itself retries a dead connection for 20 to 80 seconds.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


SHARE_VARIABLE = "FLEXINSPECT_SHARE"
"""Environment variable: "1" lets other users read new traces, as far as the umask does."""


def read_text(file: Path, what: str) -> str:
    """Return the text of a file that the user wrote. Raises `UsageError`; `what` names the file."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason if is_text else "it is not UTF-8 text"
        raise UsageError(f"The {what} {file} cannot be read: {reason}.") from error


def command_path(path: Path) -> str:
    """Return a file for a shell command in the current folder, without control characters."""
    with contextlib.suppress(ValueError, OSError):  # outside of the folder, or it is gone
        path = path.relative_to(Path.cwd())
    return escape_unprintable(shlex.quote(str(path)))


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest of its folders that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def replace_file(file: Path, data: bytes, mode: int | None = None) -> None:
    """Write a temporary file, then replace `file` by it, so that this is never incomplete.

    The file gets the permissions `mode`, by default those of a new file. Raises `OSError`; neither
    that nor an interruption leaves the temporary file.
    """
    part = file.with_name(f".{file.name}.{os.urandom(4).hex()}.part")
    first_mode = 0o666 if mode is None else 0o600
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, first_mode)) as out:
            out.write(data)
        if mode is not None:
            part.chmod(mode)
        part.replace(file)
    except BaseException:  # an interruption too
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def save_file(
    file: Path, data: bytes, error_type: type[FlexInspectError] = OutputFileError
) -> None:
    """Replace a file that the user asked for. Raises `error_type` with the reason."""
    try:
        replace_file(file, data)
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror or error}."
        hint = "Choose a file in an existing folder that you may write to."
        raise error_type(what, hint=hint) from error


def check_free(file: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` if something is at the place of a result and must not be replaced."""
    if not overwrite and file.exists():
        raise UsageError(f"{file} exists already.", hint="Name another --out, or add --overwrite.")


def require_library(
    module: str, extra: str, subject: str, error_type: type[UsageError] = UsageError
) -> Any:
    """Return a library that is installed with an extra.

    Raises `error_type` with what to install; its sentence begins with `subject`, which needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{subject} needs {module.partition('.')[0]}, which cannot be imported ({error})."
        raise error_type(what, hint=f"pip install 'flexinspect[{extra}]'") from error


def import_numpy() -> None:
    """Import numpy without a pool of threads, whose start takes as long as the rest of the import.

    OpenBLAS reads the variable when it is loaded; child processes do not inherit it. A variable
    that the user has set stays.
    """
    name = "OPENBLAS_NUM_THREADS"
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        importlib.import_module("numpy")
    finally:
        if not is_set:
            del os.environ[name]


def user_folder(variable: str, windows_variable: str, default: str) -> Path | None:
    """Return a folder of the user by its XDG variable, None without a home folder."""
    base = os.environ.get(variable)
    if not base and sys.platform == "win32":
        base = os.environ.get(windows_variable)
    try:
        return Path(base) if base else Path.home() / default
    except RuntimeError:
        return None


PACKAGE_DATA = Path(__file__).parents[1] / "data"
"""The data files of the package: the demo model, configurations of architectures."""


def is_recorder_alive(run: Mapping[str, Any]) -> bool:
    """Return whether the process of a run's manifest is alive on this machine; True when unknown.

    A process that started later with the same id does not count.
    """
    pid, started = run.get("pid"), run.get("started_at")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31 or not isinstance(started, (int, float)):
        return True
    if pid == os.getpid():
        return True
    import psutil

    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return not gone and bool(process.create_time() <= started + 1)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
