"""The words of the evidence tables, in the languages of the READMEs."""

from __future__ import annotations

WORDS = {
    "README.md": {
        "columns": ("question", "answer", "record", "command"),
        "ours": "Defects that we planted ourselves in small jobs of our own, {title}: caught by `verify`; "
        "correct plans rejected",
        "caught": "The same jobs, {title}: caught",
        "left": "; {left} judgements are left",
        "others": "Silent errors that others met (TrainCheck's evaluation), as edits of small trainings: "
        "caught by `verify --against`; correct edits rejected",
        "live": "{kinds} kinds of defects in what acts on a script's step, alone and behind bfloat16: "
        "refused by the proof of `vivace run`; correct plans refused",
        "milder": "; of the ruler's milder kinds, {count} of {of}",
        "met": "{caught[count]} of {caught[of]}; {false_alarms[count]} of {false_alarms[of]}",
        "missed": "; missed: {names}",
        "undecided": "The same examination, left undecided in little time: defects, correct plans",
        "share": "What verifying takes of a search",
        "of": "{count} of {of} ({rate:.1%})",
        "best": "Speed over the best of `pytorch-autotune` {version}, Fabric, Accelerate, `torch.compile`, "
        "geometric mean of {count} jobs, cores used: {cores}, 120 s of search; job by job",
        "peer": "Speed over that of `pytorch-autotune` {version}, geometric mean of {count} jobs",
        "flatters": " (on CPU, which flatters us: it never tries bfloat16 there)",
        "behind": "Jobs on which Vivace is slower than the best one-liner beyond noise",
        "not_timed": "; without a figure: {names}",
        "none": "none",
        "longer": "`{job}`: as fast as the best one-liner where the search takes {budget} s instead of 120",
        "broken": "Results that `verify` rejects: Vivace's, `pytorch-autotune`'s",
        "search": "`{job}`: how near `{budget}` comes to the best of {count} plans, in which share of time "
        "(92 % in 8 % demanded of `fast`)",
        "verdicts": "`profile`, cores used: {cores}; {words}",
        "verdicts_words": {
            "planted causes named first": "planted causes that are its first verdict",
            "healthy scripts without a verdict": "healthy scripts without a verdict",
            "gains inside of their interval": "predicted gains whose interval, widened by the {spread:.0%} "
            "by which two runs differ, holds the measured one",
        },
        "folders": {
            "planted": ", of scripts that were there when its rules were written",
            "aside": ", of scripts written beside the rules",
        },
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
        "memory": "Error of a step's predicted peak memory, {pairs} pairs of job and plan, {refused} more "
        "refused: median, largest",
        "gpu_memory": "A step's predicted peak memory beside that of torch's CUDA allocator, run without a "
        "GPU, {pairs} pairs of network and plan, {refused} more refused: within 3 %; what it reserves within "
        "8 %",
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
        "norm_variance": "BatchNorm of {images} images, {channels} channels of {pixels}x{pixels} pixels, on "
        "a CPU: error of the variance in the usual memory order, in PyTorch's channels-last one, with "
        "`channels_last`",
        "norm_gradient_of_weights": "The same: error of the weights' gradient",
        "norm_network": "`{name}`, a step on a CPU: error of all gradients in the same three ways",
        "norm_speed": "BatchNorm forward and backward with `channels_last` over PyTorch's in that order",
        "depthwise_gradients": "Networks with depthwise convolutions on {device}: a step with "
        "`depthwise_gradients` over the fastest of PyTorch's own layouts and precisions",
        "winograd": "Networks with wide 3x3 convolutions on {device}: a step with `winograd` and "
        "`channels_last` over the fastest of PyTorch's own layouts and precisions",
        "vectorized_dropout": "Encoders with dropout on {device}: a step with `vectorized_dropout` over the "
        "faster of fp32 and bfloat16 without",
        "vectorized_operators": "A graph network, sound with max pooling and images with PReLU on {device}: "
        "a step with `vectorized_operators` over the fastest of PyTorch's own layouts and precisions",
        "fused_recurrent": "Two GRU layers, and LSTMs of packed texts, on {device}: a step with "
        "`fused_recurrent` over the faster of fp32 and bfloat16 without",
        "batched_attention": "Transformers on {device}: a step with `batched_attention` over the faster "
        "of fp32 and bfloat16 without",
        "unsteady": "; the machine was too unsteady for {names}",
        "compress": "`{name}` as `{form}`, found in {share:.0%} of the time for all: over the fastest",
        "compress_by_hand": "`{name}`, trained, as `{form}` at batch 1: times as fast as {by_hand} by hand",
        "kernels": "Kernels compiled for {target}: most registers, spilled bytes",
        "strict": "strict fp32",
        "foretold": "ResNet-50 (224 px, batch 256) on {device} under {plan}, in images a second: "
        "what `advise` predicts (80 %), what was measured",
        "foretold_found": "{estimate:,.0f} ({low:,.0f}-{high:,.0f}), {measured:,.0f}",
        "foretold_memory": "The same steps' peak memory, predicted without a GPU, over what the {device} "
        "took",
        "gpu": "ResNet-50 (224 px, batch 256) on {device} under {plan}: training over strict fp32",
        "images": "{rate:,.0f} images/s",
        "gpu_kinds": {
            "ruler": "Plans that `verify` judged on {device}",
            "scene": "Tests of what only a GPU does (graphs, TF32, resuming, float8 and others) on {device}",
        },
        "gpu_counts": "{of}: kept {ok}, refused {refused}",
        "gpu_kernels": {
            "norms": "Kernels of `fused_batchnorm` on {device}, over PyTorch's operators",
            "products": "The same of `products`, a product that leaves BatchNorm's statistics, "
            "over PyTorch's convolution and our fused norm",
        },
        "script": "`{name}` ({repository}), unmodified, under `vivace run`: whole run",
        "broken_run": "broken: exit codes {exit_codes}",
        "stacks": "{count} examples of small runs stacked: faster beyond noise than one after another with "
        "their loaders, steps alone",
        "stack": "`{name}`: runs stacked over one after another, steps alone, with their loaders; steps over "
        "a stack by hand",
        "engines": "Trials an hour of `vivace sweep` over {engine}, {heats} x {minutes} min; best metric of "
        "both",
        "engine": {"optuna": "plain Optuna in processes", "ray": "Ray Tune"},
        "feed": "{images} JPEG files, {part}: tuned over the naive loader, over the best set by hand",
        "fed": "{}; by what feeds data alone {}",
        "feed_parts": {"first_pass": "first epoch", "later_passes": "later epochs"},
        "totals": "Whole trainings from command to end, {count} jobs: longer with the plan; largest error "
        "of the length foretold minutes before, with it and without",
        "beside": "{count} jobs tuned beside {load} processes that compute all the time, `--budget fast`: "
        "plans at least 0.95 times as fast as those found alone",
        "right": "{right} of {count}",
        "wrong": "; not: {names}",
        "total": "`{job}` trained whole: without the plan, with it",
        "accuracy": "{count} recipes trained to the end, whole time: the plan over strict fp32, over PyTorch "
        "as it comes, geometric means",
        "equals": "{over_strict:.2f}x, {over_defaults:.2f}x; the same metric as in strict fp32 within the "
        "margin: {equal} of {count}",
        "failed": "; a training of {names} failed",
        "trained": "`{name}` trained to the end: whole time of the plan over strict fp32, over PyTorch as it "
        "comes; final {metric} in strict fp32 and of the plan",
        "finals": "{over_strict}, {over_defaults}; {strict:.4f}, {plan:.4f}: {mark}",
        "same": {True: "the same", False: "not shown to be the same"},
        "frameworks": "Of {count} networks, those that another framework trains faster than PyTorch does "
        "under tune's plan, beyond noise",
        "elsewhere": "`{job}`: the fastest of Keras and JAX over the fastest of PyTorch",
        "apis": "Through {name}: copying, a matrix product in fp32 by a small kernel",
        "faults": "Faults that a training may meet, {count} kinds, each shown by its tests",
    },
    "README.zh-CN.md": {
        "columns": ("问题", "结果", "记录", "命令"),
        "ours": "我们自己植入自写小任务中的缺陷，{title}：`verify` 发现的；误判的正确方案",
        "caught": "同样的任务，{title}：发现的",
        "left": "；还有 {left} 项未判定",
        "others": "他人训练中真实发生过的静默错误（取自 TrainCheck 的评测），改写为小型训练的修改："
        "`verify --against` 发现的；误判的正确修改",
        "live": "在作用于脚本训练步的技术中植入的 {kinds} 种缺陷，单独或藏在 bfloat16 舍入之后："
        "被 `vivace run` 的证明拒绝的；误拒的正确方案",
        "milder": "；`verify` 考核中较轻微的缺陷：{count} / {of}",
        "met": "{caught[count]} / {caught[of]}；{false_alarms[count]} / {false_alarms[of]}",
        "missed": "；未发现：{names}",
        "undecided": "同一考核中，因时间少而未判定的：缺陷、正确的方案",
        "share": "验证占搜索时间的比例",
        "of": "{count} / {of}（{rate:.1%}）",
        "best": "与 `pytorch-autotune` {version}、Fabric、Accelerate、`torch.compile` 中最快者的速度之比，"
        "{count} 个任务的几何平均（{cores} 核，搜索 120 秒）；逐个任务",
        "peer": "与 `pytorch-autotune` {version} 的速度之比，{count} 个任务的几何平均",
        "flatters": "（CPU 上的比较对我们有利：它在 CPU 上从不尝试 bfloat16）",
        "behind": "Vivace 超出噪声地慢于最佳单行改动的任务",
        "not_timed": "；没有数据：{names}",
        "none": "无",
        "longer": "`{job}`：搜索 {budget} 秒（而非 120 秒）时，与最佳单行改动的速度之比",
        "broken": "未通过 `verify` 的结果：Vivace、`pytorch-autotune`",
        "search": "`{job}`：`{budget}` 达到 {count} 个方案中最佳速度的比例，以及所用时间的比例"
        "（要求 `fast` 在 8% 的时间内达到 92%）",
        "verdicts": "`profile`（{cores} 核）：{words}",
        "verdicts_words": {
            "planted causes named first": "首个结论即为植入的原因",
            "healthy scripts without a verdict": "正常脚本未被误报",
            "gains inside of their interval": "预测的收益区间（按两次运行之差放宽 {spread:.0%}）包含实测值",
        },
        "folders": {
            "planted": "（制定规则时已有的脚本）",
            "aside": "（另写的脚本，规则并非据其制定）",
        },
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
        "at_limit": "，达到上限的 {share:.0%}",
        "advise": "`advise` 在 {n:,} 个公开数据上的误差（{split}不参与拟合）：各卡中位数、最差的卡",
        "errs": "{median:.0%}（要求 18%），{card} {worst:.0%}（要求 35%）；只看 TFLOPS：{tflops:.0%}；"
        "{inside:.0%} 在区间内（要求 75–85%）",
        "memory": "一步训练峰值内存的预测误差，{pairs} 组任务与方案，另有 {refused} 组被拒绝：中位数、最大值",
        "gpu_memory": "一步训练峰值内存的预测，对照 PyTorch 的 CUDA 分配器（无 GPU），"
        "{pairs} 组网络与方案，另有 {refused} 组被拒绝：误差在 3% 以内；其保留的内存在 8% 以内",
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
        "norm_variance": "CPU 上 {images} 张图片、{channels} 个 {pixels}x{pixels} 像素通道的 BatchNorm："
        "方差的误差（通常的内存顺序、PyTorch 的 channels-last 顺序、使用 `channels_last`）",
        "norm_gradient_of_weights": "同上：权重梯度的误差",
        "norm_network": "`{name}` 在 CPU 上的一步：同样三种方式下全部梯度的误差",
        "norm_speed": "使用 `channels_last` 的 BatchNorm 前向与反向，相对 PyTorch 的同一顺序",
        "depthwise_gradients": "{device} 上含深度卷积的网络：使用 `depthwise_gradients` 的训练步，"
        "相对于 PyTorch 自带的布局与精度中最快的一种",
        "winograd": "{device} 上含较宽 3x3 卷积的网络：使用 `winograd` 与 `channels_last` 的训练步，"
        "相对于 PyTorch 自带的布局与精度中最快的一种",
        "vectorized_dropout": "{device} 上含 dropout 的编码器：使用 `vectorized_dropout` 的训练步，"
        "相对于不使用时 fp32 与 bfloat16 中较快的一种",
        "vectorized_operators": "{device} 上的图网络、含最大池化的声音网络、含 PReLU 的图像网络："
        "使用 `vectorized_operators` 的训练步，相对于 PyTorch 自带的布局与精度中最快的一种",
        "fused_recurrent": "{device} 上的两层 GRU，以及处理打包（packed）文本的 LSTM："
        "使用 `fused_recurrent` 的训练步，相对于不使用时 fp32 与 bfloat16 中较快的一种",
        "batched_attention": "{device} 上的 Transformer：使用 `batched_attention` 的训练步，"
        "相对于不使用时 fp32 与 bfloat16 中较快的一种",
        "unsteady": "；机器当时过于不稳定，未测出：{names}",
        "compress": "`{name}` 的形式 `{form}`（用时为测完全部形式的 {share:.0%}）：相对其中最快者",
        "compress_by_hand": "训练好的 `{name}` 以 `{form}` 运行，批大小为 1：速度与手工所得的 {by_hand} 之比",
        "kernels": "为 {target} 编译的内核：寄存器最多数、溢出字节数",
        "strict": "严格 fp32",
        "foretold": "ResNet-50（224 像素，批大小 256）在 {device} 上使用 {plan}，每秒图像数："
        "`advise` 的预测（80%）与实测",
        "foretold_found": "{estimate:,.0f} ({low:,.0f}-{high:,.0f})，{measured:,.0f}",
        "foretold_memory": "同样这些训练步的峰值显存：无 GPU 时的预测与 {device} 实际占用之差",
        "gpu": "ResNet-50（224 像素，批大小 256）在 {device} 上使用 {plan}：训练速度与严格 fp32 之比",
        "images": "{rate:,.0f} 张/秒",
        "gpu_kinds": {
            "ruler": "`verify` 在 {device} 上判定的方案",
            "scene": "只有 GPU 才有的行为（CUDA 图、TF32、续训、float8 等）在 {device} 上的测试",
        },
        "gpu_counts": "{of}：通过 {ok}，拒绝 {refused}",
        "gpu_kernels": {
            "norms": "`fused_batchnorm` 的内核在 {device} 上与 PyTorch 算子的速度之比",
            "products": "同上，`products`（留下 BatchNorm 统计量的矩阵乘法）"
            "与 PyTorch 卷积加本项目融合归一化之比",
        },
        "script": "`{name}`（{repository}），未经修改，用 `vivace run`：完整运行",
        "broken_run": "出错：退出码 {exit_codes}",
        "stacks": "{count} 个小型训练合并的例子中，超出噪声地快于逐个进行的：含数据加载、仅训练步",
        "stack": "`{name}`：多个训练合并相对逐个进行，仅训练步、含数据加载；仅训练步相对手写的合并",
        "engines": "`vivace sweep` 每小时试验数相对{engine}，{heats} x {minutes} 分钟；双方的最佳指标",
        "engine": {"optuna": "多进程的普通 Optuna", "ray": " Ray Tune"},
        "feed": "{images} 个 JPEG 文件，{part}：调优后相对朴素加载器、相对手工最佳设置",
        "fed": "{}；仅数据加载方面的手段 {}",
        "feed_parts": {"first_pass": "第一轮", "later_passes": "之后各轮"},
        "totals": "从命令到结束的完整训练，不用与使用方案各若干次，{count} 个任务：用方案反而更久的；"
        "使用与不用方案时预测时长的最大误差",
        "beside": "{count} 个任务在另有 {load} 个进程持续计算时以 `--budget fast` 调优："
        "速度不低于独自调优所得方案 0.95 倍的",
        "right": "{count} 个中的 {right} 个",
        "wrong": "；未达到：{names}",
        "total": "完整训练 `{job}`：不用方案、使用方案",
        "faults": "训练可能遇到的 {count} 类故障，每类由相应的测试验证",
        "accuracy": "{count} 个内置任务完整训练：方案相对严格 fp32、相对 PyTorch 默认的总用时加速，几何平均",
        "equals": "{over_strict:.2f}x、{over_defaults:.2f}x；指标与严格 fp32 在容差内相同：{equal} / {count}",
        "failed": "；{names} 有一次训练未完成",
        "trained": "`{name}` 完整训练：方案相对严格 fp32、相对 PyTorch 默认的总用时加速；"
        "严格 fp32 与方案最终的 {metric}",
        "finals": "{over_strict}、{over_defaults}；{strict:.4f}、{plan:.4f}：{mark}",
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
        "planted, alone": "20 种已知缺陷",
        "planted, with bf16_autocast": "同上，混在 bfloat16 舍入中",
        "planted, least effort": "同上，用 `tune` 的最低验证力度",
        "further, alone": "其他缺陷",
        "further, with bf16_autocast": "其他缺陷，混在 bfloat16 舍入中",
        "further, least effort": "其他缺陷，用最低验证力度",
    },
}
