"""Warnings of the pinned libraries that say nothing about a run, silenced where they would come once a rank."""

import warnings

_MESSAGES = (
    # Megatron-Core at import: what is missing is what the torch backend and torch's Adam are for.
    r".*(Apex|Transformer Engine).*not installed",
    # Megatron-Core's own default for CUDA graphs, which are off.
    r"full scope is deprecated",
    # Megatron-Core's schedule asks for the gradient of what it sends between stages.
    r"The \.grad attribute of a Tensor that is not a leaf",
    # Megatron-Core's checkpoints are of ShardedTensor, and torch announces its end at each load.
    r".*(deprecating ShardedTensor|load_state_dict` is deprecated|save_state_dict` is deprecated)",
    # Names of collectives that Megatron-Core 0.16.1 uses and torch 2.13 has renamed.
    r".*torch\.distributed\.\w+` is deprecated",
)
for message in _MESSAGES:
    warnings.filterwarnings("ignore", message=message)
