"""Registration: a package made up here stands in for Lightning; one test runs the real ones."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import json
import logging
import pathlib
import subprocess
import sys
import threading
import types

import pytest

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine import autoload
from memwall_strategy.lightning.register import register

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = "made_up_trainer.strategies"

REGISTRY = '''
class Registry(dict):
    def register(self, name, strategy, description=None):
        if name in self:
            raise ValueError(f"{name} is there already")
        self[name] = {"strategy": strategy, "description": description, "init_params": {}}
'''
SOURCE = f"{REGISTRY}\nLOADER_SEEN = (__loader__, __spec__.loader)\nStrategyRegistry = Registry()\n"

FACTORY = '''
def strategy_class(namespace):
    return type("Strategy", (), {"__init__": lambda self, **options: setattr(self, "seen", (namespace, options))})
'''


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """The folder of a package with a strategy registry, and a memwall that does not know it yet."""
    package = tmp_path / "made_up_trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "strategies.py").write_text(SOURCE)
    (package / "notes.txt").write_text("a resource")
    (tmp_path / "made_up_factory.py").write_text(FACTORY)
    entry = autoload.Registry("StrategyRegistry", "made_up_factory", "strategy_class", "made_up")
    monkeypatch.setattr(autoload, "REGISTRIES", {MODULE: entry})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not autoload._FINDER])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = set(sys.modules)
    yield package
    for name in set(sys.modules) - before:
        if name.startswith("made_up"):
            del sys.modules[name]


def _registry() -> dict:
    return importlib.import_module(MODULE).StrategyRegistry


def test_the_name_is_there_once_the_registry_is_imported(trainer):
    autoload.install()
    assert MODULE not in sys.modules
    assert _registry()["memwall"]["description"] == autoload.DESCRIPTION


def test_the_strategy_is_imported_only_when_built_and_gets_namespace_and_options(trainer):
    autoload.install()
    build = _registry()["memwall"]["strategy"]
    assert "made_up_factory" not in sys.modules
    assert build(replicate=2).seen == ("made_up", {"replicate": 2})


def test_installing_twice_changes_nothing(trainer, caplog):
    autoload.install()
    autoload.install()
    entry = _registry()["memwall"]
    autoload.install()
    assert sys.meta_path.count(autoload._FINDER) == 1
    assert _registry()["memwall"] is entry
    assert caplog.text == ""


@pytest.mark.parametrize(("name", "entry"), autoload.REGISTRIES.items())
def test_each_lightning_gets_a_strategy_of_its_own_namespace(name, entry):
    assert name.startswith(f"{entry.namespace}.")


def test_a_registry_that_is_imported_already_is_filled(trainer):
    assert "memwall" not in _registry()
    autoload.install()
    assert "memwall" in _registry()


def test_a_reload_makes_a_new_registry_and_fills_it(trainer):
    autoload.install()
    module = importlib.import_module(MODULE)
    first = module.StrategyRegistry
    assert importlib.reload(module).StrategyRegistry is not first
    assert "memwall" in module.StrategyRegistry


def test_the_module_sees_its_own_loader_and_keeps_it(trainer):
    autoload.install()
    module = importlib.import_module(MODULE)
    for loader in (*module.LOADER_SEEN, module.__loader__, module.__spec__.loader):
        assert type(loader) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(module) == SOURCE
    assert importlib.resources.files("made_up_trainer").joinpath("notes.txt").read_text() == "a resource"


def test_a_spec_that_somebody_asked_for_answers_like_its_own_loader(trainer):
    autoload.install()
    spec = importlib.util.find_spec(MODULE)
    assert spec.loader.get_source(MODULE) == SOURCE
    assert spec.loader.is_package(MODULE) is False
    assert spec.origin == str(trainer / "strategies.py")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = spec.loader.no_such_thing


def test_other_modules_are_none_of_its_business(trainer):
    autoload.install()
    assert autoload._FINDER.find_spec("made_up_trainer", None) is None
    assert type(importlib.import_module("made_up_trainer").__loader__) is importlib.machinery.SourceFileLoader


class _InMemory:
    """A finder and loader that serves the registry module from a string, as editable installs and zips do."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == MODULE else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(REGISTRY + "StrategyRegistry = Registry()\nSERVED = 'from memory'", module.__dict__)


def test_the_finders_behind_it_are_asked_in_their_order(trainer):
    importlib.import_module("made_up_trainer")
    autoload.install()
    sys.meta_path.insert(1, types.SimpleNamespace())  # one of the old kind, without find_spec
    sys.meta_path.insert(2, _InMemory())
    assert importlib.import_module(MODULE).SERVED == "from memory"
    assert "memwall" in _registry()


def test_a_finder_put_before_it_later_is_not_asked_twice(trainer):
    asked = []

    class Before:
        def find_spec(self, name, path=None, target=None):
            asked.append(name)

    autoload.install()
    sys.meta_path.insert(0, Before())
    assert "memwall" in _registry()
    assert asked.count(MODULE) == 1


def test_another_import_hook_of_the_same_kind_ends_and_both_run(trainer):
    calls = []

    class Hook:
        """Asks the whole import system again, marking that it does, as the hooks of tracing libraries do."""

        busy = False

        def find_spec(self, name, path=None, target=None):
            if self.busy or name != MODULE:
                return None
            self.busy = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.busy = False
            inner = spec.loader

            class Loader:
                create_module = staticmethod(inner.create_module)

                @staticmethod
                def exec_module(module):
                    inner.exec_module(module)
                    calls.append(module.__name__)

            spec.loader = Loader()
            return spec

    autoload.install()
    for place in (0, len(sys.meta_path)):
        sys.modules.pop(MODULE, None)
        sys.meta_path.insert(place, hook := Hook())
        assert "memwall" in _registry()
        sys.meta_path.remove(hook)
    assert calls == [MODULE]  # behind PathFinder it is never asked


def test_a_loader_without_exec_module_is_left_alone(trainer):
    class Old:
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, self) if name == MODULE else None

    autoload.install()
    sys.meta_path.insert(1, old := Old())
    assert importlib.util.find_spec(MODULE).loader is old


def test_a_missing_module_is_missing_as_ever(trainer):
    (trainer / "strategies.py").unlink()
    importlib.invalidate_caches()
    autoload.install()
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'made_up_trainer\.strategies'"):
        importlib.import_module(MODULE)


def test_an_error_of_the_module_itself_passes_and_the_next_try_registers(trainer):
    autoload.install()
    (trainer / "strategies.py").write_text("raise OSError('no such accelerator')")
    with pytest.raises(OSError, match="no such accelerator"):
        importlib.import_module(MODULE)
    assert MODULE not in sys.modules
    (trainer / "strategies.py").write_text(SOURCE + "# longer, so that no cached bytecode fits\n")
    assert "memwall" in _registry()


@pytest.mark.parametrize(
    "broken",
    ["pass", "StrategyRegistry = None", "class StrategyRegistry(dict): register = None\nStrategyRegistry = {}"],
    ids=["no registry", "not a registry", "another interface"],
)
def test_a_registry_of_another_kind_is_logged_and_the_import_goes_on(trainer, caplog, broken):
    (trainer / "strategies.py").write_text(broken)
    autoload.install()
    with caplog.at_level(logging.WARNING, logger="memwall"):
        importlib.import_module(MODULE)
        autoload.install()
    assert f"could not register itself with {MODULE}" in caplog.text
    with pytest.raises(MemwallError, match=r"could not be registered .*lightning>=2\.6,<3"):
        register()


def test_threads_that_import_and_install_at_once(trainer):
    (trainer / "strategies.py").write_text("import time; time.sleep(0.05)\n" + SOURCE)
    errors, seen = [], []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait(timeout=10)
            for _ in range(20):
                (autoload.install if number % 2 else register)()
            seen.append("memwall" in _registry())
        except (MemwallError, ImportError, AttributeError, ValueError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert errors == []
    assert seen == [True] * 8
    assert sys.meta_path.count(autoload._FINDER) == 1


def test_installing_from_inside_the_import_waits_for_its_end(trainer, caplog):
    (trainer / "strategies.py").write_text(
        "from memwall_strategy.lightning.register import register\nregister()\n" + SOURCE
    )
    autoload.install()
    assert "memwall" in _registry()
    assert caplog.text == ""


def _python(code: str, *flags: str) -> dict:
    """Run code in a fresh interpreter with the checkout on its path; the JSON that it prints last."""
    result = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_it_needs_the_standard_library_alone():
    loaded = _python(
        "import json, sys; before = set(sys.modules)\n"
        "from memwall_strategy.engine.autoload import install; install()\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    )
    assert [name for name in loaded if name not in sys.stdlib_module_names] == ["memwall_strategy"]


def test_the_real_registries_take_it():
    """Every Lightning, by whatever module it is entered, with user warnings as errors."""
    found = _python(
        "import json, sys\n"
        "from memwall_strategy.engine.autoload import DESCRIPTION, REGISTRIES, install; install()\n"
        "assert 'torch' not in sys.modules\n"
        "import lightning.pytorch.strategies, pytorch_lightning, lightning.fabric, lightning_fabric\n"
        "registries = {n: getattr(sys.modules[n], r.attribute) for n, r in REGISTRIES.items()}\n"
        "print(json.dumps({n: [r['memwall']['description'] == DESCRIPTION, 'memwall' in r.available_strategies(),\n"
        "      type(sys.modules[n].__loader__).__name__] for n, r in registries.items()}))",
        "-W",
        "error::UserWarning",
    )
    assert found == {name: [True, True, "SourceFileLoader"] for name in autoload.REGISTRIES}
