"""What is installed is whole: a wheel holds the files that commands read, not only the modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built in a copy so that no litter stays here, and unpacked."""
    pytest.importorskip("setuptools", minversion="77")
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", source / "src", symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", place, source], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("headstart-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "unpacked")
    return place / "unpacked"


def test_every_file_beside_the_modules_is_in_the_wheel(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
        return {str(file) for file in found if "__pycache__" not in file.parts and file.suffix != ".so"}

    assert files(unpacked / "headstart") == files(ROOT / "src" / "headstart")


def test_the_demo_finds_its_prompt_in_the_wheel(unpacked: Path) -> None:
    program = "from headstart.cli import demo; print(demo.__file__); print(len(demo.system_prompt()))"
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=unpacked, capture_output=True, text=True, timeout=120, check=True
    )
    file, characters = done.stdout.split()
    assert Path(file).is_relative_to(unpacked)
    assert int(characters) > 10_000


def test_the_example_and_the_demo_are_the_same_files() -> None:
    assert (ROOT / "examples" / "agent").resolve() == ROOT / "src" / "headstart" / "cli" / "agent_prompt"
