"""The choice among predicted strategies: the ranking, why each of the others loses, and what would change the choice.

[Note: The choice]
The fastest strategy that fits and trains the same as ZeRO-3 is recommended. Strategies that train something close
(islands, rounded crossings) take part only if they are asked for. If a strategy of PyTorch is
within 5 % of the fastest, it is recommended: the plan cannot tell smaller differences, so laconic may buy nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from laconic.config import Config, ConfigError, to_dict
from laconic.plan.candidates import CANDIDATES, is_asked_for
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane
from laconic.plan.prediction import Predictor, Refusal
from laconic.plan.units import format_quantity

_TIE = 1.05
_EQUAL = 1.005
"""Among laconic's own strategies that are as fast, the one with the least device memory wins."""
_MOST_RATE_BITS_PER_S, _LEAST_RATE_BITS_PER_S = 1e14, 1e5
_BISECTIONS = 18


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One strategy in the ranking."""

    estimate: Estimate
    is_recommended: bool
    reason: str
    """Why it wins or loses."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The ranking of a job's strategies on a cluster: [Note: The choice]."""

    entries: tuple[Contender, ...]
    """The strategies that can run the job: first those that fit, each group from the fastest to the slowest."""
    refusals: tuple[Refusal, ...]
    recommended: Estimate | None
    """None if no strategy fits."""
    job: Config | None
    """The job under the recommended strategy, as `laconic train` takes it; None if there is none."""
    rival: str
    """What would have to change for the best of the other side to win; empty if there is none."""
    remedy: str
    """If nothing fits: by how much, and the nearest change with which a strategy would; else empty."""
    in_toml: str
    """The keys with which the job takes the recommended strategy, as TOML; empty if there is none."""
    in_code: str
    """The line with which a script takes it; empty if there is none, or no single line does it."""


def choose(predictor: Predictor, *, allow: Collection[str] = (), names: Sequence[str] | None = None) -> Choice:
    """Predict and rank strategies, and recommend one.

    Args:
        predictor: the job and the cluster.
        allow: names of inexact strategies that may be recommended, besides those that the job asks for itself.
        names: the strategies to look at. Default: all.

    Raises:
        ConfigError: a name is not known.
    """
    found = list(predictor.all(names))
    refusals = tuple(each for each in found if isinstance(each, Refusal))
    estimates = [each for each in found if isinstance(each, Estimate)]
    own = predictor.config.shard, predictor.config.sync, predictor.config.pipeline
    allowed = {*allow, *(name for name, each in CANDIDATES.items() if is_asked_for(each, *own))}
    may_win = [each for each in estimates if each.fits and _may_win(each, allowed)]
    best = _best(may_win)
    ordered = sorted(estimates, key=lambda each: (not each.fits, each.seconds_per_token))
    entries = tuple(
        Contender(estimate=each, is_recommended=each is best, reason=_reason(each, best, allowed)) for each in ordered
    )
    return Choice(
        entries=entries,
        refusals=refusals,
        recommended=best,
        job=None if best is None else best.job,
        rival="" if best is None else _rival(predictor, best, [each for each in estimates if each.fits]),
        remedy="" if best is not None else _remedy(predictor, estimates),
        in_toml="" if best is None else _in_toml(predictor.config, best.job),
        in_code="" if best is None else _in_code(CANDIDATES[best.strategy].code, best.job, predictor.cluster),
    )


def _in_toml(before: Config, after: Config) -> str:
    """The keys of a job that differ from those before."""
    old, new = (
        {f"{section}.{key}": value for section, keys in to_dict(job).items() for key, value in keys.items()}
        for job in (before, after)
    )
    changes = [f"{key} = {json.dumps(value)}" for key, value in new.items() if old.get(key) != value]
    return ", ".join([*changes, *(f"without {key}" for key in old if key not in new)]) or "as it is"


def _in_code(code: str, job: Config, cluster: ClusterSpec) -> str:
    """A strategy's line of code with the values of a job and a cluster."""
    policy = job.shard.policy
    coded = "" if policy.wire.is_exact else f', wire="{policy.wire.word}"'
    keys = {"micro_batches": "...", **to_dict(job.sync), **to_dict(job.pipeline)}
    keys |= {"local": cluster.ranks_per_node, "nodes": cluster.nodes}
    return code.format(**keys, rests=f'cache="{policy.cache.where}"{coded}')


def _may_win(estimate: Estimate, allowed: Collection[str]) -> bool:
    return CANDIDATES[estimate.strategy].saves and (not estimate.inexact or estimate.strategy in allowed)


def _best(estimates: Sequence[Estimate]) -> Estimate | None:
    fastest = min(estimates, key=lambda each: each.seconds_per_token, default=None)
    if fastest is None:
        return None
    equal = [each for each in estimates if each.seconds_per_token <= _EQUAL * fastest.seconds_per_token]
    fastest = min(equal, key=lambda each: each.peak_bytes)
    peers = [each for each in estimates if each.is_peer and not each.inexact]
    simplest = min(peers, key=lambda each: each.seconds_per_token, default=fastest)
    return simplest if simplest.seconds_per_token <= _TIE * fastest.seconds_per_token else fastest


def _reason(estimate: Estimate, best: Estimate | None, allowed: Collection[str]) -> str:
    """One line about a strategy, compared with the recommended one."""
    if not estimate.fits:
        return shortfall(estimate)
    if best is None or estimate is best:
        return f"a step is bound by {_words(estimate.bound_by)}"
    slower = estimate.seconds_per_token / best.seconds_per_token
    if not _may_win(estimate, allowed):
        speed = f"{slower:.2f}x the time, and" if slower > 1 else f"{1 / slower:.2f}x as fast, but"
        return f"{speed} {f'inexact: {estimate.inexact}' if estimate.inexact else 'it is for comparisons'}"
    if slower <= 1:
        virtue = "is simpler" if best.is_peer else "takes less device memory"
        return f"as fast within {_TIE - 1:.0%}, but {best.label} {virtue}"
    more = {lane: estimate.waits_s.get(lane, 0.0) - best.waits_s.get(lane, 0.0) for lane in PlanLane}
    lane = max(more, key=lambda each: more[each])
    if more[lane] <= 0.2 * (estimate.seconds - best.seconds):
        return f"{slower:.2f}x the time: it computes and copies more"
    text = f"{slower:.2f}x the time: waits {format_quantity(max(0.0, more[lane]), 's')} longer for {_words(lane)}"
    if lane is PlanLane.WIRE and best.wire_bytes:
        text += f", {estimate.wire_bytes / best.wire_bytes:.2f}x the bytes"
    return text


def shortfall(estimate: Estimate) -> str:
    """The memory that a strategy lacks, in words."""
    lacks = []
    if estimate.spare_device_bytes < 0:
        lacks.append(f"{format_quantity(-estimate.spare_device_bytes, 'B')} more on each device")
    if estimate.spare_host_bytes < 0:
        lacks.append(f"{format_quantity(-estimate.spare_host_bytes * estimate.ranks_per_node, 'B')} more on each host")
    return f"does not fit: needs {' and '.join(lacks)}"


def _words(lane: PlanLane) -> str:
    words = {PlanLane.COMPUTE: "compute", PlanLane.WIRE: "the wire", PlanLane.LOCAL: "the network inside the node"}
    return words.get(lane, lane.value)


# -- what would change the choice --------------------------------------------------------------------------------------


def _rival(predictor: Predictor, best: Estimate, fitting: Sequence[Estimate]) -> str:
    """The rate of the wire at which the best exact strategy of the other side becomes the faster one."""
    cluster = predictor.cluster
    others = [each for each in fitting if each.is_peer is not best.is_peer and not each.inexact]
    rival = min(others, key=lambda each: each.seconds_per_token, default=None)
    if rival is None or cluster.wire_bits_per_s is None or cluster.nodes == 1:
        return ""
    if rival.seconds_per_token <= _TIE * best.seconds_per_token:
        return f"{rival.label} is as fast within {_TIE - 1:.0%}"
    has_to_rise = not best.is_peer
    rate = break_even(predictor, best, rival, upwards=has_to_rise)
    now = format_quantity(cluster.wire_bits_per_s, "bit/s")
    if rate is None:
        return f"{rival.label} would be slower at every {'higher' if has_to_rise else 'lower'} rate of the wire, too"
    then = f"{format_quantity(rate, 'bit/s')} or {'more' if has_to_rise else 'less'}"
    return f"{rival.label} would win if the wire carried {then} (now {now})"


def break_even(predictor: Predictor, best: Estimate, rival: Estimate, *, upwards: bool) -> float | None:
    """The rate of the wire, in bits per second, from which on `rival` is as fast as `best`; None if it never is."""
    start = predictor.cluster.wire_bits_per_s
    assert start is not None
    low, high = (start, _MOST_RATE_BITS_PER_S) if upwards else (_LEAST_RATE_BITS_PER_S, start)

    def rival_wins(rate: float) -> bool:
        other = predictor.on(dataclasses.replace(predictor.cluster, wire_bits_per_s=rate))
        two = [other.estimate(CANDIDATES[each.strategy], job=each.job) for each in (best, rival)]
        seconds = [each.seconds for each in two if isinstance(each, Estimate)]
        return len(seconds) == 2 and seconds[1] <= seconds[0] * (_TIE if upwards else 1.0)

    far = high if upwards else low
    if not rival_wins(far):
        return None
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        if rival_wins(middle) is upwards:
            high = middle
        else:
            low = middle
    return high if upwards else low


def _remedy(predictor: Predictor, estimates: Sequence[Estimate]) -> str:
    """By how much nothing fits, and the nearest change with which a strategy would."""
    if not estimates:
        return "no strategy can run this job"
    nearest = min(estimates, key=lambda each: -min(each.spare_device_bytes, each.spare_host_bytes))
    text = f"nothing fits; the nearest, {nearest.label}, {shortfall(nearest).removeprefix('does not fit: ')}"
    for words, changed in _changes(predictor):
        fitting = [
            each for each in changed.all([nearest.strategy, "host", "none"]) if isinstance(each, Estimate) and each.fits
        ]
        if fitting:
            best = min(fitting, key=lambda each: each.seconds_per_token)
            return f"{text}; with {words}, {best.label} would fit"
    return f"{text}; no single change to the batch, the checkpointing or the nodes is enough"


def _changes(predictor: Predictor) -> list[tuple[str, Predictor]]:
    """Changes that need less memory, the mildest first."""
    config, cluster = predictor.config, predictor.cluster
    train, found = config.train, []
    if not config.model.activation_checkpointing:
        model = dataclasses.replace(config.model, activation_checkpointing=True)
        changed = dataclasses.replace(config, model=model)
        found.append(("model.activation_checkpointing = true", predictor.with_job(changed)))
        config = changed
    rows = train.micro_batch_size
    while rows % 2 == 0:
        rows //= 2
        accumulation = train.accumulation * train.micro_batch_size // rows
        smaller = dataclasses.replace(train, micro_batch_size=rows, accumulation=accumulation)
        changed = dataclasses.replace(config, train=smaller)
        words = f"train.micro_batch_size = {rows} and train.accumulation = {accumulation}"
        checkpoints = config.model.activation_checkpointing and not predictor.config.model.activation_checkpointing
        words = f"model.activation_checkpointing = true, {words}" if checkpoints else words
        found.append((words, predictor.with_job(changed)))
    for nodes in (cluster.nodes * 2, cluster.nodes * 4, cluster.nodes * 8):
        if cluster.wire_bits_per_s is not None:
            found.append((f"{nodes} nodes", predictor.on(dataclasses.replace(cluster, nodes=nodes))))
    return found


def fitting_cluster(cluster: ClusterSpec, *, nodes: int, local: int) -> ClusterSpec:
    """The cluster with the nodes and ranks of a launch.

    Raises:
        ConfigError: the file lacks a figure that this launch needs.
    """
    if (cluster.nodes, cluster.ranks_per_node) == (nodes, local):
        return cluster
    try:
        return dataclasses.replace(
            cluster, nodes=nodes, ranks_per_node=local, ranks_per_host_link=min(cluster.ranks_per_host_link, local)
        )
    except ConfigError as error:
        raise ConfigError(
            f"the cluster file is for {cluster.nodes} x {cluster.ranks_per_node} ranks, and {nodes} x {local} were "
            f"started: {error}"
        ) from error
