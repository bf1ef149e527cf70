"""What the command line adds to a run.

`init` writes a job file for a folder of data, `validate` checks one, `doctor` checks a cluster
before a run; `runs` lists runs; `evaluate` computes the errors of finished runs and of ensembles.

May import everything but `cli`, Ray only in `doctor`; a command imports its module.
"""
