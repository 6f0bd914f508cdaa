"""Ctrl-C and SIGTERM end a run at the next step, with everything saved."""

import os
import signal
import threading

import jax
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
            numbers = [signal.SIGINT]
            if jax.process_count() == 1:  # Else SIGTERM is JAX's, to tell the other processes.
                numbers.append(signal.SIGTERM)
            for number in numbers:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        del frame
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.number = self.number or number


def stopping_everywhere(stop: StopSignals, step: int) -> bool:
    """Whether any process was told to stop, so that all of them leave at the same step.

    To be asked once at every step. Several processes agree through JAX's coordination service,
    which takes a SIGTERM of any of them for the notice of a preemption: one or two steps later, all
    of them hear of it.
    """
    if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
        stop.number = signal.SIGTERM
    return stop.number is not None
