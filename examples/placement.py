"""Two models on two devices (AlpaServe, section 3.1): a device each, or both split over both?

    python examples/placement.py
"""

from paceline.core.cluster import Cluster
from paceline.placement import baselines
from paceline.placement.problem import Problem
from paceline.placement.search import plan
from paceline.placement.tables import from_layers
from paceline.workload.arrivals import gamma, merged

GIB = 2**30
layers = [0.4 / 32] * 32  # seconds of each: 0.4 on one device
models = [from_layers(name, layers, [13 * GIB // 32] * 32, pipelines=(1, 2), hop=0.002) for name in "ab"]
cluster = Cluster(devices=2, memory=14 * GIB, devices_per_node=2)  # room for one of them on each

for what, cv in (("steady", 1.0), ("bursts", 4.0)):
    times, owners = merged([gamma(0.8, cv, 2000.0, seed) for seed in range(2)])
    problem = Problem(cluster, models, [2.0, 2.0], times, owners)  # within 2 s: five times the latency
    one_device = problem.shapes.index(min(problem.shapes, key=lambda parallel: parallel.devices))
    choices = {
        "planned": plan(problem, effort=1_000_000),
        "replicas": baselines.selective_replication(problem),
        "round robin": baselines.round_robin(problem, baselines.fixed(problem, one_device).shape),
    }
    print(f"{what} ({len(times)} requests, CV {cv:g})")
    for name, choice in choices.items():
        groups = problem.placement(choice.shape, choice.member).groups
        where = "; ".join(f"{group.parallel} on {group.devices} has {' '.join(group.models)}" for group in groups)
        print(f"  {name:11}  attainment {choice.outcome.attainment:.1%}  {where}")
