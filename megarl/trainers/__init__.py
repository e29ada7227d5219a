"""The loops. `rl.RLTrainer` and `sft.SFTTrainer` each read as their algorithm; the other modules are their stages.

`generation` runs this rank's engine and graders, `exchange` moves samples to the ranks that train on them,
`minibatch` packs them, `evaluation` measures held-out prompts.
"""
