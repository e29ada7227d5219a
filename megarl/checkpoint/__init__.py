"""Saving and loading, so that nothing half-written ever stands under its final name.

`weights.save_weights` writes a model's weights as a Megatron dist_checkpoint that `weights.load_weights` reads in any
layout; `publish` makes a finished folder appear at once, `resumable` does so and goes on where a killed run stopped;
`manifest` says what a checkpoint is, without torch.
`training` is the checkpoint of a run, written at once or in the background; `optimizer_state` its optimizer in any
layout, `file_list` how damage is noticed, `retention` which are kept, and `run_lock` that one run at a time writes.
"""
