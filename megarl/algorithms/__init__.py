"""The mathematics of reinforcement learning: pure functions of tensors, which import torch and nothing of megarl.

`advantages` turns rewards into advantages, `policy_loss` and `kl` turn log-probs into losses of tokens, and `aggregate`
weights tokens so that losses can be summed over micro-batches and ranks. Advantages and policy losses are found by the
name that the config gives; a file that registers another name adds to them (`registry.Registry`).

Everything is computed in float32. What a mask leaves out is never read, so it may be NaN or infinite.
"""
