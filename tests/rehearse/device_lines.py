"""The lines of the library that run on an accelerator only, found in the code: [Note: Lines of a device].

[Note: Lines of a device]
The code is read as if the device were a CPU. There `device.type` is "cpu" and groups are Gloo's; torch finds no
accelerator, and no group is bound to one; a lane has no stream, and so no event; Triton is not there. With these facts
some tests have one answer. The branch that it rules out runs on an accelerator only. So does

- what follows a branch that always returns or raises there;
- a statement that uses something of what is None there, such as an event;
- a function that only such lines refer to, and the functions of a file that imports Triton at its top;
- what uses the lanes `to_host` and `to_device`: on a CPU nothing is copied between host and device.

What functions return there, and what attributes have, is listed below. Where the code leaves it open, a line counts as
one that a CPU runs. An arm of a conditional expression, or an operand of `and` and `or`, counts as a line. Definitions,
docstrings and the word `try` do not count.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import laconic
from tests.rehearse import trees
from tests.rehearse.trees import DEFINITIONS, OPEN, Function

LIBRARY = Path(laconic.__file__).parent
ROOMS = (
    "comm", "layout", "ragged", "codec", "shard", "guard", "optim", "islands", "partial", "cyclic", "store",
    "checkpoint", "_compat.py",
)  # fmt: skip
"""The core."""
_EMPTY = ()
"""The value of every collection that is empty on a CPU."""
_FACTS: dict[str, Any] = {
    "is_cuda": False,
    "is_cpu": True,
    "bound_device_id": None,
    "device_type": "cpu",
    "_device_type": "cpu",
    "_uses_sends": True,
}
"""Attributes and names. Transfers of CPU tensors are sends and receives: [Note: Collectives on Gloo]."""
_CALLS: dict[str, Any] = {
    "current_accelerator": None,
    "torch.accelerator.is_available": False,
    "torch.cuda.is_available": False,
    "torch.cuda.is_initialized": False,
    "backend_of": "gloo",
    "get_backend": "gloo",
}
_ATTRIBUTES: dict[str, Any] = {
    "is_stream_ordered": False, "_host_waits": True, "_is_param": True, "_release": None, "_faults": _EMPTY,
    "_delayed": None, "_late": _EMPTY, "_stream": None, "_leaving": _EMPTY, "_summed": None,
}  # fmt: skip
"""What attributes of the library have on a CPU."""
_RETURNS: dict[str, Any] = {
    "is_bound": False, "splitting_device": None, "multiplies_codes": False, "_shares_groups": False,
    "device_to_bind": None, "initialized_accelerator": None, "_accelerators": _EMPTY, "load_into": None, "last": None,
    "compute_event": None, "record_event": None, "is_stream_ordered": False, "has_stream": False, "leaves": False,
}  # fmt: skip
"""What functions and properties of the library return on a CPU."""
_EVENTS = {"Event", "torch.Event | None"}
"""The annotations of what is None on a CPU."""
_LANES_OF_COPIES = {"to_host", "to_device"}


@dataclass(frozen=True, kw_only=True)
class DevicePlace:
    """A statement, without the statements in it, or a part of an expression, that runs on an accelerator only."""

    file: str
    """Below the library's folder."""
    function: str
    line: int
    last_line: int
    columns: tuple[int, int] | None = None
    """Where a part of an expression begins in its first line, and ends in its last one; None for a statement."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def device_places(root: Path = LIBRARY, rooms: Sequence[str] = ROOMS) -> list[DevicePlace]:
    """Every place of the rooms that runs on an accelerator only: [Note: Lines of a device]."""
    house = _House(root, rooms)
    while house.learn():
        pass
    return sorted(house.places(), key=lambda each: (each.file, each.line, each.columns or (-1, -1)))


class _House:
    """All files of the library, and what is known of them so far."""

    def __init__(self, root: Path, rooms: Sequence[str]) -> None:
        paths = [path for path in sorted(root.rglob("*.py")) if "__pycache__" not in path.parts]
        self.files = {path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}
        self.core = {name: tree for name, tree in self.files.items() if name.split("/")[0] in rooms}
        self.parent = {
            child: node for tree in self.files.values() for node in ast.walk(tree) for child in trees.below(node)
        }
        self.defined: dict[str, list[ast.stmt]] = defaultdict(list)
        """The functions and classes of the core by their names, and what is assigned at the top of its files."""
        for tree in self.core.values():
            for node in ast.walk(tree):
                if isinstance(node, DEFINITIONS):
                    self.defined[node.name].append(node)
            for node in tree.body:
                for target in trees.targets(node):
                    if isinstance(target, ast.Name):
                        self.defined[target.id].append(node)
        self.ruled_out: set[ast.AST] = {
            node
            for tree in self.core.values()
            if trees.imports_triton(tree.body)
            for node in ast.walk(tree)
            if isinstance(node, Function)
        }
        """Statements and parts of expressions that no CPU runs; all that is in them runs on none either."""
        self.locals: dict[tuple[ast.AST, str], Any] = {}
        """What names of functions have, by what was known when somebody asked first."""
        self.only_on_device: set[str] = set()
        """Names of definitions that only ruled out places refer to."""

    # -- places ------------------------------------------------------------------------------------------------------

    def places(self) -> Iterator[DevicePlace]:
        for file, tree in self.core.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt) and trees.does_something(node) and self.is_out(node):
                    yield self._place(file, node, node.lineno, trees.end_of_head(node))
                elif isinstance(node, ast.expr) and node in self.ruled_out and not self.is_out(self.parent[node]):
                    assert node.end_lineno is not None and node.end_col_offset is not None  # noqa: PT018
                    columns = node.col_offset, node.end_col_offset
                    yield self._place(file, node, node.lineno, node.end_lineno, columns)

    def _place(
        self, file: str, node: ast.AST, line: int, last_line: int, columns: tuple[int, int] | None = None
    ) -> DevicePlace:
        names = [each.name for each in self.above(node) if isinstance(each, DEFINITIONS)]
        function = ".".join(reversed(names)) or "the module"
        return DevicePlace(file=file, function=function, line=line, last_line=last_line, columns=columns)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.parent.get(node)) is not None:
            yield above
            node = above

    def is_out(self, node: ast.AST) -> bool:
        """True if no CPU runs a node."""
        for each in (node, *self.above(node)):
            if each in self.ruled_out or (isinstance(each, DEFINITIONS) and each.name in self.only_on_device):
                return True
        return False

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self) -> bool:
        """Draw the conclusions from what is known. Returns whether more is known now."""
        before = len(self.ruled_out) + len(self.only_on_device)
        self.locals.clear()
        for tree in self.core.values():
            if not trees.imports_triton(tree.body):
                _Reader(self, None).block(tree.body)
        self._learn_references()
        return len(self.ruled_out) + len(self.only_on_device) > before

    @cached_property
    def _references(self) -> dict[str, list[ast.AST]]:
        """Where the library names what the core defines. A package's `__init__.py` names it for everybody."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for file, tree in self.files.items():
            for node in ast.walk(tree):
                name = trees.name_of(node) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
                if name in self.defined and not self._is_annotation(node):
                    found[name].append(node)
                elif isinstance(node, ast.ImportFrom) and file.endswith("__init__.py"):
                    for each in node.names:
                        found[each.name].append(node)
        return found

    def _is_annotation(self, node: ast.AST) -> bool:
        child = node
        for above in self.above(node):
            if child is getattr(above, "annotation", None) or child is getattr(above, "returns", None):
                return True
            child = above
        return False

    def _learn_references(self) -> None:
        for name, definitions in self.defined.items():
            references = [each for each in self._references[name] if not self._is_inside(each, definitions)]
            if references and not name.startswith("__") and all(map(self._refers_in_vain, references)):
                self.only_on_device.add(name)

    def _is_inside(self, node: ast.AST, definitions: list[ast.stmt]) -> bool:
        return any(each in definitions for each in self.above(node))

    def _refers_in_vain(self, node: ast.AST) -> bool:
        """True if no CPU comes to a reference: it is ruled out, or makes a constant that only a device uses."""
        if self.is_out(node):
            return True
        line = [node, *self.above(node)]
        if len(line) < 2 or not isinstance(line[-2], ast.Assign | ast.AnnAssign):
            return False
        return all(isinstance(each, ast.Name) and each.id in self.only_on_device for each in trees.targets(line[-2]))

    def _is_ruled_out_in(self, node: ast.AST, function: Function) -> bool:
        for each in (node, *self.above(node)):
            if each is function:
                return False
            if each in self.ruled_out:
                return True
        return False


class _Reader:
    """Reads a function, or the top of a file, as a CPU would run it."""

    def __init__(self, house: _House, function: Function | None) -> None:
        self._house, self._function = house, function

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Rule out what a CPU does not run. Returns whether it comes to the end."""
        goes_on = True
        for statement in statements:
            if not goes_on:
                self._house.ruled_out.add(statement)
            else:
                goes_on = self._statement(statement)
        return goes_on

    def _rule_out(self, statements: Iterable[ast.AST]) -> None:
        self._house.ruled_out.update(statements)

    def _statement(self, node: Any) -> bool:
        if isinstance(node, DEFINITIONS):
            (_Reader(self._house, node) if isinstance(node, Function) else self).block(node.body)
            return True
        heads = [each for each in trees.below(node) if isinstance(each, ast.expr | ast.withitem)]
        if any(map(self._fails, heads)):
            self._house.ruled_out.add(node)
            return False
        for head in heads:
            self._rule_out_parts(head)
        if isinstance(node, ast.If):
            value = self.value(node.test)
            if value is not OPEN:
                self._rule_out(node.orelse if value else node.body)
                return self.block(node.body if value else node.orelse)
            ends = self.block(node.body), self.block(node.orelse)
            return any(ends)
        if isinstance(node, ast.For | ast.While):
            value = self.value(node.iter if isinstance(node, ast.For) else node.test)
            if value is not OPEN and not value:
                self._rule_out(node.body)
            else:
                self.block(node.body)
            self.block(node.orelse)
            return True
        if isinstance(node, ast.With):
            return self.block(node.body) or any("suppress" in trees.text(each) for each in node.items)
        if isinstance(node, ast.Try):
            ends = [self.block([*node.body, *node.orelse]), *(self.block(each.body) for each in node.handlers)]
            return self.block(node.finalbody) and any(ends)
        if isinstance(node, ast.Match):
            for each in node.cases:
                self.block(each.body)
            return True
        if isinstance(node, ast.Assert) and self.value(node.test) is not OPEN and not self.value(node.test):
            self._house.ruled_out.add(node)
            return False
        return not isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def _fails(self, node: ast.AST) -> bool:
        """True if an expression, as a CPU reads it, uses something of None, or a lane of copies."""
        if isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            return False
        if isinstance(node, ast.BoolOp):
            return self._fails(node.values[0])
        if isinstance(node, ast.IfExp):
            return self._fails(node.test)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _LANES_OF_COPIES:
            return True
        if isinstance(node, ast.Attribute) and self.value(node.value) is None and node.attr != "device":
            return True
        return any(map(self._fails, trees.below(node)))

    def _rule_out_parts(self, head: ast.AST) -> None:
        """Rule out parts of an expression."""
        for node in trees.within(head):
            if isinstance(node, ast.IfExp) and (value := self.value(node.test)) is not OPEN:
                self._house.ruled_out.add(node.orelse if value else node.body)
            elif isinstance(node, ast.BoolOp):
                values = [self.value(each) for each in node.values]
                ends = isinstance(node.op, ast.Or)
                place = next((i for i, each in enumerate(values) if each is not OPEN and bool(each) is ends), None)
                self._rule_out([] if place is None else node.values[place + 1 :])
            elif isinstance(node, ast.SetComp | ast.ListComp | ast.GeneratorExp) and self.value(node) == _EMPTY:
                self._house.ruled_out.add(node.elt)

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, node: ast.AST | None) -> Any:
        """The value of an expression where a CPU runs it; `OPEN` if that says nothing of it."""
        match node:
            case None:
                return None
            case ast.Constant():
                return node.value if isinstance(node.value, bool | str | None) else OPEN
            case ast.NamedExpr() | ast.Starred():
                return self.value(node.value)
            case ast.Name():
                is_told = node.id in _FACTS and not self._may_be_none(node.id)
                return _FACTS[node.id] if is_told else self._local(node.id, self._function)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp(op=ast.Not()):
                value = self.value(node.operand)
                return value if value is OPEN else not value
            case ast.BoolOp():
                return self._bool_op(node)
            case ast.IfExp():
                test = self.value(node.test)
                if test is OPEN:
                    return trees.join([self.value(node.body), self.value(node.orelse)])
                return self.value(node.body if test else node.orelse)
            case ast.Compare():
                return self._compare(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                conditions = [self.value(each) for generator in node.generators for each in generator.ifs]
                return _EMPTY if any(each is not OPEN and not each for each in conditions) else OPEN
        return OPEN

    def _attribute(self, node: ast.Attribute) -> Any:
        if node.attr in _FACTS:
            return _FACTS[node.attr]
        if node.attr == "type":
            return "cpu"
        if node.attr in _ATTRIBUTES:
            return _ATTRIBUTES[node.attr]
        definitions = self._house.defined.get(node.attr, [])
        is_property = bool(definitions) and all(map(trees.is_property, definitions))
        return _RETURNS.get(node.attr, OPEN) if is_property else OPEN

    def _call(self, node: ast.Call) -> Any:
        full, name = trees.text(node.func), trees.name_of(node.func)
        for key in (full, name):
            if key in _CALLS:
                return _CALLS[key]
        if name in ("bool", "any", "all") and len(node.args) == 1:
            argument = node.args[0]
            value = self.value(argument.elt if isinstance(argument, ast.GeneratorExp) else argument)
            return value if value is OPEN else bool(value)
        definitions = self._house.defined.get(name, [])
        if definitions and all(isinstance(each, Function) for each in definitions):
            return _RETURNS.get(name, OPEN)
        return OPEN

    def _bool_op(self, node: ast.BoolOp) -> Any:
        values = [self.value(each) for each in node.values]
        ends = isinstance(node.op, ast.Or)
        for each in values:
            if each is not OPEN and bool(each) is ends:
                return ends
        return OPEN if OPEN in values else values[-1]

    def _compare(self, node: ast.Compare) -> Any:
        sides = [node.left, *node.comparators]
        results = []
        for left, operator, right in zip(sides, node.ops, node.comparators, strict=False):
            other = self._members(right) if isinstance(operator, ast.In | ast.NotIn) else self.value(right)
            results.append(trees.compared(self.value(left), operator, other))
        if any(each is False for each in results):
            return False
        return OPEN if OPEN in results else True

    def _members(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Tuple) and all(isinstance(each, ast.Constant) for each in node.elts):
            return [each.value for each in node.elts]  # type: ignore[attr-defined]
        return OPEN

    def _local(self, name: str, function: Function | None) -> Any:
        """What a name of a function has, wherever a CPU comes to set it."""
        if function is None:
            return OPEN
        known = self._house.locals
        if (function, name) not in known:
            known[function, name] = OPEN  # while it is asked for what it depends on
            known[function, name] = self._joined(name, function)
        return known[function, name]

    def _may_be_none(self, name: str) -> bool:
        """True if a parameter says that it may be None."""
        given = [] if self._function is None else trees.parameters(self._function)
        return any(each.arg == name and "None" in trees.text(each.annotation) for each in given if each.annotation)

    def _joined(self, name: str, function: Function) -> Any:
        house, values, is_set = self._house, list[Any](), False
        for each in trees.parameters(function):
            if each.arg == name:
                if each.annotation is not None and trees.text(each.annotation) in _EVENTS:
                    return None
                values.append(OPEN)
        for node in trees.stores(function).get(name, ()):
            is_set = True
            if not house._is_ruled_out_in(node, function):
                values += self._stored(node, name)
        if not values and not is_set:
            outer = next((each for each in house.above(function) if isinstance(each, Function)), None)
            return self._local(name, outer)
        return trees.join(values)

    def _stored(self, node: ast.AST, name: str) -> list[Any]:
        if isinstance(node, ast.alias):
            statement = self._house.parent[node]
            given = f"{getattr(statement, 'module', '')}.{node.name}"
            return [None if given.endswith("_triton") else OPEN]
        above = self._house.parent[node]
        if isinstance(above, ast.NamedExpr):
            return [self.value(above.value)]
        statement = next((each for each in self._house.above(node) if isinstance(each, ast.stmt)), None)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            return [self.value(each) for each in trees.given_to(statement, node)] or [OPEN]
        return [OPEN]


if __name__ == "__main__":
    for place in device_places():
        print(place, "" if place.columns is None else place.columns)
