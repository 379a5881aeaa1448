"""Before:

    blocks_0 = self.blocks_0(x, w0)
    blocks_1 = self.blocks_1(blocks_0, w1)

After, with a plan that prefetches `blocks.1` before segment `blocks.0`:

    prefetch_blocks_1 = fxoffload_ops_prefetch('blocks.1', None)
    blocks_0 = self.blocks_0(x, w0)
    blocks_1 = self.blocks_1(blocks_0, w1)

A prefetch of the next forward (wrap-around) is inserted in the same way, late in the graph. Refuses a plan for another
graph. Moving whole segments to make room was refused: the plan never reorders compute, so results stay bit-equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from fxoffload import ops
from fxoffload.passes.base import node_name, segment_calls
from fxoffload.plan import Plan


@dataclass(frozen=True)
class InsertPrefetches:
    name: ClassVar[str] = "insert-prefetches"

    def __call__(self, gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        for i, call in enumerate(segment_calls(gm, plan)):
            with gm.graph.inserting_before(call):
                for load in plan.prefetches_before(i):
                    gm.graph.create_node(
                        "call_function", ops.prefetch, (load.name, load.after), name=node_name("prefetch", load.name)
                    )
        return gm
