"""Small mistakes as edits of a syntax tree, so that no reformatting makes one miss its place.

An edit changes one function in place and returns at how many places it did; 0 means that the
code no longer holds what it looks for. Expressions are given as text and compared as trees.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

OPERATORS: dict[str, type[ast.AST]] = {
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
    "==": ast.Eq,
    "!=": ast.NotEq,
    "is": ast.Is,
    "is not": ast.IsNot,
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "|": ast.BitOr,
    "&": ast.BitAnd,
    "and": ast.And,
    "or": ast.Or,
}


class Edit:
    """A change of the syntax tree of one function."""

    def apply(self, function: ast.AST) -> int:
        """Change the tree; return the number of places."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operator(Edit):
    """Replace an operator, everywhere or only its ``nth`` occurrence."""

    old: str
    new: str
    nth: int | None = None

    def apply(self, function: ast.AST) -> int:
        places = []
        for node in _in_order(function):
            if isinstance(node, ast.Compare):
                places += [(node.ops, i) for i, op in enumerate(node.ops) if self._meant(op)]
            elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and self._meant(node.op):
                places.append((node, "op"))
        if self.nth is not None:
            places = places[self.nth : self.nth + 1]
        for holder, key in places:
            new = OPERATORS[self.new]()
            if isinstance(holder, list):
                holder[key] = new
            else:
                setattr(holder, key, new)
        return len(places)

    def _meant(self, op: ast.AST) -> bool:
        return type(op) is OPERATORS[self.old]


@dataclass(frozen=True)
class Replace(Edit):
    """Replace an expression, wherever the function holds it, by another one."""

    old: str
    new: str

    def apply(self, function: ast.AST) -> int:
        wanted = _shape(_expression(self.old))
        return _replace(
            function,
            lambda node: isinstance(node, ast.expr) and _shape(node) == wanted,
            lambda _: _expression(self.new),
        )


@dataclass(frozen=True)
class DropCall(Edit):
    """Leave out calls of a function or method: what it was applied to stands there instead."""

    name: str

    def apply(self, function: ast.AST) -> int:
        return _replace(function, lambda node: _calls(node, self.name), _applied_to)


@dataclass(frozen=True)
class RenameCall(Edit):
    """Call another function or method with the same arguments."""

    old: str
    new: str

    def apply(self, function: ast.AST) -> int:
        calls = [node for node in ast.walk(function) if _calls(node, self.old)]
        for call in calls:
            called: Any = call.func  # type: ignore[attr-defined]
            setattr(called, "attr" if isinstance(called, ast.Attribute) else "id", self.new)
        return len(calls)


@dataclass(frozen=True)
class SwapArguments(Edit):
    """Exchange the first two arguments of every call of a function."""

    name: str

    def apply(self, function: ast.AST) -> int:
        calls: list[Any] = [node for node in ast.walk(function) if _calls(node, self.name)]
        calls = [call for call in calls if len(call.args) > 1]
        for call in calls:
            call.args[:2] = call.args[1::-1]
        return len(calls)


@dataclass(frozen=True)
class Argument(Edit):
    """Give a keyword of every call of a function another value, or leave it out (None)."""

    name: str
    keyword: str
    value: str | None

    def apply(self, function: ast.AST) -> int:
        places = 0
        for call in ast.walk(function):
            if not _calls(call, self.name):
                continue
            for own in [k for k in call.keywords if k.arg == self.keyword]:  # type: ignore[attr-defined]
                places += 1
                if self.value is None:
                    call.keywords.remove(own)  # type: ignore[attr-defined]
                else:
                    own.value = _expression(self.value)
        return places


@dataclass(frozen=True)
class SwapNames(Edit):
    """Exchange two names where they are read, within what is returned or assigned to ``into``."""

    one: str
    other: str
    into: str = "return"

    def apply(self, function: ast.AST) -> int:
        places = 0
        for value in _values(function, self.into):
            for node in ast.walk(value):
                if isinstance(node, ast.Name) and node.id in (self.one, self.other):
                    node.id = self.other if node.id == self.one else self.one
                    places += 1
        return places


@dataclass(frozen=True)
class Value(Edit):
    """Return, or assign to the name ``into``, another expression; ``_`` in it is the old one."""

    new: str
    into: str = "return"
    nth: int | None = None

    def apply(self, function: ast.AST) -> int:
        statements = list(_statements(function, self.into))
        if self.nth is not None:
            statements = statements[self.nth : self.nth + 1]
        for statement in statements:
            statement.value = _filled(self.new, statement.value)
        return len(statements)


@dataclass(frozen=True)
class DropStatement(Edit):
    """Leave out every statement that assigns to, or in place changes, ``into``."""

    into: str
    kinds: tuple[type[ast.stmt], ...] = field(default=(ast.Assign, ast.AugAssign, ast.AnnAssign))

    def apply(self, function: ast.AST) -> int:
        doomed = [s for s in _statements(function, self.into) if isinstance(s, self.kinds)]
        for parent in ast.walk(function):
            for block in ("body", "orelse"):
                own = getattr(parent, block, None)
                if isinstance(own, list):
                    left = [s for s in own if not any(s is one for one in doomed)]
                    setattr(parent, block, left or [ast.Pass()] if own else own)
        return len(doomed)


def find(tree: ast.Module, name: str) -> ast.AST | None:
    """Return the function or class of that qualified name (``Class.method.inner``), or None."""
    node: ast.AST = tree
    for part in name.split("."):
        inside = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        named = [n for n in inside if n.name == part and n is not node]
        if not named:
            return None
        node = named[0]
    return node


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _shape(node: ast.AST) -> str:
    return ast.dump(node)


def _in_order(function: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes as they are read, top to bottom."""
    for child in ast.iter_child_nodes(function):
        yield child
        yield from _in_order(child)


def _calls(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (isinstance(called, ast.Name) and called.id == name) or (
        isinstance(called, ast.Attribute) and called.attr == name
    )


def _applied_to(node: ast.Call) -> ast.expr:
    """Return x of ``x.method(…)``, ``function(x, …)`` or ``torch.function(x, …)``."""
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch":
        return node.func.value
    return node.args[0]


def _replace(
    function: ast.AST, meant: Callable[[ast.AST], bool], new: Callable[[Any], ast.expr]
) -> int:
    """Put ``new`` of every node that is meant in its place."""
    places = 0

    class Replacing(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            nonlocal places
            node = self.generic_visit(node)
            if not meant(node):
                return node
            places += 1
            return new(node)

    Replacing().visit(function)
    return places


def _statements(function: ast.AST, into: str) -> Iterator[Any]:
    """Yield the statements that return, or that assign to (a tuple or place of) ``into``."""
    for node in _in_order(function):
        if isinstance(node, ast.Return) and into == "return" and node.value is not None:
            yield node
        elif isinstance(node, ast.Assign) and into in map(ast.unparse, node.targets):
            yield node
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and ast.unparse(node.target) == into:
            yield node


def _values(function: ast.AST, into: str) -> Iterator[ast.expr]:
    for statement in _statements(function, into):
        yield statement.value


def _filled(text: str, old: ast.expr) -> ast.expr:
    """Return the expression with ``old`` for its name ``_``."""
    holder = ast.Expression(_expression(text))
    _replace(holder, lambda node: isinstance(node, ast.Name) and node.id == "_", lambda _: old)
    return holder.body
