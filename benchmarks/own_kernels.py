"""What C code of Vivace's own brings on a processor, over the fastest of PyTorch's own ways.

    scripts/bench own_kernels [NETWORK ...] [--pairs 3]

Networks of the kinds that each technique with such code is for, in bfloat16 or in strict fp32, beside the
fastest of PyTorch's layouts and precisions.
Which that is, is measured first; then both take turns in fresh processes, pair by pair. Ratios are medians
with their 95 % intervals. Writes a record; the day's other networks stay in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import _record
from _own_jobs import (
    efficientnet_b0,
    enlarger,
    graph_network,
    gru,
    mnasnet,
    mobilenet_v2,
    shufflenet_v2,
    sound,
    tagger,
    vgg11,
)
from jobs import gpt, resnet18_32, unet
from peer_jobs import bert, bert_padded, convnext_tiny, mobilenet_v3_small

import vivace
from vivace.errors import Unsteady
from vivace.ledger import Ratio
from vivace.machine import Machine
from vivace.measuring.paired import Contestant, across, compare
from vivace.plan import Plan
from vivace.processes.launch import Source

__all__ = [
    "bert",
    "bert_padded",
    "convnext_tiny",
    "efficientnet_b0",
    "enlarger",
    "gpt",
    "graph_network",
    "gru",
]
__all__ += [
    "mnasnet",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "resnet18_32",
    "shufflenet_v2",
    "sound",
    "tagger",
    "unet",
    "vgg11",
]  # jobs, by name

CHOOSING_SECONDS, COMPARING_SECONDS = 4.0, 8.0
LAYOUT, PRECISION = ("channels_last",), ("bf16_autocast",)
OF_IMAGES = ((), LAYOUT, PRECISION, (*LAYOUT, *PRECISION))
OF_OTHERS = ((), PRECISION)
DEPTHWISE = (
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mnasnet",
    "efficientnet_b0",
    "shufflenet_v2",
    "convnext_tiny",
)
TECHNIQUES = {  # and networks
    "depthwise_gradients": DEPTHWISE,
    "winograd": ("resnet18_32", "unet", "vgg11"),
    "vectorized_dropout": ("bert", "bert_padded"),
    "vectorized_operators": ("graph_network", "sound", "enlarger"),
    "fused_recurrent": ("gru", "tagger"),
    "batched_attention": ("gpt", "bert", "bert_padded"),
}
NETWORKS = tuple(dict.fromkeys(itertools.chain.from_iterable(TECHNIQUES.values())))


def main() -> None:
    """Measure the named networks, or all, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--pairs", type=int, default=3, help="of processes")
    arguments = parser.parse_args()
    machine = vivace.inspect()
    record = _record.opened("own_kernels", "scripts/bench own_kernels", machine)
    record["conditions"] = {"pairs": arguments.pairs}
    record = _record.of_today(record, ("machine", "versions", "vivace", "conditions")) or record
    for technique, names in TECHNIQUES.items():
        for name in _record.named_jobs(parser, arguments.networks, NETWORKS):
            if name not in names:
                continue
            try:
                found = measure(name, technique, machine, arguments.pairs)
            except Unsteady as error:
                print(f"{name}: not recorded; {error}", flush=True)
                unsteady = record.setdefault("unsteady", {}).setdefault(technique, [])
                unsteady += [name] if name not in unsteady else []
                _record.write(record)
                continue
            record.setdefault(technique, {})[name] = found
            if name in (unsteady := record.get("unsteady", {}).get(technique, [])):
                unsteady.remove(name)
            _record.write(record)
            print(
                f"{name}: {found['ratio']} over {' + '.join(found['fastest']) or 'strict fp32'}", flush=True
            )


def measure(name: str, technique: str, machine: Machine, pairs: int) -> dict:
    """The fastest way without the technique, the fastest with it, and how they compare."""
    source = Source(f"{__file__}:{name}")
    ways = OF_IMAGES if name in (*DEPTHWISE, *TECHNIQUES["winograd"], "enlarger") else OF_OTHERS
    usual = fastest(source, [plan_of(way) for way in ways], machine)
    ways = (LAYOUT,) if technique == "winograd" else ways  # which acts in no other
    with_it = [plan_of((*way, technique)) for way in ways]
    own = fastest(source, with_it, machine)
    return {
        "fastest": list(usual.names),
        "plan": list(own.names),
        "ratio": dataclasses.asdict(against(source, usual, own, machine, pairs, COMPARING_SECONDS)),
    }


def plan_of(names: tuple[str, ...]) -> Plan:
    """The plan of these techniques as they are by default."""
    return Plan.from_dict({name: {} for name in names})


def fastest(source: Source, plans: list[Plan], machine: Machine) -> Plan:
    """Of plans the one that runs fastest beside the first."""
    rest = [(1.0, plans[0])]
    for plan in plans[1:]:
        rest.append((against(source, plans[0], plan, machine, 1, CHOOSING_SECONDS).estimate, plan))
    return max(rest, key=lambda pair: pair[0])[1]


def against(source: Source, usual: Plan, own: Plan, machine: Machine, pairs: int, seconds: float) -> Ratio:
    """How many times as fast `own` is as `usual`, over pairs of fresh processes."""
    rounds = []
    for seed in range(pairs):
        both = [Contestant(source, machine) for _ in range(2)]
        try:
            for contestant, plan in zip(both, (usual, own), strict=True):
                contestant.open(plan, seed=seed)
            rounds.append(compare(*both, seconds=seconds))
        finally:
            for contestant in both:
                contestant.close()
    return across(rounds)


if __name__ == "__main__":
    main()
