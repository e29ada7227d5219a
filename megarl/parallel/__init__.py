"""Where a rank stands: process groups, context-parallel order, length balancing, exact global reductions.

The sizes themselves (`Layout`) are part of what a run is and live in `megarl.config`. Import the modules by name:
`groups` and `reductions` need torch, `balance` does not, and this file imports none of them.
"""
