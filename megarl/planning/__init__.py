"""What a run will cost before it costs a GPU: memory of each rank and phase, time of a step, layouts that fit.

Everything is arithmetic on a model's config.json and a `RunConfig`; nothing here imports torch. `architecture` lists
the weights of a model and `parameters` shares them out to ranks; `activations` and `schedule` say what passes keep, and
`memory` adds it all up by phase; `step_time` estimates the time from `hardware` and `communication`, beside `published`
runs; `search` tries layouts; `plan` puts a run's answers together as `sections`.
"""
