"""The expressions of a kernel file's directives: whole numbers in C's notation, of sizes and macros."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

#: Numbers stay small enough that no expression takes long.
MOST = 2**62


def ceil_div(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)  # as C does: towards zero
    return quotient if (a < 0) == (b < 0) else -quotient


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
    ast.FloorDiv: _divide, ast.Mod: lambda a, b: a - b * _divide(a, b), ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_NODES = (
    ast.Name, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.expr_context, ast.And,
    ast.Or, *_OPERATORS,
)  # fmt: skip

FUNCTIONS = {"ceil_div": ceil_div, "min": min, "max": max, "dim3": lambda *sizes: sizes}


def parse(text: str) -> ast.expr:
    """Returns the expression ``text``.

    Raises:
        ValueError: it is none, or has what is not allowed; says what.
    """
    python = re.sub(r"sizeof\s*\(\s*(float|int)\s*\)", "4", text)
    python = python.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python).strip()
    try:
        tree = ast.parse(python, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"expected an expression, found {text.strip()!r}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        ):
            raise ValueError(f"expected one of {', '.join(FUNCTIONS)}, found {ast.unparse(node)}")
        fits = isinstance(node, _NODES) or (
            isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < MOST
        )
        if not fits:
            raise ValueError(f"expected whole numbers, names and + - * / %, found {text.strip()!r}")
    return tree


def text(tree: ast.expr) -> str:
    """Returns an expression in C's notation."""
    python = ast.unparse(tree)
    for word, sign in ((" and ", " && "), (" or ", " || "), ("not ", "!")):
        python = python.replace(word, sign)
    return python


def names(tree: ast.expr) -> set[str]:
    """Returns the names of the numbers that an expression reads."""
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in called}


def value(tree: ast.expr, given: Mapping[str, Any]) -> Any:
    """Returns an expression's value.

    Raises:
        ValueError: a name is not known, a divisor is 0, or a number is too large.
    """
    match tree:
        case ast.Constant():
            return tree.value
        case ast.Name():
            if tree.id not in given:
                raise ValueError(f"expected a size or a macro of the file, found {tree.id!r}")
            return given[tree.id]
        case ast.Call():
            try:
                return FUNCTIONS[tree.func.id](*(value(a, given) for a in tree.args))
            except (TypeError, ZeroDivisionError):
                raise ValueError(f"expected numbers that fit, found {ast.unparse(tree)}") from None
        case ast.BoolOp():
            wants = isinstance(tree.op, ast.Or)
            return any(value(v, given) for v in tree.values) if wants else all(
                value(v, given) for v in tree.values
            )  # fmt: skip
        case ast.UnaryOp():
            return _OPERATORS[type(tree.op)](value(tree.operand, given))
        case ast.Compare():
            left = value(tree.left, given)
            for op, right in zip(tree.ops, tree.comparators, strict=True):
                found = value(right, given)
                if not _OPERATORS[type(op)](left, found):
                    return False
                left = found
            return True
    try:
        found = _OPERATORS[type(tree.op)](value(tree.left, given), value(tree.right, given))
    except ZeroDivisionError:
        raise ValueError(f"expected a divisor above 0, found {ast.unparse(tree)}") from None
    if abs(found) > MOST:
        raise ValueError(f"expected a number below 2^62, found {found}")
    return found
