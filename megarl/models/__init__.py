"""Megatron models: built from a Hugging Face config, run over packed micro-batches.

`build.build_model` gives a `MegatronModel` (actor, critic, reward or reference) without weights, which
`megarl.weights.load_hf` fills; `pipeline` runs it forward, or forward and backward, through Megatron's schedules;
`logprobs` turns vocabulary-sharded logits into log-probabilities and entropy, `scores` a scalar head's values into the
scores of whole sequences.
"""
