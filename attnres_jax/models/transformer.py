"""A decoder-only language model whose residual connections are a setting.

The forward pass is a python loop over blocks. Inside one, consecutive sub-layers are scanned in
pairs, so that compile time grows with the number of blocks and not of layers. That is why the
parameters of all layers are stacked along a leading axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from flax import nnx

from attnres_jax.models.capture import (
    Probes,
    ReadState,
    add_probe,
    finish_state,
    mean_square,
    read_state,
    unstack_probes,
)
from attnres_jax.models.config import ModelConfig
from attnres_jax.models.sublayers import (
    KINDS,
    Run,
    gradients_together,
    run_sublayers,
    split_into_runs,
    split_leading,
)
from attnres_jax.modules import Attention, AttentionResidual, FeedForward, ReadVectors, RMSNorm
from attnres_jax.ops import FinishedSources, inter_block, merge, rms_norm
from attnres_jax.ops.block import block_boundaries
from attnres_jax.ops.sources import row_major


class _Layer(NamedTuple):
    """Parameters of one sub-layer, or of several stacked."""

    norm_gain: jax.Array
    state: nnx.State


class _Read(NamedTuple):
    """Phase 1 of one read, and what phase 2 needs besides."""

    output: jax.Array
    lse: jax.Array
    weights: Any  # float32 [n, b, t], or None where nothing is captured.
    query_d: jax.Array
    gain_d: jax.Array
    probe: Any  # Of its sub-layer, or None.


class TransformerLM(nnx.Module):
    """Token ids to next-token logits, with standard, Full or Block Attention Residuals.

    Every layer is attention then SwiGLU, each behind its own RMSNorm. Used functionally:

        graphdef, params = nnx.split(TransformerLM(config, rngs=nnx.Rngs(0)), nnx.Param)
        logits = nnx.merge(graphdef, params)(tokens)

    Attributes:
        embedding_table: float32 `[v, d]`; also the output head when embeddings are tied.
        attention: Attention of all layers, each parameter stacked along a leading axis.
        attention_norm: The norms before them, stacked.
        feed_forward: Feed-forward of all layers, stacked.
        feed_forward_norm: The norms before them, stacked.
        reads: Pseudo-queries and key-norm gains of the reads before the L sub-layers; None for the
            standard residual, as is `final_read`.
        final_read: The read before the final norm.
        final_norm: The norm before the head.
        head_kernel: float32 `[d, v]`, or None when embeddings are tied.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Creates the parameters that `config` describes, in float32."""
        c = self.config = config
        initial_table = nnx.initializers.normal(c.embedding_std)
        self.embedding_table = nnx.Param(initial_table(rngs.params(), (c.vocab_size, c.width)))

        @nnx.split_rngs(splits=c.num_layers)
        @nnx.vmap
        def layers(rngs):
            attention = Attention(
                c.width,
                c.num_heads,
                c.num_kv_heads or c.num_heads,
                c.head_width or c.width // c.num_heads,
                rope_theta=c.rope_theta,
                implementation=c.attention,
                rngs=rngs,
            )
            feed_forward = FeedForward(c.width, c.feed_forward_width, rngs=rngs)
            return attention, RMSNorm(c.width), feed_forward, RMSNorm(c.width)

        self.attention, self.attention_norm, self.feed_forward, self.feed_forward_norm = layers(
            rngs
        )
        reads = c.residual != "standard"
        self.reads = ReadVectors(2 * c.num_layers, c.width) if reads else None
        self.final_read = (
            AttentionResidual(c.width, eps=c.norm_eps, implementation=c.implementation)
            if reads
            else None
        )
        self.final_norm = RMSNorm(c.width)
        if c.tie_embeddings:
            self.head_kernel = None
        else:
            initial_kernel = nnx.initializers.lecun_normal()
            self.head_kernel = nnx.Param(initial_kernel(rngs.params(), (c.width, c.vocab_size)))

    @overload
    def __call__(self, tokens_bt: jax.Array, *, probes: Probes | None = ...) -> jax.Array: ...

    @overload
    def __call__(
        self, tokens_bt: jax.Array, *, capture: Literal[True], probes: Probes | None = ...
    ) -> tuple[jax.Array, dict[str, Any]]: ...

    def __call__(
        self, tokens_bt: jax.Array, *, capture: bool = False, probes: Probes | None = None
    ) -> jax.Array | tuple[jax.Array, dict[str, Any]]:
        """Computes the logits of the next token at every position.

        Args:
            tokens_bt: Integer token ids below `vocab_size`.
            capture: Whether to return what the reads did.
            probes: Added in on the way, to differentiate with respect to.

        Returns:
            float32 logits `[b, t, v]`; with `capture` also a dict of

            - `depth_weights`: for each of the L + 1 reads float32 `[n, b, t]` (no reads for the
              standard residual);
            - `hidden_norm`, float32 `[L + 1]`: the root mean square of what each sub-layer and the
              head read, before their norms;
            - `states`: for each of the L + 1 reads a `ReadState`;
            - `finished`: the embedding and, except for the standard residual, every block sum.

            Inside `jax.jit`, what of it is not used is not computed.
        """
        c = self.config
        hidden_btd = self.embedding_table[...][tokens_bt].astype(c.compute_dtype)
        finished = (hidden_btd,)
        plan = plan_blocks(c)
        blocks = self._split_into_blocks(plan, probes)
        captured, weights, num_sources = [], None, 1
        if self.final_read is None:
            for groups, parameters in zip(plan, blocks, strict=True):
                run_block = partial(self._standard_block, groups, capture)
                hidden_btd, ones = self._recompute("block", run_block)(hidden_btd, parameters)
                captured += ones
        else:
            sources = FinishedSources((hidden_btd,))
            for groups, parameters in zip(plan, blocks, strict=True):
                run_block = partial(self._attention_residual_block, groups, capture)
                sources, block_sum, ones = self._recompute("block", run_block)(sources, parameters)
                sources = sources.append(block_sum)
                captured += ones
            hidden_btd, weights = self.final_read(sources, return_weights=True)
            finished, num_sources = sources.values, len(sources.values)
        hidden_btd = add_probe(hidden_btd, probes, "final")
        logits_btv = self.head(hidden_btd, num_sources)
        if not capture:
            return logits_btv
        captured.append((mean_square(hidden_btd), ReadState(hidden_btd, weights)))
        mean_squares, states = zip(*captured, strict=True)
        return logits_btv, {
            "depth_weights": [state.weights for state in states if state.weights is not None],
            "hidden_norm": jnp.sqrt(jnp.stack(mean_squares)),
            "states": list(states),
            "finished": finished,
        }

    def head(self, hidden_btd: jax.Array, num_sources: int) -> jax.Array:
        """Final norm and head: float32 logits `[b, t, v]` of a read of `num_sources` sources."""
        normed_btd = self.final_norm(hidden_btd, eps=self.norm_eps(num_sources))
        if self.head_kernel is None:
            kernel, equation = self.embedding_table[...], "btd,vd->btv"
        else:
            kernel, equation = self.head_kernel[...], "btd,dv->btv"
        return jnp.einsum(
            equation,
            normed_btd,
            kernel.astype(normed_btd.dtype),
            preferred_element_type=jnp.float32,
        )

    def norm_eps(self, num_sources: int) -> float:
        """What the norm after a read of `num_sources` sources adds to the mean square.

        With zero queries a read is the mean of n sources: eps / n**2 undoes that 1 / n.
        """
        return self.config.norm_eps / (num_sources**2 if self.config.retrofit else 1)

    def _attention_residual_block(self, groups, capture, sources, parameters):
        """Algorithm 1 of the paper for one block: the sources, its sum, and what was captured."""
        c, n = self.config, len(sources.values)
        sum_dtype = jnp.float32 if c.float32_partial_sum else c.compute_dtype
        # No row of zeros is kept unless a scan or a wider dtype needs one.
        scanned = any(run.scanned_pairs for runs in groups for run in runs)
        starts_with_zeros = scanned or c.float32_partial_sum

        def sublayer(kind, carry, layer, read):
            if carry is None:  # A block's first read has no partial sum to merge.
                zeros = jnp.zeros(read.output.shape, sum_dtype)
                partial_sum, gate = zeros if starts_with_zeros else None, None
                normed = rms_norm(read.output, layer.norm_gain, eps=self.norm_eps(n))
            else:
                partial_sum, normed, gate = merge(
                    read.output,
                    read.lse,
                    carry[0],
                    carry[1],
                    read.query_d,
                    read.gain_d,
                    norm_gain_d=layer.norm_gain,
                    eps=c.norm_eps,
                    norm_eps=self.norm_eps(n + 1),
                    implementation=c.implementation,
                    return_gate=True,
                )
            normed = add_probe(normed, read.probe, "received")
            update = self._apply(kind, layer, normed, in_rows=sources.read_by_kernels)
            update = add_probe(update, read.probe, "output")
            if not capture:
                return (partial_sum, update), None
            state = read_state(read, gate, partial_sum)
            return (partial_sum, update), finish_state(state, normed, update)

        step = self._recompute("full", sublayer, static_argnums=(0,))
        captured: list[Any] = []
        carry: Any = None
        for runs, parameters_of_group in zip(groups, parameters, strict=True):
            query_sd, gain_sd, probes, layers_of_runs = parameters_of_group
            outputs, lse, weights_snbt, sources = inter_block(
                sources,
                query_sd,
                gain_sd,
                eps=c.norm_eps,
                implementation=c.implementation,
                return_weights=True,
                return_sources=True,
            )
            weights = weights_snbt if capture else [None] * len(outputs)
            probe_of_read = unstack_probes(probes, len(outputs))
            reads = list(map(_Read, outputs, lse, weights, query_sd, gain_sd, probe_of_read))
            for run, layers in zip(runs, layers_of_runs, strict=True):
                offset = run.start - runs[0].start
                reads_of_run = reads[offset : offset + run.stop - run.start]
                carry, ones = run_sublayers(step, carry, run, layers, reads_of_run)
                captured += ones
        partial_sum, update = carry
        if partial_sum is not None:
            update = (partial_sum + update.astype(sum_dtype)).astype(c.compute_dtype)
        return sources, update, captured

    def _standard_block(self, groups, capture, hidden_btd, parameters):
        """The same sub-layers around a plain residual stream."""

        def sublayer(kind, hidden_btd, layer, probe):
            normed_btd = rms_norm(hidden_btd, layer.norm_gain, eps=self.norm_eps(1))
            normed_btd = add_probe(normed_btd, probe, "received")
            update_btd = add_probe(self._apply(kind, layer, normed_btd), probe, "output")
            one = finish_state(ReadState(hidden_btd), normed_btd, update_btd) if capture else None
            return hidden_btd + update_btd, one

        step = self._recompute("full", sublayer, static_argnums=(0,))
        captured = []
        for runs, (_, _, probes, layers_of_runs) in zip(groups, parameters, strict=True):
            probe_of_read = iter(unstack_probes(probes, runs[-1].stop - runs[0].start))
            for run, layers in zip(runs, layers_of_runs, strict=True):
                probes_of_run = [next(probe_of_read) for _ in run.kinds]
                hidden_btd, ones = run_sublayers(step, hidden_btd, run, layers, probes_of_run)
                captured += ones
        return hidden_btd, captured

    def _apply(
        self, kind: str, layer: _Layer, normed_btd: jax.Array, *, in_rows: bool = False
    ) -> jax.Array:
        graphdef = nnx.graphdef(getattr(self, kind))
        # Converted first, so that the gradients held together are in the compute dtype too.
        kernels = jax.tree.map(lambda kernel: kernel.astype(normed_btd.dtype), layer.state)
        normed_btd, kernels = gradients_together((normed_btd, kernels))
        if in_rows:
            normed_btd = row_major(normed_btd)
        return nnx.merge(graphdef, kernels)(normed_btd)

    def _split_into_blocks(
        self, plan: list[list[list[Run]]], probes: Probes | None
    ) -> list[list[tuple]]:
        """For each block and group: queries, gains, probes and the layers of each of its runs."""
        stacked = {
            kind: _Layer(
                getattr(self, f"{kind}_norm").gain[...], nnx.state(getattr(self, kind), nnx.Param)
            )
            for kind in KINDS
        }
        groups = [runs for block in plan for runs in block]
        layers = iter(split_into_runs(stacked, [run for runs in groups for run in runs]))
        reads = self.reads
        queries_and_gains = (None, None) if reads is None else (reads.query[...], reads.gain[...])
        inner_probes = None if probes is None else probes._replace(final=None)
        sizes = [runs[-1].stop - runs[0].start for runs in groups]
        vectors = iter(split_leading((*queries_and_gains, inner_probes), sizes))
        return [
            [(*next(vectors), [next(layers) for _ in runs]) for runs in block] for block in plan
        ]

    def _recompute(self, level: str, function: Callable, **kwargs: Any) -> Callable:
        wanted = {"none": (), "block": ("block",), "full": ("block", "full")}
        if level not in wanted[self.config.remat]:
            return function
        return jax.checkpoint(function, **kwargs)


def plan_blocks(config: ModelConfig) -> list[list[list[Run]]]:
    """Cuts the sub-layers into blocks, those into groups that share a phase 1, those into runs.

    A run is what `run_sublayers` may scan; a block's first sub-layer, whose read has no partial
    sum, is one of its own. The standard residual follows the same plan, so that the two compare.
    """
    block_size = 1 if config.residual == "full" else config.block_size
    plan = []
    for start, stop in block_boundaries(2 * config.num_layers, block_size):
        size = config.reads_per_group or block_size
        groups = [[Run(a, min(a + size, stop))] for a in range(start, stop, size)]
        first = groups[0][0]
        groups[0] = [Run(start, start + 1)]
        if first.stop > start + 1:
            groups[0].append(Run(start + 1, first.stop))
        plan.append(groups)
    return plan
