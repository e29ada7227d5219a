"""How a process of a run ends: with its parent, and when somebody asks it to.

`parent` lets the kernel end a process whose parent is gone; `stop_signals` notes SIGUSR1 and SIGTERM, which the loops
act on at the end of a step (`trainers.preemption`). Imports nothing heavy: reward workers use it, and
`launch/train.py` before it imports torch.
"""
