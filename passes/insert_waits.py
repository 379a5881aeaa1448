"""Before:

    blocks_1 = self.blocks_1(blocks_0, w1)

After, with a plan that streams `blocks.1`:

    wait_blocks_1 = fxoffload_ops_wait('blocks.1')
    blocks_1 = self.blocks_1(blocks_0, w1)

A wait stands right before the first reader, after the prefetches of that place: those need not wait for it. Refuses a plan
for another graph. One wait for several loads was refused: a copy is one event, and the first reader names the one it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from fxoffload import ops
from fxoffload.passes.base import node_name, segment_calls
from fxoffload.plan import Plan


@dataclass(frozen=True)
class InsertWaits:
    name: ClassVar[str] = "insert-waits"

    def __call__(self, gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        calls = segment_calls(gm, plan)
        for load in plan.loads:
            with gm.graph.inserting_before(calls[load.wait_before]):
                gm.graph.create_node("call_function", ops.wait, (load.name,), name=node_name("wait", load.name))
        return gm
