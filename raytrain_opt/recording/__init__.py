"""The records that a run writes, and how they are written and read.

Start with `records`: one model for each record file. `recorder` writes them during a run, collects
what happens beside the numbers, and writes the numbers for TensorBoard; `reader` reads them back.

May import `search`, `storage`, `paths`, `results`, `errors` and `clock`; neither torch nor Ray.
"""
