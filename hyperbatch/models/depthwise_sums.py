"""A pass over compiled graphs that merges the sum after a depthwise convolution's input gradient into its kernel.

    x ─┬─> depthwise ─> ... ─> + ─>          backward    dx = depthwise_input(dz, weight) + dy
       └───────────────────────┘             becomes     dx = depthwise_input(dz, weight, dy)

In a residual block that begins with a depthwise convolution, such as ConvNeXt's, the gradient of the input is the sum
of two. If the kernel that makes one of them adds the other, the sum costs one read instead of two reads and a write,
and it is rounded once.
"""

from __future__ import annotations

from typing import Any

from torch import fx, ops
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from hyperbatch.models import depthwise  # the import registers the operations

INPUT_GRADIENT = ops.hyperbatch.depthwise_input.default


class SumsInDepthwise(CustomGraphPass):
    """The pass, for inductor's option `post_grad_custom_post_pass`."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=INPUT_GRADIENT):
            total = next(iter(node.users), None)
            if total is not None and (other := _other_summand(total, node)) is not None:
                with graph.inserting_before(total):
                    merged = graph.call_function(INPUT_GRADIENT, (*node.args[:2], other))
                # Inductor's note about the arguments is not copied, because there is one more argument now.
                merged.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
                total.replace_all_uses_with(merged)
                graph.erase_node(total)
                graph.erase_node(node)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, depthwise.__file__))


def _other_summand(total: fx.Node, node: fx.Node) -> fx.Node | None:
    """Returns the other summand if `total` is a plain sum of the node and a tensor of the same shape and dtype, and
    nothing else uses the node. Otherwise returns None."""
    if total.target is not ops.aten.add.Tensor or total.kwargs or len(node.users) != 1 or len(node.args) != 2:
        return None
    others = [arg for arg in total.args if isinstance(arg, fx.Node) and arg is not node]
    if len(others) != 1:
        return None
    here, there = node.meta["val"], others[0].meta["val"]
    return others[0] if here.shape == there.shape and here.dtype == there.dtype == total.meta["val"].dtype else None
