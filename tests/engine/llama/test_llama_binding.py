"""The library is the one that this was written for, or it is refused with a sentence."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from headstart.engine.llama import binding
from headstart.engine.llama.binding import Library
from headstart.errors import MissingExtra, ModelError


def test_the_packages_library_is_the_one_that_this_was_written_for(library: Library) -> None:
    assert library.build.startswith(binding.VERSIONS)


def test_another_library_is_refused_by_what_it_lacks() -> None:
    other = ctypes.util.find_library("m")
    assert other is not None
    with pytest.raises(ModelError, match=r"is not the libllama that this headstart speaks to: it has no llama_version; use a"):
        Library(Path(other))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_text("nothing")
    with pytest.raises(ModelError, match="libllama cannot be loaded"):
        Library(tmp_path / "libllama.so")


def test_a_build_of_ones_own_is_taken_with_the_code_that_lies_beside_it(library: Library, tmp_path: Path) -> None:
    (tmp_path / "libllama.so").symlink_to(library.path)
    assert Library(tmp_path / "libllama.so").build == library.build


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "VERSIONS", ("9.9.9",))
    with pytest.raises(ModelError, match=r"it is llama.cpp 0\.6\.0-dev; use a build of llama.cpp 9\.9\.9"):
        Library()


@pytest.mark.parametrize(("table", "name"), [("_MODEL_DEFAULTS", "n_gpu_layers"), ("_CONTEXT_DEFAULTS", "type_v")])
def test_a_struct_that_lies_otherwise_is_refused(table: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(getattr(binding, table), name, 77)
    with pytest.raises(ModelError, match=f"its default {name} is -?1, not 77"):
        Library()


def test_arguments_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "_halved", lambda self, logit: logit)
    with pytest.raises(ModelError, match=r"its repetition penalty makes 2\.0 of 2\.0"):
        Library()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "PACKAGE", "no_such_package_here")
    with pytest.raises(MissingExtra, match=r"pip install 'headstart\[llama\]'"):
        Library()
