"""What a traced program is made of."""

from collections import Counter

import jax
from jax.extend.core import Literal


def equations(jaxpr):
    """The equations that its results depend on, also of programs within, but for kernels."""
    needed, found = set(_variables(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        # JAX itself leaves kernels whose results nobody needs to the compiler.
        if not equation.effects and needed.isdisjoint(equation.outvars):
            continue
        needed.update(_variables(equation.invars))
        within = []
        if equation.primitive.name != "pallas_call":
            programs = jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            )
            within = [e for p in programs if hasattr(p, "eqns") for e in equations(p)]
        found = [equation, *within, *found]
    return found


def _variables(atoms):
    return [x for x in atoms if not isinstance(x, Literal)]


def launches(function, *arguments):
    """The equations of all kernels of a program, in order."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return [e for e in equations(jaxpr) if e.primitive.name == "pallas_call"]


def count_launches(function, *arguments) -> Counter[str]:
    """How many kernels of each name a program has."""
    return Counter(e.params["name"] for e in launches(function, *arguments))
