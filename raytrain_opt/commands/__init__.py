"""What the command line adds to a run.

`submit` runs a job on a cluster and downloads its results with `download`; `evaluate` computes the
errors of finished runs and of ensembles; `doctor` checks a cluster before a
run, `plan` predicts a run on one that is only described.

May import everything but `cli`; each module is imported by the command that needs it.
"""
