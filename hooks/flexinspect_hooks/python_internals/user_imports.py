"""Import an object that the user names as "package.module:name"."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from flexinspect.core.errors import UsageError, summarize_error


def import_object(spec: str, what: str, error_type: type[UsageError] = UsageError) -> Any:
    """Return the object; modules of the current folder are found too.

    Raises `error_type`, whose message begins with `what`, for anything that cannot be imported.
    """
    module_name, _, name = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here must not replace an installed module
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # the module may be a script that calls sys.exit
        hint = "Name it as package.module:function, importable from the current folder."
        text = f"{what} {spec} cannot be loaded: {summarize_error(error)}"
        raise error_type(text, hint=hint) from error
