"""Benchmarks, started as `python -m benchmarks.NAME` from the repository's root.

Each module's docstring says what is measured, what the timers cover and what the JSON keys mean;
the last line printed is one JSON object. RESULTS.md lists the results.

Learning-rate searches: start in `time_to_accuracy`; their rows, tasks and units
are in `comparison_*`, and `in_process` trains without Ray. Batch size: `batch_size_search`. Speed
of training: `train_throughput` against `plain_ddp`, `gpu_train`, `optimizer_step`,
`async_straggler`. Start and failures: `startup`, `chaos`, `every_fault`; equal bits: `same_bits`.
"""
