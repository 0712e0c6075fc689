"""The shape of the source tree: who may import whom, and what stands nowhere in the library.

    storage <- datapipe <- unirl <- recipes <- tools

Inside unirl: types, errors, config, model_folder, words <- algorithms, rewards, policies <- rollout
    <- trainer <- explore, cli.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("storage", "datapipe", "unirl", "recipes")

PACKAGE_LEVEL = {"storage": 0, "datapipe": 1, "unirl": 2, "recipes": 3, "tools": 4}
UNIRL_LEVEL = {
    "unirl.torchvision_ops": -1,
    "unirl": 0,
    "unirl.types": 0,
    "unirl.errors": 0,
    "unirl.config": 0,
    "unirl.model_folder": 0,
    "unirl.words": 0,
    "unirl.algorithms": 1,
    "unirl.rewards": 1,
    "unirl.policies": 1,
    "unirl.rollout": 2,
    "unirl.trainer": 3,
    "unirl.explore": 4,
    "unirl.cli": 4,
    "unirl.__main__": 5,
}
# The edges inside a level. Anything else on the same level stands alone.
SAME_LEVEL = {
    ("unirl.errors", "unirl.types"),
    ("unirl.config", "unirl.types"),
    ("unirl.config", "unirl.errors"),
    ("unirl.model_folder", "unirl.errors"),
    ("unirl.policies", "unirl.algorithms"),
    ("unirl.rewards", "unirl.algorithms"),
    ("unirl.cli", "unirl.explore"),
}
# What a folder may import of its own package, beside itself.
FOLDER_IMPORTS = {
    "storage.backends": {
        "storage.disk",
        "storage.errors",
        "storage.files",
        "storage.fork_locks",
        "storage.manifest",
    },
    "datapipe.decode": {"datapipe.errors"},
    "datapipe.sources": {"datapipe.errors", "datapipe.decode"},
}
# Folders that stand on the rest of their package: the only modules outside that import them.
FOLDER_IMPORTERS = {
    "storage.exchange": {"storage.store"},
    "storage.repair": {"storage.care"},
}
# Packages of extras and of other parts, and slow ones: loaded where they are used, if at all.
LOADED_ON_USE = {
    "storage": {"torch", "datapipe", "duckdb", "fsspec", "PIL"},
    "datapipe": {
        "torch",
        "unirl",
        "duckdb",
        "fsspec",
        "av",
        "decord",
        "ray",
        "datasets",
        "aiohttp",
        "webdataset",
    },
    "unirl": {"torch", "transformers", "av", "decord", "ray", "vllm", "pandas"},
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
SETTINGS_TO_AVOID = {("weights_only", False), ("trust_remote_code", True), ("allow_pickle", True)}
GLOBAL_RNG = {
    "seed",
    "rand",
    "randn",
    "randint",
    "random",
    "choice",
    "shuffle",
    "permutation",
    "normal",
    "uniform",
}


def read_sources(packages: tuple[str, ...] = tuple(PACKAGE_LEVEL)) -> dict[str, str]:
    """Return dotted module name -> source text; a package goes by its own name."""
    sources = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text("utf-8")
    return sources


def imports_of(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Yield each imported name in full, wherever the import stands: `from a import b` gives "a" and "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) + is_package - node.level]
                base = ".".join([*parents, base] if base else parents)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """Return the part that an edge is judged by: a package, or a child of `unirl`."""
    names = module.split(".")
    child = ".".join(names[:2])
    return child if names[0] == "unirl" and child in UNIRL_LEVEL else names[0]


def wrong_edges(sources: Mapping[str, str]) -> list[str]:
    """Return "module -> imported" for every import against the direction."""
    wrong = []
    for module, source in sources.items():
        is_package = any(other.startswith(module + ".") for other in sources)
        for name in sorted(set(imports_of(module, source, is_package))):
            if name.split(".")[0] in PACKAGE_LEVEL and not is_allowed(part_of(module), part_of(name)):
                wrong.append(f"{module} -> {name}")
    return wrong


def is_allowed(importer: str, imported: str) -> bool:
    packages = importer.split(".")[0], imported.split(".")[0]
    if packages[0] != packages[1]:
        return PACKAGE_LEVEL[packages[0]] > PACKAGE_LEVEL[packages[1]]
    if importer == imported or packages[0] != "unirl" or imported == "unirl":
        return True
    return UNIRL_LEVEL[importer] > UNIRL_LEVEL[imported] or (importer, imported) in SAME_LEVEL


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imports_when_run(packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Return module -> modules of the same packages that it imports, except for type checking alone."""
    sources = read_sources(packages)
    found = {}
    for module, source in sources.items():
        is_package = any(other.startswith(module + ".") for other in sources)
        code = ast.unparse(_WithoutTypeChecking().visit(ast.parse(source)))
        found[module] = set(imports_of(module, code, is_package)) & sources.keys() - {module}
    return found


def is_inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(folder + ".")


def circle_of(imports: Mapping[str, set[str]]) -> list[str] | None:
    """Return the modules that import each other in a circle, in the order of their names, or None."""
    left = {module: set(names) for module, names in imports.items()}
    while left:
        done = {module for module, names in left.items() if not names & left.keys()}
        done |= left.keys() - set().union(*left.values())
        if not done:
            return sorted(left)
        left = {module: names for module, names in left.items() if module not in done}
    return None


def forbidden(source: str) -> list[str]:
    """Return what a library module must not contain, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in {"print", "eval", "exec"} or name in {"yaml.load", "os.system"}:
                found.append((node.lineno, f"{name}()"))
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Constant):
                    setting = (keyword.arg, keyword.value.value)
                    if setting in SETTINGS_TO_AVOID:
                        found.append((node.lineno, ast.unparse(keyword)))
            owner, _, function = name.rpartition(".")
            if owner in {"random", "np.random", "numpy.random"} and function in GLOBAL_RNG:
                found.append((node.lineno, f"{name}() draws from a global generator"))
        names = (
            imports_of("module", ast.unparse(node), False)
            if isinstance(node, ast.Import | ast.ImportFrom)
            else ()
        )
        if not (
            isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} == {"PicklingError"}
        ):
            found += [(node.lineno, name) for name in names if name in PICKLES]
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append((node.lineno, "bare except"))
    return [f"line {line}: {what}" for line, what in sorted(found)]


def test_imports_go_one_way() -> None:
    assert wrong_edges(read_sources()) == []


def test_every_part_of_unirl_has_its_level() -> None:
    children = {name for name in read_sources(("unirl",)) if name.count(".") <= 1}
    assert children <= UNIRL_LEVEL.keys(), "give the new part a level in UNIRL_LEVEL"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("storage.store", "import datapipe"),
        ("storage.store", "def f():\n    from unirl.types import Sample"),
        ("datapipe.loader", "from unirl import types"),
        ("unirl.types", "from unirl.algorithms.gae import gae"),
        ("unirl.algorithms.gae", "from unirl.rewards import vlm"),
        ("unirl.rewards.vlm", "from ..rollout import native"),
        ("unirl.rollout.native", "from unirl import trainer"),
        ("unirl.trainer.loop", "import unirl.cli"),
        ("unirl.explore.scores", "from unirl.cli.main import app"),
        ("unirl.cli.main", "from recipes import numbers"),
        ("recipes.numbers", "import tools.bench"),
    ],
)
def test_the_check_sees_a_wrong_edge(module: str, source: str) -> None:
    assert len(wrong_edges({module: source})) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("datapipe.loader", "from storage import View\nimport torch"),
        ("unirl.policies.token_lm", "from unirl.algorithms import sampling"),
        ("unirl.rollout.native", "from ..policies.token_lm import TokenLM"),
        ("unirl.cli.main", "from unirl.explore.report import write_report\nfrom datapipe import ingest"),
        ("tools.bench.numbers", "from recipes import numbers"),
    ],
)
def test_the_check_lets_a_right_edge_pass(module: str, source: str) -> None:
    assert wrong_edges({module: source}) == []


def test_storage_knows_no_torch() -> None:
    heavy = {"torch", "transformers", "accelerate", "tokenizers", "safetensors"}
    found = {
        module: name
        for module, source in read_sources(("storage",)).items()
        for name in imports_of(module, source, False)
        if name.split(".")[0] in heavy
    }
    assert found == {}


@pytest.mark.parametrize("folder", FOLDER_IMPORTS)
def test_a_folder_knows_little_of_its_package(folder: str) -> None:
    allowed = (folder, *FOLDER_IMPORTS[folder])
    found = {
        f"{module} -> {name}"
        for module, names in imports_when_run(("storage", "datapipe")).items()
        for name in names
        if is_inside(module, folder) and name.split(".")[0] == folder.split(".")[0]
        if not any(is_inside(name, part) for part in allowed)
    }
    assert found == set()


@pytest.mark.parametrize("folder", FOLDER_IMPORTERS)
def test_a_folder_on_top_is_imported_by_few(folder: str) -> None:
    found = {
        module
        for module, names in imports_when_run(("storage",)).items()
        if not is_inside(module, folder) and any(is_inside(name, folder) for name in names)
    }
    assert found == FOLDER_IMPORTERS[folder]


def test_modules_of_storage_and_datapipe_import_each_other_in_no_circle() -> None:
    assert circle_of(imports_when_run(("storage", "datapipe"))) is None


def test_the_check_sees_a_circle() -> None:
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    assert circle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


@pytest.mark.parametrize("package", LOADED_ON_USE)
def test_importing_a_package_loads_neither_torch_nor_an_extra(package: str) -> None:
    code = f"import sys, {package}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert LOADED_ON_USE[package] & set(run.stdout.split()) == set()


def test_file_names_say_what_is_inside() -> None:
    names = {path for package in (*PACKAGE_LEVEL, "tests") for path in (ROOT / package).rglob("*.py")}
    assert [str(path) for path in names if path.stem.removeprefix("test_") in FORBIDDEN_NAMES] == []


def test_the_library_holds_nothing_forbidden() -> None:
    found = {module: forbidden(source) for module, source in read_sources(LIBRARY).items()}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "print('x')",
        "import pickle",
        "from cloudpickle import dumps",
        "import yaml\nyaml.load(f)",
        "torch.load(f, weights_only=False)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.load(f, allow_pickle=True)",
        "np.random.seed(0)",
        "random.shuffle(rows)",
        "try:\n    f()\nexcept:\n    pass",
    ],
)
def test_the_check_sees_what_is_forbidden(source: str) -> None:
    assert len(forbidden(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "rng.random(3)",
        "np.random.default_rng(0)",
        "torch.load(f, weights_only=True)",
        "logger.info('print()')",
    ],
)
def test_the_check_lets_the_rest_pass(source: str) -> None:
    assert forbidden(source) == []
