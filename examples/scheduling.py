"""SARATHI's policies and those it was compared with, on the same requests in virtual time.

    python examples/scheduling.py
"""

from collections import defaultdict

from paceline.batching.config import SchedulerConfig
from paceline.controller import Controller, GroupConfig
from paceline.core.request import Request
from paceline.latency.step_time import StepTime, percentile
from paceline.simulator.driver import FixedOutputs, simulate

# a step reads the weights in 20 ms, and from 200 tokens on computing takes longer than that
linear = tuple(max(0.02, 1e-4 * tokens) for tokens in range(4097))
steps = StepTime(linear, emit=0.0, decode=1e-4, decode_context=1e-8, chunk=1e-4, chunk_context=1e-8, chunk_pair=1e-9)
prompts = [1500 if i % 4 == 0 else 200 for i in range(64)]
requests = [Request(str(i), prompt, 100, arrival=0.3 * i) for i, prompt in enumerate(prompts)]

print("policy             first token P50  between tokens P50   P99 (ms)   all done (s)")
for policy in ("request_level", "orca", "prefill_first", "sarathi_2023", "sarathi_serve", "paceline"):
    limits = SchedulerConfig(token_budget=256, max_batch=32, max_model_len=2048)
    controller = Controller([GroupConfig(scheduler=limits, policy=policy)])
    times: dict[str, list[float]] = defaultdict(list)
    for event in simulate(controller, requests, steps, FixedOutputs({request.id: 100 for request in requests})):
        if event.kind == "tokens":
            for name in event.detail.requests:
                times[name].append(event.time)
    first = [1e3 * (times[request.id][0] - request.arrival) for request in requests]
    gaps = [1e3 * (b - a) for some in times.values() for a, b in zip(some, some[1:], strict=False)]
    ends = max(some[-1] for some in times.values())
    print(f"{policy:16} {percentile(first, 0.5):17.0f} {percentile(gaps, 0.5):19.1f} {percentile(gaps, 0.99):10.1f}"
          f" {ends:14.1f}")  # fmt: skip
