"""Joining the processes of a run, before anything else asks for devices."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find each other. TPU pods, SLURM, Kubernetes and Open MPI need no setting."""

    coordinator_address: str | None = None
    """Host and port of process 0, such as 10.0.0.1:1234; none looks for a cluster that JAX knows,
    and trains in one process where there is none."""
    num_processes: int | None = None
    """Processes of the run; goes with coordinator_address."""
    process_id: int | None = None
    """Which of them this is, from 0; goes with coordinator_address."""
    detect: bool = True
    """Look for a cluster; without it, and without an address, this process trains alone."""

    def __post_init__(self) -> None:
        given = self.coordinator_address, self.num_processes, self.process_id
        names = "coordinator_address, num_processes and process_id"
        if any(value is not None for value in given):
            if any(value is None for value in given):
                raise ValueError(
                    f"distributed: {names} go together, got {', '.join(map(str, given))}; give all"
                    " three, or none on a cluster that JAX knows"
                )
            assert self.coordinator_address and self.num_processes and self.process_id is not None
            host, _, port = self.coordinator_address.rpartition(":")
            if not host or not port.isdigit():
                raise ValueError(
                    f"distributed.coordinator_address: expected host:port, such as 10.0.0.1:1234,"
                    f" got {self.coordinator_address!r}"
                )
            if not 0 <= self.process_id < self.num_processes:
                raise ValueError(
                    f"distributed.process_id: expected 0 to {self.num_processes - 1}, one below"
                    f" num_processes, got {self.process_id}"
                )


def join(config: DistributedConfig) -> None:
    """Waits for all processes of the run, if there are several.

    Raises:
        ValueError: They did not come together, within five minutes or at all.
    """
    try:
        if config.coordinator_address is not None:
            jax.distributed.initialize(
                config.coordinator_address, config.num_processes, config.process_id
            )
        elif config.detect:
            _join_cluster()
    except RuntimeError as error:
        raise ValueError(
            f"the processes of the run do not come together: {error};"
            " --distributed.no-detect trains in this one alone"
        ) from error


def _join_cluster() -> None:
    try:
        jax.distributed.initialize()
    except ValueError as error:
        if "coordinator_address" not in str(error):  # What JAX says where it knows no cluster.
            raise
