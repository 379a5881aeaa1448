"""Before:

    blocks_1 = self.blocks_1(blocks_0, w1)
    getitem_1 = blocks_1[0]

After, with a plan that streams `blocks.1`:

    blocks_1 = self.blocks_1(blocks_0, w1)
    evict_blocks_1 = fxoffload_ops_evict('blocks.1')
    getitem_1 = blocks_1[0]

An eviction stands right behind the call of the last reader, so that nothing else delays the copy that waits for it. Refuses a
plan for another graph. Evicting at the next prefetch of the same bytes was refused: it would hide from the graph how long a
load lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from fxoffload import ops
from fxoffload.passes.base import node_name, segment_calls
from fxoffload.plan import Plan


@dataclass(frozen=True)
class InsertEvictions:
    name: ClassVar[str] = "insert-evictions"

    def __call__(self, gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        calls = segment_calls(gm, plan)
        for load in reversed(plan.loads):
            with gm.graph.inserting_after(calls[load.evict_after]):
                gm.graph.create_node("call_function", ops.evict, (load.name,), name=node_name("evict", load.name))
        return gm
