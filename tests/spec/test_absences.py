"""What is nowhere in the package: code that runs what it reads, and an environment read outside `config`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headstart

PACKAGE = Path(headstart.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_CALLS = {"eval", "exec", "compile", "__import__"}
_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("np", "load"), ("numpy", "load"), ("os", "system")}


def runs_what_it_reads(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.split(".")[0] in _MODULES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module.split(".")[0] in _MODULES else []
                found += [f"{module}.{n.name}" for n in names if (module, n.name) in _METHODS]
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in _METHODS:
                found.append(f"{owner}.{name}")
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" | "shell", value=ast.Constant(value=True)):
                found.append(str(node.arg))
    return found


def reads_the_environment(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {n.name for n in node.names} & {"environ", "getenv"})
        for node in ast.walk(tree)
    )  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    assert runs_what_it_reads(ast.parse(path.read_text())) == []


def test_only_config_reads_the_environment() -> None:
    found = [path.relative_to(PACKAGE).as_posix() for path in SOURCES if reads_the_environment(ast.parse(path.read_text()))]
    assert set(found) <= {"config.py"}


def test_keys_use_no_hash_of_python() -> None:
    for path in (PACKAGE / "block").glob("*.py"):
        names = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert "hash" not in [name.id for name in names if isinstance(name, ast.Name)], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "torch.load(f)",
        "from torch import load",
        "f(allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert runs_what_it_reads(ast.parse(source))
