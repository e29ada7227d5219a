"""What a run will cost before it costs a GPU: memory of each rank and phase, time of a step, layouts that fit.

Nearly everything is arithmetic on a model's config.json and a `RunConfig`, without torch. `architecture` lists the
weights of a model and `parameters` shares them out to ranks; `activations` and `schedule` say what passes keep, and
`memory` adds it all up by phase; `step_time` estimates the time from `hardware` and `communication`, beside `published`
runs; `sync_plan` counts what goes to the engines; `search` tries layouts; `plan` puts a run's answers together as
`sections`. `weight_map` proves that the shards of all ranks are the model: `weight_map_run` starts `simulated_ranks`,
the only module here that imports torch, which builds every rank's modules without memory.
"""
