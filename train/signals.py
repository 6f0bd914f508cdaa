"""Ctrl-C and SIGTERM end a run at the next step, with everything saved."""

import signal
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils


class StopSignals:
    """Turns SIGTERM and the first Ctrl-C into a flag; a second Ctrl-C ends the process at once.

    Attributes:
        number: The signal that came, or None.
    """

    def __init__(self):
        self.number: int | None = None

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        del frame
        self.number = self.number or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopping_everywhere(stop: StopSignals) -> bool:
    """Whether any process was told to stop, so that all of them leave at the same step."""
    if jax.process_count() == 1:
        return stop.number is not None
    return bool(multihost_utils.process_allgather(np.array(stop.number is not None)).any())
