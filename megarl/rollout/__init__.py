"""Generating samples: engines behind one protocol.

`engine` says what an engine is: token ids in, token ids and log-probs out, weights by Hugging Face name.
`transformers_engine` is the one that runs anywhere: it holds the weights, `generation` runs one `generate` call,
`batch` decides what runs and what waits, `decoder` is the model, `kv_cache` its memory, `sampling` draws the tokens.
`sglang_engine` is SGLang on the ranks' devices, `server_engine` SGLang elsewhere; `sglang` has their parts.
"""
