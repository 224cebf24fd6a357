"""Mutants of Python source: the same module with one small error.

    comparison  a < b -> a <= b,  a == b -> a != b,  a in b -> a not in b
    arithmetic  a + b -> a - b,  a * b -> a / b,  a & b -> a | b,  -a -> a
    constant    3 -> 4,  0.5 -> 1.0,  True -> False
    boolean     a and b -> a or b,  not a -> a,  if a -> if not a
    removed     a call, an augmented assignment, an assignment to an attribute or an element, or a raise, is left out
    swapped     f(a, b) -> f(b, a)

Annotations, docstrings, texts of errors, decorators and imports are not mutated, nor what cannot change a result: `strict` of zip,
`raise NotImplementedError` in an abstract method, and the order of arguments that are interchangeable.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# Functions of which the order of the first two arguments does not matter, or raises TypeError.
ORDERLESS = {"max", "min", "maximum", "minimum", "equal", "gcd", "lcm", "logaddexp", "isinstance", "issubclass"}
ORDERLESS |= {"promote_types", "transpose", "flip", "addcmul", "addcmul_", "swapaxes"}
SKIPPED = {"annotation", "returns", "decorator_list", "type_params", "type_comment", "bases"}
NEGATED_BY_COMPARISON = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn


@dataclass(frozen=True)
class Mutant:
    """One mutation of one module: the `index`-th of those that `sites` finds in it."""

    path: str  # relative to the package
    index: int
    kind: str
    line: int
    end: int
    function: str  # the qualified name of the innermost function or class; "" at the level of the module
    imported: bool  # True if the mutated code runs when the module is imported
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {self.text}"

    @property
    def key(self) -> str:
        """What names the mutant when lines move."""
        return f"{self.path} {self.function}: {self.text}"


@dataclass
class Site:
    """A place in a syntax tree, and what to put there."""

    kind: str
    node: ast.AST
    new: ast.AST
    put: Callable[[ast.AST], None]
    statement: ast.stmt
    function: str
    imported: bool


def mutants(root: Path, path: str) -> list[Mutant]:
    """All mutants of the module at this path under the package's folder."""
    found: list[Mutant] = []
    texts: Counter[tuple[str, str]] = Counter()
    for index, site in enumerate(sites(ast.parse((root / path).read_text(encoding="utf-8")))):
        text = _text(site)
        texts[site.function, text] += 1
        if (count := texts[site.function, text]) > 1:
            text = f"{text} [{count}]"
        found.append(Mutant(path, index, site.kind, _line(site), _end(site), site.function, site.imported, text))
    return found


def mutated(root: Path, mutant: Mutant) -> ast.Module:
    """The syntax tree of the module with this one mutation; it keeps the lines of the original."""
    tree = ast.parse((root / mutant.path).read_text(encoding="utf-8"))
    site = sites(tree)[mutant.index]
    site.put(ast.copy_location(site.new, site.node))
    return ast.fix_missing_locations(tree)


def sites(tree: ast.Module) -> list[Site]:
    return list(_walk(tree, ast.Pass(), "", True))


def _line(site: Site) -> int:
    return site.node.lineno  # type: ignore[attr-defined]


def _end(site: Site) -> int:
    return site.node.end_lineno or _line(site)  # type: ignore[attr-defined]


def _text(site: Site) -> str:
    old = " ".join(ast.unparse(site.node).split())
    new = " ".join(ast.unparse(site.new).split())
    text = f"{old[:90]} -> {'(removed)' if site.kind == 'removed' else new[:90]}"
    return f"{text} in {ast.unparse(site.statement).splitlines()[0][:90]}" if site.kind == "constant" else text


def _walk(node: ast.AST, statement: ast.stmt, function: str, imported: bool) -> Iterator[Site]:
    """The sites below a node, in the order of the source."""
    for field, value in ast.iter_fields(node):
        if field in SKIPPED or (isinstance(node, ast.ClassDef) and field == "keywords"):
            continue
        inside, when = function, imported
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) and field == "body":
            name = getattr(node, "name", "<lambda>")
            inside = f"{function}.{name}" if function else name
            when = isinstance(node, ast.ClassDef) and imported
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _left_out(child):

                def put(new: ast.AST, field: str = field, index: int | None = index) -> None:
                    if index is None:
                        setattr(node, field, new)
                    else:
                        getattr(node, field)[index] = new

                now = child if isinstance(child, ast.stmt) else statement
                for kind, new in _mutations(child, field):
                    yield Site(kind, child, new, put, now, inside, when)
                if not isinstance(child, ast.Raise) and not _negative_number(child):
                    yield from _walk(child, now, inside, when)


def _left_out(node: ast.AST) -> bool:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    strict = isinstance(node, ast.keyword) and node.arg == "strict"
    abstract = isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node)
    return docstring or typing or strict or abstract or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def _negative_number(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)


def _mutations(node: ast.AST, field: str) -> Iterator[tuple[str, ast.AST]]:
    """Each kind of mutation of this node itself, with the node to put in its place."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], COMPARISONS[type(op)](), *node.ops[index + 1 :]]
                yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.BinOp(op=op, left=ast.Constant(value=value)) if type(op) in ARITHMETIC and not isinstance(value, str):
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.AugAssign(op=op):
            yield "removed", ast.Pass()
            if type(op) in ARITHMETIC:
                yield "arithmetic", ast.AugAssign(node.target, ARITHMETIC[type(op)](), node.value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            yield "constant", ast.UnaryOp(ast.USub(), ast.Constant(_other(value)))
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert() as op):
            yield "boolean" if isinstance(op, ast.Not) else "arithmetic", node.operand
        case ast.Constant(value=bool() | int() | float() as value):
            yield "constant", ast.Constant(_other(value))
        case ast.BoolOp(op=op):
            yield "boolean", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), node.values)
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "removed", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", ast.Pass()
        case ast.Call(args=[first, second, *rest]) if _swappable(node, first, second):
            yield "swapped", ast.Call(node.func, [second, first, *rest], node.keywords)
    if field in ("test", "ifs") and not _negated_otherwise(node):
        yield "boolean", ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def _other(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) or value == 0 else value * 2


def _swappable(call: ast.Call, first: ast.expr, second: ast.expr) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return not starred and name not in ORDERLESS and ast.unparse(first) != ast.unparse(second)


def _negated_otherwise(node: ast.AST) -> bool:
    """Whether another mutation of this condition is its negation already."""
    compared = isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], NEGATED_BY_COMPARISON)
    return compared or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
