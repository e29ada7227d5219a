"""From rows to what a forward pass takes: packing of sequences into micro-batches.

`packing` turns ragged sequences into `[1, tokens]` micro-batches with `cu_seqlens`, in the order that tensor, context
and pipeline parallelism need.
"""
