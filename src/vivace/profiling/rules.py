"""The rules: each looks at what was seen and returns its verdict, or None. Pure functions, torch-free."""

from __future__ import annotations

import re
from collections import Counter

from vivace import words
from vivace.profiling import rules_memory, rules_precision, rules_ranks
from vivace.profiling.seen import LARGE_WAIT, Seen, Verdict
from vivace.words import duration, percent, times

LARGE_COLLATING = 0.3  # of the step: every DataLoader collates samples
LARGE_SYNC = 0.05
LARGE_IDLE = 0.25
LARGE_SILENCE = 0.4
HANDING_SECONDS = 20e-6  # that Python and torch take at most to hand over one operator
LARGE_RESTART = 0.10
CLEAR_GAIN = 1.05
MANY_GRAPHS = 3  # in the timed window; one or two belong to a first validation

COLLATING = "collating samples into batches"
OWN_CODE = "code of the dataset or of its collate_fn"
LARGE_SECOND = 0.25  # of the samples; a second kind of work is then named beside the first
# By the innermost frame's path and function, then by the text of the lines: what is certain comes first.
KINDS = (
    (COLLATING, r"torch/utils/data/_utils/collate"),
    (
        "decoding",
        r"PIL/(ImageFile|\w+Plugin|Image.py:\d+ (open|load))|torchvision/io|jpeg|decode|soundfile|torchaudio"
        r"|zlib|gzip|lzma|bz2",
    ),
    ("decoding", r"\bImage\.open|imread|\bjson\b|json/|librosa"),
    (
        "reading",
        r"_npyio|numpy/lib/\w*format|torch/serialization|\bpickle|h5py|lmdb|sqlite|pandas/io|np\.load",
    ),
    (
        "augmenting",
        r"transforms|albumentations|kornia|augment|imgaug|noise|rotate|blur|filter|resize|crop|flip",
    ),
    ("augmenting", r"random|numpy|scipy|skimage|PIL"),
    (
        "reading",
        r"\bopen|\b_?(read|load)|_(read|load)|sleep|seek|mmap|socket|ssl|http|requests|wait|fetch_|download",
    ),
)


def rules() -> list[object]:
    """All rules, in the order in which equal verdicts are shown."""
    return [
        rules_precision.overflow,
        rules_precision.amp_misuse,
        rules_memory.memory,
        recompiles,
        rules_ranks.multi_gpu,
        data_wait,
        placing,
        threads,
        restarts,
        sync,
        idle,
        rules_precision.no_gain,
        rules_precision.no_effect,
    ]


def judge_all(seen: Seen) -> list[Verdict]:
    """Verdicts of every rule, those on correctness first, then by what they would bring."""
    found = [verdict for rule in rules() if (verdict := rule(seen)) is not None]  # type: ignore[operator]
    wrong = ("overflow", "amp_misuse", "memory")
    causes = {verdict.cause for verdict in found}
    late = rules_ranks.straggler(seen) if "multi_gpu" in causes else None
    # Values asked for, or what only one rank does, are what the loop's own code does.
    if "sync" in causes or (late is not None and late.phase == "idle"):
        found = [verdict for verdict in found if verdict.cause != "idle"]
    return sorted(found, key=lambda v: (v.cause not in wrong, -(v.low + v.high)))


def data_wait(seen: Seen) -> Verdict | None:
    """The step waits for its batch: is it what the dataset does, or the number of workers?"""
    share = seen.shares["data"]
    if share < LARGE_WAIT:
        return None
    step = seen.step_seconds
    wait, rest = share * step, (1 - share) * step
    workers = int(seen.loader.get("num_workers") or 0)
    fetch = seen.record.get("fetch") or {}
    best, several = 1 / (1 - share), words.count(workers, "loader worker")
    if workers == 0:
        hidden = _with_workers(seen, wait, rest)
        kind, where = _what_fetching_does(seen)
        if kind == COLLATING and share < LARGE_COLLATING:
            return None
        evidence = f"{percent(share)} of the step ({duration(wait)}) waits for data: {kind}{where}"
        low, high = min(0.95 * best, step / hidden), best * 1.2  # the rest finds its data in the caches again
        return Verdict("input", evidence, max(1.0, low), high, _next_input(seen, kind))
    batches = fetch.get("worker_batches") or 0
    each = fetch["worker_seconds"] / batches if batches else None
    if each is not None and each / workers < 0.5 * step:
        evidence = (
            f"{percent(share)} of the step waits for {several}, although one makes a batch in "
            f"{duration(each)}: handing batches over costs more than making them "
            f"({words.count(seen.cores, 'core')})"
        )
        low = max(1.0, step / (rest + each) * 0.9)
        crowded = 1.6 if workers >= seen.cores else 1.0  # they take the cores that the rest of the step uses
        return Verdict(
            "workers",
            evidence,
            low,
            best * 1.1 * crowded,
            ("num_workers=0" if workers == 1 else "fewer workers, or none") + seen.measured("both"),
        )
    if each is not None and workers < seen.cores and each / seen.cores < rest:
        needed = min(seen.cores, max(workers + 1, -(-each // rest)))
        evidence = (
            f"{percent(share)} of the step waits for {several}; one makes a batch in {duration(each)}, the "
            f"step takes {duration(rest)}, and {seen.cores} cores are there"
        )
        low = step / max(rest, each / needed) * 0.8
        return Verdict("workers", evidence, max(1.0, low), best * 1.1, f"num_workers={int(needed)}")
    kind, where = _what_fetching_does(seen)
    evidence = f"{percent(share)} of the step waits for data in spite of {several}: {kind}{where}"
    return Verdict("input", evidence, max(1.0, 0.8 * best), best * 1.1, _next_input(seen, kind))


def _with_workers(seen: Seen, wait: float, rest: float) -> float:
    """The step's seconds where workers fetch, if they have to share the cores with training."""
    busy = (seen.record.get("data_cpu_seconds") or 0.0) / max(wait, 1e-9)
    threads = min(int(seen.flags.get("threads") or 1), seen.cores) if seen.device == "cpu" else 1
    return max(rest, (min(busy, 1.0) * wait + rest * threads) / seen.cores)


def _what_fetching_does(seen: Seen) -> tuple[str, str]:
    """Reading, decoding, augmenting or collating, by where the sampling thread found it, and the line; what
    else takes long is named behind it.
    """
    kinds: Counter[str] = Counter()
    lines: dict[str, Counter[str]] = {}
    for site, count in (seen.record.get("fetch") or {}).get("seen", []):
        theirs, _, inner = site.partition(" | ")
        kind = _kind_of(inner, theirs)
        kinds[kind] += count
        lines.setdefault(kind, Counter())[theirs] += count
    if not kinds:
        return "the loader's own work", ""
    named = []
    for kind, count in kinds.most_common(2):
        file, _, function = lines[kind].most_common(1)[0][0].rpartition(" ")
        named.append((kind, count / sum(kinds.values()), f"{seen.short(file)}, {function}"))
    (first, share, place), *others = named
    where = f" ({percent(share)} of it; most in {place})"
    for kind, share, place in others:
        where += f" and {kind} ({percent(share)}; {place})" if share >= LARGE_SECOND else ""
    return first, where


def _kind_of(inner: str, theirs: str) -> str:
    """What a library's path, a function's name, or the text of a line says; the person's folders do not."""
    path, _, function = inner.rpartition(" ")
    library = re.search(r"(site-packages|/lib/python[\d.]+|torch/utils)/.*", path)
    name = path.rpartition("/")[2]
    line = "" if library else _source(inner)
    for text in (f"{library.group() if library else ''} {function}", line, _source(theirs), name):
        for kind, pattern in KINDS:
            if re.search(pattern, text):
                return kind
    return OWN_CODE


def _source(place: str) -> str:
    import linecache

    path, _, rest = place.rpartition(" ")[0].rpartition(":")
    return linecache.getline(path, int(rest)) if rest.isdigit() else ""


def _next_input(seen: Seen, kind: str) -> str:
    advice = {
        "reading": "keep the samples in memory or in one memory-mapped file",
        "decoding": "decode once and keep the result, or decode faster",
        "augmenting": "augment a whole batch at once",
        COLLATING: "index the whole tensor by a batch of indices",
    }.get(kind, "make the dataset cheaper")
    return advice + seen.measured("workers and prefetching")


def placing(seen: Seen) -> Verdict | None:
    """The step waits while its batch is copied to the device."""
    share = seen.shares["place"]
    size = seen.record.get("batch_bytes") or 0
    if seen.device == "cpu" or share < LARGE_WAIT or not size:
        return None
    seconds = share * seen.step_seconds
    rate, fast = size / seconds, seen.machine.ceilings.get("host_to_device_pinned")
    evidence = (
        f"{percent(share)} of the step ({duration(seconds)}) copies batches to the device: "
        f"{words.size(size)} at {words.quantity(rate, 'B/s')}"
    )
    advice = "copy the next batch during this step, or send fewer bytes (uint8 images, converted there)"
    if not seen.loader.get("pin_memory"):
        advice = "pin_memory=True in the loader, and .to(device, non_blocking=True)"
        evidence += f"; from pinned memory this machine copies {words.quantity(fast, 'B/s')}" if fast else ""
    saved = share * (1 - min(1.0, rate / fast)) if fast else 0.0
    return Verdict(
        "input", evidence, 1 / (1 - saved), 1.1 / (1 - share), f"{advice}; {seen.tune} measures it"
    )


def threads(seen: Seen) -> Verdict | None:
    """torch uses fewer or more threads than there are cores, and the experiment says that it matters."""
    found = seen.experiment("threads")
    if found is None or found[0] < CLEAR_GAIN:
        return None
    used = seen.flags.get("threads")
    where = (seen.record.get("asked") or {}).get("threads")
    by = f", set in {seen.short(where)}" if where else ""
    environment = seen.flags.get("environment") or {}
    by = by or "".join(f", set by {key}={value}" for key, value in environment.items())
    evidence = (
        f"torch uses {words.count(used, 'thread')} on {words.count(seen.cores, 'core')}{by}; "
        f"with {seen.cores} a copy of the step ran {times(found[1])} as fast"
    )
    advice = f"torch.set_num_threads({seen.cores}), or leave it to torch"
    return Verdict("workers", evidence, found[0] * 0.95, found[2] * 1.05, advice)


def restarts(seen: Seen) -> Verdict | None:
    """Loader workers start anew each epoch, and that takes long."""
    workers = int(seen.loader.get("num_workers") or 0)
    broken = seen.record.get("interrupted") or []
    whole = sum(seen.record.get("walls") or [])
    usual = seen.record["seconds"]["data"]
    begun = [row for row in broken if row["starting"] > usual]
    lost = sum(row["starting"] - usual for row in begun)
    lasting = seen.loader.get("persistent_workers") or seen.loader.get("hears_epochs")
    if not workers or lasting or whole <= 0 or lost / whole < LARGE_RESTART:
        return None
    share, batches = lost / whole, seen.loader.get("batches")
    often = f"every {words.number(batches)} batches" if batches else "for each pass over the data"
    evidence = (
        f"{words.count(workers, 'worker')} started anew {often}, which takes "
        f"{duration(lost / len(begun))}: {percent(share)} of all time"
    )
    best = 1 / (1 - share)
    return Verdict("workers", evidence, 1 + 0.5 * (best - 1), best * 1.15, "persistent_workers=True")


def sync(seen: Seen) -> Verdict | None:
    """Python asks tensors for their values, so that the host waits and the loop is slow."""
    rows = seen.record.get("waits") or []
    steps = max(1, int(seen.record.get("watched_steps") or 1))
    if not rows:
        return None
    per_step = sum(row["span"] for row in rows) / steps
    share = min(0.95, per_step / seen.step_seconds)
    if seen.device == "cuda":  # waiting for a busy device costs nothing: only what it leaves idle does
        share = min(share, 1 - seen.busy_share)
    if share < LARGE_SYNC:
        return None
    first = rows[0]
    evidence = (
        f"{_often(first['count'], steps)} {seen.short(first['site'])} asks a tensor for its value: "
        f"{duration(per_step)} of {duration(seen.step_seconds)}"
    )
    best = 1 / (1 - share)
    advice = "gather values on the device, and ask for them once in many steps"
    return Verdict("sync", evidence, 1 + 0.4 * (best - 1), best * 1.15, advice)


def _often(count: float, steps: int) -> str:
    return f"{count:.0f} times in {steps} steps" if count < steps else f"{count / steps:.0f} times a step"


def idle(seen: Seen) -> Verdict | None:
    """The loop's own code between two steps takes long: logging, saving, sleeping."""
    share = seen.shares["idle"]
    if share < LARGE_IDLE:
        return _silence(seen)
    evidence = (
        f"{percent(share)} of the step ({duration(share * seen.step_seconds)}) is the loop's own "
        "code between an update and the next batch: logging, saving, Python"
    )
    best = 1 / (1 - share)
    return Verdict("idle", evidence, 1 + 0.7 * (best - 1), best * 1.1, "do it once in many steps")


def _silence(seen: Seen) -> Verdict | None:
    """The same in a loop without a DataLoader, where what makes a batch comes before the backward pass and
    counts to forward: time in which no operator runs, beyond what handing them over takes.
    """
    if seen.loader or seen.device != "cpu" or not seen.trace or seen.record.get("silent_modules"):
        return None
    handing = HANDING_SECONDS * (seen.record.get("kernels") or 0) / seen.step_seconds
    elsewhere = seen.shares["data"] + seen.shares["communication"] + handing
    share = min(1 - seen.busy_share - elsewhere, seen.shares["forward"] + seen.shares["idle"])
    if share < LARGE_SILENCE:
        return None
    evidence = (
        f"no operator runs for {percent(share)} of the step ({duration(share * seen.step_seconds)}), "
        "most of it before the backward pass: the loop's own code, such as making the batch"
    )
    best = 1 / (1 - share)
    advice = "a DataLoader with workers, or batches made before the loop"
    return Verdict("idle", evidence, 1 + 0.3 * (best - 1), best * 1.2, advice)


def recompiles(seen: Seen) -> Verdict | None:
    """torch.compile compiles again and again, or cuts the model in pieces."""
    found = seen.record.get("dynamo") or {}
    reasons = found.get("reasons") or []
    window = sum(seen.record.get("walls") or []) or 1.0
    seconds = sum(row["seconds"] for row in found.get("compilations") or [])
    late = found.get("compilations") or []
    anew = [row for row in late if row["reason"]]
    stops = [reason for reason, _ in found.get("breaks") or []]
    stops += [row["failed"] for row in found.get("failed") or []]
    gave_up = any(re.search(r"recompile.{0,20}limit", str(reason)) for reason in stops)
    often = len(late) >= MANY_GRAPHS and seconds / window > LARGE_SYNC
    rows = reasons or late
    at_least = "at least " if found.get("cut") else ""  # torch has kept only the last of them
    in_window = at_least if len(late) >= (found.get("cut") or 0) else ""
    if rows and (often or len(anew) >= MANY_GRAPHS or gave_up):
        share = min(0.97, seconds / window)
        named = [row for row in rows if not row["place"].startswith("None")]
        theirs = [row for row in named if "site-packages" not in row["place"]]
        row = (theirs or named or rows)[-1]
        why = " ".join(str(row["reason"] or "a new graph").partition("(HINT")[0].split())[:200]
        where = seen.short(row["place"].rpartition(" ")[0])
        evidence = (
            f"torch.compile made {found['new_graphs']} graphs in {seen.record['steps']} steps after warm-up"
            f" ({in_window}{seconds:.3g} s of {window:.3g} s), last {where}: {why}"
            if often or len(anew) >= MANY_GRAPHS
            else f"torch.compile compiled {where} {at_least}{len(reasons)} times anew, and gave up: {why}"
        )
        best = 1 / (1 - share)
        quiet = seen.record.get("quiet_seconds")  # of a step in which nothing was compiled
        most = max(best, seen.step_seconds / quiet) if quiet else 20 * best if late else best
        return Verdict("recompiles", evidence, max(1.0, 0.7 * best), most * 1.3, _next_recompile(why))
    breaks = found.get("breaks") or []
    failed = found.get("failed") or []
    if failed and not found.get("graphs"):
        row = failed[-1]
        why = " ".join(str(row["failed"]).split())[:200]
        evidence = f"torch.compile gave up on {seen.short(row['place'].rpartition(' ')[0])}: {why}"
        return Verdict("recompiles", evidence, 0.9, 1.5, "TORCH_LOGS=graph_breaks shows each line")
    if breaks:
        reason = " ".join(str(breaks[0][0]).partition("Explanation:")[0].split())[:200]
        places = [seen.short(place) for place in found.get("break_places") or {} if place]
        where = f" ({', '.join(places[:3])})" if places else ""
        evidence = f"torch.compile breaks the graph {sum(n for _, n in breaks)} times{where}: {reason}"
        high = 1 / max(0.3, seen.busy_share)
        advice = "do that with tensors (torch.where in place of if), or outside of what is compiled"
        advice += "; TORCH_LOGS=graph_breaks shows each line"
        return Verdict("recompiles", evidence, 1.0, max(1.1, high), advice)
    return None


def _next_recompile(why: str) -> str:
    """What to do about a guard that fails again and again."""
    if number := re.search(r"([A-Za-z_][\w.\[\]']*) == -?[\d.]+", why):
        return (
            f"change {number.group(1)} outside of what is compiled, or hold it in a tensor: a graph fixes it"
        )
    if re.search(r"size|shape|stride|len\(|dynamic", why):
        return "pad to a few shapes, or torch.compile(..., dynamic=True)"
    return "keep what the reason names the same in each step; TORCH_LOGS=recompiles shows each"
