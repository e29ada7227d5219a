"""Stand-ins for two packages that SGLang imports and that have no CPU build.

This folder is put on the import path of an engine's processes, and only on a CPU: see `environment`. Nothing in it
computes anything; what SGLang would call on a GPU raises.
"""
