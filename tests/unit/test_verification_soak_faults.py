"""Faults in the native runtime's own objects are found by the check that is there for them, and clean runs find nothing."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from benchmarks.soak_fault_parts import FAULTS
from benchmarks.soak_faults import PLAN, STRESS, open_model, write_packed
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.journal import Journal
from model_optimizer.protocols import GenerationRequest, Quiet
from model_optimizer.runtimes.registry import framework_version
from model_optimizer.runtimes.torch import engine
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.robustness import robustness_measures, soak_measure
from model_optimizer.verification.soak import ACCELERATED_TURNS, Setting, TrafficClock, run_soak, sample_drift
from model_optimizer.verification.soak_extremes import run_trials
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_summary import summarise_soak
from model_optimizer.verification.soak_twin import Opener, Twin
from model_optimizer.verification.soak_watch import Watched
from model_optimizer.verification.soak_worker import SoakJob, SoakWorker, Stops, ended_how

DAY = SoakConfig(duration=86400.0, segment=8 * 3600.0, drift_every=16 * 3600.0, requests_per_segment=12)
EXACT = ("kv-cross-talk", "double-free", "scale-mutation", "nan-at-step", "clock-jump", "page-corruption")
"""Faults that a few segments show; what grows or slows down needs a trend and is in the catalogue (benchmarks/soak_faults.py)."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads do not survive the forks of this file."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return write_packed(tiny_llama, tmp_path_factory.mktemp("packed") / "model")


def soaked(model: Path, folder: Path, fault: str = "") -> SoakResult:
    clock = TrafficClock()
    with closing(open_model(model)) as runtime:
        if fault:
            FAULTS[fault][0](runtime, clock)
        journal = Journal(folder / "soak.jsonl", "k", Segment)
        return run_soak(runtime, STRESS, DAY, journal, Quiet(), setting=Setting(clock=clock))


@pytest.fixture(scope="module")
def sound(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> SoakResult:
    return soaked(tiny_llama, tmp_path_factory.mktemp("sound"))


def rejected(soak: SoakResult) -> set[str]:
    return {measure.name for measure in robustness_measures(soak, 0, 0, soak.peak_bytes) if measure.verdict is Verdict.REJECT}


def test_run_soak_of_a_sound_runtime_rejects_nothing_and_makes_every_check(sound: SoakResult) -> None:
    found = sound
    assert rejected(found) == set()
    assert {tally.check for tally in found.tallies} == {"page_faults", "clock_faults", "wrong_scores", "failed_trials"}
    assert min(tally.num_checked for tally in found.tallies) >= 4
    assert found.num_drift_samples == 2 and found.num_digests == 3 * (1 + ACCELERATED_TURNS) and found.is_deterministic
    assert found.equivalent_s == 86400 and found.ran_s < 3600
    reason = soak_measure(found, 86400).reason
    assert "provisional" in reason and "stands for 24 h" in reason


@pytest.mark.parametrize("fault", EXACT)
def test_run_soak_finds_the_fault(
    tiny_llama: Path, packed: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "time", engine.time)  # put back what clock-jump replaces
    found = rejected(soaked(packed if fault == "scale-mutation" else tiny_llama, tmp_path, fault))
    assert found & FAULTS[fault][1], found


def test_trials_pass_on_a_sound_runtime_and_name_what_one_that_takes_anything_lets_through(tiny_llama: Path) -> None:
    with closing(open_model(tiny_llama)) as runtime:
        assert run_trials(runtime, STRESS.text_tokens, STRESS.concurrency) == [
            ("length jump", ""), ("batch swings", ""), ("refusals", ""), ("extreme prompts", ""),
        ]  # fmt: skip
        submit = runtime.submit
        runtime.submit = lambda request: submit(request if request.prompt else GenerationRequest((5,), 1))  # type: ignore[method-assign]
        trials = dict(run_trials(runtime, STRESS.text_tokens, STRESS.concurrency))
        assert trials["refusals"] == "an empty prompt was not refused" and trials["length jump"] == ""


def test_drift_sample_changes_with_a_single_scale(packed: Path) -> None:
    with closing(open_model(packed)) as runtime:
        batch = STRESS.drift_batch()
        first, second = sample_drift(runtime, batch), sample_drift(runtime, batch)
        assert first == second and first.num_tokens == 8 * 63
        runtime._opened.model._layers[1].down.weight.parts[".weight_scale"][0] *= 1.01  # type: ignore[attr-defined]
        third = sample_drift(runtime, batch)
    assert third.digest != first.digest and abs(third.mean_log_prob_nats - first.mean_log_prob_nats) < 0.01


def test_watched_counts_pages_that_are_held_though_nothing_runs(tiny_llama: Path) -> None:
    with closing(open_model(tiny_llama)) as runtime:
        watched = Watched(runtime)
        watched.check_pool(idle=True)
        kept = runtime._pool.begin([1] * 20)
        kept.extend(20)
        watched.check_pool(idle=True)
        (tally,) = watched.tallies()
        assert (tally.check, tally.num_checked, tally.num_found) == ("page_faults", 2, 1)
        assert tally.first == "2 pages are held by 1 sequences though no request is in flight"
        assert watched.tallies() == ()


def test_twin_gives_the_bits_of_the_soaked_runtime_and_ends_with_its_owner(tiny_llama: Path) -> None:
    canaries = STRESS.canaries()
    with Twin(lambda: open_model(tiny_llama), canaries, start_method="fork") as twin:
        first, second, counters = twin.run(), twin.run(), twin.counters()
        process = twin._process
    assert first.digest == second.digest and first.wall_s > 0
    assert counters.heap_bytes is not None and counters.num_fds > 0
    assert process.exitcode == 0


def job_at(folder: Path, model: Path) -> SoakJob:
    folder.mkdir(exist_ok=True)
    opener = Opener(
        Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch")), model, PLAN
    )
    stops = Stops(folder, deadline_unix_s=2**40, min_free_memory_bytes=0, min_free_disk_bytes=0)
    return SoakJob(opener, STRESS, DAY, folder / "soak.jsonl", "k", stops, with_control=False, start_method="fork")


def die(job: SoakJob, owner: Connection) -> None:
    faulthandler.disable()  # else pytest prints the whole stack of a crash that is meant
    os.kill(os.getpid(), signal.SIGSEGV)


def test_worker_writes_a_crash_down_and_gives_up_after_three(tiny_llama: Path, tmp_path: Path) -> None:
    job = job_at(tmp_path / "soak", tiny_llama)
    with SoakWorker(job, target=die) as worker:
        worker.run_until(DAY.duration)
    assert worker.stopped_because == "its process ended by itself 3 times, last: killed by SIGSEGV"
    found = summarise_soak(job.opened_journal().records, DAY.duration)
    assert rejected(found) == {"crashes"} and found.ran_s == 0
    with SoakWorker(job) as worker:  # the next one goes on, and what crashed stays found
        assert worker.run_until(DAY.duration) == DAY.duration
    found = summarise_soak(job.opened_journal().records, DAY.duration)
    assert rejected(found) == {"crashes"} and found.num_segments == 3


def test_worker_stops_for_a_stop_file_and_goes_on_as_if_never_stopped(
    sound: SoakResult, tiny_llama: Path, tmp_path: Path
) -> None:
    job = job_at(tmp_path / "soak", tiny_llama)
    (tmp_path / "soak" / "STOP").touch()
    with SoakWorker(job) as worker:
        worker.run_until(DAY.duration)
    assert worker.stopped_because == "STOP lies in its folder" and worker.stood_for_s == DAY.segment
    (tmp_path / "soak" / "STOP").unlink()
    with SoakWorker(job) as worker:
        assert worker.run_until(DAY.duration) == DAY.duration
    found = summarise_soak(job.opened_journal().records, DAY.duration)
    assert found.num_sessions == 2 and found.gap_s > 0 and rejected(found) == set()
    assert (found.output_digest, found.num_tokens) == (sound.output_digest, sound.num_tokens)


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "killed by SIGSEGV"), (-9, "killed by SIGKILL, perhaps for want of memory"), (1, "exit code 1")]
)
def test_ended_how_says_it_in_words(code: int, words: str) -> None:
    assert ended_how(code) == words
