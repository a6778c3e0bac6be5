"""Rows about the schedule as the runtime keeps it: live activations, messages and wall-clock of sleeping stages."""

from __future__ import annotations

import statistics

from benchmarks.cyclic.bench import BENCHMARK, TIMEOUT_S, Bench
from benchmarks.cyclic.sleeping import STAGE_BYTES, Observation, live_over_time, run_sleeping
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule
from tests.support.launch import launch
from tests.support.record import Row


def _run_sleeping(bench: Bench, rule: str, num_workers: int, batches: int) -> list[Observation]:
    args = rule, "replicated", num_workers, batches, bench.op_s
    return launch(run_sleeping, *args, num_ranks=num_workers, timeout_s=TIMEOUT_S)


@BENCHMARK.row("live")
def live(bench: Bench) -> Row:
    measured, notes, is_met = [], [], True
    for n in bench.num_workers:
        cyclic, plain = (
            [alive for _, alive in live_over_time(_run_sleeping(bench, rule, n, bench.batches))]
            for rule in ("v2", "dp")
        )
        ideal = n * (n + 1) // 2
        is_met &= max(cyclic) <= ideal + n // 2 and max(plain) == n * n
        measured.append(f"N={n}: {max(cyclic)} against {max(plain)}")
        notes.append(f"N={n}: ideal {ideal}, at most {ideal + n // 2}")
    return Row(
        claim=(
            "live stage activations summed over workers, "
            f"N = {', '.join(map(str, bench.num_workers))}, at most, against dp"
        ),
        required="N(N+1)/2 + at most N/2, against N^2",
        measured="; ".join(measured),
        is_met=is_met,
        note=(
            f"{'; '.join(notes)}. Rule v2 on Gloo, equal stages of {bench.op_s * 1e3:.0f} ms each way, "
            f"{bench.batches} batches, counted by the stages, from the beginning of a forward to the end of its "
            "backward."
        ),
    )


@BENCHMARK.row("messages")
def messages(bench: Bench) -> Row:
    n, by_rule, most, largest, burst = 4, [], 0, 0.0, 0.0
    for rule in ("v1", "v2", "lag2", "clip"):
        workers = _run_sleeping(bench, rule, n, bench.batches + 2)
        sends, receives = (
            max(len(step) for worker in workers for step in getattr(worker.log, name))
            for name in ("sent_bytes", "received_bytes")
        )
        steps = [step for worker in workers for step in worker.log.sent_bytes if step]
        largest = max(largest, max(size for step in steps for size in step) / (n * STAGE_BYTES))
        burst = max(burst, max(map(sum, steps)) / (n * STAGE_BYTES))
        most = max(most, sends, receives)
        by_rule.append(f"{rule} {sends} + {receives}")
    return Row(
        claim=f"messages per worker per time step, N = {n}, sends + receives / largest burst, against DP's all-reduce",
        required="<= 2 + 2 / P/N against P",
        measured=f"{', '.join(by_rule)} / {burst:.3f} P, in messages of {largest:.3f} P",
        is_met=most <= 2 and burst <= 1 / n,
        note=(
            "counted at the sender and the receiver, between the ops of the runtime on Gloo, replicated states; P: "
            "bytes of all parameters. The burst is what a worker sends between two ops. An all-reduce begins with P "
            f"bytes on every worker, and each worker sends {2 * (n - 1) / n:.2f} P. New parameters of a stage wait for "
            "one time step where a gradient sum leaves, under every rule. Receives are counted where they are taken: "
            "the sum of the first stage after the last backward, its new parameters before the next forward."
        ),
    )


@BENCHMARK.row("wall-clock")
def wall_clock(bench: Bench) -> Row:
    n, ratios, on_time = 4, {}, {}
    ideal_s = Schedule(Rule.named("v2", n)).num_steps(bench.wall_batches) * bench.op_s
    for rule in ("v2", "lag2", "v1"):
        workers = _run_sleeping(bench, rule, n, bench.wall_batches)
        wall_s = max(worker.end_s for worker in workers) - min(worker.start_s for worker in workers)
        ratios[rule] = wall_s / ideal_s
        on_time[rule] = statistics.mean(worker.on_time for worker in workers)
    measured = ", ".join(f"{rule} {ratio:.3f}x" for rule, ratio in ratios.items())
    return Row(
        claim="wall-clock against the ideal 2N-step schedule, unshaped",
        required="<= 1.10x",
        measured=measured,
        is_met=max(ratios.values()) <= 1.10,
        note=(
            f"N = {n} processes, {bench.wall_batches} batches of stages that take {bench.op_s * 1e3:.0f} ms each way, "
            f"filling and draining included: {ideal_s:.2f} s ideally. Time steps on time: "
            f"{', '.join(f'{rule} {fraction:.0%}' for rule, fraction in on_time.items())}."
        ),
    )
