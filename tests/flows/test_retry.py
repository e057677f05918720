"""Retry in the UI of a run that failed in compile: what was finished is not done again."""

from from_commit import Story

HELD = ("profile", "scan", "quantize")


def test_retry_takes_profile_scan_and_quantize_from_the_cache(story: Story) -> None:
    assert {stage: story.first.states(stage) for stage in ("profile", "scan")} == {
        "profile": {"Completed"},
        "scan": {"Completed"},
    }
    assert story.first.states("compile") == {"Failed"} and story.first.states("memory") == set()
    assert {stage: story.second.states(stage) for stage in HELD} == {stage: {"Cached"} for stage in HELD}


def test_retry_leaves_finished_entries_as_they_are_and_completes_the_rest(story: Story) -> None:
    before, after = story.first.made_at, story.second.made_at
    assert {entry.partition("/")[0] for entry in before} == set(HELD)
    assert {entry: after[entry] for entry in before} == before
    assert {entry.partition("/")[0] for entry in after} == {*HELD, "compile", "memory", "verify", "package"}


def test_retry_is_the_same_flow_run(story: Story) -> None:
    assert story.first.run.id == story.second.run.id
    assert (story.first.run.run_count, story.second.run.run_count) == (1, 2)
