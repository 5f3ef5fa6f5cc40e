"""Waiting until a command that was accepted has had its effect."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flexinspect.control.messages import CommandResponse, StatusResponse
from flexinspect.errors import ControlError

if TYPE_CHECKING:
    from flexinspect.control.client import ControlClient

POLL_INTERVAL_S = 0.02


def wait_for_effect(client: ControlClient, answer: CommandResponse) -> StatusResponse | None:
    """Return the status once nothing is on its way any more, None when the run has ended by then.

    An order counts when it is done or failed, and then the pause that it ends in. Raises
    `ControlError` when the capture is there and does not answer.
    """
    status = answer.status
    while _is_pending(status, answer):
        time.sleep(POLL_INTERVAL_S)
        try:
            status = client.status()
        except ControlError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise  # it is there, and something holds it
            return None  # a run that ends does not say so any more
    return status


def _is_pending(status: StatusResponse, answer: CommandResponse) -> bool:
    order = status.last_rewind
    if (
        answer.rewind_number is not None
        and order is not None
        and order.number == answer.rewind_number
    ):
        if order.state in ("waiting", "working"):
            return True
        return status.state == "pausing"
    return bool(status.until) and status.state in ("loading", "running", "pausing")
