"""Silences progress bars and warnings of other libraries, and reports their progress."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flexinspect.inputs.hub_download import OnLoadProgress


@contextlib.contextmanager
def quiet_libraries(report: OnLoadProgress) -> Iterator[None]:
    """Silence transformers and huggingface_hub; report the fraction of the weights that is read.

    All settings are restored at the end, also after an exception.
    """
    from huggingface_hub import utils
    from transformers.utils import logging

    hub: Any = utils
    level, hub_level = logging.get_verbosity(), hub.logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        hub.logging.set_verbosity_error()
        hook = logging.set_tqdm_hook(
            lambda _factory, args, kw: _ProgressReporter(report, *args, **kw)
        )
        try:
            yield
        finally:
            logging.set_tqdm_hook(hook)
            logging.set_verbosity(level)
            hub.logging.set_verbosity(hub_level)
            if bars:
                logging.enable_progress_bar()
            (hub.enable_progress_bars if hub_bars else hub.disable_progress_bars)()


class _ProgressReporter:
    """A stand-in for tqdm that transformers uses; methods that it does not define do nothing."""

    def __init__(
        self, report: OnLoadProgress, iterable: Any = None, *_args: Any, **kwargs: Any
    ) -> None:
        self._report = report
        self._iterable = iterable
        size = len(iterable) if hasattr(iterable, "__len__") else None
        self._total = kwargs.get("total") or size
        self._reported = 0.0

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._iterable or (), start=1):
            yield item
            fraction = done / self._total if self._total else None
            if fraction is not None and (fraction - self._reported >= 0.02 or done == self._total):
                self._reported = fraction
                self._report("reading weights", {"fraction": fraction})

    def __enter__(self) -> _ProgressReporter:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None
