"""What people install: the wheel in a clean environment, the editable install, the Makefile's checks, the README.

Nothing is downloaded: the clean environments see the libraries of the one that runs the tests through a path file
(which does not run that environment's own path files, so an editable memwall there is not seen).
"""

from __future__ import annotations

import dataclasses
import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from memwall_strategy.config import MemwallConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHIPPED = ("memwall_strategy", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")
"""All that the build needs of a checkout."""


def _run(*command: object, cwd: pathlib.Path, fails: bool = False, **env: str) -> str:
    """Run a command outside the checkout's reach; its output, of which the end is shown when it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=clean | env, text=True, timeout=150, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert (result.returncode != 0) == fails, result.stdout[-4000:]
    return result.stdout


def _copy_source(folder: pathlib.Path) -> pathlib.Path:
    """The parts of the checkout that the build needs, so that building leaves nothing in the checkout itself."""
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _environment(folder: pathlib.Path) -> pathlib.Path:
    """A new environment that sees the libraries of this one; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    return python


def _pip(python: pathlib.Path, *arguments: object, cwd: pathlib.Path) -> None:
    _run(sys.executable, "-m", "pip", "--python", python, *arguments, "-q", "--no-index", "--no-deps", cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = _copy_source(folder / "source")
    _run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"),
        *("-w", folder, source),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """The Python of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = _environment(folder / "env")
    _pip(python, "install", wheel, cwd=folder)
    return python


def test_the_wheel_holds_the_package_with_conf_and_recipes_inside(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"memwall_strategy"}
    source = [
        (prefix + path.relative_to(ROOT).as_posix())
        for prefix, top in (("", "memwall_strategy"), ("memwall_strategy/", "conf"), ("memwall_strategy/", "recipes"))
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml") and path.relative_to(ROOT / top).parts[0] not in ("conf", "recipes")
    ]
    assert sorted(name for name in names if name.endswith((".py", ".yaml"))) == sorted(source)
    assert any(name.startswith("memwall_strategy/conf/") for name in names)
    assert any(name.startswith("memwall_strategy/recipes/") for name in names)


def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    fields = email.message_from_bytes(archive.read(metadata))
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "Apache-2.0"
    assert "torch<3,>=2.11" in fields.get_all("Requires-Dist")
    assert archive.read(metadata.replace("METADATA", "licenses/LICENSE")).decode().strip().startswith("Apache License")
    entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert "[torch.backends]\nmemwall = memwall_strategy.engine.autoload:install" in entry_points
    assert "memwall-train = memwall_strategy.cli.train:main" in entry_points


STRATEGIES = """
import sys
import lightning as L, lightning.pytorch.strategies, lightning.fabric.strategies
import pytorch_lightning, pytorch_lightning.strategies
import lightning_fabric, lightning_fabric.strategies
assert "memwall_strategy.lightning" not in sys.modules
options = {"strategy": "memwall", "accelerator": "cpu", "devices": 2}
for built, base in (
    (L.Trainer(**options), L.pytorch.strategies.ModelParallelStrategy),
    (pytorch_lightning.Trainer(**options), pytorch_lightning.strategies.ModelParallelStrategy),
    (L.Fabric(**options), L.fabric.strategies.ModelParallelStrategy),
    (lightning_fabric.Fabric(**options), lightning_fabric.strategies.ModelParallelStrategy),
):
    assert isinstance(built.strategy, base), built.strategy
    assert type(built.strategy).__module__.startswith("memwall_strategy."), built.strategy
import memwall_strategy
for name in memwall_strategy.__all__:
    getattr(memwall_strategy, name)
print(memwall_strategy.__file__)
"""


def test_the_name_resolves_for_every_front_end_and_every_export_is_there(installed, tmp_path):
    where = _run(installed, "-c", STRATEGIES, cwd=tmp_path).splitlines()[-1]
    assert where.startswith(str(installed.parent.parent))


BY_HAND = """
import lightning as L
from lightning.pytorch.strategies import StrategyRegistry
assert "memwall" not in StrategyRegistry
import memwall_strategy.lightning
L.Trainer(strategy="memwall", accelerator="cpu", devices=2)
"""


def test_without_torchs_autoload_importing_the_front_end_is_enough(installed, tmp_path):
    _run(installed, "-c", BY_HAND, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_importing_the_package_imports_the_standard_library_alone(installed, tmp_path):
    code = (
        "import sys; before = set(sys.modules); import memwall_strategy; dir(memwall_strategy)\n"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    assert _run(installed, "-c", code, cwd=tmp_path).strip() == "['memwall_strategy']"


def test_the_command_finds_its_configuration_in_the_wheel(installed, tmp_path):
    command = installed.parent / "memwall-train"
    shown = _run(command, "experiment=gpt_nano", "--cfg", "job", cwd=tmp_path)
    assert "memwall_strategy.recipes." in shown
    assert list(tmp_path.iterdir()) == []  # showing the configuration trains and writes nothing


def test_an_editable_install_finds_conf_and_recipes_from_anywhere(tmp_path):
    source = _copy_source(tmp_path / "source")
    python = _environment(tmp_path / "env")
    # Build isolation is off through the environment variable: `pip --python` looks for the backend where it runs.
    _pip(python, "install", "--no-build-isolation", "-e", source, cwd=tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    code = (
        "import importlib.resources, importlib.util, memwall_strategy, memwall_strategy.recipes\n"
        "assert any(importlib.resources.files('memwall_strategy.conf').glob('**/*.yaml'))\n"
        "print(memwall_strategy.__file__, [importlib.util.find_spec(name) for name in ('conf', 'recipes', 'tests')])"
    )
    assert _run(python, "-c", code, cwd=outside).split(maxsplit=1) == [
        str(source / "memwall_strategy" / "__init__.py"),
        "[None, None, None]\n",
    ]


@pytest.mark.parametrize("name", ["conf", "recipes"])
def test_the_package_holds_links_to_the_folders_of_the_checkout(name):
    link = ROOT / "memwall_strategy" / name
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs the program `make`")
@pytest.mark.parametrize(
    ("there", "says"), [(True, "memwall needs Python >= 3.11"), (False, "there is no")], ids=["too old", "missing"]
)
def test_make_says_which_python_it_needs(tmp_path, there, says):
    python = tmp_path / "python3"
    if there:
        python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
        python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shown = _run("make", f"PYTHON={python}", "demo", cwd=tmp_path, fails=True)
    assert says in shown
    assert str(python) in shown
    assert not (tmp_path / ".venv").exists()


def test_the_readme_names_every_option():
    readme = (ROOT / "README.md").read_text()
    options = []
    for part in dataclasses.fields(MemwallConfig):
        inner = part.default_factory
        if dataclasses.is_dataclass(inner):
            options += [f"{part.name}.{field.name}" for field in dataclasses.fields(inner)]
        else:
            options.append(part.name)
    assert "pool.device_budget" in options
    assert [option for option in options if f"| `{option}` |" not in readme] == []


def test_the_readmes_commands_are_targets_and_scripts():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"^make ([a-z]+)", readme, re.MULTILINE)) <= targets


def test_the_version_is_one():
    import memwall_strategy

    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{memwall_strategy.__version__}"\n' in text
