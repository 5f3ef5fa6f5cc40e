"""`flexinspect run … --remote-help`: the command lines to type on the laptop."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from flexinspect.cli.open import WEB_PORT
from flexinspect.launch.vscode_config import PORT


def remote_help(debugpy: int | None, serve: int | None) -> Iterator[str]:
    """Yield the lines for a run with these ports, None without the flag and 0 for a free port."""
    host = f"{getpass.getuser()}@{socket.gethostname()}"
    server = os.environ.get("SSH_CONNECTION", "").split()  # the last one is the port of the server
    login = f"{host} -p {server[3]}" if server[3:] and server[3] != "22" else host
    yield f"On the laptop, where {host} stands for the name that you use in ssh:"
    yield "the interface in the terminal, while the run lasts:"
    yield f"  ssh -t {login} {shlex.join(_program())} attach"
    yield f"in a browser, after `flexinspect open TRACE --web` on {socket.gethostname()}:"
    yield f"  ssh -N -L {WEB_PORT}:127.0.0.1:{WEB_PORT} {login}"
    yield f"  then open http://127.0.0.1:{WEB_PORT}"
    if debugpy is None:
        yield f"VS Code: start the run with --debugpy {PORT} for its lines."
    else:
        yield "VS Code, on your own code:"
        yield f"  ssh -N -L {PORT}:127.0.0.1:{debugpy or 'PORT'} {login}{_where(debugpy)}"
        yield '  then start the configuration "flexinspect: attach to a run" (`flexinspect vscode`)'
    if serve is None:
        yield "commands from scripts: start the run with --serve 127.0.0.1:8421 for their lines."
    else:
        yield "commands from scripts:"
        port = serve or "PORT"
        yield f"  ssh -N -L {port}:127.0.0.1:{port} {login}{_where(serve)}"
        yield f"  FLEXINSPECT_TOKEN=… flexinspect ctl --url http://127.0.0.1:{port} status"


def _where(port: int) -> str:
    return "" if port else "   # PORT: printed when the run starts"


def _program() -> list[str]:
    """Return how to start flexinspect here without the environment of this shell."""
    script = Path(sys.argv[0])
    is_script = script.name == "flexinspect" and script.is_file()
    return [str(script.absolute())] if is_script else [sys.executable, "-m", "flexinspect"]
