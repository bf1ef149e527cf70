"""What the command line adds to a run.

`init` writes a job file for a folder of data, `validate` checks one; `submit` runs a job on a
cluster and downloads its results with `download`; `runs` lists runs; `evaluate` computes the
errors of finished runs and of ensembles; `doctor` checks a cluster before a run, `plan` predicts
a run on one that is only described.

May import everything but `cli`; each module is imported by the command that needs it.
"""
