"""The floors: a module imports from its own floor or lower ones, and nothing imports in a circle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The first pattern that a module's name starts with decides its floor. Floor 0 needs no torch, so that settings and
# their errors are there at once; leaves (floor 1) are parts that do not know of one another.
FLOORS = [
    ("trainer.config", 0),
    ("trainer.models.llama.config", 0),
    ("trainer.models.llama.plan", 0),
    ("trainer.log", 0),
    ("trainer.metrics.speed", 0),
    ("trainer.metrics.clock", 0),
    ("trainer.metrics.report", 0),
    ("trainer.metrics.lines", 0),
    ("trainer.door", 0),
    ("trainer.files", 0),
    ("trainer.labels", 0),
    ("trainer.units", 0),
    ("trainer.models", 1),
    ("trainer.data", 1),
    ("trainer.metrics", 1),
    ("trainer.loss", 1),
    ("trainer.optim", 1),
    ("trainer.schedule", 1),
    ("trainer.distributed", 1),
    ("trainer.ranks", 1),
    ("trainer.interrupt", 1),
    ("trainer.memory", 1),
    ("trainer.dtypes", 1),
    ("trainer.generate", 1),
    ("trainer.parallel", 2),
    ("trainer.checkpoint", 3),
    ("trainer.evaluate", 3),
    ("trainer.resume", 4),
    ("trainer.initial", 4),
    ("trainer.fit", 4),
    ("trainer.launch", 4),
    ("trainer.parts", 4),
    ("trainer.state", 4),
    ("trainer.begin", 4),
    ("trainer.build", 4),
    ("trainer.describe", 4),
    ("trainer.step", 4),
    ("trainer.loop", 4),
    ("trainer.parity", 4),
    ("trainer.benchmark", 4),
    ("train", 5),
    ("scripts", 5),
]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [ROOT / "train.py", *ROOT.glob("trainer/**/*.py"), *ROOT.glob("scripts/*.py")]
}
LIGHT = {"__future__", "tomli", "trainer"}


def floor(module: str) -> int:
    for prefix, number in FLOORS:
        if module == prefix or module.startswith(prefix + ".") or (prefix, module) == ("trainer.models", "trainer"):
            return number
    raise AssertionError(f"{module} has no floor: give it one in FLOORS and in the README's map")


def leaf(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(module: str, *, inside_functions: bool = True) -> set[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if inside_functions else tree.body
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full}
    return names


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in ("trainer", "scripts", "train")}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "trainer"])
def test_a_module_imports_from_lower_floors_only(module: str) -> None:
    for name in ours(imports(module)):
        assert floor(name) <= floor(module), f"{module} (floor {floor(module)}) imports {name} (floor {floor(name)})"
        if floor(module) == floor(name) == 1:
            assert leaf(module) == leaf(name), f"the leaf {module} imports the leaf {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "trainer" and floor(name) == 0])
def test_settings_need_only_the_standard_library_and_tomli(module: str) -> None:
    import sys

    for name in imports(module):
        assert name.split(".")[0] in LIGHT | sys.stdlib_module_names, f"{module} imports {name}"


def test_parallel_never_imports_a_model() -> None:
    for module in MODULES:
        if module.startswith("trainer.parallel"):
            assert not any(name.startswith("trainer.models") for name in imports(module)), module


def test_imports_of_ours_stand_at_the_top_except_in_doors() -> None:
    for module in MODULES:
        if module != "trainer" and floor(module) < 5:
            assert ours(imports(module)) == ours(imports(module, inside_functions=False)), module


def test_there_is_no_import_cycle() -> None:
    state: dict[str, str] = {}

    def visit(module: str, path: list[str]) -> None:
        if state.get(module) == "done":
            return
        assert state.get(module) != "open", f"import cycle: {' -> '.join([*path, module])}"
        state[module] = "open"
        for name in ours(imports(module)) & MODULES.keys() - {"trainer"}:
            visit(name, [*path, module])
        state[module] = "done"

    for module in MODULES:
        visit(module, [])
