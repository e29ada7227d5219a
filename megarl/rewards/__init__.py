"""Scores of responses: graders, functions of the user's own, and the worker processes that run them.

`manager.RewardManager` takes samples as they are generated and gives them back with rewards. `graders` are the rules
for known data sets, `custom` loads a function from a file; both run in processes of `worker`, which import neither
torch nor the rest of megarl, start in a fraction of a second, and can be killed without harm.
"""
