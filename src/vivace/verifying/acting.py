"""Does a plan act? What changed nothing keeps every promise, so each technique proves first that it acted."""

from __future__ import annotations

from vivace.errors import ChildFailed, JobError, Refused
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.processes.launch import Child
from vivace.training.crew import Company, Crew, needed_by
from vivace.verifying.verifier import TIMEOUT_SECONDS

WORKER = "vivace.measuring.worker:Worker"  # which `tune` asks, too; started by its name, and not imported
WARM_SECONDS, WARM_SHARE = 0.5, 0.05  # at most, of the seconds given
WARMER_SECONDS = 2.0  # before a technique that showed nothing is asked again


def evidence_of(
    plan: Plan, company: Company, machine: Machine, *, threads: int = 0, seconds: float | None = None
) -> dict[str, str]:
    """How each technique of the plan acted, by its name: from one step with all of them beside one without.

    In two processes, one after the other, that have done nothing else: what a technique shows in a process
    as a whole, such as memory that is given back, would not tell where something ran before. Several ranks
    take these steps together.

    Raises Refused with the technique's name where one declines or changed nothing, and JobError where the job
    fails without the plan.
    """
    if not plan.techniques:
        return {}
    arguments = {"machine": machine.to_dict(), "threads": threads}
    warm = WARM_SECONDS if seconds is None else min(WARM_SECONDS, WARM_SHARE * seconds)

    def begin(child: Child | Crew, plan: Plan) -> None:
        child.ask("open", TIMEOUT_SECONDS, plan=plan.to_dict())
        child.ask("warm", TIMEOUT_SECONDS, seconds=warm)

    try:
        with company.child(WORKER, arguments, meeting=True) as job:
            begin(job, needed_by(company.world_size))
            reference = job.ask("observe", TIMEOUT_SECONDS)
    except ChildFailed as failed:
        raise of_the_job(failed) from None
    with company.child(WORKER, arguments, meeting=True) as planned:
        begin(planned, plan)
        try:
            confirmed = planned.ask("confirm", TIMEOUT_SECONDS, reference=reference)
        except Refused:  # what is measured, such as memory that is given back, may need longer to show
            if company.world_size > 1:  # whose processes have ended
                raise
            planned.ask("warm", TIMEOUT_SECONDS, seconds=WARMER_SECONDS)
            confirmed = planned.ask("confirm", TIMEOUT_SECONDS, reference=reference)
    found: dict[str, str] = confirmed["evidence"]
    return found


def of_the_job(failed: ChildFailed) -> ChildFailed | JobError:
    """The error of a process that ran the job without any plan; a JobError unless it has a cause of its own,
    such as a lack of memory.
    """
    return failed if failed.code else JobError(f"the job cannot run as it is, before any plan: {failed}")
