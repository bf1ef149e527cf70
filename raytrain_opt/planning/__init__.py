"""Predict time, memory, storage and cost of a job on a cluster that is only described.

`cluster` describes it, `terms` measures or counts what a worker computes, `prediction` adds up the
terms. Start with `prediction`; docs/planning.md has the equations. Nothing here knows Ray, except
through the plan of the pools in `cluster.resources`, which is pure.
"""
