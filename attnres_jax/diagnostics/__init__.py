"""What a model reads over depth, and how large it is there: measured in its own forward pass."""

from attnres_jax.diagnostics.measure import diagnose as diagnose
from attnres_jax.diagnostics.record import AXES as AXES
from attnres_jax.diagnostics.record import Diagnostics as Diagnostics
from attnres_jax.diagnostics.record import ReadInfo as ReadInfo
from attnres_jax.diagnostics.record import read_diagnostics as read_diagnostics
