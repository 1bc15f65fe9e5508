"""One contender in a process of its own: reads commands as JSON lines, answers each with one.

python worker.py FRAMEWORK JOB SETTING [--quick] [--plan PATH]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import resource
import sys
import time

BEGAN = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
FRAMEWORKS = {"torch": "of_torch", "keras": "of_keras", "jax": "of_jax"}


def main() -> None:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser()
    for name in ("framework", "job", "setting"):
        parser.add_argument(name)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is no answer
    sys.path.insert(0, HERE)
    import importlib

    import common

    framework = importlib.import_module(FRAMEWORKS[given.framework])
    task = common.tasks(given.quick)[given.job]

    def contender(dropout: bool, noise_seed: int | None = None) -> object:
        return framework.Contender(
            given.job, given.setting, dropout, common.weights(task, noise_seed), given.plan
        )

    timed = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["command"] == "losses":
            found: object = losses(contender(False, asked["noise_seed"]), task, asked["steps"], common)
        elif asked["command"] == "begin":
            timed = Timed(contender(True), task, common)
            found = timed.first() | {"lines": lines_of(framework, given.job)}
        elif asked["command"] == "learn":
            assert timed is not None
            found = timed.learn(asked["steps"], asked["every"], common.ACCURACY)
        else:
            assert timed is not None
            found = timed.steps(asked["steps"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def losses(contender: object, task: object, steps: int, common: object) -> list[float]:
    """The losses of the first steps, dropout off."""
    return [float(contender.step(contender.batch(*batch))) for batch in common.batches(task)[:steps]]


class Timed:
    """Steps on batches that lie ready, timed until the last loss is known."""

    def __init__(self, contender: object, task: object, common: object) -> None:
        self.contender, self.number = contender, 0
        self.ready = [contender.batch(*batch) for batch in common.batches(task)]
        self.held = [(contender.batch(*batch), batch[1]) for batch in common.held_out(task)]

    def steps(self, count: int) -> dict[str, float]:
        """Seconds of so many steps, of the process's time as well, and the peak of memory until now."""
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = self.contender.step(self.ready[self.number % len(self.ready)])
            self.number += 1
        last = float(loss)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": seconds, "cpu_seconds": cpu, "loss": last, "peak_bytes": peak}

    def first(self) -> dict[str, float]:
        """The first step, which compiles; from the process's start, and alone."""
        found = self.steps(1)
        return {"first_step_seconds": found["seconds"], "to_first_step_seconds": time.monotonic() - BEGAN}

    def learn(self, most: int, every: int, wanted: float) -> dict[str, float | None]:
        """Train, with an evaluation every so many steps, until the accuracy is there, or `most` steps.

        Seconds count from the process's start, compiling and evaluations included; None: not reached.
        """
        reached = 0.0
        while self.number < most and reached < wanted:
            self.steps(every - self.number % every)
            right = [self.contender.predict(batch) == classes for batch, classes in self.held]
            reached = float(sum(each.mean() for each in right)) / len(right)
        seconds = time.monotonic() - BEGAN if reached >= wanted else None
        return {"accuracy_seconds": seconds, "accuracy_steps": self.number, "accuracy": reached}


def lines_of(framework: object, job: str) -> int:
    """Lines of code of a model with what of its own it calls, without blank ones, comments and docstrings."""
    source = ast.parse(inspect.getsource(framework))
    tops = {node.name: node for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    wanted, found = [framework.MODELS[job].__name__], {}
    wanted += ["Contender", "train_step", "loss_of", "optimizer_of"]
    while wanted:
        name = wanted.pop()
        if name in tops and name not in found:
            found[name] = tops[name]
            if name != "Contender":
                wanted += [node.id for node in ast.walk(tops[name]) if isinstance(node, ast.Name)]
    return sum(len(ast.unparse(without_docstrings(node)).splitlines()) for node in found.values())


def without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


if __name__ == "__main__":
    main()
