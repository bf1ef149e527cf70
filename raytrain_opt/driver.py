"""The main job. `train` reads as the algorithm; `TrainingRun` makes its moves."""

from __future__ import annotations

from raytrain_opt.batch_size import with_batch_size, with_scaled_lr
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.result import RunResult, finish
from raytrain_opt.resume import unfinished_run
from raytrain_opt.start import open_run, open_session
from raytrain_opt.training_run import TrainingRun


def run(
    job: Job,
    *,
    address: str | None = None,
    verbose: bool = False,
    resume: str | None = None,
    fresh: bool = False,
    started_s: float | None = None,
) -> RunResult:
    """Train as the job says; returns when done.

    `address`: a Ray cluster ("auto", "ray://…", host:port); default: the one of RAY_ADDRESS,
    else Ray is started on this machine and ended afterwards. A Ray that the caller has
    initialised is used and left as it is. `resume`: the run directory of an earlier run of
    this job, to go on from its last commit; default: as the job's `resume` says. `fresh`: where
    the job asks for a batch-size search, do not take the kept answer of an earlier one.
    `started_s` (monotonic): from when the start-up time counts. Raises RaytrainOptError; what was
    committed stays in the run directory.
    """
    began_s = monotonic_s() if started_s is None else started_s
    resume = resume or unfinished_run(job)
    with open_session(
        job, address=address, verbose=verbose, began_s=began_s, resume=resume
    ) as session:
        job = with_scaled_lr(with_batch_size(job, session, fresh=fresh))
        with open_run(job, session) as this:
            train(job, this)
            return finish(this)


def train(job: Job, this: TrainingRun) -> None:
    """STPT (Yamada et al., algorithm 1), or any other policy, on the resident pools."""
    state = this.initial_state()
    history = this.position.history
    for epoch in range(this.position.next_epoch, job.epochs + 1):
        plan = this.policy.plan(epoch, history, this.losses)
        while plan.candidates:
            results = this.pretrain(state, plan)
            choice = this.policy.choose(plan, results)
            history = (*history, choice)
            state = this.take_state(state, plan, results, choice)
            this.commit_round(state, plan, history)
            plan = this.policy.plan(epoch, history, this.losses)
        state = this.main_train(state, plan)
        this.evaluate(state, plan)
        this.commit(state, plan, history)
