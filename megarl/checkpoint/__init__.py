"""Saving and loading, so that nothing half-written ever stands under its final name.

`weights.save_weights` writes a model's weights as a Megatron dist_checkpoint that `weights.load_weights` reads in any
layout; `publish` makes a finished folder appear at once; `manifest` says what a checkpoint is, without torch.
"""
