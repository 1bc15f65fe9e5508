"""Rows of the evidence tables: what each benchmark other than `cpu` asked, and what its record answers."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator

from faults import counts as told_counts
from faults import figures as told_figures

from vivace.advising.software import chosen, options_of
from vivace.inspection.table import API_KEYS, ceiling_in_words
from vivace.measuring.statistics import speed_ratio
from vivace.recipes import RECIPES

Row = tuple[str, str]  # what was asked, what was found
WORDS = {
    "README.md": {
        "columns": ("question", "answer", "record", "command"),
        "ours": "Defects that we planted ourselves in small jobs of our own, {title}: caught by `verify`; "
        "correct plans rejected",
        "caught": "The same jobs, {title}: caught",
        "left": "; {left} judgements are left",
        "others": "Silent errors that others met (TrainCheck's evaluation), as edits of small trainings: "
        "caught by `verify --against`; correct edits rejected",
        "met": "{caught[count]} of {caught[of]}; {false_alarms[count]} of {false_alarms[of]}",
        "missed": "; missed: {names}",
        "share": "What verifying takes of a search",
        "of": "{count} of {of} ({rate:.1%})",
        "best": "Speed over the best of `pytorch-autotune` {version}, Fabric, Accelerate, `torch.compile`, "
        "geometric mean of {count} jobs, one core, 120 s of search; job by job",
        "peer": "Speed over that of `pytorch-autotune` {version}, geometric mean of {count} jobs",
        "flatters": " (on CPU, which flatters us: it never tries bfloat16 there)",
        "behind": "Jobs on which Vivace is slower than `pytorch-autotune` beyond noise",
        "none": "none",
        "longer": "`{job}`: as fast as `pytorch-autotune` where both search {budget} s instead of 120",
        "broken": "Results that `verify` rejects: Vivace's, `pytorch-autotune`'s",
        "search": "`{job}`: how near `{budget}` comes to the best of {count} plans, in which share of time",
        "verdicts": "`profile`, cores used: {cores}; {words}",
        "verdicts_words": {
            "planted causes named first": "planted causes that are its first verdict",
            "healthy scripts without a verdict": "healthy scripts without a verdict",
            "gains inside of their interval": "predicted gains whose interval holds the measured one",
        },
        "folders": {"planted": "", "aside": ", of scripts written beside the rules"},
        "profile_cost": {
            "recorded": "What the hooks of `profile` add to a script of {seconds:.0f} s, in {clock} time",
            "whole": "The same with starting Vivace and writing the page",
        },
        "wall": "wall",
        "processor": "processor",
        "added": "{middle:+.1%} ({low:+.1%} to {high:+.1%}; 3 % demanded), {extra:+.1f} s",
        "whole": "{middle:+.1%} ({low:+.1%} to {high:+.1%}), {extra:+.1f} s",
        "loop": "What `profile` says of `{loop}` ({repository}), unmodified",
        "said": "{mark} `{said}`{limit}",
        "marks": {True: "right:", False: "wrong:"},
        "at_limit": ", {share:.0%} of the limit",
        "advise": "Error of `advise` on {n:,} figures, without {split} in the fit: median, worst card",
        "errs": "{median:.0%} (18% demanded), {card} {worst:.0%} (35% demanded); by TFLOPS {tflops:.0%}; "
        "{inside:.0%} in the interval (75-85% demanded)",
        "memory": "Error of a step's predicted peak memory, {pairs} pairs of job and plan: median, largest",
        "gpu_memory": "A step's predicted peak memory beside that of torch's CUDA allocator, run without a "
        "GPU, {pairs} pairs of network and plan: within 3 %; what it reserves within 8 %",
        "blocks": "`{job}`: more time a step at {shares} % of the activation memory, by decisions for blocks",
        "exact": "`{job}`: the same, by whatever changes no bit",
        "rounding": "`{job}`: the same, rounding allowed",
        "floor": "no plan (at least {smallest_percent:.0f} % are needed)",
        "random": "`{job}`: how much slower than the best of {count} random plans in the same memory",
        "cnn_models": "Networks that `fused_batchnorm` trains within its promise, {steps} steps",
        "without": "; refused: {names}",
        "float64": "The same in float64, with products: largest difference of a loss, of what training moved",
        "fold_eval": "Evaluation of `{name}` with `fold_eval`, on one core",
        "conv_gemm": "ResNet-50's bfloat16 step ({batch} images of {pixels} px) with `conv_gemm`: {name}",
        "compress": "`{name}` as `{form}`, found in {share:.0%} of the time for all: over the fastest",
        "compress_by_hand": "`{name}` as `{form}` over `{baseline}` by hand",
        "kernels": "Kernels compiled for {target}: most registers, spilled bytes",
        "script": "`{name}` ({repository}), unmodified, under `vivace run`: whole run",
        "broken_run": "broken: exit codes {exit_codes}",
        "stack": "`{name}`: runs stacked over one after another, steps alone, with their loaders",
        "engines": "`{job}`: trials an hour of `vivace sweep` over {engine}, {count} heats",
        "engine": {"optuna": "plain Optuna in processes", "ray": "Ray Tune"},
        "best_metric": "{}; best metric {:.4g}, theirs {:.4g}",
        "feed": "{images} JPEG files, {part}: tuned over the naive loader, over the best set by hand",
        "feed_parts": {"first_pass": "first epoch", "later_passes": "later epochs"},
        "totals": "Whole trainings from command to end, {count} jobs: longer with the plan",
        "error": "Predicted against measured length of a whole training with the plan, largest error",
        "beside": "{count} jobs tuned beside {load} processes that compute all the time, `--budget fast`: "
        "plans at least 0.95 times as fast as those found alone",
        "right": "{right} of {count}",
        "wrong": "; not: {names}",
        "total": "`{job}` trained whole: without the plan, with it",
        "accuracy": "{count} recipes trained to the end, whole time: the plan over strict fp32, "
        "geometric mean",
        "equals": "{ratio:.2f}x; the same metric within the margin: {equal} of {count}",
        "trained": "`{name}` trained to the end: whole time of the plan over strict fp32; final "
        "{metric} of both",
        "finals": "{interval}; {strict:.4f}, {plan:.4f}: {mark}",
        "same": {True: "the same", False: "not shown to be the same"},
        "frameworks": "Of {count} networks, those that another framework trains faster than PyTorch does "
        "under tune's plan, beyond noise",
        "elsewhere": "`{job}`: the fastest of Keras and JAX over the fastest of PyTorch",
        "apis": "Through {name}: copying, a matrix product in fp32 by a small kernel",
        "faults": "Faults that a training may meet, {count} kinds, each shown by its tests",
    },
    "README.zh-CN.md": {
        "columns": ("问题", "结果", "记录", "命令"),
        "ours": "我们自己植入自写小任务中的错误，{title}：`verify` 发现的；误判的正确方案",
        "caught": "同样的任务，{title}：发现的",
        "left": "；还有 {left} 项未判定",
        "others": "他人训练中真实发生过的静默错误（取自 TrainCheck 的评测），改写为小型训练的修改："
        "`verify --against` 发现的；误判的正确修改",
        "met": "{caught[count]} / {caught[of]}；{false_alarms[count]} / {false_alarms[of]}",
        "missed": "；未发现：{names}",
        "share": "校验占搜索时间的比例",
        "of": "{count} / {of}（{rate:.1%}）",
        "best": "与 `pytorch-autotune` {version}、Fabric、Accelerate、`torch.compile` 中最快者的速度之比，"
        "{count} 个任务的几何平均（一个核，搜索 120 秒）；逐个任务",
        "peer": "与 `pytorch-autotune` {version} 的速度之比，{count} 个任务的几何平均",
        "flatters": "（CPU 上的比较对我们有利：它在 CPU 上从不尝试 bfloat16）",
        "behind": "Vivace 明显慢于 `pytorch-autotune` 的任务",
        "none": "无",
        "longer": "`{job}`：双方都搜索 {budget} 秒（而非 120 秒）时的速度之比",
        "broken": "未通过 `verify` 的结果：Vivace、`pytorch-autotune`",
        "search": "`{job}`：`{budget}` 达到 {count} 个方案中最佳速度的比例，以及所用时间的比例",
        "verdicts": "`profile`（{cores} 核）：{words}",
        "verdicts_words": {
            "planted causes named first": "首个结论即为植入的原因",
            "healthy scripts without a verdict": "正常脚本未被误报",
            "gains inside of their interval": "预测的收益区间包含实测值",
        },
        "folders": {"planted": "", "aside": "（另写的脚本，规则并非据其制定）"},
        "profile_cost": {
            "recorded": "`profile` 的钩子使一个 {seconds:.0f} 秒的脚本增加的{clock}时间",
            "whole": "同上，并包括启动 Vivace 和写页面",
        },
        "wall": "墙钟",
        "processor": "处理器",
        "added": "{middle:+.1%}（{low:+.1%} 至 {high:+.1%}；要求 3%），{extra:+.1f} 秒",
        "whole": "{middle:+.1%}（{low:+.1%} 至 {high:+.1%}），{extra:+.1f} 秒",
        "loop": "`profile` 对未经修改的 `{loop}`（{repository}）的结论",
        "said": "{mark} `{said}`{limit}",
        "marks": {True: "正确：", False: "错误："},
        "at_limit": "，达到极限的 {share:.0%}",
        "advise": "`advise` 在 {n:,} 个公开数据上的误差（{split}不参与拟合）：各卡中位数、最差的卡",
        "errs": "{median:.0%}（要求 18%），{card} {worst:.0%}（要求 35%）；只看 TFLOPS：{tflops:.0%}；"
        "{inside:.0%} 在区间内（要求 75–85%）",
        "memory": "一步训练峰值内存的预测误差，{pairs} 组任务与方案：中位数、最大值",
        "gpu_memory": "一步训练峰值内存的预测，对照 PyTorch 的 CUDA 分配器（无 GPU），"
        "{pairs} 组网络与方案：误差在 3% 以内；其保留的内存在 8% 以内",
        "blocks": "`{job}`：激活内存降到 {shares}% 时每步多花的时间（仅对各模块作选择，逐位相同）",
        "exact": "`{job}`：同上，允许任何逐位相同的方法",
        "rounding": "`{job}`：同上，允许舍入误差",
        "floor": "无方案（至少需要 {smallest_percent:.0f}%）",
        "random": "`{job}`：比同样内存下 {count} 个随机方案中最快的慢多少",
        "cnn_models": "`fused_batchnorm` 在承诺范围内训练的含 BatchNorm 网络（{steps} 步）",
        "without": "；拒绝：{names}",
        "float64": "同上，float64，`products = true`：损失的最大差异、训练改变量的最大差异",
        "fold_eval": "使用 `fold_eval` 评估 `{name}`（单核）",
        "conv_gemm": "ResNet-50 的 bfloat16 训练步（{batch} 张 {pixels} 像素的图片）使用 `conv_gemm`：{name}",
        "compress": "`{name}` 的形式 `{form}`（用时为测完全部形式的 {share:.0%}）：相对其中最快者",
        "compress_by_hand": "`{name}` 的形式 `{form}`：相对手工的 `{baseline}`",
        "kernels": "为 {target} 编译的内核：寄存器最多数、溢出字节数",
        "script": "`{name}`（{repository}），未经修改，用 `vivace run`：完整运行",
        "broken_run": "出错：退出码 {exit_codes}",
        "stack": "`{name}`：多个训练合并相对逐个进行，仅训练步、含数据加载",
        "engines": "`{job}`：`vivace sweep` 每小时试验数相对{engine}，{count} 轮",
        "engine": {"optuna": "多进程的普通 Optuna", "ray": " Ray Tune"},
        "best_metric": "{}；最佳指标 {:.4g}，对方 {:.4g}",
        "feed": "{images} 个 JPEG 文件，{part}：调优后相对朴素加载器、相对手工最佳设置",
        "feed_parts": {"first_pass": "第一轮", "later_passes": "之后各轮"},
        "totals": "从命令到结束的完整训练，不用与使用方案各若干次，{count} 个任务：用方案反而更久的",
        "error": "使用方案的完整训练：预测时长与实测时长的最大误差",
        "beside": "{count} 个任务在另有 {load} 个进程持续计算时以 `--budget fast` 调优："
        "速度不低于独自调优所得方案 0.95 倍的",
        "right": "{count} 个中的 {right} 个",
        "wrong": "；未达到：{names}",
        "total": "完整训练 `{job}`：不用方案、使用方案",
        "faults": "训练可能遇到的 {count} 类故障，每类由相应的测试验证",
        "accuracy": "{count} 个任务完整训练：方案相对严格 fp32 的总用时加速，几何平均",
        "equals": "{ratio:.2f}x；指标在容差内相同：{equal} / {count}",
        "trained": "`{name}` 完整训练：方案相对严格 fp32 的总用时加速；两者最终的 {metric}",
        "finals": "{interval}；{strict:.4f}、{plan:.4f}：{mark}",
        "same": {True: "相同", False: "未能证明相同"},
        "frameworks": "{count} 个网络中，换用其他框架比 PyTorch 采用 tune 的方案更快（超出噪声）的",
        "elsewhere": "`{job}`：Keras 与 JAX 中最快者相对 PyTorch 最快者",
        "apis": "通过 {name}：复制，小内核的 fp32 矩阵乘法",
    },
}
TITLES = {
    "README.md": {
        "new card": "the card",
        "known card and model": "the figure alone",
        "new model": "the family of models",
        "new card and model": "card and family of models",
        "new architecture": "the whole architecture",
        "planted, alone": "the 20 known kinds",
        "planted, with bf16_autocast": "the same, hidden behind bfloat16",
        "planted, least effort": "the same, with the least effort that `tune` spends",
        "further, alone": "further kinds",
        "further, with bf16_autocast": "further kinds, hidden behind bfloat16",
        "further, least effort": "further kinds, with the least effort",
    },
    "README.zh-CN.md": {
        "new card": "该显卡",
        "known card and model": "仅该数据",
        "new model": "该模型族",
        "new card and model": "该显卡和模型族",
        "new architecture": "整个显卡架构",
        "planted, alone": "20 种已知错误",
        "planted, with bf16_autocast": "同上，混在 bfloat16 舍入中",
        "planted, least effort": "同上，用 `tune` 的最小校验量",
        "further, alone": "其他错误",
        "further, with bf16_autocast": "其他错误，混在 bfloat16 舍入中",
        "further, least effort": "其他错误，用最小校验量",
    },
}


def ruler(record: dict, file: str) -> Iterator[Row]:
    """How many defects are caught, how many correct plans are rejected, and the cost."""
    words, titles = WORDS[file], TITLES[file]
    (first, known), *others = [(title, found) for title, found in record["caught"].items() if found["of"]]
    told = words["met"].format(caught=known, false_alarms=record["false_alarms"])
    told += words["left"].format(**record) if record.get("left") else ""
    yield words["ours"].format(title=titles[first]), told
    for title, found in others:
        yield words["caught"].format(title=titles[title]), words["of"].format(**found)
    if record["verify_share_of_search"]:
        yield words["share"], f"{record['verify_share_of_search']:.0%}"


def silent_errors(record: dict, file: str) -> Iterator[Row]:
    """How many of the errors that others met are caught, and how many correct edits are rejected."""
    words, missed = WORDS[file], [f"`{name}`" for name in record["missed"]]
    told = words["missed"].format(names=", ".join(missed)) if missed else ""
    yield words["others"], words["met"].format(**record) + told


def peer(record: dict, file: str) -> Iterator[Row]:
    """The geometric mean of the ratios, and whose results the ruler rejects."""
    words, jobs = WORDS[file], record["jobs"].values()
    over = {name: ratio for name, job in record["jobs"].items() if (ratio := _over_the_best(job)) is not None}
    if over:
        asked = words["best"].format(version=record["versions"]["pytorch-autotune"], count=len(over))
        each = ", ".join(f"`{name}` {ratio:.2f}" for name, ratio in sorted(over.items(), key=lambda o: -o[1]))
        yield asked, f"{statistics.geometric_mean(over.values()):.2f}x; {each}"
    if record["vivace_against_peer"]:
        asked = words["peer"].format(version=record["versions"]["pytorch-autotune"], count=len(jobs))
        flatters = words["flatters"] if record["note"] else ""
        yield asked, _interval(record["vivace_against_peer"]) + flatters
    ratios = {name: job["vivace_against_peer"] for name, job in record["jobs"].items()}
    behind = [f"`{name}`" for name, ratio in ratios.items() if ratio and ratio["high"] < 1]
    yield words["behind"], ", ".join(behind) or words["none"]
    broken = []
    for name in ("vivace", "peer"):
        verdicts = [job["contestants"][name].get("verdict") or {} for job in jobs]
        judged = [verdict["kept"] for verdict in verdicts if verdict.get("kept") is not None]
        broken.append(f"{judged.count(False)} / {len(judged)}")
    yield words["broken"], ", ".join(broken)
    for budget, entries in record.get("longer", {}).items():
        for name, entry in entries.items():
            yield words["longer"].format(job=name, budget=budget), _interval(entry["vivace_against_peer"])


def _over_the_best(job: dict) -> float | None:
    """How much faster Vivace's plan is than the fastest of the others, all measured against strict fp32."""
    ratios = {name: found["ratio"] for name, found in job["contestants"].items() if found.get("ratio")}
    own = ratios.pop("vivace", None)
    return own["estimate"] / max(each["estimate"] for each in ratios.values()) if own and ratios else None


def search(record: dict, file: str) -> Iterator[Row]:
    """How near the budgets come to the best of all plans."""
    for budget, found in record["tuned"].items():
        asked = WORDS[file]["search"].format(job=record["job"], count=record["num_measured"], budget=budget)
        share = found["share_of_best"]
        interval = f"{share['estimate']:.1%} ({share['low']:.1%}-{share['high']:.1%})"
        yield asked, f"{interval}, {found['share_of_time']:.0%}"


def memory(record: dict, file: str) -> Iterator[Row]:
    """How far the predicted peaks are from the measured ones."""
    found = f"{record['median_percent']:.2f} %, {record['worst_percent']:.2f} %"
    yield WORDS[file]["memory"].format(pairs=record["pairs"]), found


def gpu_memory(record: dict, file: str) -> Iterator[Row]:
    """How many predictions are as near to torch's CUDA allocator as is demanded."""
    found = f"{record['within_peak']}, {record['within_reserved']}"
    yield WORDS[file]["gpu_memory"].format(pairs=record["pairs"]), found


def memory_budgets(record: dict, file: str) -> Iterator[Row]:
    """What less activation memory costs, and how the choice stands against random ones."""
    words, job = WORDS[file], record["job"].removeprefix("memory_budgets_")
    for allow in ("blocks", "exact", "rounding"):
        rows = [row for row in record["rows"] if row["allow"] == allow]
        found = [
            _percent(row["slowdown_percent"]) if "slowdown_percent" in row else words["floor"].format(**row)
            for row in rows
        ]
        shares = ", ".join(str(row["percent"]) for row in rows)
        if rows:
            yield words[allow].format(job=job, shares=shares), "; ".join(found)
    random = [row["random"] for row in record["rows"] if row.get("random", {}).get("behind_percent")]
    worst = [max(each["behind_percent"], key=lambda behind: behind["estimate"]) for each in random]
    if worst:
        asked = words["random"].format(job=job, count=", ".join(str(each["feasible"]) for each in random))
        yield asked, "; ".join(map(_percent, worst))


def verdicts(record: dict, file: str) -> Iterator[Row]:
    """How often the planted cause comes first, healthy scripts have none, and gains are held."""
    words, cores = WORDS[file], record["machine"]["cores"]
    for folder, scores in record["scores"].items():
        for name, found in scores.items():
            asked = words["verdicts"].format(cores=cores, words=words["verdicts_words"][name])
            rate = found["count"] / found["of"]
            yield asked + words["folders"][folder], words["of"].format(**found, rate=rate)


def profile_cost(record: dict, file: str) -> Iterator[Row]:
    """What the recorder costs an unmodified script, and what the whole command does."""
    words = WORDS[file]
    seconds = statistics.median(each["alone"][0] for each in record["rounds"])
    for way, clock in (("recorded", "wall"), ("recorded", "processor"), ("whole", "wall")):
        found = record[way][clock]
        shares = {"middle": found["estimate"] - 1, "low": found["low"] - 1, "high": found["high"] - 1}
        shown = words["added" if way == "recorded" else "whole"]
        asked = words["profile_cost"][way].format(seconds=seconds, clock=words[clock])
        yield asked, shown.format(**shares, extra=found["extra_seconds"])


def real_loops(record: dict, file: str) -> Iterator[Row]:
    """What is said of loops that people use."""
    words = WORDS[file]
    for row in record["rows"]:
        share = row["share_of_limit"]
        limit = words["at_limit"].format(share=share) if share else ""
        mark = words["marks"][row["right"]]
        said = words["said"].format(mark=mark, said=row["said"][0], limit=limit)
        yield words["loop"].format(**row), said


def advise(record: dict, file: str) -> Iterator[Row]:
    """How far predicted throughput is from published figures that the fit has not seen."""
    for name in sorted(record["splits"], key=list(TITLES[file]).index):
        split = record["splits"][name]
        card, error = split["worst_card"]
        told = {"median": split["median_card"], "card": card, "worst": error}
        told |= {"inside": split["interval_coverage"], "tflops": split["simple_median_card"]["TFLOPS only"]}
        asked = WORDS[file]["advise"].format(n=split["n"], split=TITLES[file][name])
        yield asked, WORDS[file]["errs"].format(**told)


def cnn_models(record: dict, file: str) -> Iterator[Row]:
    """How many networks are matched and keep their promise, and which are refused."""
    words, found = WORDS[file], record["models"]
    judged = {name: one for name, one in found.items() if one["status"] != "refused"}
    kept = [name for name, one in judged.items() if one["status"] == "kept"]
    refused = ", ".join(f"`{name}`" for name in found if name not in judged)
    counts = {"count": len(kept), "of": len(judged), "rate": len(kept) / len(judged)}
    asked = words["cnn_models"].format(steps=min(one["steps"] for one in judged.values()))
    yield asked, words["of"].format(**counts) + words["without"].format(names=refused)
    if followed := [one["float64"] for one in judged.values() if "float64" in one]:
        worst = (max(one[key] for one in followed) for key in ("loss", "displacement"))
        yield words["float64"], ", ".join(f"{value:.0e}" for value in worst)


def fold_eval(record: dict, file: str) -> Iterator[Row]:
    """How much faster networks are evaluated."""
    for name, found in record["models"].items():
        yield WORDS[file]["fold_eval"].format(name=name), _interval(found["ratio"])


def conv_gemm(record: dict, file: str) -> Iterator[Row]:
    """How much faster a step is with convolutions as products."""
    for name, ratio in record["steps"].items():
        yield WORDS[file]["conv_gemm"].format(name=name, **record["conditions"]), _interval(ratio)


def compress(record: dict, file: str) -> Iterator[Row]:
    """How far the chosen form is behind the fastest of all, and ahead of what one writes by hand."""
    words, name = WORDS[file], record["job"].removeprefix("compress_")
    asked = {"name": name, "form": record["ordered"]["chosen"], "share": record["share_of_time"]}
    yield words["compress"].format(**asked), _ratio_or_reason(record["ordered_beside_every"])
    for baseline, found in record["baselines"].items():
        asked = {"name": name, "form": record["every"]["chosen"], "baseline": baseline}
        yield words["compress_by_hand"].format(**asked), _ratio_or_reason(found)


def kernels(record: dict, file: str) -> Iterator[Row]:
    """What the kernels take of each kind of chip, without one."""
    for target, found in record["kernels"].items():
        registers = max(one["registers"] for one in found.values())
        spilled = sum(one["spilled_bytes"] for one in found.values())
        yield WORDS[file]["kernels"].format(target=target), f"{registers}, {spilled}"


def feed(record: dict, file: str) -> Iterator[Row]:
    """How much faster a folder of pictures is read and trained on, in the first epoch and later."""
    words = WORDS[file]
    for part, title in words["feed_parts"].items():
        row = record[part]["rows"]["tuned"]
        found = [f"{row[key]['estimate']:.2f}x" for key in ("over_naive", "over_by_hand")]
        yield words["feed"].format(images=record["images"], part=title), ", ".join(found)


def totals(record: dict, file: str) -> Iterator[Row]:
    """Whether plans shorten whole trainings, and how well their length was predicted."""
    words = WORDS[file]
    planned = {name: job for name, job in record["jobs"].items() if "saved_seconds" in job}
    longer = [f"`{name}`" for name, job in planned.items() if job["saved_seconds"] < 0]
    yield words["totals"].format(count=len(record["jobs"])), ", ".join(longer) or words["none"]
    if errors := [abs(job["error"]) for job in planned.values() if "error" in job]:
        yield words["error"], f"{max(errors):.1%}"
    for name, job in planned.items():
        strict, plan = (statistics.median(job["totals"][way]) for way in ("strict", "plan"))
        yield words["total"].format(job=name), f"{strict:.1f} s, {plan:.1f} s"


def busy(record: dict, file: str) -> Iterator[Row]:
    """Plans that were found while others used the machine, held against those found alone."""
    words, count = WORDS[file], record["of"]
    names = ", ".join(f"`{name}`" for name, job in record["jobs"].items() if not job["right"])
    told = words["right"].format(right=record["right"], count=count)
    told += words["wrong"].format(names=names) if names else ""
    yield words["beside"].format(count=count, load=record["load"]), told


def accuracy(record: dict, file: str) -> Iterator[Row]:
    """Whole trainings under the plan against strict fp32: time, and whether the metric is the same."""
    words = WORDS[file]
    done = {name: found for name, found in record["recipes"].items() if "speed" in found}
    if not done:
        return
    ratio = statistics.geometric_mean(found["speed"]["strict"]["estimate"] for found in done.values())
    counts = {"count": len(done), "equal": sum(found["equal"] for found in done.values())}
    yield words["accuracy"].format(**counts), words["equals"].format(ratio=ratio, **counts)
    for name, found in done.items():
        finals = {way: found["ways"][way]["metric"]["estimate"] for way in ("strict", "plan")}
        told = {"interval": _interval(found["speed"]["strict"]), "mark": words["same"][found["equal"]]}
        yield (
            words["trained"].format(name=name, metric=RECIPES[name].metric),
            words["finals"].format(**finals, **told),
        )


def faults(record: dict, file: str) -> Iterator[Row]:
    """What befalls a training, and what comes of it."""
    text = WORDS[file]["faults"].format(count=len(record["rows"]))
    yield text, f"{told_counts(record['rows'])}; {told_figures(record['total'])}"


def script(record: dict, file: str) -> Iterator[Row]:
    """One public script, alone and under `vivace run`."""
    words = WORDS[file]
    found = _interval(record["ratio"]) if record["ratio"] else words["broken_run"].format(**record)
    yield words["script"].format(name=record["job"].removeprefix("script_"), **record["script"]), found


def sweep(record: dict, file: str) -> Iterator[Row]:
    """What stacking brings, run by run; or trials an hour over plain Optuna's, job by job."""
    words, cells = WORDS[file], record["cells"]
    if record["job"] == "sweep_stacks":
        for name, cell in cells.items():
            yield words["stack"].format(name=name), f"{_interval(cell['steps'])}, {_interval(cell['loaded'])}"
        return
    jobs = dict.fromkeys(name.partition(",")[0] for name in cells)
    for job, engine in itertools.product(jobs, words["engine"]):
        heats = sorted({name.rpartition(" ")[2] for name in cells if name.startswith(f"{job},")})
        pairs = [[cells.get(f"{job}, {one}, heat {heat}") for one in ("vivace", engine)] for heat in heats]
        done = [pair for pair in pairs if None not in pair]
        if len(done) >= 3:  # an interval needs as many
            ratio = speed_ratio([(one["trials_an_hour"], other["trials_an_hour"]) for one, other in done])
            best = [statistics.median(one["best"] for one in side) for side in zip(*done, strict=True)]
            asked = words["engines"].format(job=job, engine=words["engine"][engine], count=len(done))
            yield asked, words["best_metric"].format(_interval(dataclasses.asdict(ratio)), *best)


def frameworks(record: dict, file: str) -> Iterator[Row]:
    """Whether another framework is faster than PyTorch at its fastest, network by network."""
    words, faster, each = WORDS[file], [], []
    for job in record["work"]:
        rows = [row for row in record["rows"] if row["job"] == job]
        answer, best, over, _ = chosen(options_of({**record, "rows": rows}))
        if over is not None:
            each.append((words["elsewhere"].format(job=job), _interval(dataclasses.asdict(over))))
        if answer == "move" and best is not None:
            faster.append(f"`{job}`: {best.name}")
    yield words["frameworks"].format(count=len(record["work"])), ", ".join(faster) or words["none"]
    yield from each


def apis(record: dict, file: str) -> Iterator[Row]:
    """What each compute API reaches."""
    for name, facts in record["apis"].items():
        rates = [ceiling_in_words(key, facts[key]["value"]) for key in API_KEYS[:2] if key in facts]
        yield WORDS[file]["apis"].format(name=name), ", ".join(rates)


KINDS: dict[str, Callable[[dict, str], Iterator[Row]]] = {
    "ruler": ruler,
    "silent_errors": silent_errors,
    "peer": peer,
    "search": search,
    "memory": memory,
    "gpu_memory": gpu_memory,
    "memory_budgets": memory_budgets,
    "verdicts": verdicts,
    "profile_cost": profile_cost,
    "real_loops": real_loops,
    "advise": advise,
    "cnn_models": cnn_models,
    "kernels": kernels,
    "feed": feed,
    "fold_eval": fold_eval,
    "conv_gemm": conv_gemm,
    "compress": compress,
    "totals": totals,
    "busy": busy,
    "accuracy": accuracy,
    "faults": faults,
    "scripts": script,
    "sweep": sweep,
    "frameworks": frameworks,
    "apis": apis,
}

# In records/README.md only.
DETAILS = (
    "gpu_memory",
    "memory_budgets",
    "cnn_models",
    "kernels",
    "real_loops",
    "fold_eval",
    "conv_gemm",
    "compress",
    "faults",
    "scripts",
    "apis",
)


def rows(records: list[dict], file: str, prefix: str, most: int | None) -> Iterator[tuple[str, ...]]:
    """Cells of the table in the words of a README, from the newest record of each benchmark and machine: its
    first `most` rows.
    """
    for record in records:
        place = f"{prefix}{record['job']}/{record['machine']['fingerprint']}/{record['date']}.json"
        for asked, found in itertools.islice(KINDS[record["benchmark"]](record, file), most):
            yield asked, found, f"[{record['date']}]({place})", f"`{record['command']}`"


def _interval(ratio: dict) -> str:
    return f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _ratio_or_reason(found: dict) -> str:
    return _interval(found["ratio"]) if found.get("ratio") else str(found["reason"])


def _percent(change: dict) -> str:
    return f"{change['estimate']:+.1f} % ({change['low']:+.1f} to {change['high']:+.1f})"
