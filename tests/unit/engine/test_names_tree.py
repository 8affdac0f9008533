"""Names are found in Python files as an import would find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.engine.names.tree import Tree
from pullfill.errors import ConfigError
from tests.support.fake_release import write

FILES = {
    "vllm/__init__.py": "from .version import __version__\nfrom vllm import one",
    "vllm/version.py": "__version__ = '1'",
    "vllm/one.py": """
import os
from typing import TYPE_CHECKING
from msgspec import Struct
from vllm.deep import Late, Chosen as Renamed
if TYPE_CHECKING:
    chosen: "Kind"
else:
    chosen = object()
try:
    import fast
except ImportError:
    fast = None
class Root:
    plain = 1
    def __init__(self):
        self.made: int = 0
        self.first, self.second = 1, 2
    def turn(self): self.turned = True
class Kind(Root, Struct):
    field: int
    def method(self, a, b=1, *, c): ...
""",
    "vllm/deep/__init__.py": "from .inner import Late\nfrom . import inner\nfrom .inner import *",
    "vllm/deep/inner.py": "class Late:\n    def late(self): ...\nclass Chosen(Late[int]): ...",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(write(tmp_path, FILES))


@pytest.mark.parametrize(
    "name",
    [
        "vllm ", "vllm __version__", "vllm one", "vllm one.Root.plain", "vllm.one Kind",
        "vllm.one Kind.field", "vllm.one Kind.plain", "vllm.one Kind.made", "vllm.one Kind.second",
        "vllm.one Kind.turned", "vllm.one Kind.turn", "vllm.one chosen.method", "vllm.one fast",
        "vllm.one os.path", "vllm.one Struct.anything", "vllm.one Renamed.late",
        "vllm.deep inner.Chosen", "vllm.deep.inner Late", "vllm.deep Late.late",
    ],
)  # fmt: skip
def test_found(tree: Tree, name: str) -> None:
    module, _, path = name.partition(" ")
    assert tree.find(module, path) is not None


@pytest.mark.parametrize(
    "name",
    [
        "vllm.two ", "vllm two", "vllm.one Nothing", "vllm.one Kind.nothing", "vllm.one Chosen",
        "vllm.one Root.field", "vllm.one chosen.nothing", "vllm.one Renamed.early",
        "vllm.deep two.Late", "other Name", "vllm.one Root.turn.deeper",
    ],
)  # fmt: skip
def test_not_found(tree: Tree, name: str) -> None:
    module, _, path = name.partition(" ")
    assert tree.find(module, path) is None


def test_where_a_name_is_defined(tree: Tree) -> None:
    assert tree.defining("Late") == ["vllm.deep.inner"]
    assert tree.defining("__version__") == ["vllm.version"]
    assert tree.defining("late") == [], "a method is no name of the module"


def test_circles_end(tmp_path: Path) -> None:
    files = {
        "vllm/__init__.py": "from vllm import a",
        "vllm/a.py": "from vllm.b import X, Y\nclass K(K): ...",
        "vllm/b.py": "from vllm.a import X\nfrom vllm import Y",
    }
    tree = Tree(write(tmp_path, files))
    assert tree.find("vllm.a", "X") is None
    assert tree.find("vllm", "Y") is None
    assert tree.find("vllm.a", "K.anything") is None


def test_a_file_for_another_python_is_named(tmp_path: Path) -> None:
    tree = Tree(write(tmp_path, {"vllm/__init__.py": "", "vllm/new.py": "later x = 1"}))
    with pytest.raises(ConfigError, match=r"new\.py is no source for this Python"):
        tree.find("vllm", "new.x")


def takes(tree: Tree, module: str, path: str) -> str:
    found = tree.find(module, path)
    assert found is not None
    return str(tree.signature(found, bound="." in path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f", "(a, b=…, *args, c, d=…, **kwargs)"),
        ("K.m", "(a, *, b)"),
        ("K.s", "(a)"),
        ("K.c", "(a)"),
        ("K.p", "()"),
        ("K", "(x)"),
        ("Under", "(x)"),
        ("Data", "(a, b=…, c=…, d)"),
        ("Sub", "(a, b=…, c=…, d, e=…)"),
        ("Wire", "(x, y=…)"),
        ("Plain", "None"),
        ("value", "None"),
    ],
)
def test_signatures(tmp_path: Path, name: str, expected: str) -> None:
    text = """
import msgspec
from dataclasses import dataclass, field
from typing import ClassVar, overload
@overload
def f(a): ...
def f(a, b=1, *args, c, d=2, **kwargs): ...
class K:
    def __init__(self, x): ...
    def m(self, a, *, b): ...
    @staticmethod
    def s(a): ...
    @classmethod
    def c(cls, a): ...
    @property
    def p(self): ...
class Under(K): ...
@dataclass(frozen=True)
class Data:
    a: int
    b: int = 1
    c: list = field(default_factory=list)
    d: int = field(repr=False)
    no: ClassVar[int] = 1
    made: int = field(init=False)
class Sub(Data):
    e: int = 2
class Wire(msgspec.Struct, array_like=True):
    x: int
    y: int = 0
class Plain: ...
value = 1
"""
    tree = Tree(write(tmp_path, {"vllm/__init__.py": text}))
    assert takes(tree, "vllm", name) == expected
