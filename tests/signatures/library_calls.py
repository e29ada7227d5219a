"""Program: holds every call that a folder's source makes of a package against the installed package's signatures.

    python library_calls.py FOLDER PACKAGE …

Prints one line for each name that is imported and not there, and for each call that its signature does not take; and
at last how many names and calls were looked at. It sees calls of imported names, of attributes of these, and of the
objects in KNOWN. That is how calls that only a GPU run makes are checked where there is none.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN = {
    "self._manager": ("sglang.srt.managers.tokenizer_manager", "TokenizerManager"),
}
"""What some expressions of the source are instances of."""


class Checker:
    """Checks one file."""

    def __init__(self, file: Path, packages: list[str]) -> None:
        self.file, self.packages = file, packages
        self.names: dict[str, Any] = {}
        self.looked_at = 0

    def problems(self) -> Iterator[str]:
        tree = ast.parse(self.file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and self._is_ours(node.module):
                yield from self._take_names(node)
            elif isinstance(node, ast.Import):
                yield from self._take_modules(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from self._check(node)

    def _is_ours(self, module: str | None) -> bool:
        return module is not None and module.split(".")[0] in self.packages

    def _take_names(self, node: ast.ImportFrom) -> Iterator[str]:
        assert node.module is not None
        module = importlib.import_module(node.module)
        for alias in node.names:
            self.looked_at += 1
            try:
                value = getattr(module, alias.name)
            except AttributeError:
                try:
                    value = importlib.import_module(f"{node.module}.{alias.name}")
                except ImportError:
                    yield f"{self._at(node)}: {node.module} has no {alias.name}"
                    continue
            self.names[alias.asname or alias.name] = value

    def _take_modules(self, node: ast.Import) -> Iterator[str]:
        for alias in node.names:
            if self._is_ours(alias.name):
                self.looked_at += 1
                try:
                    module = importlib.import_module(alias.name)
                except ImportError as error:
                    yield f"{self._at(node)}: {error}"
                    continue
                self.names[alias.asname or alias.name] = module

    def _check(self, call: ast.Call) -> Iterator[str]:
        owner, bound = self._callee(call.func)
        if owner is None:
            return
        self.looked_at += 1
        if isinstance(owner, Missing):
            yield f"{self._at(call)}: {owner.what}"
            return
        try:
            signature = inspect.signature(owner)
        except (TypeError, ValueError):  # a builtin
            return
        positional: list[Any] = [None] * bound
        is_open = False
        for argument in call.args:
            is_open |= isinstance(argument, ast.Starred)
            positional.append(None)
        is_open |= any(keyword.arg is None for keyword in call.keywords)
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        try:
            (signature.bind_partial if is_open else signature.bind)(*positional, **keywords)
        except TypeError as error:
            yield f"{self._at(call)}: {ast.unparse(call.func)}{signature}: {error}"

    def _callee(self, function: ast.expr) -> tuple[Any, int]:
        """What is called, and how many arguments come before those of the call (self); None: not of our packages."""
        text = ast.unparse(function)
        if isinstance(function, ast.Name):
            return self.names.get(function.id), 0
        if not isinstance(function, ast.Attribute):
            return None, 0
        owner_text = text.rpartition(".")[0]
        if owner_text in KNOWN and KNOWN[owner_text][0].split(".")[0] in self.packages:
            module, name = KNOWN[owner_text]
            owner = getattr(importlib.import_module(module), name)
            return getattr(owner, function.attr, Missing(f"{name} has no {function.attr}")), 1
        owner, _ = self._value(function.value)
        if owner is None:
            return None, 0
        return getattr(owner, function.attr, Missing(f"{owner_text} has no {function.attr}")), 0

    def _value(self, expression: ast.expr) -> tuple[Any, int]:
        if isinstance(expression, ast.Name):
            return self.names.get(expression.id), 0
        if isinstance(expression, ast.Attribute):
            owner, _ = self._value(expression.value)
            return (None if owner is None else getattr(owner, expression.attr, None)), 0
        return None, 0

    def _at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.file}:{node.lineno}"


class Missing:
    """A name that an owner does not have."""

    def __init__(self, what: str) -> None:
        self.what = what


def main(folder: Path, packages: list[str]) -> None:
    looked_at = 0
    for file in sorted(folder.rglob("*.py")):
        if "cpu_standins" not in file.parts:
            checker = Checker(file, packages)
            for problem in checker.problems():
                print(problem)
            looked_at += checker.looked_at
    print(f"{looked_at} names and calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
