"""One direction: each layer imports only lower ones, and the environment is read in two places.

Imports are read from the source, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "holdfast"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("interrupts", "patience", "registry", "text"),
    ("errors", "types", "files"),
    ("http",),
    ("answers",),
    ("config",),
    ("data", "objectives", "advantages", "rewards", "metrics"),
    ("models", "environments"),
    ("parallel",),
    ("optim",),
    ("rollout", "checkpoint"),
    ("training",),
    ("recipes",),
    ("launch",),
    ("cli", "api"),
    ("features",),
    ("__main__",),
)
"""From the lowest up. Those of one layer never import each other."""

HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
FREE_OF_TORCH = (
    "patience",
    "interrupts",
    "registry",
    "text",
    "errors",
    "types",
    "files",
    "http",
    "answers",
    "config",
    "launch",
    "features/report",
    "features/rescue/systems",
    "features/rescue/configuration",
    "features/cluster",
    "cli",
)
HEAVY = {"torch", "transformers", "datasets", "numpy", "safetensors", "tokenizers", "peft"}
# The launcher and the ranks it starts; a server's key, the one secret that may not stand in a YAML; what of the
# environment a tracker's process may see; and that of an agent's program, where clients look for address and key.
READS_THE_ENVIRONMENT = (
    "launch/",
    "parallel/mesh.py",
    "http.py",
    "environments/agents.py",
    "features/cluster/",
    "features/trackers/environment.py",
    "features/vllm/processes.py",
)


def parts(path: str) -> tuple[str, ...]:
    return Path(path).with_suffix("").parts


def imports(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module) of every import in a module of ours."""
    package = ["holdfast", *parts(path)[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield node.lineno, module
            # `from holdfast import data` imports a layer by its name.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names if module == "holdfast")


def layer(module: str) -> str | None:
    """Return the layer of a module of ours, None for any other and for the package itself."""
    names = module.split(".")
    return names[1] if names[0] == "holdfast" and len(names) > 1 and names[1] in HEIGHT else None


def against_the_layers(source: str, path: str) -> list[str]:
    """Return a sentence for every import that goes up or aside."""
    own = parts(path)[0]
    found = []
    for line, module in imports(ast.parse(source), path):
        other = layer(module)
        if other is None or other == own or HEIGHT[other] < HEIGHT[own]:
            continue
        relation = "beside" if HEIGHT[other] == HEIGHT[own] else "above"
        found.append(f"{path}:{line} may not import {module}: {other} stands {relation} {own}")
    return found


def heavy_at_import(source: str, path: str) -> list[str]:
    """Return a sentence for every heavy library that a module imports when it is imported itself."""
    tree = ast.parse(source)
    skipped = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or checks_types(node)
    ]
    later = {id(inner) for node in skipped for inner in ast.walk(node)}
    allowed_later = parts(path)[0] not in {"config", "errors"}
    return [
        f"{path}:{node.lineno} may not import {name}: checking a configuration takes no time"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not (allowed_later and id(node) in later)
        for name in modules_of(node)
        if name.split(".")[0] in HEAVY
    ]


def checks_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]


def reads_environment(source: str, path: str) -> list[str]:
    """Return a sentence for every use of environment variables in a file that may not have one."""
    if path.startswith(READS_THE_ENVIRONMENT):
        return []
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(ast.parse(source)):
        used = node.attr if isinstance(node, ast.Attribute) and is_name(node.value, "os") else None
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            used = next((alias.name for alias in node.names if alias.name in names), None)
        if used in names:
            found.append(f"{path}:{node.lineno} may not use os.{used}: only {', '.join(READS_THE_ENVIRONMENT)} may")
    return found


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


FILES = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def test_every_module_belongs_to_a_layer() -> None:
    homeless = [path for path in FILES if path != "__init__.py" and parts(path)[0] not in HEIGHT]

    assert homeless == []


def test_each_layer_imports_only_lower_ones() -> None:
    wrong = [
        line for path, source in FILES.items() if path != "__init__.py" for line in against_the_layers(source, path)
    ]

    assert wrong == [], "\n" + "\n".join(wrong)


def test_configuration_launcher_and_command_line_start_without_heavy_libraries() -> None:
    wrong = [
        line
        for path, source in FILES.items()
        if path.removesuffix(".py").startswith(tuple(FREE_OF_TORCH))
        for line in heavy_at_import(source, path)
    ]

    assert wrong == [], "\n" + "\n".join(wrong)


def test_the_environment_is_read_in_the_launcher_and_where_ranks_join() -> None:
    wrong = [line for path, source in FILES.items() for line in reads_environment(source, path)]

    assert wrong == [], "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("data/rows.py", "from holdfast.models.setup import x", "data/rows.py:1 may not import holdfast.models.setup: "
                                                                "models stands above data"),
        ("data/rows.py", "import holdfast.metrics.sink", "data/rows.py:1 may not import holdfast.metrics.sink: metrics "
                                                         "stands beside data"),
        ("config/a.py", "def f():\n    from holdfast.data import rows", "config/a.py:2 may not import holdfast.data: "
                                                                        "data stands above config"),
        ("config/a.py", "if TYPE_CHECKING:\n    from holdfast import data", "config/a.py:2 may not import "
                                                                            "holdfast.data: data stands above config"),
        ("config/a.py", "from ..data.rows import Row", "config/a.py:1 may not import holdfast.data.rows: data stands "
                                                       "above config"),
        ("api.py", "from holdfast.cli.main import app", "api.py:1 may not import holdfast.cli.main: cli stands beside "
                                                        "api"),
    ],
)  # fmt: skip
def test_an_import_against_the_direction_is_told_in_a_sentence(path: str, source: str, said: str) -> None:
    assert against_the_layers(source, path) == [said]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/scores.py", "from holdfast.data.packing import pack"),
        ("data/rows.py", "from holdfast.data.files import find_local"),
        ("data/rows.py", "from .files import find_local"),
        ("cli/running/train.py", "from holdfast.training.directory import run_directory\nimport holdfast"),
        ("training/step.py", "import torch\nfrom holdfast import types"),
    ],
)
def test_an_import_down_or_within_a_layer_is_fine(path: str, source: str) -> None:
    assert against_the_layers(source, path) == []


def test_a_heavy_import_is_told_where_it_costs_time() -> None:
    late = "def f():\n    import torch\n"
    typed = "if TYPE_CHECKING:\n    from torch import Tensor\n"

    assert heavy_at_import("import torch.nn", "cli/main.py") != []
    assert heavy_at_import(late, "config/data.py") != []
    assert heavy_at_import(late, "cli/main.py") == heavy_at_import(typed, "types.py") == []


@pytest.mark.parametrize("use", ["os.environ['X']", "os.getenv('X')", "os.environ.get('X')", "f(os.environ)"])
def test_a_look_into_the_environment_is_told_in_a_sentence(use: str) -> None:
    assert len(reads_environment(f"import os\n{use}\n", "training/fit.py")) == 1
    assert reads_environment(f"import os\n{use}\n", "launch/local.py") == []
    assert reads_environment("from os import environ\n", "data/files.py") == [
        f"data/files.py:1 may not use os.environ: only {', '.join(READS_THE_ENVIRONMENT)} may"
    ]
