"""The batches of all processes from streams of documents: a process reads those that it needs.

A batch has `data.shards` streams, each with its share of documents and of sequences. Which they are
is a setting of the run and not a matter of processes, so that batches and their position stay the
same when a run goes on with other processes or on another mesh.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding


class Batches:
    """Whole batches, of which the rows of streams that are not open stay zero.

    Args:
        open_stream: Opens the stream of this number: an iterator of dicts of equally many rows.
        count: Streams of a batch.
        numbers: Those that this process needs.
    """

    def __init__(self, open_stream: Callable[[int], Any], count: int, numbers: list[int]):
        self._count = count
        self._streams = {number: open_stream(number) for number in numbers}

    def __next__(self) -> dict[str, np.ndarray]:
        parts = {number: next(stream) for number, stream in self._streams.items()}
        first = next(iter(parts.values()))
        if self._count == 1:
            return first
        batch = {}
        for name, rows in first.items():
            whole = np.zeros((self._count, *rows.shape), rows.dtype)
            for number, part in parts.items():
                whole[number] = part[name]
            batch[name] = whole.reshape(-1, *rows.shape[1:])
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position in every stream, as JSON has it; all processes have to ask together."""
        states = {str(number): stream.get_state() for number, stream in self._streams.items()}
        return states if len(states) == self._count else _of_all_processes(states)

    def set_state(self, states: Mapping[str, Any]) -> None:
        """Goes to the position that `get_state` gave, in whichever processes."""
        for number, stream in self._streams.items():
            stream.set_state(states[str(number)])

    def close(self) -> None:
        """Stops the threads and processes of the streams."""
        for stream in self._streams.values():
            stream.close()


def needed_streams(sharding: NamedSharding, batch_size: int, count: int) -> list[int]:
    """Numbers of the streams that have a sequence of a device of this process."""
    rows = batch_size // count
    numbers = set()
    for where in sharding.addressable_devices_indices_map((batch_size,)).values():
        assert where is not None
        first, end, _ = where[0].indices(batch_size)
        numbers |= set(range(first // rows, -(-end // rows)))
    return sorted(numbers)


def to_devices(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Makes global arrays of whole batches; of each, a process gives what its devices hold."""
    return {
        name: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        for name, rows in batch.items()
    }


def _of_all_processes(states: dict[str, Any]) -> dict[str, Any]:
    text = np.frombuffer(json.dumps(states).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([text.size])).ravel()
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: text.size] = text
    merged: dict[str, Any] = {}
    for row, length in zip(multihost_utils.process_allgather(padded), lengths, strict=True):
        merged |= json.loads(row[:length].tobytes())
    return merged
