"""From rows to what a forward pass takes: datasets, the order in which they are drawn, packing into micro-batches.

- `prompts`: `PromptDataset`, rows in verl's columns as `Prompt`s (`sample`); `sft`: `SftDataset`, conversations with a
  loss mask (`turns`); `pairs`: `PairDataset`, a preferred response and another; `labelled`: responses that are good or
  bad; `demonstrations`: prompts with a response to imitate. They read `parquet` files lazily, speak through the model's
  chat template (`chat`), and have one rule for what is too long (`lengths`). Conversations are tokenised once, as far
  as there is room (`encoded`).
- `responses`: `OfflineResponses`, prompts whose responses the files have too (`response_rows`).
- `sampler`: `PromptSampler`, which rows each step takes; its state can be saved.
- `packing` turns ragged sequences into `[1, tokens]` micro-batches with `cu_seqlens`, in the order that tensor, context
  and pipeline parallelism need.
"""
