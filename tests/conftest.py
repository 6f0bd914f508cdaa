"""Strict settings for every test: eight CPU devices, no silent promotion."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
