"""The records that a run writes, and how they are written and read.

Start with `records`: one model for each record file, with `spans` (timeline and events) and
`predictions`. `recorder` writes them during a run, `reader` reads them back, `event_log` collects
what happens beside the numbers, and `tensorboard` writes the same numbers for TensorBoard.

May import `search`, `storage`, `paths`, `results`, `errors` and `clock`; neither torch nor Ray.
"""
