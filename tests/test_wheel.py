"""The wheel holds the two packages, and works without the checkout."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import attnres_jax

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: a build writes into its source folder."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.suffix in (".toml", ".md") or path.name == "LICENSE":
            shutil.copy(path, source)
        elif path.is_dir() and any(path.glob("*.py")) and path.name[0] != ".":
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    # Packages of the checkout that must stay out of the wheel are there to be picked up.
    assert {"attnres_jax", "pallas_kernels", "train", "configs", "benchmarks", "tests"} <= {
        path.name for path in source.iterdir()
    }
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = out.iterdir()
    return path


def test_the_wheel_holds_exactly_the_two_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    metadata = {name for name in top_level if name.endswith(".dist-info")}
    assert len(metadata) == 1
    assert top_level - metadata == {"attnres_jax", "pallas_kernels"}


def test_every_python_file_of_the_packages_is_in_the_wheel(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert names == {
        str(path.relative_to(ROOT))
        for package in ("attnres_jax", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
    }


def test_the_wheel_states_its_name_version_python_and_licence(wheel):
    assert wheel.name == f"attnres_jax-{attnres_jax.__version__}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    assert "Name: attnres-jax" in lines
    assert f"Version: {attnres_jax.__version__}" in lines
    assert "Requires-Python: >=3.12" in lines
    assert "License-Expression: Apache-2.0" in lines
    required = [line for line in lines if line.startswith("Requires-Dist:") and ";" not in line]
    assert {re.match(r"[\w-]+", line.split()[1])[0] for line in required} == {"flax", "jax"}
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_the_unpacked_wheel_is_what_gets_imported_and_it_runs(wheel, tmp_path):
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    program = f"""
import json, sys
sys.path.insert(0, {str(unpacked)!r})
import jax, jax.numpy as jnp, attnres_jax, attnres_jax.linen, pallas_kernels
from flax import nnx
model = attnres_jax.AttentionResidualStack([jnp.tanh, jnp.sin], 4, block_size=2)
hidden = model(jnp.ones((1, 2, 4)))
ours = [m for n, m in sys.modules.items() if n.split(".")[0] in ("attnres_jax", "pallas_kernels")]
print(json.dumps({{"files": [m.__file__ for m in ours], "shape": hidden.shape}}))
"""
    # Isolated: neither the working folder nor PYTHONPATH is searched.
    result = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["shape"] == [1, 2, 4]
    assert all(pathlib.Path(file).is_relative_to(unpacked) for file in report["files"])
