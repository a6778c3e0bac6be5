"""The lines of the library that run on an accelerator only, found in the code: [Note: Lines of a device].

[Note: Lines of a device]
The code is read as if the device were a CPU. There `device.type` is "cpu" and groups are Gloo's; torch finds no
accelerator; a lane has no stream, and so no event; Triton is not there. With these facts some conditions have one
answer. The statements of the branch that it rules out run on an accelerator only. So does

- what follows a branch that always returns or raises there;
- a function that only such lines refer to, and the functions of a file that imports Triton at its top.

What functions return there, and what attributes have, is listed below. Where the code leaves it open, a line counts as
one that a CPU runs. Definitions, docstrings and the word `try` do not count.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laconic

LIBRARY = Path(laconic.__file__).parent
ROOMS = (
    "comm", "layout", "ragged", "codec", "layers", "shard", "guard", "optim", "islands", "partial", "cyclic", "store",
    "checkpoint", "_compat.py",
)  # fmt: skip
"""The core."""
_OPEN: Any = object()
"""The value of what the code leaves open."""
_CALLS: dict[str, Any] = {
    "current_accelerator": None, "torch.accelerator.is_available": False, "torch.cuda.is_available": False,
    "torch.cuda.is_initialized": False, "backend_of": "gloo", "get_backend": "gloo",
}  # fmt: skip
"""What functions of torch return, and of the library that ask it."""
ATTRIBUTES: dict[str, Any] = {
    "is_stream_ordered": False, "_host_waits": True, "_release": None, "_delayed": None, "_stream": None,
    "_summed": None, "is_cuda": False, "is_cpu": True, "bound_device_id": None, "type": "cpu", "device_type": "cpu",
    "_device_type": "cpu", "_uses_sends": True,
}  # fmt: skip
"""What attributes have. Transfers of CPU tensors are sends and receives: [Note: Collectives on Gloo]."""
RETURNS: dict[str, Any] = {
    "splitting_device": None, "multiplies_codes": False, "_shares_groups": False,
    "device_to_bind": None, "initialized_accelerator": None, "load_into": None, "compute_event": None,
    "record_event": None, "is_stream_ordered": False, "has_stream": False, "leaves": False,
}  # fmt: skip
"""What functions and properties of the library return on a CPU."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class DevicePlace:
    """A statement, without the statements in it, that runs on an accelerator only."""

    file: str
    """Below the library's folder."""
    function: str
    line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def device_places(root: Path = LIBRARY, rooms: Sequence[str] = ROOMS) -> list[DevicePlace]:
    """Every place of the rooms that runs on an accelerator only: [Note: Lines of a device]."""
    house = _House(root, rooms)
    while house.learn():
        pass
    return sorted(house.places(), key=lambda each: (each.file, each.line))


class _House:
    """All files of the library, and what is known of them so far."""

    def __init__(self, root: Path, rooms: Sequence[str]) -> None:
        files = {path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path in root.rglob("*.py")}
        self._core = {name: tree for name, tree in sorted(files.items()) if name.split("/")[0] in rooms}
        trees = files.values()
        self._parent = {
            below: node for tree in trees for node in ast.walk(tree) for below in ast.iter_child_nodes(node)
        }
        self.defined: dict[str, list[ast.stmt]] = defaultdict(list)
        """The functions and classes of the core by their names."""
        self._ruled_out = set[ast.stmt]()
        """Statements that no CPU runs; all that is in them runs on none either."""
        self._only_on_device = set[str]()
        """Names of definitions that only ruled out places refer to."""
        for tree in self._core.values():
            for node in ast.walk(tree):
                if isinstance(node, _DEFINITIONS):
                    self.defined[node.name].append(node)
                    if isinstance(node, _Function) and _imports_triton(tree):
                        self._ruled_out.add(node)
        self._references: dict[str, list[ast.AST]] = defaultdict(list)
        """Where the library names what the core defines. A package's `__init__.py` names it for everybody."""
        for file, tree in files.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Name | ast.Attribute) and (name := _name_of(node)) in self.defined:
                    self._references[name].append(node)
                elif isinstance(node, ast.ImportFrom) and file.endswith("__init__.py"):
                    for each in node.names:
                        self._references[each.name].append(node)

    def places(self) -> Iterator[DevicePlace]:
        for file, tree in self._core.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt) and _does_something(node) and self._is_out(node):
                    body = getattr(node, "body", None)  # whose statements are places of their own
                    last: Any = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
                    names = [each.name for each in self._above(node) if isinstance(each, _DEFINITIONS)]
                    function = ".".join(reversed(names)) or "the module"
                    yield DevicePlace(file=file, function=function, line=node.lineno, last_line=last)

    def learn(self) -> bool:
        """Draw the conclusions from what is known. Returns whether more is known now."""
        before = len(self._ruled_out) + len(self._only_on_device)
        for tree in self._core.values():
            if not _imports_triton(tree):
                _Reader(self, None).block(tree.body)
        for name, definitions in self.defined.items():
            references = [
                each for each in self._references[name] if not any(above in definitions for above in self._above(each))
            ]
            if references and not name.startswith("__") and all(map(self._is_out, references)):
                self._only_on_device.add(name)
        return len(self._ruled_out) + len(self._only_on_device) > before

    def rule_out(self, statements: Iterable[ast.stmt]) -> None:
        self._ruled_out.update(statements)

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self._parent.get(node)) is not None:
            yield above
            node = above

    def _is_out(self, node: ast.AST) -> bool:
        """True if no CPU runs a node."""
        return any(
            each in self._ruled_out or (isinstance(each, _DEFINITIONS) and each.name in self._only_on_device)
            for each in (node, *self._above(node))
        )


class _Reader:
    """Reads a function, or the top of a file, as a CPU would run it."""

    def __init__(self, house: _House, function: _Function | None) -> None:
        self._house = house
        self._given: dict[str, list[ast.expr]] = defaultdict(list)
        """What the function gives to its names, in plain assignments."""
        self._open = set[str]()
        """Its names that have anything else."""
        plain = set[ast.expr]()
        for node in ast.walk(function) if function is not None else ():  # an assignment comes before its names
            match node:
                case ast.arg():
                    self._open.add(node.arg)
                case ast.Global() | ast.Nonlocal():
                    self._open.update(node.names)
                case ast.Assign(targets=[ast.Name() as target]):
                    self._given[target.id].append(node.value)
                    plain.add(target)
                case ast.Name(ctx=ast.Store() | ast.Del()) if node not in plain:
                    self._open.add(node.id)

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Rule out what a CPU does not run. Returns whether it comes to the end."""
        goes_on = True
        for statement in statements:
            if goes_on:
                goes_on = self._statement(statement)
            else:
                self._house.rule_out([statement])
        return goes_on

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                _Reader(self._house, node).block(node.body)
            case ast.ClassDef() | ast.For() | ast.While():
                self.block(node.body)
            case ast.If():
                value, ends = self.value(node.test), []
                for arm, taken in ((node.body, True), (node.orelse, False)):
                    if value is not _OPEN and bool(value) is not taken:
                        self._house.rule_out(arm)
                    else:
                        ends.append(self.block(arm))
                return any(ends)
            case ast.With():
                return self.block(node.body) or any("suppress" in ast.unparse(each) for each in node.items)
            case ast.Try():
                ends = [self.block([*node.body, *node.orelse]), *(self.block(each.body) for each in node.handlers)]
                return self.block(node.finalbody) and any(ends)
        return not isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression where a CPU runs it; `_OPEN` if that says nothing of it."""
        match node:
            case ast.Constant():
                return node.value if isinstance(node.value, bool | str | None) else _OPEN
            case ast.Name():
                if node.id in self._open:
                    return _OPEN
                self._open.add(node.id)  # what is given to a name may have the name in it
                value = _joined([self.value(each) for each in self._given[node.id]])
                self._open.remove(node.id)
                return value
            case ast.Attribute():
                definitions = self._house.defined.get(node.attr, [])
                returned = RETURNS.get(node.attr, _OPEN) if any(map(_is_property, definitions)) else _OPEN
                return ATTRIBUTES.get(node.attr, returned)
            case ast.Call():
                name = _name_of(node.func)
                returned = RETURNS.get(name, _OPEN) if self._house.defined.get(name) else _OPEN
                return _CALLS.get(ast.unparse(node.func), _CALLS.get(name, returned))
            case ast.UnaryOp(op=ast.Not()):
                value = self.value(node.operand)
                return value if value is _OPEN else not value
            case ast.BoolOp():
                values, ends = [self.value(each) for each in node.values], isinstance(node.op, ast.Or)
                if any(each is not _OPEN and bool(each) is ends for each in values):
                    return ends
                return _OPEN if _OPEN in values else values[-1]
            case ast.Compare(ops=[operator], comparators=[right]):
                return _compared(self.value(node.left), operator, self.value(right))
        return _OPEN


def _joined(values: Sequence[Any]) -> Any:
    """The value that all have; `_OPEN` if they differ, or there is none."""
    same = all(type(each) is type(values[0]) and each == values[0] for each in values)
    return values[0] if values and same else _OPEN


def _compared(one: Any, operator: ast.cmpop, other: Any) -> Any:
    if one is _OPEN or other is _OPEN:
        return _OPEN
    is_negated = isinstance(operator, ast.NotEq | ast.IsNot)
    if isinstance(operator, ast.Eq | ast.NotEq):
        is_other = {one, other} - {"gloo", "nccl"} and {one, other} - {"cpu", "cuda"}  # "meta", say
        return _OPEN if is_other else (one == other) is not is_negated
    if isinstance(operator, ast.Is | ast.IsNot) and None in (one, other):
        return (one is other) is not is_negated
    return _OPEN


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_property(node: ast.stmt) -> bool:
    return any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", ()))


def _imports_triton(tree: ast.Module) -> bool:
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    return any(each.name == "triton" for node in imports for each in node.names)


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, (*_DEFINITIONS, ast.Try, ast.Global, ast.Nonlocal)):
        return False
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return not is_text and not (isinstance(node, ast.AnnAssign) and node.value is None)


if __name__ == "__main__":
    print("\n".join(map(str, device_places())))
