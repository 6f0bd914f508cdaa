"""Recomputing in the backward pass changes no result, and really happens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models import reference
from tests.models.programs import (
    STANDARD,
    apply,
    cotangent,
    logits_and_gradients,
    tiny,
    tokens,
)

BLOCK = tiny(block_size=3, reads_per_group=2)
MODELS = {"standard": STANDARD, "full": tiny(residual="full"), "block": BLOCK}
LAST_IN_BLOCK = {
    "standard": ["feed_forward"],
    "full": ["attention", "feed_forward"] * 3,
    "block": ["attention", "feed_forward"],
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "config, remat",
    [
        (tiny(block_size=3, num_layers=2), "block"),
        (tiny(block_size=3, num_layers=2), "full"),
        (tiny(residual="standard", num_layers=1), "full"),
    ],
    ids=["block-block", "block-full", "standard-full"],
)
def test_loss_and_gradients_do_not_depend_on_what_is_recomputed(config, remat):
    params = reference.random_params(config, query_scale=2.0)
    inputs = params, tokens(), cotangent()
    logits, grads = logits_and_gradients(dataclasses.replace(config, remat=remat))(*inputs)
    expected_logits, expected_grads = logits_and_gradients(config)(*inputs)
    assert oracles.relative_error(logits, expected_logits) <= 1e-6
    for (name, got), (_, want) in zip(
        reference.leaves(grads), reference.leaves(expected_grads), strict=True
    ):
        assert oracles.relative_error(got, want) <= 1e-5, name


def products_of(jaxpr):
    """Matrix products that a program runs."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                count += products_of(parameter) * equation.params.get("length", 1)
    return count


def products_of_gradient(config):
    params = reference.random_params(config)

    def loss(params):
        return jnp.square(apply(config, params, tokens())).sum()

    return products_of(jax.make_jaxpr(jax.grad(loss))(params))


@pytest.mark.parametrize("residual", MODELS)
def test_full_and_block_recompute_the_products_of_every_sublayer(residual):
    none, block, full = (
        products_of_gradient(dataclasses.replace(MODELS[residual], remat=remat))
        for remat in ("none", "block", "full")
    )
    # Attention has six products and SwiGLU three. The last one of a block is of no use to that
    # block's backward pass, nor is the last one of a sub-layer to its own. Logits of reads, which
    # are products too, come on top.
    assert block >= none + 3 * (6 + 3) - len(LAST_IN_BLOCK[residual])
    # A block whose sub-layers are recomputed has no need of the last one twice.
    once = {"attention": 5, "feed_forward": 2}
    saved = sum(once[kind] for kind in LAST_IN_BLOCK[residual])
    assert full >= block + 3 * (5 + 2) - saved


def kept_bytes(config):
    """Bytes of everything that the forward pass keeps for the backward pass."""
    params = reference.random_params(config)
    many_tokens = np.zeros((2, 64), np.int32)

    def pullback_of(params):
        return jax.vjp(lambda params: apply(config, params, many_tokens), params)[1]

    kept = jax.tree.leaves(jax.eval_shape(pullback_of, params))
    given = sum(leaf.size for leaf in jax.tree.leaves(params))
    return 4 * (sum(leaf.size for leaf in kept if leaf.dtype == np.float32) - given)


@pytest.mark.parametrize("residual", MODELS)
def test_recomputing_keeps_less(residual):
    none, block, full = (
        kept_bytes(dataclasses.replace(MODELS[residual], remat=remat, num_layers=4))
        for remat in ("none", "block", "full")
    )
    assert block < 0.5 * none
    assert full <= block


def test_recomputed_blocks_keep_their_sources_once():
    # As the plain residual does with its own blocks: one activation for each block.
    n_blocks, activation = 3, 4 * 2 * 64 * 16
    block, standard = (
        kept_bytes(tiny(residual=residual, block_size=3, num_layers=4, remat="block"))
        for residual in ("block", "standard")
    )
    # Depth weights and other scalars of a token come on top of the final read's sources.
    assert block <= standard + (n_blocks + 1) * activation


def barriers_in(jaxpr):
    """Sorted shapes of what each optimization barrier of a program holds together."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            found.append(sorted(x.aval.shape for x in equation.invars))
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                found += barriers_in(parameter)
    return found


@pytest.mark.parametrize("remat", ["none", "block"])
@pytest.mark.parametrize("residual", MODELS)
def test_parameters_get_their_gradients_before_the_backward_pass_goes_on(residual, remat):
    # Blocks too short to scan anything.
    config = dataclasses.replace(MODELS[residual], remat=remat, block_size=3)
    params = reference.random_params(config)

    def loss(params):
        return jnp.square(apply(config, params, tokens())).sum()

    found = barriers_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    for kind in ("attention", "feed_forward"):
        kernels = [leaf.shape[1:] for leaf in jax.tree.leaves(params[kind])]
        cotangents = sorted([(*tokens().shape, config.width), *kernels])
        assert found.count(cotangents) == config.num_layers, kind


def test_gradients_of_the_reads_alone_are_those_of_the_whole():
    params, inputs = reference.random_params(BLOCK, query_scale=2.0), tokens()

    def loss(reads):
        return jnp.square(apply(BLOCK, params | {"reads": reads}, inputs)).sum()

    def loss_of_all(params):
        return jnp.square(apply(BLOCK, params, inputs)).sum()

    found, expected = jax.grad(loss)(params["reads"]), jax.grad(loss_of_all)(params)["reads"]
    for (name, got), (_, want) in zip(
        reference.leaves(found), reference.leaves(expected), strict=True
    ):
        assert np.any(want)
        assert oracles.relative_error(got, want) <= 1e-6, name
