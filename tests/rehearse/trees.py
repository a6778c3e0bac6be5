"""Reading a tree of Python's syntax: names, assignments, and values of which some are open."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

OPEN: Any = object()
"""The value of what the code leaves open."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BACKENDS, _KINDS = {"gloo", "nccl"}, {"cpu", "cuda"}


@cache
def stores(function: Function) -> dict[str, list[ast.AST]]:
    """Where a function sets its names."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    for node in own(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id].append(node)
        elif isinstance(node, ast.alias):
            found[node.asname or node.name].append(node)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found[node.name].append(node)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                found[name].append(node)
    return found


def parameters(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


@cache
def own(function: Function) -> tuple[ast.AST, ...]:
    """The nodes of a function, without those of functions in it."""
    found, waiting = list[ast.AST](), [*function.body]
    while waiting:
        found.append(node := waiting.pop())
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            waiting += below(node)  # type: ignore[arg-type]
    return tuple(found)


@cache
def within(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


def is_property(node: ast.stmt) -> bool:
    return any("property" in text(each) for each in getattr(node, "decorator_list", ()))


@cache
def below(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.iter_child_nodes(node))


@cache
def text(node: ast.AST) -> str:
    return ast.unparse(node)


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def given_to(statement: ast.Assign | ast.AnnAssign, target: ast.AST) -> list[ast.expr | None]:
    """The expressions that an assignment gives to one of its targets; none, if it only declares it."""
    found: list[ast.expr | None] = []
    for whole in targets(statement):
        if whole is target:
            found += [statement.value] if statement.value is not None else []
        elif isinstance(whole, ast.Tuple) and any(each is target for each in whole.elts):
            if isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(whole.elts):
                found += [v for each, v in zip(whole.elts, statement.value.elts, strict=True) if each is target]
            else:
                found.append(ast.Name(id="", ctx=ast.Load()))  # which nobody knows
    return found


def join(values: Sequence[Any]) -> Any:
    """The value that all have; `OPEN` if they differ, or there is none."""
    if not values or any(each is OPEN for each in values):
        return OPEN
    return values[0] if all(type(each) is type(values[0]) and each == values[0] for each in values) else OPEN


def compared(one: Any, operator: ast.cmpop, other: Any) -> Any:
    if one is OPEN or other is OPEN:
        return OPEN
    is_negated = isinstance(operator, ast.NotEq | ast.IsNot | ast.NotIn)
    if isinstance(operator, ast.Eq | ast.NotEq):
        if {one, other} - _BACKENDS and {one, other} - _KINDS:  # "meta", say
            return OPEN
        return (one == other) is not is_negated
    if isinstance(operator, ast.Is | ast.IsNot):
        return (one is other) is not is_negated if None in (one, other) else OPEN
    if isinstance(operator, ast.In | ast.NotIn) and one == "cpu":
        return (one in other) is not is_negated
    return OPEN


def imports_triton(body: Iterable[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Import) and any(each.name == "triton" for each in node.names) for node in body)


def does_something(node: ast.stmt) -> bool:
    if isinstance(node, (*DEFINITIONS, ast.Try, ast.Global, ast.Nonlocal)):
        return False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return False
    return not (isinstance(node, ast.AnnAssign) and node.value is None)


def end_of_head(node: Any) -> int:
    """The last line of a statement, without the statements in it."""
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else int(node.end_lineno)
