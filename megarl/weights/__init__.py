"""Hugging Face ↔ Megatron: which box of which tensor each parameter shard is, and streaming in both directions.

`pieces` says, for every parameter of this rank, which boxes of which Hugging Face tensors it is made of (`geometry` has
the arithmetic); `load_hf` copies the boxes in, `export_hf` streams whole tensors out, `exchange` brings them to the
ranks that want them, and `save_hf` writes a Hugging Face folder.

Syncs go by a plan that each rank derives alone: `placement` says where in a layout every tensor lies, `replicas` who
gives what to whom, `plan` what travels in which bucket; `bucket_stream` walks it, and an engine takes each `bucket`.
"""
