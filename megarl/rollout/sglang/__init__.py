"""SGLang behind the `Engine` protocol; `megarl.rollout.sglang_engine` and `server_engine` are its faces.

SGLang ends the process it was started from when anything in it fails, so it never runs in a rank. The first rank of an
engine starts a server process (`process`, `environment`), which runs SGLang (`server`) and, through a hook in its
scheduler processes (`scheduler`), takes weights and checks them (`payload`). A server on GPUs of its own is the same
with a port (`listener`): a rank connects to it (`server_connection`, `sockets`), both find that they fit (`facts`), and
weights come over a process group (`update_group`). What a rank and either of them say goes through a `channel` as
`messages`; `shared_engine` is what both engines have in common. `placement` and `options` say where an engine stands
and how it is configured. `cpu_standins` holds what SGLang imports and a CPU does not have.
"""
