"""Imports go down only: a module knows the layers below it and its own, never one above.

A new module fails here until it is given its layer in `LAYERS`. The order counts for annotations too (`if TYPE_CHECKING:`).
One way up is open: `show` inside a `__str__`, since a value prints itself but how it looks is no business of its own.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

LAYERS = [
    ["errors", "sizes", "debug", "names", "forks", "ops", "sequence"],
    ["accepted", "config", "budget"],
    ["facts", "machine"],
    ["wrappers"],
    [
        "hostalias",
        "storages",
        "owner",
        "select",
        "units",
        "edits",
        "calibrate",
        "metamodel",
        "shapes",
        "containers",
        "foreign",
        "hostmemory",
        "devices",
        "checkpoint",
    ],
    ["causal", "memo", "fakes", "counts", "read", "sink"],
    ["blocks"],
    ["buckets", "split"],
    ["cost"],
    ["plan", "price", "pieces"],
    ["dynamic"],
    ["show", "html", "verify", "verify_capture", "timeline"],
    ["stream", "offsets", "residency", "planner"],
    ["curve", "words"],
    ["passes"],
    ["layout", "regions"],
    ["packed"],
    ["pins", "store", "arena", "transfer", "profile", "warmup", "pace", "capture", "cuda"],
    ["rows", "unwrap", "cut", "program", "resize", "lower"],
    [
        "slots",
        "staged",
        "pack",
        "engine",
        "planned",
        "captured",
        "graph",
        "binding",
        "attached",
        "dispatch",
        "returned",
        "managed",
        "look",
        "steps",
        "unitcosts",
        "follow",
        "ways",
        "entries",
        "eager",
    ],
    ["backend"],
    ["analysis", "handle", "components", "pipelines", "doors", "loading", "api", "draw", "measure", "report"],
    ["flags", "media", "presets", "tiny", "sources", "summary", "forecast", "workloads", "timing", "hardware", "twoblock"],
    ["sessions", "peers", "contenders"],
    ["trial", "results", "launch", "benchdraw", "benchreport", "benchargs"],
    ["demo", "plancmd", "generate", "bench", "cli"],
    ["__init__", "__main__"],
]
WITHOUT_TORCH = [
    "facts",
    "blocks",
    "buckets",
    "price",
    "machine",
    "cost",
    "plan",
    "pieces",
    "planner",
    "verify",
    "verify_capture",
    "timeline",
    "pace",
    "show",
    "curve",
    "words",
]

ROOT = Path(__file__).parents[2]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
FILES = {
    **{path.stem: [path] for path in sorted((ROOT / "fxoffload").glob("*.py"))},
    "passes": sorted((ROOT / "fxoffload" / "passes").rglob("*.py")),
}


@dataclass(frozen=True)
class Import:
    """`importer` names `imported` (a module of fxoffload, or `torch`) at `line`, inside `function` if any."""

    importer: str
    imported: str
    line: int
    function: str | None = None
    typing_only: bool = False


class Reader(ast.NodeVisitor):
    """Collects the imports of one file. All files of `passes/` are the one module `passes`."""

    def __init__(self, importer: str, package: str) -> None:
        self.importer = importer
        self.package = package
        self.found: list[Import] = []
        self._function: str | None = None
        self._typing_only = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    def visit_If(self, node: ast.If) -> None:
        outer, self._typing_only = self._typing_only, ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for child in node.body:
            self.visit(child)
        self._typing_only = outer
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        if base != "fxoffload":
            self._add(base, node.lineno)
            return
        for alias in node.names:
            self._add(f"fxoffload.{alias.name}" if alias.name in RANK or alias.name in FILES else "fxoffload", node.lineno)

    def _add(self, dotted: str, line: int) -> None:
        top, _, rest = dotted.partition(".")
        if top == "torch":
            self.found.append(Import(self.importer, "torch", line, self._function, self._typing_only))
        if top == "fxoffload":
            imported = rest.split(".")[0] or "__init__"
            if imported != self.importer:
                self.found.append(Import(self.importer, imported, line, self._function, self._typing_only))


def read_imports(importer: str, source: str, package: str = "fxoffload") -> list[Import]:
    reader = Reader(importer, package)
    reader.visit(ast.parse(source))
    return reader.found


def breach_of(found: Import) -> str | None:
    """What is wrong with one import, naming both modules; None if nothing is."""
    if found.imported == "torch" or found.importer not in RANK:
        return None
    where = f"{found.importer} (line {found.line}) imports {found.imported}"
    if found.imported not in RANK:
        return f"{where}, which is in no layer; give it one in LAYERS of {Path(__file__).name}"
    if RANK[found.imported] <= RANK[found.importer] or (found.imported == "show" and found.function == "__str__"):
        return None
    return (
        f"{where}, which lies above it (layers {RANK[found.importer]} and {RANK[found.imported]} of LAYERS); imports go down only"
    )


def chain_to_torch(module: str, imports: list[Import], seen: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The chain of modules by which importing `module` loads torch; None if it does not."""
    if module == "torch":
        return (*seen, module)
    if module in seen:
        return None
    loaded = [found.imported for found in imports if found.importer == module and not found.function and not found.typing_only]
    chains = (chain_to_torch(imported, imports, (*seen, module)) for imported in loaded)
    return next((chain for chain in chains if chain is not None), None)


def find_cycle(imports: list[Import]) -> tuple[str, ...] | None:
    """Modules of one layer that import each other in a circle. What is imported for annotations only can't close one."""
    edges = {(found.importer, found.imported) for found in imports if not found.function and not found.typing_only}
    paths = [(start,) for start in RANK]
    while paths:
        path = paths.pop()
        for imported in (b for a, b in edges if a == path[-1] and RANK.get(b) == RANK.get(a)):
            if imported == path[0]:
                return (*path, imported)
            if imported not in path:
                paths.append((*path, imported))
    return None


def all_imports() -> list[Import]:
    found: list[Import] = []
    for module, paths in FILES.items():
        for path in paths:
            package = ".".join(path.relative_to(ROOT).parent.parts)
            found += read_imports(module, path.read_text(), package)
    return found


def test_every_module_has_one_layer() -> None:
    named = list(itertools.chain.from_iterable(LAYERS))
    assert len(named) == len(set(named))
    unknown = sorted(set(FILES) - set(named))
    assert not unknown, f"fxoffload/{unknown[0]}.py is in no layer; give it one in LAYERS of {Path(__file__).name}"


def test_imports_go_down_only() -> None:
    breaches = [breach for breach in map(breach_of, all_imports()) if breach is not None]
    assert not breaches, "\n".join(breaches)


def test_no_circle_within_a_layer() -> None:
    cycle = find_cycle(all_imports())
    assert cycle is None, f"{' imports '.join(cycle or ())}; one of them needs a layer of its own"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_plans_without_torch(module: str) -> None:
    imports = all_imports()
    direct = [f"line {found.line}" for found in imports if found.importer == module and found.imported == "torch"]
    assert not direct, f"{module} imports torch ({', '.join(direct)}); plans and planning know nothing of torch"
    chain = chain_to_torch(module, imports)
    assert chain is None, f"{' imports '.join(chain or ())}; plans and planning know nothing of torch"


@pytest.mark.parametrize(
    ("importer", "source", "breach"),
    [
        ("planner", "from fxoffload.engine import Engine", "planner (line 1) imports engine, which lies above it"),
        ("plan", "from fxoffload import planner", "plan (line 1) imports planner, which lies above it"),
        ("passes", "import fxoffload.lower as low", "passes (line 1) imports lower, which lies above it"),
        ("cost", "from .plan import Plan", "cost (line 1) imports plan, which lies above it"),
        ("facts", "def f():\n    from fxoffload.show import table", "facts (line 2) imports show, which lies above it"),
        ("cost", "if TYPE_CHECKING:\n    from fxoffload.plan import Plan", "cost (line 2) imports plan, which lies above it"),
        ("engine", "from fxoffload import layerwise_offload", "engine (line 1) imports __init__, which lies above it"),
        ("planner", "from fxoffload.magic import wand", "planner (line 1) imports magic, which is in no layer"),
        ("planner", "from fxoffload.plan import Plan", None),
        ("arena", "from fxoffload.store import Store", None),
        ("plan", "class Plan:\n    def __str__(self):\n        from fxoffload.show import plan_table", None),
    ],
)
def test_the_check_itself(importer: str, source: str, breach: str | None) -> None:
    (found,) = read_imports(importer, source)
    text = breach_of(found)
    assert text is None if breach is None else text is not None and text.startswith(breach)


def test_relative_imports_inside_passes() -> None:
    (found,) = read_imports("passes", "from ..plan import Plan", "fxoffload.passes")
    assert found.imported == "plan"
    assert read_imports("passes", "from .base import Pass", "fxoffload.passes") == []


def test_chains_and_circles_are_found() -> None:
    imports = [Import("planner", "plan", 1), Import("plan", "cost", 2), Import("cost", "torch", 3)]
    assert chain_to_torch("planner", imports) == ("planner", "plan", "cost", "torch")
    assert chain_to_torch("planner", [Import("planner", "torch", 1, typing_only=True)]) is None
    assert set(find_cycle([Import("arena", "store", 1), Import("store", "arena", 1)]) or ()) == {"arena", "store"}
