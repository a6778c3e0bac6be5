"""The rules against their published formulas, and against the limits of the schedule."""

from __future__ import annotations

import pytest

from laconic.cyclic.schedule import RULES, Rule

SIZES = range(1, 17)


def test_v2_of_four_is_the_published_mask() -> None:
    rows = ["".join(str(int(fresh)) for fresh in row) for row in Rule.named("v2", 4).mask]
    assert rows == ["0001", "0011", "0111", "1111"]


def test_freshness_of_named_rules() -> None:
    assert [Rule.named(name, 4).freshness for name in ("dp", "v1", "v2", "lag2", "clip")] == [1, 0, 0.625, 0.375, 0.375]
    assert Rule.named("clip", 8).freshness == 0.3125
    for num_stages in SIZES:
        assert Rule.named("v2", num_stages).freshness == pytest.approx((num_stages + 1) / (2 * num_stages))
        assert Rule.named("lag2", num_stages).freshness == pytest.approx((num_stages - 1) / (2 * num_stages))


@pytest.mark.parametrize("num_stages", SIZES)
def test_versions_follow_from_the_mask(num_stages: int) -> None:
    for name in RULES:
        rule = Rule.named(name, num_stages)
        for worker in range(num_stages):
            for stage in range(num_stages):
                assert rule.version_in_run(worker, stage, 0) == (0 if rule.mask[worker][stage] else -1)
                assert rule.version_in_run(worker, stage, 5) == (5 if rule.mask[worker][stage] else 4)


def test_slack() -> None:
    assert [Rule.named("v2", 4).slack(j) for j in range(4)] == [0, 0, 0, 0]
    assert [Rule.named("lag2", 4).slack(j) for j in range(4)] == [2, 2, 2, 2]
    assert [Rule.named("v1", 4).slack(j) for j in range(4)] == [2, 4, 6, 8]


@pytest.mark.parametrize("num_stages", range(2, 9))
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


def test_at_most_two_versions_of_a_stage_are_in_use() -> None:
    """On average over stages and time steps 1 + (N - 1) / 2N versions are in use, if workers are staggered."""
    for num_stages in range(1, 9):
        for name in ("v1", "v2", "lag2", "clip"):
            rule = Rule.named(name, num_stages)
            most, total, samples = [0] * num_stages, 0, 0
            for step in range(6 * num_stages, 8 * num_stages):
                for stage in range(num_stages):
                    in_use = {
                        rule.version_in_run(worker, stage, batch)
                        for batch in range(6)
                        for worker in range(num_stages)
                        if 0 <= step - 2 * (num_stages * batch + worker) - stage < 2 * (num_stages - stage)
                    }
                    most[stage] = max(most[stage], len(in_use))
                    total, samples = total + len(in_use), samples + 1
            if rule.is_staggered:  # all rules but those of a single stage
                assert most == [2] * (num_stages - 1) + [1]
                assert total / samples == pytest.approx(1 + (num_stages - 1) / (2 * num_stages))


def test_owners_are_a_permutation_where_the_switches_are() -> None:
    for num_stages in SIZES:
        for name in ("dp", "v2", "lag2"):
            rule = Rule.named(name, num_stages)
            assert sorted(rule.owner(stage) for stage in range(num_stages)) == list(range(num_stages))


def test_mask_round_trip_and_refusals() -> None:
    for num_stages in SIZES:
        for name in RULES:
            rule = Rule.named(name, num_stages)
            assert Rule.from_mask(rule.mask).switch == rule.switch
    with pytest.raises(ValueError, match="square"):
        Rule.from_mask([[1, 1], [1]])
    with pytest.raises(ValueError, match=r"fresh for workers \[0\]"):
        Rule.from_mask([[1, 1], [0, 1]])
    with pytest.raises(ValueError, match="unknown rule 'v3'; the rules are dp, v1, v2, lag2, clip"):
        Rule.named("v3", 4)
    with pytest.raises(ValueError, match="one per stage"):
        Rule("short", 3, (2, 1))
    with pytest.raises(ValueError, match=r"not in 0\.\.2"):
        Rule("late", 2, (1, 3))
    with pytest.raises(ValueError, match="for 4 stages, but there are 3"):
        Rule.of(Rule.named("v2", 4), 3)
    assert Rule.of("v2", 3) == Rule.named("v2", 3)
