"""SGLang behind the `Engine` protocol; `megarl.rollout.sglang_engine` is its face.

SGLang ends the process it was started from when anything in it fails, so it never runs in a rank. The first rank of an
engine starts a server process (`process`, `environment`), which runs SGLang (`server`) and, through a hook in its
scheduler processes (`scheduler`), takes weights and checks them (`payload`). `placement` and `options` say where an
engine stands and how it is configured. `cpu_standins` holds what SGLang imports and a CPU does not have.
"""
