"""Small changes of meaning in a module's code, one at a time: what a careless edit could do."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}  # fmt: skip
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_HINTS = {"strict", "non_blocking", "exist_ok", "parents", "encoding", "daemon", "stacklevel", "kw_only", "frozen"}
"""Keywords that say how, not what: to change one changes no result."""
_SPOKEN = ("__repr__", "__str__", "extra_repr")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one module."""

    module: str
    """The path of the module below src."""
    function: str
    """The qualified name of the function with the change."""
    before: str
    after: str
    """The statement or expression, in one line, as it is and as it becomes."""
    line: int
    ordinal: int
    """How many equal changes come before this one in the function."""
    code: str
    """The whole changed module."""

    @property
    def key(self) -> str:
        """A name that stays when other functions of the module change."""
        number = f" #{self.ordinal + 1}" if self.ordinal else ""
        return f"{self.module}:{self.function}: {self.before} -> {self.after}{number}"


def mutants(module: str, code: str) -> Iterator[Mutant]:
    """Return all mutants of the code of one module, in the order of its lines."""
    lines = code.splitlines(keepends=True)
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, node in _sites(ast.parse(code), ""):
        before = ast.unparse(node)
        for changed in _changes(node):
            after = ast.unparse(changed)
            change = (function, before, after)
            text = _replaced(lines, node, f"({after})" if isinstance(changed, ast.expr) else after)
            yield Mutant(
                module=module, function=function, before=_short(before), after=_short(after), line=node.lineno,
                ordinal=seen[change], code=text,
            )  # fmt: skip
            seen[change] += 1


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else line[:87] + "..."


def _sites(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Return what can change in functions: no messages, annotations, decorators or text for people."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments | ast.Assert | ast.AnnAssign):
            if isinstance(child, ast.AnnAssign) and function and child.value is not None:
                yield from _sites(ast.Expression(child.value), function)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name not in _SPOKEN:
                name = f"{function}.{child.name}" if function else child.name
                yield from _sites(ast.Module(child.body, []), name)
        elif isinstance(child, ast.keyword) and child.arg in _HINTS:
            continue
        else:
            if function and isinstance(child, ast.expr | ast.stmt):
                yield function, child
            yield from _sites(child, function)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """Return what may stand in the place of a node."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            changed.ops = [_COMPARED[type(operator)]()]
            yield changed
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED and not _is_text(changed):
            changed.op = _COMPUTED[type(operator)]()
            yield changed
        case ast.BoolOp():
            changed.op = ast.And() if isinstance(changed.op, ast.Or) else ast.Or()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield changed.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int(number)):
            yield ast.Constant(number + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED and len(changed.args) > (name in ("min", "max")):
            changed.func = ast.Name(_CALLED[name])
            yield changed
        case ast.IfExp():
            yield changed.orelse
        case ast.If(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp):
            pass  # its test is an expression of its own, which `_sites` reaches
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Return(value=ast.Name() | ast.Call() | ast.Attribute()):
            changed.value = ast.Constant(None)
            yield changed
        case ast.Break():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    texts = (str, bytes)
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), texts)
               for part in (node.left, node.right))  # fmt: skip


def _replaced(lines: list[str], node: ast.expr | ast.stmt, text: str) -> str:
    """Return the code with `text` in the place of the node. Columns count bytes."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], head, text, tail, *lines[last + 1 :]])
