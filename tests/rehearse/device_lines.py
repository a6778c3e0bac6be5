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
from functools import cache, cached_property
from itertools import pairwise
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
_EMPTY = ()
"""The value of every collection that is empty on a CPU."""
_FACTS: dict[str, Any] = {
    "is_cuda": False, "is_cpu": True, "bound_device_id": None, "device_type": "cpu", "_device_type": "cpu",
    "_uses_sends": True,
}  # fmt: skip
"""Attributes and names. Transfers of CPU tensors are sends and receives: [Note: Collectives on Gloo]."""
_CALLS: dict[str, Any] = {
    "current_accelerator": None, "torch.accelerator.is_available": False, "torch.cuda.is_available": False,
    "torch.cuda.is_initialized": False, "backend_of": "gloo", "get_backend": "gloo",
}  # fmt: skip
_ATTRIBUTES: dict[str, Any] = {
    "is_stream_ordered": False, "_host_waits": True, "_is_param": True, "_release": None, "_faults": _EMPTY,
    "_delayed": None, "_late": _EMPTY, "_stream": None, "leaving": _EMPTY, "_summed": None,
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
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        self.files = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8")) for path in root.rglob("*.py")
        }
        self.core = {name: tree for name, tree in sorted(self.files.items()) if name.split("/")[0] in rooms}
        self.parent = {child: node for tree in self.files.values() for node in ast.walk(tree) for child in _below(node)}
        self.defined: dict[str, list[ast.stmt]] = defaultdict(list)
        """The functions and classes of the core by their names, and what is assigned at the top of its files."""
        self.ruled_out = set[ast.AST]()
        """Statements and parts of expressions that no CPU runs; all that is in them runs on none either."""
        self.locals: dict[tuple[ast.AST, str], Any] = {}
        """What names of functions have, by what was known when somebody asked first."""
        self.only_on_device = set[str]()
        """Names of definitions that only ruled out places refer to."""
        for tree in self.core.values():
            definitions = [node for node in ast.walk(tree) if isinstance(node, _DEFINITIONS)]
            for definition in definitions:
                self.defined[definition.name].append(definition)
            for node in tree.body:
                for target in _targets(node):
                    if isinstance(target, ast.Name):
                        self.defined[target.id].append(node)
            if _imports_triton(tree):
                self.ruled_out.update(each for each in definitions if isinstance(each, _Function))

    # -- places ------------------------------------------------------------------------------------------------------

    def places(self) -> Iterator[DevicePlace]:
        for file, tree in self.core.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt) and _does_something(node) and self.is_out(node):
                    body = getattr(node, "body", None)  # whose statements are places of their own
                    last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
                    yield self._place(file, node, last)
                elif isinstance(node, ast.expr) and node in self.ruled_out and not self.is_out(self.parent[node]):
                    yield self._place(file, node, node.end_lineno, (node.col_offset, node.end_col_offset))

    def _place(self, file: str, node: Any, last_line: Any, columns: Any = None) -> DevicePlace:
        names = [each.name for each in self.above(node) if isinstance(each, _DEFINITIONS)]
        function = ".".join(reversed(names)) or "the module"
        return DevicePlace(file=file, function=function, line=node.lineno, last_line=last_line, columns=columns)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (above := self.parent.get(node)) is not None:
            yield above
            node = above

    def is_out(self, node: ast.AST, within: ast.AST | None = None) -> bool:
        """True if no CPU runs a node; of what is `within` a function, if that says so."""
        for each in (node, *self.above(node)):
            if each is within:
                return False
            if each in self.ruled_out:
                return True
            if within is None and isinstance(each, _DEFINITIONS) and each.name in self.only_on_device:
                return True
        return False

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self) -> bool:
        """Draw the conclusions from what is known. Returns whether more is known now."""
        before = len(self.ruled_out) + len(self.only_on_device)
        self.locals.clear()
        for tree in self.core.values():
            if not _imports_triton(tree):
                _Reader(self, None).block(tree.body)
        for name, definitions in self.defined.items():
            references = [
                each for each in self._references[name] if not any(above in definitions for above in self.above(each))
            ]
            if references and not name.startswith("__") and all(map(self._refers_in_vain, references)):
                self.only_on_device.add(name)
        return len(self.ruled_out) + len(self.only_on_device) > before

    @cached_property
    def _references(self) -> dict[str, list[ast.AST]]:
        """Where the library names what the core defines. A package's `__init__.py` names it for everybody."""
        found: dict[str, list[ast.AST]] = defaultdict(list)
        for file, tree in self.files.items():
            for node in ast.walk(tree):
                name = _name_of(node) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
                if name in self.defined and not self._is_annotation(node):
                    found[name].append(node)
                elif isinstance(node, ast.ImportFrom) and file.endswith("__init__.py"):
                    for each in node.names:
                        found[each.name].append(node)
        return found

    def _is_annotation(self, node: ast.AST) -> bool:
        line = [node, *self.above(node)]
        return any(
            child in (getattr(above, "annotation", None), getattr(above, "returns", None))
            for child, above in pairwise(line)
        )

    def _refers_in_vain(self, node: ast.AST) -> bool:
        """True if no CPU comes to a reference: it is ruled out, or makes a constant that only a device uses."""
        if self.is_out(node):
            return True
        *_, statement, _ = (node, node, *self.above(node))
        targets = _targets(statement)
        return bool(targets) and all(isinstance(each, ast.Name) and each.id in self.only_on_device for each in targets)


class _Reader:
    """Reads a function, or the top of a file, as a CPU would run it."""

    def __init__(self, house: _House, function: _Function | None) -> None:
        self._house, self._function = house, function

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Rule out what a CPU does not run. Returns whether it comes to the end."""
        goes_on = True
        for statement in statements:
            if goes_on:
                goes_on = self._statement(statement)
            else:
                self._rule_out([statement])
        return goes_on

    def _rule_out(self, nodes: Iterable[ast.AST]) -> None:
        self._house.ruled_out.update(nodes)

    def _statement(self, node: Any) -> bool:
        if isinstance(node, _DEFINITIONS):
            (_Reader(self._house, node) if isinstance(node, _Function) else self).block(node.body)
            return True
        heads = [each for each in _below(node) if isinstance(each, ast.expr | ast.withitem)]
        if any(map(self._fails, heads)) or (isinstance(node, ast.Assert) and _is(self.value(node.test), False)):
            self._rule_out([node])
            return False
        for head in heads:
            self._rule_out_parts(head)
        match node:
            case ast.If():
                value = self.value(node.test)
                ends = []
                for arm, taken in ((node.body, True), (node.orelse, False)):
                    if _is(value, not taken):
                        self._rule_out(arm)
                    else:
                        ends.append(self.block(arm))
                return any(ends)
            case ast.For() | ast.While():
                if _is(self.value(node.iter if isinstance(node, ast.For) else node.test), False):
                    self._rule_out(node.body)
                else:
                    self.block(node.body)
                self.block(node.orelse)
                return True
            case ast.With():
                return self.block(node.body) or any("suppress" in _text(each) for each in node.items)
            case ast.Try():
                ends = [self.block([*node.body, *node.orelse]), *(self.block(each.body) for each in node.handlers)]
                return self.block(node.finalbody) and any(ends)
            case ast.Match():
                for each in node.cases:
                    self.block(each.body)
        return not isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)

    def _fails(self, node: ast.AST) -> bool:
        """True if an expression, as a CPU reads it, uses something of None, or a lane of copies."""
        match node:
            case ast.Lambda() | ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                return False
            case ast.BoolOp():
                return self._fails(node.values[0])
            case ast.IfExp():
                return self._fails(node.test)
            case ast.Attribute(ctx=ast.Load()) if node.attr in _LANES_OF_COPIES:
                return True
            case ast.Attribute() if self.value(node.value) is None and node.attr != "device":
                return True
        return any(map(self._fails, _below(node)))

    def _rule_out_parts(self, head: ast.AST) -> None:
        """Rule out parts of an expression."""
        for node in _within(head):
            if isinstance(node, ast.IfExp) and (value := self.value(node.test)) is not _OPEN:
                self._rule_out([node.orelse if value else node.body])
            elif isinstance(node, ast.BoolOp):
                ends = isinstance(node.op, ast.Or)
                place = next((i for i, each in enumerate(node.values) if _is(self.value(each), ends)), len(node.values))
                self._rule_out(node.values[place + 1 :])
            elif isinstance(node, ast.SetComp | ast.ListComp | ast.GeneratorExp) and self.value(node) == _EMPTY:
                self._rule_out([node.elt])

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, node: ast.AST | None) -> Any:
        """The value of an expression where a CPU runs it; `_OPEN` if that says nothing of it."""
        match node:
            case None:
                return None
            case ast.Constant():
                return node.value if isinstance(node.value, bool | str | None) else _OPEN
            case ast.NamedExpr() | ast.Starred():
                return self.value(node.value)
            case ast.Name():
                is_told = node.id in _FACTS and not self._may_be_none(node.id)
                return _FACTS[node.id] if is_told else self._local(node.id, self._function)
            case ast.Attribute():
                definitions = self._house.defined.get(node.attr, [])
                is_property = bool(definitions) and all(map(_is_property, definitions))
                returned = _RETURNS.get(node.attr, _OPEN) if is_property else _OPEN
                return {"type": "cpu", **_FACTS, **_ATTRIBUTES}.get(node.attr, returned)
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp(op=ast.Not()):
                value = self.value(node.operand)
                return value if value is _OPEN else not value
            case ast.BoolOp():
                values, ends = [self.value(each) for each in node.values], isinstance(node.op, ast.Or)
                if any(_is(each, ends) for each in values):
                    return ends
                return _OPEN if _OPEN in values else values[-1]
            case ast.IfExp():
                test, arms = self.value(node.test), (node.body, node.orelse)
                return _join([self.value(each) for each in arms]) if test is _OPEN else self.value(arms[not test])
            case ast.Compare():
                results = [
                    _compared(self.value(left), operator, self._other(operator, right))
                    for left, operator, right in zip(
                        [node.left, *node.comparators[:-1]], node.ops, node.comparators, strict=True
                    )
                ]
                return False if False in results else _OPEN if _OPEN in results else True
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                conditions = [each for generator in node.generators for each in generator.ifs]
                return _EMPTY if any(_is(self.value(each), False) for each in conditions) else _OPEN
        return _OPEN

    def _call(self, node: ast.Call) -> Any:
        name = _name_of(node.func)
        for key in (_text(node.func), name):
            if key in _CALLS:
                return _CALLS[key]
        if name in ("bool", "any", "all") and len(node.args) == 1:
            argument = node.args[0]
            value = self.value(argument.elt if isinstance(argument, ast.GeneratorExp) else argument)
            return value if value is _OPEN else bool(value)
        definitions = self._house.defined.get(name, [])
        is_known = bool(definitions) and all(isinstance(each, _Function) for each in definitions)
        return _RETURNS.get(name, _OPEN) if is_known else _OPEN

    def _other(self, operator: ast.cmpop, node: ast.expr) -> Any:
        """The right side of a comparison: of `in`, the constants."""
        if not isinstance(operator, ast.In | ast.NotIn):
            return self.value(node)
        members = node.elts if isinstance(node, ast.Tuple) else [node]
        is_known = isinstance(node, ast.Tuple) and all(isinstance(each, ast.Constant) for each in members)
        return [each.value for each in members] if is_known else _OPEN  # type: ignore[attr-defined]

    def _local(self, name: str, function: _Function | None) -> Any:
        """What a name of a function has, wherever a CPU comes to set it."""
        known = self._house.locals
        if function is not None and (function, name) not in known:
            known[function, name] = _OPEN  # while it is asked for what it depends on
            known[function, name] = self._joined(name, function)
        return _OPEN if function is None else known[function, name]

    def _may_be_none(self, name: str) -> bool:
        """True if a parameter says that it may be None."""
        given = [] if self._function is None else _parameters(self._function)
        return any(each.arg == name and "None" in _text(each.annotation) for each in given if each.annotation)

    def _joined(self, name: str, function: _Function) -> Any:
        values = []
        for each in _parameters(function):
            if each.arg == name:
                if each.annotation is not None and _text(each.annotation) in _EVENTS:
                    return None
                values.append(_OPEN)
        stores = _stores(function).get(name, [])
        for node in stores:
            if not self._house.is_out(node, function):
                values += self._stored(node)
        if not values and not stores:
            outer = next((each for each in self._house.above(function) if isinstance(each, _Function)), None)
            return self._local(name, outer)
        return _join(values)

    def _stored(self, node: ast.AST) -> list[Any]:
        above = self._house.parent[node]
        if isinstance(node, ast.alias):
            return [None if f"{getattr(above, 'module', '')}.{node.name}".endswith("_triton") else _OPEN]
        if isinstance(above, ast.NamedExpr):
            return [self.value(above.value)]
        statement = next((each for each in self._house.above(node) if isinstance(each, ast.stmt)), None)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            return [self.value(each) for each in _given_to(statement, node)] or [_OPEN]
        return [_OPEN]


# -- trees of Python's syntax ------------------------------------------------------------------------------------------


@cache
def _stores(function: _Function) -> dict[str, list[ast.AST]]:
    """Where a function, without the functions in it, sets its names."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    waiting: list[Any] = [*function.body]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            waiting += _below(node)
        match node:
            case ast.Name() if not isinstance(node.ctx, ast.Load):
                found[node.id].append(node)
            case ast.alias():
                found[node.asname or node.name].append(node)
            case ast.ExceptHandler():
                found[node.name or ""].append(node)
            case ast.Global() | ast.Nonlocal():
                for name in node.names:
                    found[name].append(node)
    return found


def _parameters(function: _Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


@cache
def _within(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


@cache
def _below(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.iter_child_nodes(node))


@cache
def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_property(node: ast.stmt) -> bool:
    return any("property" in _text(each) for each in getattr(node, "decorator_list", ()))


def _imports_triton(tree: ast.Module) -> bool:
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    return any(each.name == "triton" for node in imports for each in node.names)


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, (*_DEFINITIONS, ast.Try, ast.Global, ast.Nonlocal)):
        return False
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return not is_text and not (isinstance(node, ast.AnnAssign) and node.value is None)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _given_to(statement: ast.Assign | ast.AnnAssign, target: ast.AST) -> list[ast.expr | None]:
    """The expressions that an assignment gives to one of its targets; none, if it only declares it."""
    found: list[ast.expr | None] = []
    for whole in _targets(statement):
        if whole is target:
            found += [statement.value] if statement.value is not None else []
        elif isinstance(whole, ast.Tuple) and any(each is target for each in whole.elts):
            if isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(whole.elts):
                found.append(statement.value.elts[whole.elts.index(target)])  # type: ignore[arg-type]
            else:
                found.append(ast.Name(id="", ctx=ast.Load()))  # which nobody knows
    return found


def _is(value: Any, truth: bool) -> bool:
    """True if a value is known, and counts as true or false as said."""
    return value is not _OPEN and bool(value) is truth


def _join(values: Sequence[Any]) -> Any:
    """The value that all have; `_OPEN` if they differ, or there is none."""
    if not values or any(each is _OPEN for each in values):
        return _OPEN
    return values[0] if all(type(each) is type(values[0]) and each == values[0] for each in values) else _OPEN


def _compared(one: Any, operator: ast.cmpop, other: Any) -> Any:
    if one is _OPEN or other is _OPEN:
        return _OPEN
    is_negated = isinstance(operator, ast.NotEq | ast.IsNot | ast.NotIn)
    if isinstance(operator, ast.Eq | ast.NotEq):
        is_other = {one, other} - {"gloo", "nccl"} and {one, other} - {"cpu", "cuda"}  # "meta", say
        return _OPEN if is_other else (one == other) is not is_negated
    if isinstance(operator, ast.Is | ast.IsNot):
        return (one is other) is not is_negated if None in (one, other) else _OPEN
    if isinstance(operator, ast.In | ast.NotIn) and one == "cpu":
        return (one in other) is not is_negated
    return _OPEN


if __name__ == "__main__":
    for place in device_places():
        print(place, "" if place.columns is None else place.columns)
