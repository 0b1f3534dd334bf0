"""Who may import whom, and who may touch a private name of torch, Lightning or Accelerate: read off the syntax trees.

A layer is a folder of the package (or a module beside them). Imports for typing alone are free: they tie no module to
another when it runs. An import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "memwall_strategy"

PILLARS = {"pool", "cluster", "overlap", "topology", "resilience"}
BELOW_PILLARS = {"core", "config", "engine", "planner", "telemetry"}
BELOW_FRONT_ENDS = {*BELOW_PILLARS, *PILLARS, "runtime"}

MAY_IMPORT: dict[str, set[str]] = {
    "": set(),  # the package's own module: names are resolved on first use
    "core": set(),
    "config": {"core"},
    "engine": {"core", "config"},
    "planner": {"core", "config"},
    "telemetry": {"core", "config", "planner"},
    **dict.fromkeys(PILLARS, BELOW_PILLARS),
    "runtime": BELOW_PILLARS | PILLARS,
    "lightning": {*BELOW_FRONT_ENDS, "callbacks"},
    "accelerate": BELOW_FRONT_ENDS,
    "callbacks": BELOW_FRONT_ENDS,
    "recipes": {*BELOW_FRONT_ENDS - {"engine"}, "", "lightning", "accelerate", "callbacks"},
    "cli": {*BELOW_FRONT_ENDS, "", "lightning", "callbacks", "recipes"},
    "conf": set(),
}
"""Layer -> the other layers that it may import; each may import itself. ``""`` is ``memwall_strategy`` itself."""

MEASURES_ENGINE = "recipes.bench_"
"""Recipes that time what is inside the engine, which no layer above it shows."""

STDLIB_ONLY = ("__init__", "config", "core.errors", "engine.__init__", "engine.autoload", "lightning.register")
"""Modules that must cost nothing and fail nowhere: of others they import only what is in this list."""

NO_ENGINE_NEEDED = {"planner": ("torch.distributed", "lightning", "pytorch_lightning", "accelerate")}
"""Pure layers -> what they may not import even inside a function."""

FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}
"""Whose private names live in engine/ alone."""

PUBLIC_UNDERSCORES = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe"}
"""Documented names that begin with an underscore, of namedtuple, os and sys."""

_STRATEGIES = ("strategy", "parallel", "model_parallel")

BASES = tuple(
    f"{half}/{file}.py"
    for half in ("pytorch", "fabric")
    for file in (*(f"strategies/{name}" for name in _STRATEGIES), "plugins/precision/precision")
)
"""Lightning's files whose classes memwall's front end extends."""


def _files() -> list[tuple[str, ast.Module]]:
    """Dotted name inside the package (``core.lane``) and syntax tree of each module, the recipes' included."""
    found = []
    for top in (ROOT / PACKAGE, ROOT / "recipes"):
        for path in sorted(top.rglob("*.py")):
            if PACKAGE in path.parts and path.relative_to(ROOT / PACKAGE).parts[0] in ("conf", "recipes"):
                continue  # links; their target is read under its own name
            relative = path.relative_to(top if top.name == PACKAGE else ROOT)
            found.append((".".join(relative.with_suffix("").parts), ast.parse(path.read_text(), str(path))))
    return found


FILES = _files()


def _layer(name: str) -> str:
    first = name.partition(".")[0]
    return "" if first == "__init__" else first


def _imports(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a module imports when it runs, as full dotted names with the line; ``from a import b`` is ``a.b``."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    package = [PACKAGE, *name.split(".")[:-1]]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if not node.level else package[: len(package) - node.level + 1]
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def _of_package(imported: str) -> str | None:
    """``core.lane.Lane`` for ``memwall_strategy.core.lane.Lane``; None for somebody else's."""
    head, _, rest = imported.partition(".")
    if head == "recipes":
        return imported
    return rest if head == PACKAGE else None


def layer_faults(name: str, tree: ast.Module) -> list[str]:
    """Imports of a module that its layer may not make."""
    layer, faults = _layer(name), []
    allowed = MAY_IMPORT[layer] | {layer} | ({"engine"} if name.startswith(MEASURES_ENGINE) else set())
    for imported, line in _imports(name, tree):
        inner = _of_package(imported)
        # `from memwall_strategy import PoolConfig` asks the package itself, which may be any layer.
        free = inner in (None, "", "__version__")
        target = None if free else _layer(inner) if _layer(inner) in MAY_IMPORT else ""
        if target is not None and target not in allowed:
            faults.append(f"{name}:{line} imports {imported}: {layer or PACKAGE} may not import {target or PACKAGE}")
        if imported.startswith(NO_ENGINE_NEEDED.get(layer, ())):
            faults.append(f"{name}:{line} imports {imported}: {layer} needs no engine")
        if name in STDLIB_ONLY and not _is_light(imported, inner):
            faults.append(f"{name}:{line} imports {imported}: only the standard library here")
    return faults


def _is_light(imported: str, inner: str | None) -> bool:
    if inner is None:
        return imported.partition(".")[0] in sys.stdlib_module_names
    return inner.startswith(tuple(f"{module}." for module in STDLIB_ONLY)) or inner in STDLIB_ONLY


def private_faults(name: str, tree: ast.Module, own: set[str]) -> list[str]:
    """Private names of somebody else that a module uses; ``own`` are the private names that memwall defines."""
    faults, foreign_roots = [], set()
    for imported, line in _imports(name, tree):
        parts = imported.split(".")
        if parts[0] in FOREIGN and any(_is_private(part) for part in parts):
            faults.append(f"{name}:{line} imports {imported}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                if (source or alias.name).partition(".")[0] in FOREIGN:
                    foreign_roots.add((alias.asname or alias.name).partition(".")[0])
    for attribute, root, line in _attributes(tree):
        if _is_private(attribute) and attribute not in PUBLIC_UNDERSCORES:
            if root in foreign_roots:
                faults.append(f"{name}:{line} uses {root}...{attribute}")
            elif attribute not in own:
                faults.append(f"{name}:{line} uses .{attribute}, which no module outside engine/ defines")
    return faults


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _attributes(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Every attribute that is read or written, by dot or by ``getattr`` and its kin: name, root of the chain, line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, _root(node), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            given = node.args[1]
            if (
                node.func.id in ("getattr", "setattr", "hasattr", "delattr")
                and isinstance(given, ast.Constant)
                and isinstance(given.value, str)
            ):
                yield given.value, _root(node.args[0]), node.lineno


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _defined(tree: ast.Module) -> set[str]:
    """Private names that a module makes itself: functions, classes, module and class variables, its own ``self._x``.

    A factory may set them from outside (``made._x = 1``): they count when the module's own classes use them too.
    """
    names, of_self, set_from_outside = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            direct = isinstance(node.value, ast.Name)
            if direct and node.value.id in ("self", "cls"):
                (names if isinstance(node.ctx, ast.Store) else of_self).add(node.attr)
            elif direct and isinstance(node.ctx, ast.Store):
                set_from_outside.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return {name for name in names | (of_self & set_from_outside) if _is_private(name)}


def _lightning_private() -> set[str]:
    """Private names in the classes of Lightning that memwall extends, read without importing Lightning."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None and spec.submodule_search_locations
    folder = pathlib.Path(spec.submodule_search_locations[0])
    names: set[str] = set()
    for path in BASES:
        tree = ast.parse((folder / path).read_text())
        names |= {name for name, root, _ in _attributes(tree) if root in ("self", "cls") and _is_private(name)}
        names |= {method.name for method in _methods(tree) if _is_private(method.name)}
    return names


def _methods(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            yield from (node for node in owner.body if isinstance(node, ast.FunctionDef))


def base_faults(name: str, tree: ast.Module, bases: set[str]) -> list[str]:
    """Uses of a name that a base class in Lightning already means something by: a private name of Lightning's."""
    return [
        f"{name}:{line} uses self.{attribute}, a private name of the Lightning class it extends"
        for attribute, root, line in _attributes(tree)
        if root in ("self", "cls") and attribute in bases
    ] + [
        f"{name}:{node.lineno} overrides {node.name}, a private name of the Lightning class it extends"
        for node in _methods(tree)
        if node.name in bases
    ]


def test_every_folder_is_a_known_layer():
    assert {_layer(name) for name, _ in FILES} <= set(MAY_IMPORT)
    assert {"", "core", "config", "engine"} <= {_layer(name) for name, _ in FILES}


def test_imports_follow_the_layers():
    assert [fault for name, tree in FILES for fault in layer_faults(name, tree)] == []


def test_private_names_stay_in_the_engine():
    outside = [(name, tree) for name, tree in FILES if _layer(name) != "engine"]
    own = set().union(*(_defined(tree) for _, tree in outside))
    assert [fault for name, tree in outside for fault in private_faults(name, tree, own)] == []


def test_the_front_end_uses_no_private_name_of_the_classes_it_extends():
    bases = _lightning_private()
    assert "_device_mesh" in bases  # what is being looked for is there
    front = [(name, tree) for name, tree in FILES if _layer(name) in ("lightning", "accelerate")]
    assert [fault for name, tree in front for fault in base_faults(name, tree, bases)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core.block", "from memwall_strategy.engine.fsdp import x"),
        ("core.block", "def f():\n    import memwall_strategy.config"),
        ("config", "import numpy"),
        ("config", "from memwall_strategy.core.lane import Lane"),
        ("engine.lanes", "from memwall_strategy.runtime import Runtime"),
        ("engine.lanes", "from ..planner import plan"),
        ("engine.autoload", "import torch"),
        ("planner.plan", "def f():\n    import torch.distributed as dist"),
        ("pool.table", "from memwall_strategy.cluster import Cluster"),
        ("runtime.runtime", "from memwall_strategy.lightning.strategy import strategy_class"),
        ("runtime.runtime", "from memwall_strategy import MemwallStrategy"),
        ("lightning.strategy", "from memwall_strategy.recipes.gpt import model"),
        ("lightning.strategy", "from recipes.gpt import model"),
        ("recipes.gpt.model", "from memwall_strategy.engine import fsdp"),
    ],
)
def test_a_forbidden_import_is_found(name, source):
    assert layer_faults(name, ast.parse(source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("core.pillar", "import typing\nif typing.TYPE_CHECKING:\n    from memwall_strategy.runtime import Runtime"),
        ("config", "from memwall_strategy.core.errors import ConfigError"),
        ("engine.lanes", "from ..core.lane import Lane\nfrom .fsdp import x\nimport torch"),
        ("planner.plan", "def f():\n    import torch"),
        ("runtime.runtime", "from memwall_strategy.overlap import Overlap"),
        ("telemetry.summary", "import memwall_strategy\nfrom memwall_strategy import __version__"),
        ("recipes.gpt.model", "import torch\nfrom memwall_strategy import MemwallStrategy"),
    ],
)
def test_an_allowed_import_is_let_be(name, source):
    assert layer_faults(name, ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp._fully_shard import FSDPState",
        "from lightning.fabric.strategies.registry import _StrategyRegistry",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "import torch\ntorch._C._thing()",
        "def f(module):\n    return module._get_fsdp_state()",
        "def f(p):\n    return getattr(p, '_local_tensor')",
        "def f(trainer):\n    trainer.strategy._launcher = None",
    ],
)
def test_a_private_name_is_found(source):
    assert private_faults("runtime.x", ast.parse(source), set())


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def _f(self):\n        self._x = 1\n        return self._x, self._f()",
        "class A:\n    def f(self):\n        return self._x\ndef make():\n    a = A()\n    a._x = 1",
        "import os\nos._exit(1)",
    ],
)
def test_own_private_names_are_let_be(source):
    tree = ast.parse(source)
    assert private_faults("runtime.x", tree, _defined(tree)) == []


@pytest.mark.parametrize(
    "source",
    [
        "class S(Base):\n    def setup(self):\n        self._device_mesh = 1",
        "class S(Base):\n    def _device_mesh(self):\n        return 1",
    ],
)
def test_a_private_name_of_a_base_class_is_found(source):
    assert base_faults("lightning.strategy", ast.parse(source), {"_device_mesh"})


def test_a_function_beside_the_class_may_have_that_name():
    assert base_faults("lightning.strategy", ast.parse("def _device_mesh():\n    return 1"), {"_device_mesh"}) == []
