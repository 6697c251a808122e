"""AlpaServe's figures: two models on two devices, sweeps over S1 to S3, S4, and when model parallelism pays.

Latencies and weights are those that its authors measured on V100s (S4's are derived from two published numbers); the
timing is that of their simulator. Traffic is Gamma with power-law shares: their recorded traces are not public in a
form that we have.
"""

import time

import numpy as np

from benchmarks.placement import MEMORY, expected, tables
from benchmarks.plots import figure
from paceline.core.cluster import Cluster, Parallel
from paceline.placement import baselines, explain
from paceline.placement.greedy import fill
from paceline.placement.problem import ALPASERVE, Problem
from paceline.placement.search import plan, uniform
from paceline.placement.tables import ModelTable, ShapeTable
from paceline.workload.arrivals import gamma, merged

CASES = ["two_models", "published", "sweeps", "s4", "maps"]
PUBLISHED = {  # Gamma, CV 4, 60 models, 64 requests/s: devices -> AlpaServe with buckets, selective replication
    8: (0.364, 0.264), 24: (0.842, 0.583), 40: (0.990, 0.776), 56: (1.0, 0.880),
}  # fmt: skip


def run(case: str) -> dict:
    begin = time.time()
    result = {"two_models": two_models, "published": published, "sweeps": sweeps, "s4": s4, "maps": maps}[case]()
    print(f"  {time.time() - begin:.0f} s", flush=True)
    return result


def two_models() -> dict:
    """Section 3.1: 13.4 GB each, devices of 14 GiB, 3 requests/s in all, no goal: mean and P99 latency."""
    result: dict = {}
    with figure("alpaserve_two_models", 2) as axes:
        for ax, (name, cv) in zip(axes, (("Poisson", 1.0), ("Gamma, CV 3", 3.0)), strict=True):
            times, models = merged([gamma(1.5, cv, 4000.0, seed) for seed in range(2)])
            one = Problem(
                Cluster(2, 14 * 2**30), tables(["bert-6.7b"], 2), [np.inf] * 2, times, models, "finish", ALPASERVE
            )
            row = result[name] = {}
            shapes = {"a device each": Parallel(), "pipeline": Parallel(2), "tensor": Parallel(1, 2)}
            for what, parallel in shapes.items():
                p = one.shapes.index(parallel)
                shape = np.full(2 // parallel.devices, p, np.int64)
                member = np.eye(2, dtype=bool) if parallel == Parallel() else np.ones((1, 2), bool)
                waited = one.evaluate(shape, member, whole=True).finish - times
                mean, late = float(waited.mean()), float(np.percentile(waited, 99))
                row[what] = {"mean_s": round(mean, 3), "p99_s": round(late, 3)}
                ax.plot(np.sort(waited), np.linspace(0, 1, len(waited)), label=what)
            choice = plan(one, effort=1_000_000)
            row["planned"] = " ".join(str(one.shapes[p]) for p in choice.shape)
            ax.set(title=name, xlabel="latency, seconds", ylabel="share of requests", xlim=(0, 8))
            ax.legend()
    return result


def policies(one: Problem) -> dict[str, float]:
    """Attainment of ours, of AlpaServe's search without ours behind it, and of what it was compared with."""
    theirs = Problem(one.cluster, one.tables, one.slo, one.times, one.models, "last_stage", one.timing)
    parts = baselines.clockwork(theirs, 50.0)
    ours = Problem(one.cluster, one.tables, one.slo, one.times, one.models, "deadline", one.timing)
    return {
        "paceline": plan(one, effort=3_000_000).outcome.attainment,
        "paceline, by deadlines": plan(ours, effort=3_000_000).outcome.attainment,
        "one shape for all": max(uniform(theirs, p).outcome.attainment for p in range(len(one.shapes))),
        "selective replication": baselines.selective_replication(theirs).outcome.attainment,
        "Clockwork++": sum(int(choice.outcome.good.sum()) for _, choice in parts) / max(1, len(one.times)),
    }


def published() -> dict:
    result = {}
    for devices, (theirs, replication) in PUBLISHED.items():
        row = policies(expected("S3", 60, devices, 64.0))
        result[str(devices)] = {name: round(value, 3) for name, value in row.items()} | {
            "published, AlpaServe": theirs, "published, selective replication": replication,
        }  # fmt: skip
        print(f"  {devices} devices: {result[str(devices)]}", flush=True)
    return result


SWEEPS = {
    "devices": {"S1": (8, 16, 24), "S2": (8, 16, 32), "S3": (16, 24, 40)},
    "rate": {"S1": (32, 64, 96), "S2": (10, 20, 40), "S3": (32, 64, 96)},
    "cv": {"S1": (1, 4, 8), "S2": (1, 4, 8), "S3": (1, 4, 8)},
    "scale": {"S1": (1.5, 3, 10), "S2": (1.5, 3, 10), "S3": (1.5, 3, 10)},
}
BASE = {"S1": (32, 16, 64.0), "S2": (16, 16, 20.0), "S3": (60, 24, 64.0)}  # models, devices, requests/s


def sweeps() -> dict:
    result: dict = {}
    with figure("alpaserve_sweeps", 4, 3) as axes:
        for row, (kind, (models, devices, rate)) in enumerate(BASE.items()):
            for column, (what, values) in enumerate(SWEEPS.items()):
                found: dict[str, list[float]] = {}
                for value in values[kind]:
                    given = {"devices": devices, "rate": rate, "cv": 4.0, "scale": 5.0} | {what: value}
                    for name, share in policies(expected(kind, models, duration=100.0, **given)).items():
                        found.setdefault(name, []).append(round(share, 4))
                result[f"{kind}, {what}"] = {"values": list(values[kind])} | found
                ax = axes[4 * row + column]
                for name, shares in found.items():
                    ax.plot(values[kind], shares, "o-", label=name)
                ax.set(title=kind, xlabel=what, ylabel="attainment", ylim=(0, 1.02))
                print(f"  {kind}, {what}: {found}", flush=True)
        axes[0].legend(fontsize="small")
    return result


def s4() -> dict:
    """Four models of 208 GB, 4.6 s on 16 devices in a pipeline, 64 devices: groups of 16 in every shape.

    Derived, not measured: stages of equal time; a tensor split of t keeps 92 % of its speed-up with each doubling.
    """
    shapes = {}
    for pipeline, tensor in ((16, 1), (8, 2), (4, 4), (2, 8)):
        stage = 4.6 / pipeline / (tensor * 0.92 ** np.log2(tensor))
        shapes[Parallel(pipeline, tensor)] = ShapeTable((int(208e9) // 16,) * pipeline, {1: (stage,) * pipeline})
    known = [ModelTable(f"m{i}", shapes) for i in range(4)]
    rates = [4.0, 2.0, 1.0, 1.0]
    times, models = merged([gamma(rate, 4.0, 600.0, seed) for seed, rate in enumerate(rates)])
    result = {}
    for scale in (1.5, 3.0, 5.0):
        one = Problem(Cluster(64, MEMORY * 2, 8), known, [4.6 * scale] * 4, times, models, "finish", ALPASERVE)
        row = {str(one.shapes[p]): round(uniform(one, p).outcome.attainment, 4) for p in range(4)}
        alone = [round(baselines.alone(one, p).outcome.attainment, 4) for p in range(4)]
        result[f"goal {scale:g}x"] = {"shared groups": row, "a group for each model": alone,
                                      "planned": round(plan(one, effort=1_000_000).outcome.attainment, 4)}  # fmt: skip
        print(f"  {scale}: {result[f'goal {scale:g}x']}", flush=True)
    return result


def maps() -> dict:
    """When model parallelism pays: 8 models of 1.3B on 8 devices. Points that it gains over replication, by memory a
    device (models that fit), rate over the peak of all devices, CV, and goal; and whether the planner says the same."""
    memories, loads, cvs, scales = (1, 2, 4, 8), (0.2, 0.4, 0.6, 0.8), (1.0, 2.0, 4.0, 8.0), (1.5, 3.0, 5.0, 10.0)
    table = tables(["bert-1.3b"], 1)[0]
    weight, peak = table.shapes[Parallel()].stage_weight_bytes[0], 8 / table.alone
    agree, result = [], {}

    def gain(memory: int, load: float, cv: float, scale: float) -> float:
        one = expected("S1", 8, 8, load * peak, cv, scale, 100.0, memory=int(memory * weight * 1.05))
        single = fill(one, np.zeros(8, np.int64)).outcome.attainment
        choice = plan(one, effort=400_000)
        if (one.devices[choice.shape] > 1).any():
            g = int(np.argmax(one.devices[choice.shape] > 1))
            others = [other for other in explain.of_group(one, choice, g) if "x (1,1)" in other.what]
            agree.append(bool(others) and others[0].attainment <= choice.outcome.attainment + 1e-9)
        else:
            agree.append(single >= choice.outcome.attainment - 0.005)
        return round(100 * (choice.outcome.attainment - single), 2)

    grids = {
        "memory x rate": (memories, loads, lambda a, b: gain(a, b, 4.0, 5.0)),
        "memory x CV": (memories, cvs, lambda a, b: gain(a, 0.5, b, 5.0)),
        "memory x goal": (memories, scales, lambda a, b: gain(a, 0.5, 4.0, b)),
        "rate x CV": (loads, cvs, lambda a, b: gain(2, a, b, 5.0)),
    }
    with figure("alpaserve_maps", 4) as axes:
        for ax, (name, (first, second, cell)) in zip(axes, grids.items(), strict=True):
            grid = [[cell(a, b) for b in second] for a in first]
            result[name] = {"rows": list(first), "columns": list(second), "points": grid}
            picture = ax.imshow(grid, origin="lower", cmap="viridis", vmin=0)
            ax.set_xticks(range(len(second)), second)
            ax.set_yticks(range(len(first)), first)
            ax.set(title="points gained over replication", xlabel=name.split(" x ")[1], ylabel=name.split(" x ")[0])
            ax.figure.colorbar(picture)
            print(f"  {name}: {grid}", flush=True)
    result["the planner's reasons agree"] = round(float(np.mean(agree)), 3)
    return result
