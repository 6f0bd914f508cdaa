"""Imports flow one way, from kernels to the application; every file is parsed."""

import ast
import pathlib
import subprocess
import sys

import pytest

import attnres_jax

ROOT = pathlib.Path(__file__).parent.parent
OWN_PACKAGES = {"attnres_jax", "pallas_kernels", "train", "configs", "benchmarks", "tests"}
HEAVY_PACKAGES = {"optax", "orbax", "grain", "rich", "tyro", "tensorboardX", "tokenizers"}


def imported_names(source: str, package: str) -> set[str]:
    """Dotted names of everything that a file imports, also inside functions.

    `from a.b import c` counts as `a.b.c`, whether c is a module or not.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def files_of(folder: str) -> list[pathlib.Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def is_within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def offending(folder: str, is_allowed) -> list[str]:
    """ "file: name" for each import in a folder that breaks its rule."""
    files = files_of(folder)
    assert files, f"{folder} has no python files"
    return [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imported_names(file.read_text(), ".".join(file.relative_to(ROOT).parent.parts))
        if not is_allowed(name)
    ]


def own(name: str) -> bool:
    return name.split(".")[0] in OWN_PACKAGES


def only(*prefixes: str, never: tuple[str, ...] = ()):
    """Of our own packages only these; of the others, all but some."""

    def is_allowed(name):
        return is_within(name, *prefixes) if own(name) else not is_within(name, *never)

    return is_allowed


RULES = {
    "pallas_kernels": only("pallas_kernels", never=("flax",)),
    "attnres_jax/ops": only("attnres_jax.ops", "pallas_kernels", never=("flax",)),
    "attnres_jax/modules": only("attnres_jax.modules", "attnres_jax.ops"),
    "attnres_jax/linen.py": only("attnres_jax.ops"),
    "attnres_jax/models": only("attnres_jax.models", "attnres_jax.modules", "attnres_jax.ops"),
    "attnres_jax/diagnostics": only(
        "attnres_jax.diagnostics", "attnres_jax.models", "attnres_jax.ops"
    ),
    "attnres_jax": only(
        "attnres_jax", "pallas_kernels", never=(*HEAVY_PACKAGES, "numpy.testing", "pytest")
    ),
}


@pytest.mark.parametrize("folder", RULES)
def test_imports_flow_from_kernels_to_models(folder):
    assert offending(folder, RULES[folder]) == []


PUBLIC_NAMES = {f"attnres_jax.{name}" for name in vars(attnres_jax) if not name.startswith("_")}
SUBPACKAGES = {
    f"attnres_jax.{path.stem}" for path in (ROOT / "attnres_jax").iterdir() if path.stem[0] != "_"
}


def is_public(name: str) -> bool:
    """`import attnres_jax`, or a name from it that is not one of its modules."""
    return name == "attnres_jax" or name in PUBLIC_NAMES - SUBPACKAGES


@pytest.mark.parametrize(
    "folder, others",
    [("train", ("train",)), ("configs", ("configs", "train.config"))],
)
def test_the_application_imports_public_names_only(folder, others):
    assert (
        offending(folder, lambda name: is_within(name, *others) or not own(name) or is_public(name))
        == []
    )


def test_kernels_are_imported_inside_functions_only():
    # A plain `import attnres_jax` must not need a compiler for accelerators.
    for file in files_of("attnres_jax"):
        top = [
            n
            for n in ast.parse(file.read_text()).body
            if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        names = imported_names(ast.unparse(ast.Module(top, [])), "attnres_jax")
        assert not [name for name in names if is_within(name, "pallas_kernels", "jax_triton")]


def test_importing_the_library_loads_no_application_package_and_starts_no_backend():
    program = """
import sys
import attnres_jax, attnres_jax.linen, attnres_jax.models.retrofit, attnres_jax.models.presets
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was initialised"
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "attnres_jax" in loaded
    unwanted = {"optax", "orbax", "grain", "rich", "tyro", "jax_triton", "train"}
    # Flax itself loads some of them; what `import flax` loads is not ours to choose.
    by_flax = subprocess.run(
        [
            sys.executable,
            "-c",
            "import flax.nnx, flax.linen, sys; print(*{n.split('.')[0] for n in sys.modules})",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert loaded & unwanted <= set(by_flax.stdout.split())


@pytest.mark.parametrize(
    "source, names",
    [
        ("import a.b as c", {"a.b"}),
        ("from a import b, c", {"a.b", "a.c"}),
        ("from . import b", {"x.y.b"}),
        ("from ..z import b", {"x.z.b"}),
        ("def f():\n  import a", {"a"}),
    ],
)
def test_all_forms_of_import_are_seen(source, names):
    assert imported_names(source, "x.y") == names
