"""Lending our terminal to pdb, which a run's process has on it while it is stopped."""

from __future__ import annotations

import signal
import time

from flexinspect.capture import Capture

LOOK_EVERY_S = 0.05


def lend(process: Capture) -> None:
    """Let pdb have the terminal until it is done with it, or its process has ended.

    Nothing else may read from the terminal or draw on it meanwhile. Ctrl-C goes to pdb. Call it
    from the main thread.
    """
    before = signal.signal(signal.SIGINT, lambda number, frame: process.interrupt())
    try:
        n_granted = 0
        while process.state.wants_terminal and process.poll() is None:
            if n_granted != process.state.terminal_wishes:  # it may want it again between two looks
                n_granted = process.state.terminal_wishes
                process.lend_terminal()
            time.sleep(LOOK_EVERY_S)
    finally:
        signal.signal(signal.SIGINT, before)
