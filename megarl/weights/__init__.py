"""Hugging Face ↔ Megatron: which box of which tensor each parameter shard is, and streaming in both directions.

`pieces` says, for every parameter of this rank, which boxes of which Hugging Face tensors it is made of; `load_hf`
copies the boxes in, `export_hf` streams whole tensors out, and `save_hf` writes a Hugging Face folder.
"""
