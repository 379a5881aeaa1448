"""Facts of a traced graph: its weights, its inputs, and what every node reads, allocates and costs (`read.read_facts`).

Counts are sympy expressions of the dynamic dimensions, plain integers when shapes are static. Two values alias when they share a
storage, so a view of a weight counts as a use of that weight wherever it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the module: a parameter, a buffer or a tensor attribute, and one placeholder of the graph.

    `nbytes` spans the memory from the first to the last element, holes of a strided layout included.
    """

    placeholder: str
    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mutated: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node of the graph. `weights` are placeholder names, `reads` and `allocates` storages by number.

    `rate` names the rate of the machine that its operations run at (`machine`).
    `kind` is "extern" (a library kernel, a matrix product say: its operands are in memory anyway), "fused" (Inductor will
    fuse it with its neighbours), "view" or "other" (no tensors).
    """

    name: str
    target: str
    path: tuple[tuple[str, str, str], ...]
    """The modules around it, outermost first: (key, dotted path, class name)."""
    weights: tuple[str, ...]
    reads: tuple[int, ...]
    allocates: tuple[tuple[int, sympy.Expr], ...]
    flops: sympy.Expr
    touched_nbytes: sympy.Expr
    rate: str
    kind: str


@dataclass(frozen=True, slots=True)
class Facts:
    weights: tuple[Weight, ...]
    inputs: tuple[tuple[str, int, sympy.Expr], ...]
    """Placeholders that are no weights: (name, storage, bytes)."""
    nodes: tuple[NodeFacts, ...]
    outputs: tuple[int, ...]
    """Storages that the graph returns."""
    output_weights: tuple[tuple[int, str, bool], ...]
    """Outputs that alias a weight: (position, placeholder, whether the output is a weight that the graph writes, as a whole)."""
    symbols: tuple[tuple[sympy.Symbol, str, int | None], ...]
    """Dynamic dimensions, and where a call shows them: (symbol, placeholder, dimension of that tensor; None: it is an int)."""
    hints: tuple[tuple[sympy.Symbol, int], ...]
    """Dynamic dimensions and the sizes that were traced."""
    written_inputs: tuple[str, ...] = ()
    """Placeholders that are no weights, and that the graph writes to."""

    def number(self, expression: sympy.Expr | int) -> int:
        """The value of an expression at the sizes that were traced."""
        if isinstance(expression, (int, sympy.Integer)):
            return int(expression)
        return int(expression.subs(dict(self.hints)))

    def value(self, expression: sympy.Expr | float) -> float:
        """The value of an expression at the sizes that were traced."""
        if isinstance(expression, (int, float, sympy.Number)):
            return float(expression)
        return float(expression.subs(dict(self.hints)))

    def __str__(self) -> str:
        from fxoffload.show import table

        rows = [(w.name, w.nbytes, w.dtype, "x".join(map(str, w.shape)), "mutated" if w.mutated else "") for w in self.weights]
        total = sum(w.nbytes for w in self.weights)
        return f"facts  {len(self.nodes)} nodes  {len(self.weights)} weights, {total} bytes\n" + table(
            ("weight", "bytes", "dtype", "shape", ""), rows
        )
