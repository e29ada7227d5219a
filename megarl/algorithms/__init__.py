"""The mathematics of reinforcement learning: pure functions of tensors, which import torch and nothing of megarl.

`advantages` turns rewards into advantages, `policy_loss`, `value_loss` and `kl` turn log-probs into losses of tokens,
and `aggregate` weights tokens so that losses can be summed over micro-batches and ranks. `kl_reward` puts a KL penalty
into rewards, `rollout_correction` measures and corrects what separates engine and trainer, `filters` choose samples.
`pairwise` and `preference` are losses over pairs of responses: of reward models, and of DPO and its relatives.

Advantages, policy losses and preference losses are found by the name that the config gives, as soon as this folder is
imported; a person's own file adds names (`plugins`). What needs other ranks gets their collectives as an argument
(`ranks.AcrossRanks`).

Everything is computed in float32. What a mask leaves out is never read, so it may be NaN or infinite.
"""

# For their entries in the registries.
from megarl.algorithms import (  # noqa: F401
    covariance_losses,
    group_advantages,
    preference,
    sequence_losses,
    token_advantages,
    token_losses,
)
