"""A pass over compiled graphs: a depthwise convolution's input gradient takes the sum that follows it along.

    x ─┬─> depthwise ─> ... ─> + ─>          backward    dx = depthwise_input(dz, weight) + dy
       └───────────────────────┘             becomes     dx = depthwise_input(dz, weight, dy)

In a residual block that begins with a depthwise convolution, as ConvNeXt's, the input's gradient is the sum of two.
Added where one of them is made, it costs one more read instead of two reads and a write, and is rounded once.
"""

from __future__ import annotations

from typing import Any

from torch import fx, ops
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from hyperbatch.models import depthwise  # which registers the operations

INPUT_GRADIENT = ops.hyperbatch.depthwise_input.default


class SumsInDepthwise(CustomGraphPass):
    """For inductor's option `post_grad_custom_post_pass`."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=INPUT_GRADIENT):
            total = next(iter(node.users), None)
            if total is not None and (other := _other_summand(total, node)) is not None:
                with graph.inserting_before(total):
                    merged = graph.call_function(INPUT_GRADIENT, (*node.args[:2], other))
                # All but what inductor noted about the arguments: there is one more.
                merged.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
                total.replace_all_uses_with(merged)
                graph.erase_node(total)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, depthwise.__file__))


def _other_summand(total: fx.Node, node: fx.Node) -> fx.Node | None:
    """What `total` adds to the node, if it is a plain sum of two tensors alike and nobody else needs the node."""
    if total.target is not ops.aten.add.Tensor or total.kwargs or len(node.users) != 1 or len(node.args) != 2:
        return None
    others = [arg for arg in total.args if isinstance(arg, fx.Node) and arg is not node]
    if len(others) != 1:
        return None
    here, there = node.meta["val"], others[0].meta["val"]
    return others[0] if here.shape == there.shape and here.dtype == there.dtype == total.meta["val"].dtype else None
