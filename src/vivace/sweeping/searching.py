"""`vivace.sweep`: many runs of one job, and the best of them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from vivace.errors import InputError, JobError, OutOfMemory, nearest
from vivace.events import OnEvent, Tell, teller
from vivace.files import finite, replace_text
from vivace.inspection import inspect
from vivace.job import Job, JobFunction
from vivace.machine import Machine
from vivace.pages.notebook import listening
from vivace.plan import Plan
from vivace.processes.launch import Child, Source, enough_memory_to, preload
from vivace.sweeping import page, probe
from vivace.sweeping.best import title_of, write_best
from vivace.sweeping.folder import BEST, LOG, PAGE, RESULT, SweepFolder
from vivace.sweeping.importance import importances_of
from vivace.sweeping.packing import SILENCE_SECONDS, Packing, packed
from vivace.sweeping.record import Finalist, TrialRecord, ranked, record_of, spread_of, within_share
from vivace.sweeping.result import Swept
from vivace.sweeping.runs import Repeat, Runs
from vivace.sweeping.space import Parameters, Space, space_of, to_dict, told
from vivace.sweeping.study import Asked, Setting, Study
from vivace.sweeping.transfer import Transferred
from vivace.training.course import differences
from vivace.training.stopping import ends_like_ctrl_c
from vivace.words import count

if TYPE_CHECKING:
    from vivace.sweeping.cluster import Cluster

FINALISTS = 3
COSTS = ("seconds", "parameters")  # of a step; of a model


def run_sweep(
    job: Callable[..., Job] | str,
    space: Mapping[str, Any] | Sequence[str],
    *,
    trials: int,
    seeds: int,
    seed: int,
    plan: Plan | str | os.PathLike[str] | None,
    workers: int | None,
    out: str | os.PathLike[str],
    resume: bool,
    against: str | None,
    transfer: str | None,
    engine: str | None,
    address: str | None,
    on_event: OnEvent | None,
) -> Swept:
    """See `vivace.sweep`, which this is."""
    _check(trials=trials, seeds=seeds, seed=seed, workers=workers, against=against)
    cluster_at = _engine(engine, address)
    begin, tell, machine = time.monotonic(), teller(listening(on_event)), inspect()
    for text in filter(None, (machine.passed_over, _idle_gpus(machine))):
        if cluster_at is None:  # a cluster's machines are others
            tell("notice", {"text": text})
    function = JobFunction(job)
    searched, fixed = space_of(space, function.parameters)
    if transfer is not None:
        function = _transferring(job, function, transfer, searched, fixed)
    source = Source(function)
    loaded = plan if isinstance(plan, Plan) else Plan() if plan is None else Plan.load(plan)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(SweepFolder(out, resume=resume))
        cluster = stack.enter_context(contextlib.closing(cluster_at(folder, workers))) if cluster_at else None
        stack.enter_context(ends_like_ctrl_c())  # Ray takes SIGTERM for itself when it connects
        tell("phase", {"name": "the job is looked at"})
        fusing = not loaded.techniques and against != "seconds" and cluster is None
        looked = _look(source, searched, fixed, machine.num_cores, folder, tell, fusing)
        setting = _setting(function, searched, fixed, seed, looked["epochs"], against, loaded)
        study = Study(folder.journal, setting, searched)
        changed = _begun_anew(study, folder, looked["sources"], tell)
        packing = _as_told(machine, workers, cluster) or packed(
            source, machine, looked["largest"], loaded, _left(study, trials, seeds), seed, folder.path / LOG
        )
        runs = Runs(
            study,
            folder,
            source,
            loaded,
            packing=packing,
            tell=tell,
            shaping=looked["shaping"],
            fusing=fusing,
            cluster=cluster,
        )
        interrupted, finalists = _run(study, runs, trials, seeds, tell)
        device = cluster.name if cluster else machine.device.name
        ends: dict[str, Any] = {"device": device, "seconds": time.monotonic() - begin}
        found = _concluded(runs, function, finalists, looked, changed, interrupted=interrupted, **ends)
        _write(found, folder)
        return found


def _idle_gpus(machine: Machine) -> str:
    """That trials leave some of this machine's GPUs idle; empty where they do not."""
    num = sum(device.kind == "cuda" and device.served for device in machine.devices)
    if machine.device.kind != "cuda" or num < 2:
        return ""
    on_ray = "on a Ray cluster (--engine ray) each has one of its own"
    return f"all trials train on the first of {num} GPUs; {on_ray}"


def _as_told(machine: Machine, workers: int | None, cluster: Cluster | None) -> Packing | None:
    """As many trials at a time as the cluster has places, or the person says; None where nobody does."""
    if cluster is not None:
        return Packing(*cluster.shares)
    return Packing(workers, max(1, machine.num_cores // workers)) if workers is not None else None


def _begun_anew(study: Study, folder: SweepFolder, sources: dict[str, str], tell: Tell) -> str:
    """Of a job that has changed, what had been begun begins anew; a sentence on that, or none."""
    changed = ", ".join(differences(study.sources, sources))
    if changed:
        folder.begin_anew()
        study.begin_anew()
    study.keep_sources(sources)
    if not changed:
        return ""
    begun = (
        "trials that had not ended and runs under other seeds begin anew, and other trials are the old one's"
    )
    text = f"the job has changed since this sweep was begun ({changed}): {begun}"
    tell("notice", {"text": text})
    return text


def _left(study: Study, trials: int, seeds: int) -> int:
    """How many runs are to come at most: of the search, and of the best under other seeds."""
    left = max(trials - len(study.counted()), len(study.open()))
    if study.open() or (left and not study.exhausted):
        return left + FINALISTS * seeds
    known = study.repeated()
    return sum((asked.number, seed) not in known for asked, seed in _under_seeds(study, seeds))


def _run(study: Study, runs: Runs, trials: int, seeds: int, tell: Tell) -> tuple[bool, list[Finalist]]:
    """The search, and the best under other seeds: was it interrupted, and the finalists."""
    if runs.packing.sentence:
        tell("notice", {"text": runs.packing.sentence})
    tell("phase", {"name": "trials are run"})
    try:
        runs.search(trials)
        tell("phase", {"name": "the best configurations are trained under other seeds"})
        return False, _finalists(study, runs, seeds)
    except KeyboardInterrupt:
        return True, _unrepeated(study)


def _check(*, trials: int, seeds: int, seed: int, workers: int | None, against: str | None) -> None:
    if against not in (None, *COSTS):
        raise InputError(f"the metric is weighed against {' or '.join(COSTS)}, not '{against}'")
    if trials < 1:
        raise InputError(f"a sweep needs at least 1 trial, not {trials}")
    if seeds < 0 or seeds == 1:
        raise InputError(f"a spread over seeds needs 2 of them or more, and 0 asks for none, not {seeds}")
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, not {seed}")
    if workers is not None and workers < 1:
        raise InputError(f"at least 1 trial must run at a time, not {workers}")


def _engine(engine: str | None, address: str | None) -> Callable[..., Cluster] | None:
    """What opens the Ray cluster; None: trials run on this machine. Raises InputError without Ray."""
    if engine not in (None, "ray"):
        raise InputError(f"trials run on this machine or with engine ray, not '{engine}'")
    if engine is None:
        if address is not None:
            raise InputError(f"the address '{address}' is a Ray cluster's: give --engine ray with it")
        return None
    from vivace.sweeping.cluster import Cluster

    return partial(Cluster, address or "auto")


def _setting(
    function: JobFunction,
    space: Space,
    fixed: dict[str, Any],
    seed: int,
    epochs: int,
    against: str | None,
    plan: Plan,
) -> Setting:
    objectives = ("metric", *filter(None, [against]))
    transfer = f"{function.width} from {function.base}" if isinstance(function, Transferred) else ""
    techniques = [f"{name} {settings}" if settings else name for name, settings in plan.to_dict().items()]
    under = " + ".join(techniques) or "none"
    return Setting(function.name, to_dict(space), fixed, seed, epochs, objectives, transfer, under)


def _transferring(
    job: object, function: JobFunction, name: str, space: Space, fixed: dict[str, Any]
) -> Transferred:
    """The function whose learning rates are those of the smallest width that is searched."""
    known = function.parameters
    if name not in known:
        raise InputError(f"the job's function has no parameter '{name}'{nearest(name, known)}")
    default = known[name].default
    values = probe.values_of(space[name]) if name in space else [fixed.get(name, default), default]
    values = [value for value in values if value is not known[name].empty]
    wrong = [value for value in values if not isinstance(value, int | float) or isinstance(value, bool)]
    if wrong:
        raise InputError(f"learning rates are carried over along a number, and {name} may be {wrong[0]!r}")
    if len(set(values)) == 1:
        raise InputError(f"{name} is always {values[0]}: with --transfer give it a range, as {name}=32,64")
    return Transferred(job, name, min(values))


def _look(
    source: Source,
    space: Space,
    fixed: dict[str, Any],
    threads: int,
    folder: SweepFolder,
    tell: Tell,
    fusing: bool,
) -> dict[str, Any]:
    """What the parameters change; raises JobError where the first configuration cannot be built. Of another
    that cannot, `tell` says so: its parameter may fit with other values of the rest. Raises InputError where
    what learning rates are to be carried over along would change no weight.

    `shaping` change shapes of weights or, where runs may be fused, what else those of one stack have in
    common. Of real numbers only the first counts: no two runs share one, unless they are made to.
    """
    tried, found = probe.variations(space, fixed), dict[str, list[dict[str, Any] | None]]()
    counted = [name for name, values in space.items() if not isinstance(values, FloatDistribution)]
    with Child(probe.ENTRY, source, {"threads": threads}, log=folder.path / LOG) as child:
        preload(probe.OURS)  # while the child begins
        first = _looked_at(child, *tried[""], closely=fusing)
        for name, some in tried.items():
            look = partial(_if_built, child, tell=tell, closely=fusing and name in counted)
            found[name] = [first if name == "" else look(one) for one in some]
        preload(child.ask("libraries", SILENCE_SECONDS))
        if isinstance(function := source.payload, Transferred):
            name = function.width
            wide = [one for one, look in zip(tried.get(name, []), found.get(name, []), strict=True) if look]
            _asked(child, "rates", (wide or tried.get(name) or tried[""])[-1])
    looks = [one for some in found.values() for one in some if one is not None]
    sizing = [
        n for n, some in found.items() if any(not one or one["shape"] != first["shape"] for one in some)
    ]
    if isinstance(function, Transferred) and function.width in space and function.width not in sizing:
        raise InputError(f"{function.width} changes the shape of no weight: give the width with --transfer")
    kinds = {n: {first["kind"], *(one["kind"] for one in some if one)} - {""} for n, some in found.items()}
    return {
        **first,
        "epochs": max(one["epochs"] for one in looks),
        "shaping": [name for name in space if name in sizing or len(kinds[name]) > 1],
        "largest": tried[""][0] | {name: _largest(name, tried, found) for name in counted},
    }


def _looked_at(child: Child, parameters: Parameters, *, closely: bool) -> dict[str, Any]:
    found: dict[str, Any] = _asked(child, "look", parameters, closely=closely)
    return found


def _asked(child: Child, command: str, parameters: Parameters, **how: bool) -> Any:
    try:
        with enough_memory_to(f"begin a trial with {told(parameters)}"):
            found = child.ask(command, SILENCE_SECONDS, parameters=parameters, **how)
    except JobError as error:
        raise JobError(f"with {told(parameters)}: {error}") from None
    return found


def _if_built(child: Child, parameters: Parameters, tell: Tell, *, closely: bool) -> dict[str, Any] | None:
    try:
        return _looked_at(child, parameters, closely=closely)
    except (JobError, OutOfMemory) as error:
        tell("notice", {"text": f"{error}; a trial in which this happens fails, and the sweep goes on"})
        return None


def _largest(
    name: str, tried: dict[str, list[Parameters]], found: dict[str, list[dict[str, Any] | None]]
) -> Any:
    """The value of a parameter that makes the most weights; of equals the last, as of batch sizes."""
    values = [one[name] for one in (*tried[""], *tried[name])]
    sizes = [look["num_parameters"] if look else 0 for look in (*found[""], *found[name])]
    return max(zip(sizes, range(len(values)), values, strict=True))[2]


def _finalists(study: Study, runs: Runs, seeds: int) -> list[Finalist]:
    """The best configurations, trained under other seeds."""
    first, wanted = _unrepeated(study), _under_seeds(study, seeds)
    if not wanted:
        return first
    metrics = runs.repeat(wanted)
    found = []
    for one in first:
        values = {seed: metric for (number, seed), metric in metrics.items() if number == one.number}
        spread = spread_of(values) if values else None
        found.append(Finalist(one.number, one.parameters, one.metric, spread))
    return ranked(found)


def _under_seeds(study: Study, seeds: int) -> list[Repeat]:
    """The best configurations, each with `seeds` seeds that the search has not seen."""
    fresh = [study.setting.seed + 1 + number for number in range(seeds)]
    return [(Asked(one.number, one.parameters), seed) for one in _unrepeated(study) for seed in fresh]


def _unrepeated(study: Study) -> list[Finalist]:
    """The best configurations as the search saw them."""
    done = [t for t in study.trials() if t.state == TrialState.COMPLETE]
    best = sorted(done, key=lambda trial: -trial.values[0])[:FINALISTS]
    return [Finalist(t.number, {**study.setting.fixed, **t.params}, float(t.values[0]), None) for t in best]


def _concluded(
    runs: Runs,
    function: JobFunction,
    finalists: list[Finalist],
    looked: dict[str, Any],
    changed: str,
    *,
    device: str,
    seconds: float,
    interrupted: bool,
) -> Swept:
    study, folder, setting = runs.study, runs.folder, runs.study.setting
    records = [record_of(t, setting.fixed) for t in (*study.counted(), *study.open())]
    best = finalists[0] if finalists else None
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
    num_ended = sum(record.state != "open" for record in records)
    title = title_of(num_ended, function.name, best.parameters) if best else ""
    return Swept(
        job=write_best(folder.path / BEST, function, best.parameters, title) if best else "",
        function=function.name,
        metric_name=looked["metric_name"],
        metric_data=looked["metric_data"],
        objectives=setting.objectives,
        best=best.parameters if best else {},
        metric=best.rank if best else None,
        finalists=tuple(within_share(finalists, looked["metric_name"])),
        trials=tuple(records),
        importances=importances_of(study.trials(), study.importances, setting.seed),
        front=tuple(study.front()) if study.costs else (),
        fusing=tuple(runs.decisions),
        epochs=setting.epochs,
        pruned_seconds_saved=_saved(records, setting.epochs),
        sampler=study.sampler_name,
        pruner=study.pruner_name,
        seed=setting.seed,
        workers=runs.at_once,
        threads=runs.packing.threads,
        packing=runs.packing.to_dict(),
        plan=runs.plan.to_dict(),
        seconds=seconds,
        date=began.isoformat(timespec="seconds"),
        device=device,
        out=str(folder.path),
        page_path=str(folder.path / PAGE),
        notices=tuple(filter(None, [changed, runs.packing.sentence, *_notices(records, runs)])),
        interrupted=interrupted,
    )


def _notices(records: Sequence[TrialRecord], runs: Runs) -> list[str]:
    """What the person should know of how trials were run."""
    found, plan = list[str](), runs.plan
    if runs.cluster is not None:
        found += [runs.cluster.lost] if runs.cluster.lost else []
        found.append(f"trials were run by {runs.cluster.name}, each by itself: none were trained as one")
    is_open = any(record.state == "open" for record in records)
    if runs.study.exhausted and not is_open and len(records) < runs.wanted:
        found.append(f"all {count(len(records), 'combination')} were tried: {runs.wanted} were asked for")
    for number, reasons in sorted(runs.failed_under.items()):
        times = count(len(reasons), "other seed")
        behind = f"trial {number} failed under {times}, and stands behind those that failed less"
        found.append(f"{behind}; {reasons[-1]}")
    left = [record for record in records if record.plan_left]
    if left:
        why = f"{left[-1].plan_left} (trial {left[-1].number})"
        found.append(f"the plan did not act to the end in {count(len(left), 'trial')}: {why}")
    elif plan.techniques:
        found.append("the plan acted in every trial, and its first steps were repeated under the reference")
    if plan.techniques:
        found.append("runs were not trained as one: a plan acts on the steps of a run alone")
    if "seconds" in runs.study.costs:
        beside = " while others ran" if runs.at_once > 1 else ""
        found.append(
            f"runs were not trained as one, and each was timed once{beside}: of trials whose times are near "
            "to each other any may be the faster one"
        )
    return found


def _saved(records: Sequence[TrialRecord], epochs: int) -> float:
    """Seconds that the epochs would have taken which pruning left out, at each trial's own pace; `epochs`
    stands in where an earlier version has not noted a trial's own number.
    """
    return sum(
        record.seconds * ((record.of_epochs or epochs) - len(record.curve)) / len(record.curve)
        for record in records
        if record.state == "pruned" and record.curve
    )


def _write(found: Swept, folder: SweepFolder) -> None:
    replace_text(folder.path / RESULT, json.dumps(finite(found.to_dict()), indent=1, default=str) + "\n")
    replace_text(Path(found.page_path), page.render(found))
