"""A soak's folder: continued when it is the same soak, refused by name when it is not; its report follows from the journal."""

from pathlib import Path

import pytest

from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.verification import Tally
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.measurement.process import Counters
from model_optimizer.spec import Traffic
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.robustness import robustness_measures
from model_optimizer.verification.soak_profile import load_soak_profile
from model_optimizer.verification.soak_records import Check, ControlReading, Drift, Segment, merged
from model_optimizer.verification.soak_report import JOURNAL, Asked, SoakInputs, build_report, claim_folder, key_of, write_report
from model_optimizer.verification.soak_summary import summarise_soak

INPUTS = SoakInputs(
    engine_digest="e", text_digest="t", runtime="torch", traffic=Traffic(), concurrency=4, segment_s=60,
    kv=KvPlan(page_tokens=16, num_pages=8, bytes_per_token=512, max_batch=4, max_model_len=128),
    requests_per_segment=None, drift_every_s=3600, with_control=True, seed=0, machine="m",
)  # fmt: skip
MIB = 2**20


def counters(heap_bytes: int = 300 * MIB, gap_bytes: int = 50 * MIB, num_fds: int = 20) -> Counters:
    return Counters(
        rss_bytes=heap_bytes + gap_bytes, anonymous_bytes=heap_bytes + gap_bytes, heap_bytes=heap_bytes, python_blocks=10**6,
        num_fds=num_fds, num_threads=4,
    )  # fmt: skip


def control(held: Counters, digest: str = "a", wall_s: float = 0.1) -> ControlReading:
    return ControlReading(digest=digest, wall_s=wall_s, cpu_s=0.1, counters=held)


def minute(number: int, session: int = 0, **changed: object) -> Segment:
    """A sound minute."""
    fields: dict[str, object] = {
        "session": session, "ran_s": 60, "stands_for_s": 60, "num_requests": 10, "num_failed": 0, "num_non_finite": 0,
        "num_tokens": 100, "canaries": (((1, 2),), ((1, 2),)), "memory": (), "end_to_end_ms": (5.0, 6.0),
        "canary_s": 0.1, "canary_cpu_s": 0.1,
        "canary_digests": ("a", "a"), "began_unix_s": 60.0 * number, "ended_unix_s": 60.0 * number + 60,
        "counters": counters(), "control": control(counters(200 * MIB)),
        "peak_rss_bytes": 400 * MIB, "tallies": (Tally(check=Check.PAGE_FAULTS, num_checked=2, num_found=0),),
    }  # fmt: skip
    return Segment.model_validate(fields | changed)


def rejected(records: list[Segment]) -> set[str]:
    soak = summarise_soak(records, 3600)
    return {it.name for it in robustness_measures(soak, 0, 0, soak.peak_bytes) if it.verdict is Verdict.REJECT}


def test_claim_folder_continues_the_same_soak_and_refuses_another_by_name(tmp_path: Path) -> None:
    claim_folder(tmp_path / "s", INPUTS)
    claim_folder(tmp_path / "s", INPUTS)
    changed = INPUTS.model_copy(update={"engine_digest": "f", "concurrency": 8})
    with pytest.raises(ConfigError, match=r"engine_digest \(was e, is f\); concurrency \(was 4, is 8\)"):
        claim_folder(tmp_path / "s", changed)


def test_build_report_is_provisional_until_the_hours_are_real(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL, key_of(INPUTS), Segment)
    for number in range(60):
        journal.append(minute(number))
    config = SoakConfig(duration=3600)
    report = build_report(tmp_path, "m", INPUTS, Asked(config, required_s=86400))
    assert (report.verdict, report.level, report.not_accelerated) == (Verdict.ACCEPT, "provisional", ())
    assert build_report(tmp_path, "m", INPUTS, Asked(config, required_s=3600)).level == "final"
    with (tmp_path / JOURNAL).open("ab") as stream:
        stream.write(b'{"session": 0, "ran_s": 60, "num_req')  # killed while it wrote
    again = build_report(tmp_path, "m", INPUTS, Asked(config, required_s=86400))
    assert write_report(tmp_path, again).read_bytes() == write_report(tmp_path, report).read_bytes()


def test_an_accelerated_hour_is_provisional_and_says_what_was_not_accelerated(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL, key_of(INPUTS), Segment)
    for number in range(60):
        journal.append(minute(number, ran_s=1.0, stands_for_s=3600.0))
    report = build_report(tmp_path, "m", INPUTS, Asked(SoakConfig(duration=86400, requests_per_segment=9), required_s=3600))
    assert report.level == "provisional" and any("heat" in it for it in report.not_accelerated)
    assert report.soak.equivalent_s == 60 * 3600


def test_summary_counts_gaps_between_processes_as_not_tested() -> None:
    records = [minute(0), minute(1), minute(7, session=1), minute(8, session=1), Segment.crashed(2, "killed by SIGBUS", 600.0)]
    soak = summarise_soak(records, 3600)
    assert (soak.gap_s, soak.ran_s, soak.num_sessions) == (5 * 60 + 60, 240, 2)
    assert rejected(records) == {"crashes"}


def test_growth_is_judged_against_the_control_arm() -> None:
    both = [
        minute(at, counters=counters(300 * MIB + at * MIB), control=control(counters(200 * MIB + at * MIB)))
        for at in range(60)
    ]  # fmt: skip
    loaded = [minute(at, counters=counters(300 * MIB + at * MIB)) for at in range(60)]
    assert rejected(loaded) == {"heap_growth"}
    soak = summarise_soak(both, 3600)
    heap = next(growth for growth in soak.growth if growth.counter == "heap")
    assert (heap.verdict, heap.control_verdict) == (Verdict.ACCEPT, Verdict.REJECT)
    assert heap.per_hour == 0 and heap.control_per_hour == pytest.approx(60 * MIB)
    measure = next(it for it in robustness_measures(soak, 0, 0, soak.peak_bytes) if it.name == "heap_growth")
    assert measure.verdict is Verdict.REJECT and "without any load" in measure.reason


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"counters": lambda at: counters(gap_bytes=50 * MIB + at * MIB)}, "fragmentation_growth"),
        ({"counters": lambda at: counters(num_fds=20 + at // 3)}, "open_files_growth"),
        ({"canary_s": lambda at: 0.1 * (1 + at / 60)}, "slow_down"),
        ({"canary_cpu_s": lambda at: 0.1 * (1 + at / 60)}, "cpu_slow_down"),
        ({"canary_digests": lambda at: ("a", "b" if at == 40 else "a")}, "changed_bits"),
        ({"control": lambda at: control(counters(), digest="b")}, "control_mismatches"),
        (
            {"drift": lambda at: Drift(digest=str(at // 30), mean_log_prob_nats=-2 - at, num_tokens=8, greedy="f0")},
            "drifted_samples",
        ),
        ({"num_failed": lambda at: int(at == 3)}, "failed_requests"),
    ],
)
def test_robustness_measures_reject_by_the_check_that_is_there_for_it(changed: dict, name: str) -> None:
    records = [minute(at, **{field: make(at) for field, make in changed.items()}) for at in range(60)]
    assert name in rejected(records)
    assert rejected([minute(at) for at in range(60)]) == set()


def test_bits_do_not_gate_where_the_engine_never_gave_the_same_twice() -> None:
    records = [minute(at, canary_digests=(f"{at}a", f"{at}b")) for at in range(10)]
    assert rejected(records) == set()
    soak = summarise_soak(records, 600)
    assert not soak.is_deterministic
    shown = next(it for it in robustness_measures(soak, 0, 0, 1) if it.name == "changed_bits")
    assert shown.verdict is None and "tokens and scores gate instead" in shown.reason


def test_slow_down_of_the_machine_is_not_the_engines() -> None:
    slower = [0.1 * (1 + at / 30) for at in range(60)]
    records = [minute(at, canary_s=slower[at], control=control(counters(), wall_s=slower[at])) for at in range(60)]
    assert rejected(records) == set()


def test_what_passes_is_no_slow_down_and_what_stays_is_not_accepted() -> None:
    wave = [1e-4 * (at % 7) for at in range(60)]
    courses = {
        "a neighbour for a while": [0.1 * (1.5 if 36 <= at < 46 else 1.0) for at in range(60)],
        "caches that fill": [0.1 * (0.5 if at < 10 else 1.0) for at in range(60)],
        "a step that stays": [0.1 * (1.5 if at >= 36 else 1.0) for at in range(60)],
        "a rise": [0.1 * (1 + at / 60) for at in range(60)],
    }
    found = {}
    for name, canary_s in courses.items():
        records = [minute(at, canary_s=canary_s[at] + wave[at], canary_cpu_s=0.1 + wave[at]) for at in range(60)]
        measures = robustness_measures(summarise_soak(records, 3600), 0, 0, 1)
        found[name] = next(measure.verdict for measure in measures if measure.name == "slow_down")
    assert found == {
        "a neighbour for a while": Verdict.ACCEPT,
        "caches that fill": Verdict.INCONCLUSIVE,
        "a step that stays": Verdict.INCONCLUSIVE,
        "a rise": Verdict.REJECT,
    }


def test_merged_adds_checks_up_and_keeps_the_first_finding() -> None:
    tallies = [
        Tally(check=Check.PAGE_FAULTS, num_checked=2, num_found=0),
        Tally(check=Check.CRASHES, num_checked=1, num_found=1, first="one"),
        Tally(check=Check.PAGE_FAULTS, num_checked=3, num_found=2, first="two"),
        Tally(check=Check.PAGE_FAULTS, num_checked=1, num_found=1, first="three"),
    ]
    crashes, pages = merged(tallies)
    assert (crashes.num_found, crashes.first) == (1, "one")
    assert (pages.num_checked, pages.num_found, pages.first) == (6, 3, "two")


@pytest.mark.parametrize(
    ("name", "hours", "accelerated"), [("24h", 24, False), ("72h", 72, False), ("24h-accelerated", 24, True)]
)
def test_shipped_soak_profiles_say_what_their_names_say(name: str, hours: int, accelerated: bool) -> None:
    profile = load_soak_profile(name)
    assert profile.soak.duration == profile.required == hours * 3600
    assert (profile.soak.requests_per_segment is not None) is accelerated
    assert profile.soak.segment == 60 and profile.soak.drift_every == 3600


def test_load_soak_profile_names_line_and_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: 24h, 24h-accelerated, 72h"):
        load_soak_profile("25h")
    (tmp_path / "mine.yaml").write_text("concurrency: 4\nsoak: {duration: 1h, segment: 90s}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:2: .*60 s at most"):
        load_soak_profile(str(tmp_path / "mine.yaml"))
