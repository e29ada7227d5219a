"""The loops. `rl.RLTrainer` reads as its algorithm; the other modules are its stages.

`generation` runs this rank's engine and graders, `exchange` moves samples to the ranks that train on them,
`minibatch` packs them, `evaluation` measures held-out prompts.

`supervised` is the loop of everything that learns from data as it is. A `Task` says what one example is and what its
loss is: `sft.SftTask`, `reward_model.RewardModelTask` (whose `teacher`, if there is one, scores the pairs beforehand),
`preference.PairTask` and `preference.LabelledTask` (for which `reference` computes log-probs beforehand).
`preference_run` goes through rounds, each with pairs that `round_pairs` generates.
"""
