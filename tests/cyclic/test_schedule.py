"""The time steps against the published figure, the messages of all programs, and the rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate, product

import pytest

from laconic.cyclic.program import Message
from laconic.cyclic.schedule import RULES, Op, Rule, Schedule
from tests.cyclic.toys import sent

STAGGERED = tuple(name for name in RULES if name != "dp")


def table(schedule: Schedule, batches: int) -> list[dict[int, Op]]:
    """Each worker's ops by time step."""
    rows: list[dict[int, Op]] = [{} for _ in range(schedule.num_stages)]
    for device, batch in product(range(schedule.num_devices), range(batches)):
        for op in schedule.ops(device, batch):
            rows[op.worker][op.step] = op
    return rows


def live(schedule: Schedule, batches: int) -> list[int]:
    """The stage activations that are alive during each time step: each until the end of its backward."""
    change: Counter[int] = Counter()
    for op in (op for row in table(schedule, batches) for op in row.values()):
        change[op.step if op.is_forward else op.step + 1] += 1 if op.is_forward else -1
    return list(accumulate(change[step] for step in range(max(change))))


def test_figure_of_four_workers() -> None:
    rows = table(Schedule(Rule.named("v2", 4)), 3)
    names = [{step: f"{'BF'[op.is_forward]}{op.stage + 1}" for step, op in row.items()} for row in rows]
    assert [" ".join(row.get(step, ".") for step in range(16)) for row in names] == [
        "F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1",
        ". . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3",
        ". . . . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4",
        ". . . . . . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2",
    ]


def test_live_activations_are_flat() -> None:
    assert live(Schedule(Rule.named("dp", 4)), 1) == [4, 8, 12, 16, 16, 12, 8, 4]
    assert live(Schedule(Rule.named("v2", 4)), 2)[:9] == [1, 2, 4, 6, 8, 9, 10, 10, 10]
    for n in (2, 3, 8, 16):
        schedule = Schedule(Rule.named("v1", n))
        rows = table(schedule, 4)
        for step in range(2 * (n - 1), 8 * n):  # each stage is used by one worker at a time
            assert sorted(row[step].stage for row in rows) == list(range(n))
        assert set(live(schedule, 4)[2 * (n - 1) : 8 * n]) == {n * (n + 1) // 2}
        assert max(live(Schedule(Rule.named("dp", n)), 4)) == n * n


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_shared_devices_never_collide(num_stages: int) -> None:
    """Each runs one op at a time, and has one stage's activation."""
    schedule = Schedule(Rule.named("v1", num_stages), "shared")
    assert schedule.num_devices == num_stages * (num_stages + 1) // 2
    for device in range(schedule.num_devices):
        ops = [op for batch in range(6) for op in schedule.ops(device, batch)]
        assert len({op.step for op in ops}) == len(ops)
        in_order = sorted(ops, key=lambda op: op.step)
        assert max(accumulate(1 if op.is_forward else -1 for op in in_order)) == 1


def in_batches(schedule: Schedule, *batches: int) -> list[tuple[int, Message]]:
    """(time step, message) of what leaves in these batches."""
    return [(step, message) for step, batch, message in sent(schedule, max(batches) + 1) if batch in batches]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("rule", STAGGERED)
def test_messages_are_few_and_have_time_to_arrive(num_stages: int, rule: str) -> None:
    """Only the totals of v2 are needed at once: see the table in docs/cyclic.md."""
    schedule = Schedule(Rule.named(rule, num_stages))
    messages = [(step, message) for step, _, message in sent(schedule, 6)]
    assert max(Counter((step, message.source) for step, message in messages).values()) == 1
    has_one_sender = rule == "v1" or num_stages == 2 or (rule == "v2" and num_stages == 3)
    receives = max(Counter((step, message.target) for step, message in messages).values())
    assert receives == (1 if has_one_sender else 2)  # a total may meet weights from another worker
    steady = Counter(message.kind for _, message in in_batches(schedule, 5))
    assert steady["gradient"] == steady["weights"] == num_stages * (num_stages - 1)
    assert steady["total"] == sum(schedule.rule.owner(stage) != num_stages - 1 for stage in range(num_stages))
    spare: dict[str, set[int]] = defaultdict(set)
    for step, message in messages:
        spare[message.kind].add(message.due - step)
    assert spare["gradient"] == {2}
    assert spare["weights"] <= ({1} if rule == "v1" else {1, 2})
    assert 1 in spare["weights"] or num_stages == 2
    if rule in ("v2", "lag2"):
        assert spare["total"] == {0 if rule == "v2" else 2}
    else:
        assert all(steps >= 2 for steps in spare["total"])


def staggered_rules(num_stages: int) -> list[Rule]:
    """All rules of N workers that are possible, except plain data parallelism."""
    switches = product(*(range(num_stages - 1 - stage, num_stages + 1) for stage in range(num_stages)))
    return [Rule("mask", num_stages, switch) for switch in switches if any(switch)]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_worker_sends_one_message_at_a_time(num_stages: int) -> None:
    """Under every rule; weights wait for one time step if, and only if, another message leaves when they are ready."""
    for rule in staggered_rules(num_stages):
        schedule = Schedule(rule)
        messages = sent(schedule, 4)
        at = {(message.source, step): message for step, _, message in messages}
        assert len(at) == len(messages), rule
        for step, batch, message in messages:
            if message.kind == "weights" and batch == 2:  # the first batch has no gradients before it
                ready = schedule.step(message.source, message.stage, batch)
                assert message.due == ready + 2, rule
                is_taken = at.get((message.source, ready), message) is not message
                assert step == ready + is_taken, (rule, message)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
def test_sharded_states_travel_on_rings(num_stages: int) -> None:
    schedule = Schedule(Rule.named("v2", num_stages), "sharded")
    steady = in_batches(schedule, *range(1, 6))  # the first batch fills the rings
    for kind in ("weights", "rear weights", "gradient"):
        hops = [(step, message) for step, message in steady if message.kind == kind]
        assert set(Counter((message.source, step) for step, message in hops).values()) == {1}
        assert set(Counter((message.target, step) for step, message in hops).values()) == {1}
    for step, message in steady:
        if message.kind != "total":
            assert message.target == (message.source + 1) % num_stages
            assert message.due - step == 2 or message.kind == "gradient"


def test_shared_gradients_and_totals() -> None:
    """Stage j has N - j devices; one of them made the total."""
    steady = in_batches(Schedule(Rule.named("v2", 4), "shared"), 3, 4, 5)
    totals = Counter(message.stage for _, message in steady if message.kind == "total")
    assert totals == {stage: 3 * (3 - stage) for stage in range(3)}


# -- rule --------------------------------------------------------------------------------------------------------------


def mask(rule: Rule) -> list[list[bool]]:
    """N rows of workers x N columns of stages, true where the worker is fresh."""
    workers = range(rule.num_stages)
    return [[rule.is_fresh(worker, stage) for stage in workers] for worker in workers]


def test_masks_of_named_rules() -> None:
    rows = ["".join(str(int(fresh)) for fresh in row) for row in mask(Rule.named("v2", 4))]
    assert rows == ["0001", "0011", "0111", "1111"], "as published"
    fresh = {"dp": 16, "v1": 0, "v2": 10, "lag2": 6, "clip": 6}
    assert {name: sum(map(sum, mask(Rule.named(name, 4)))) for name in RULES} == fresh, "the shares of docs/cyclic.md"
    for num_stages, name in product((1, 2, 3, 7, 16), RULES):
        rule = Rule.named(name, num_stages)
        assert Rule.from_mask(mask(rule)).switch == rule.switch
        for worker, stage in product(range(num_stages), repeat=2):
            is_fresh = rule.is_fresh(worker, stage)
            for batch in (0, 5):
                version = rule.version_in_run(worker, stage, batch)
                assert version == (batch if is_fresh else batch - 1)
                assert rule.batch_of_version(worker, stage, version) == batch


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
def test_fresher_than_v2_is_refused(num_stages: int) -> None:
    fastest = Rule.named("v2", num_stages).switch
    for stage in range(num_stages - 1):  # the last stage's switch is 0 already
        hasty = tuple(switch - (stage == j) for j, switch in enumerate(fastest))
        if any(hasty):  # at two stages, one worker less is plain data parallelism
            with pytest.raises(ValueError, match=f"newest version of stage {stage}.*at least {fastest[stage]}"):
                Rule("hasty", num_stages, hasty)


def test_who_may_clip_by_the_global_norm() -> None:
    for num_stages in range(4, 9):  # with fewer stages lag2 may clip too
        allowed = [name for name in RULES if Rule.named(name, num_stages).allows_global_norm]
        assert allowed == ["dp", "v1", "clip"]
        clip = Rule.named("clip", num_stages)
        for stage in range(1, num_stages):  # no fresher rule may clip
            hasty = tuple(switch - (stage == j) for j, switch in enumerate(clip.switch))
            if hasty[stage] >= num_stages - 1 - stage:
                assert not Rule("hasty", num_stages, hasty).allows_global_norm
    assert all(Rule.named(name, 1).allows_global_norm for name in RULES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule.from_mask([[1, 1], [1]]), "square"),
        (lambda: Rule.from_mask([[1, 1], [0, 1]]), r"fresh for workers \[0\]"),
        (lambda: Rule.named("v3", 4), "unknown rule 'v3'; the rules are dp, v1, v2, lag2, clip"),
        (lambda: Rule("short", 3, (2, 1)), "one per stage"),
        (lambda: Rule("late", 2, (1, 3)), r"not in 0\.\.2"),
        (lambda: Rule.of(Rule.named("v2", 4), 3), "for 4 stages, but there are 3"),
        (lambda: Schedule(Rule.named("v2", 2), "everywhere"), "expected one of single, replicated"),  # type: ignore[arg-type]
        (lambda: Schedule(Rule.named("dp", 4), "shared"), "different times"),
        (
            lambda: Schedule(Rule.named("v2", 4), has_norm=True),
            r"rule 'v2' cannot wait for; rules that can: dp, v1, clip\.",
        ),
    ],
)
def test_bad_rules_and_schedules_are_refused(make: Callable[[], object], words: str) -> None:
    assert Rule.of("v2", 3) == Rule.named("v2", 3)
    with pytest.raises(ValueError, match=words):
        make()
