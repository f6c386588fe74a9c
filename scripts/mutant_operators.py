"""The changes that ``scripts/mutants`` makes: those of cosmic-ray that leave plausible code, and two more."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from cosmic_ray.operators.operator import Operator  # pyright: ignore[reportMissingImports]
from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]
from parso.python.tree import Newline, PythonNode  # pyright: ignore[reportMissingImports]

_COMPARISONS = ("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")
_EQUALITIES = ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "BitAnd_BitOr", "BitOr_BitAnd")
_OTHERS = (
    "AddNot",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
)
_AUGMENTED = ("+", "-", "*", "|", "&")
_MOST_NUMBER = 100  # larger constants stay: one more or less is no fault
Place = tuple[int, int]  # line from 1, column from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A changed module."""

    path: str  # from the root of the project
    operator: str
    place: Place
    before: str
    code: str


class SwapArguments(Operator):
    """Swaps two neighbouring positional arguments of a call."""

    def mutation_positions(self, node):
        """See ``Operator``."""
        for one, other in _neighbours(node):
            yield (one.start_pos, other.end_pos)

    def mutate(self, node, index):
        """See ``Operator``."""
        one, other = list(_neighbours(node))[index]
        first, second = node.children.index(one), node.children.index(other)
        node.children[first], node.children[second] = other, one
        return node

    @classmethod
    def examples(cls):
        """See ``Operator``."""
        return ()


class DeleteStatement(Operator):
    """Deletes a call, an augmented assignment, or an assignment to an attribute or an item."""

    def mutation_positions(self, node):
        """See ``Operator``."""
        if _is_deletable(node):
            yield (node.start_pos, node.end_pos)

    def mutate(self, node, index):
        """See ``Operator``."""
        leaf = node.get_first_leaf()
        return PythonNode("simple_stmt", [Newline(leaf.prefix + "pass", node.start_pos), node.children[-1]])

    @classmethod
    def examples(cls):
        """See ``Operator``."""
        return ()


_OWN = {"SwapArguments": SwapArguments, "DeleteStatement": DeleteStatement}


def _neighbours(node) -> Iterator[tuple]:
    """Two positional arguments of a call that follow each other and differ, where their order matters."""
    if node.type != "arglist" or node.parent.get_previous_leaf().value in ("min", "max"):
        return
    arguments = [child for child in node.children if child.type != "operator"]
    for one, other in pairwise(arguments):
        codes = [each.get_code(include_prefix=False) for each in (one, other)]
        if "argument" not in (one.type, other.type) and codes[0] != codes[1]:
            yield one, other


def _is_deletable(node) -> bool:
    if node.type != "simple_stmt" or node.get_code().lstrip().startswith(("super()", "logger.")):
        return False
    statement = node.children[0]
    if statement.type == "expr_stmt":
        target, sign = statement.children[:2]
        return target.type == "atom_expr" or sign.get_code(include_prefix=False).rstrip("=") in _AUGMENTED
    return statement.type in ("atom_expr", "await_expr")


def operators() -> dict[str, Operator]:
    """All operators, by name."""
    names = [f"ReplaceComparisonOperator_{pair}" for pair in (*_COMPARISONS, *_EQUALITIES)]
    names += [f"ReplaceBinaryOperator_{pair}" for pair in _BINARY]
    found = {name: get_operator(f"core/{name}")() for name in (*names, *_OTHERS)}
    return found | {name: made() for name, made in _OWN.items()}


def mutants(path: str, code: str, *, count: int, rng: random.Random) -> list[Mutant]:
    """Choose ``count`` mutants of a module: first a line for each, then a place in it, then a change."""
    nodes, left_out = list(ast_nodes(get_ast(code))), _left_out(code)
    signs = {node.start_pos for node in nodes if node.parent is not None and node.parent.type == "parameters"}
    lines: dict[int, dict[Place, list[tuple[str, int]]]] = {}
    for name, operator in operators().items():
        positions = [place for node in nodes for place, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(positions):
            if place not in signs and not any(begin <= place < end for begin, end in left_out):
                lines.setdefault(place[0], {}).setdefault(place, []).append((name, occurrence))
    chosen: list[Mutant] = []
    for line in rng.sample(sorted(lines), len(lines)):
        if len(chosen) == count:
            break
        place = rng.choice(sorted(lines[line]))
        name, occurrence = rng.choice(lines[line][place])
        changed = mutate_code(code, operators()[name], occurrence)
        if _is_other_code(code, changed):
            chosen.append(Mutant(path=path, operator=name, place=place, before=code, code=changed))
    return chosen


def num_lines(code: str) -> int:
    """Return the lines that hold statements within functions: a module's weight in the sample."""
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return len({node.lineno for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)})


def _is_other_code(code: str, changed: str) -> bool:
    """Return whether a change left valid code that means something else."""
    try:
        return ast.dump(ast.parse(code)) != ast.dump(ast.parse(changed))
    except SyntaxError:
        return False


def _left_out(code: str) -> list[tuple[Place, Place]]:
    """The ranges whose changes say nothing: types, decorators, assertions, large constants, ``strict`` of zip."""
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.AnnAssign() | ast.arg():
                found += _given(node.annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found += [*node.decorator_list, *_given(node.returns)]
            case ast.ClassDef():
                found += node.decorator_list
            case ast.Assert():
                found.append(node)
            case ast.Constant() if isinstance(node.value, int | float) and abs(node.value) > _MOST_NUMBER:
                found.append(node)
            case ast.Call(func=ast.Name(id="isinstance")) | ast.Assign(value=ast.BinOp(op=ast.BitOr())):
                found.append(node)
            case ast.Call():
                found += [keyword.value for keyword in node.keywords if keyword.arg == "strict"]
            case _:
                pass
    return [((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)) for node in found]


def _given(node: ast.expr | None) -> Iterable[ast.expr]:
    return () if node is None else (node,)
