"""`model-optimizer bench`: what it measures, prints and writes, and with which code it refuses."""

import csv
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from entry import Command
from serving_fixtures import write_onnx_model

from model_optimizer.measurement.samples import LoadSamples
from model_optimizer.measurement.scripted_server import Script, running

OPTIONS = ("--rate", "40", "--duration", "1", "--seed", "3")
DONE = (0, 5)
"""Accepted, or the machine was so busy that the generator says that it was the bottleneck: the figures are there."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Script(ttft_ms=(20.0,), itl_ms=(10.0,), tokens_per_event=2, fail_every=15, fail_status=500)) as address:
        yield address


def test_bench_prints_figures_and_writes_page_table_and_samples(url: str, tmp_path: Path, command: Command) -> None:
    outputs = ("--csv", "b.csv", "--html", "b.html", "--samples", "b.parquet", "--json")
    lengths = ("--output-tokens", "8", "--sla", "ttft_ms=10000", "--sla", "tpot_ms=1")
    ended = command("bench", f"{url}/v1", *OPTIONS, *outputs, *lengths, cwd=tmp_path)
    assert ended.code in DONE, ended.err
    report = json.loads(ended.out)
    load, samples = report["load"], LoadSamples.load(tmp_path / "b.parquet")
    assert (report["model"], report["stream"], report["seed"]) == ("scripted", True, 3)
    # requests are numbered in the order of their arrival and four came before: 15 of every 15 fail
    assert load["num_requests"] == samples.num_requests and 1 <= load["failures"]["status 500"] <= 4
    good = load["statuses"]["ok"]
    assert load["output_tokens"] == 8 * good and load["num_events"] == 4 * good
    assert load["tokens_counted_by"] == "the server's usage record" and load["goodput"]["ratio"] == 0.0
    figures = {it["name"]: it for it in load["latency"]}
    assert "itl" not in figures  # two tokens a chunk: who came when is not known
    assert figures["chunk_gap"]["num_samples"] == 3 * good and figures["ttft"]["percentiles"][0]["value"] >= 20
    assert figures["end_to_end"]["num_samples"] == load["num_requests"] and "count as endless" in figures["end_to_end"]["note"]
    assert figures["end_to_end"]["percentiles"][-1]["value"] is None  # P99.9: a failed request stands there
    rows = list(csv.DictReader((tmp_path / "b.csv").open()))
    medians = {row["name"]: float(row["value"]) for row in rows if row["statistic"] == "P50"}
    assert medians["ttft"] == pytest.approx(figures["ttft"]["percentiles"][0]["value"])
    page = (tmp_path / "b.html").read_text()
    assert _loads_nothing(page) and "prefers-color-scheme: dark" in page and "status 500" in page


def _loads_nothing(page: str) -> bool:
    outside: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            outside.extend(value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#"))

    Reader().feed(page)
    return not outside and "url(" not in page


def test_bench_closed_loop_and_chat_in_words(url: str, tmp_path: Path, command: Command) -> None:
    ended = command("bench", url, "--concurrency", "3", "--requests", "9", "--chat", "--no-stream", cwd=tmp_path)
    assert ended.code in DONE, ended.err
    words = " ".join(ended.out.split())
    assert "closed loop, 3 in flight" in words and "A closed loop sends less while the server is slow" in words
    assert "of 9 requests ended well" in words and "Traceback" not in ended.err


def test_bench_replays_a_trace_and_counts_by_a_tokenizer(url: str, tmp_path: Path, command: Command, tiny_llama: Path) -> None:
    rows = [{"arrival_s": 10 + number / 20, "prompt_tokens": 30, "output_tokens": 6} for number in range(8)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = command(
        "bench",
        url,
        "--trace",
        "trace.jsonl",
        "--speed",
        "2",
        "--tokenizer",
        str(tiny_llama),
        "--samples",
        "s.parquet",
        cwd=tmp_path,
    )
    assert ended.code in DONE, ended.err
    samples = LoadSamples.load(tmp_path / "s.parquet")
    gaps_ms = [round(float(gap) / 1e6) for gap in samples.intended_ns[1:] - samples.intended_ns[:-1]]
    assert gaps_ms == [25] * 7
    ok = samples.ok
    from tokenizers import Tokenizer

    counted = len(Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(" word" * 6, add_special_tokens=False).ids)
    assert set(samples.num_tokens[ok].tolist()) == {counted} and int(samples.chunk_tokens.sum()) == counted * int(ok.sum())


def test_bench_sweeps_to_the_capacity_of_a_server(tmp_path: Path, command: Command) -> None:
    with running(Script(ttft_ms=(5.0,), num_slots=1)) as slow:
        ended = command(
            "bench", slow, "--sweep", "--rate", "400", "--step", "1", "--no-stream", "--html", "s.html", "--json", cwd=tmp_path
        )
    assert ended.code in DONE, ended.err
    sweep = json.loads(ended.out)["sweep"]
    if ended.code == 0:
        assert sweep["capacity_per_s"] == pytest.approx(200, rel=0.15) and sweep["sustained_per_s"] is None
        assert sweep["ended_because"].endswith("already the first rate is too high, begin with a lower one")
    assert _loads_nothing((tmp_path / "s.html").read_text())


def test_bench_serves_a_model_directory_for_the_time(tmp_path: Path, command: Command, tiny_llama: Path) -> None:
    write_onnx_model(tiny_llama, tmp_path / "onnx")
    (tmp_path / "serve.yaml").write_text("engine: {runtime: onnxruntime}\n")
    asked = ("--concurrency", "2", "--requests", "6", "--prompt-tokens", "8", "--output-tokens", "5", "--json")
    ended = command("bench", "onnx", "--config", "serve.yaml", *asked, cwd=tmp_path)
    assert ended.code in DONE, ended.err
    load = json.loads(ended.out)["load"]
    assert load["statuses"] == {"ok": 6} and 6 <= load["output_tokens"] <= 30 and load["prompt_tokens"] >= 6 * 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("http://127.0.0.1:9", "--rate", "3"), 2, "no server answers at http://127.0.0.1:9"),
        (("ftp://x", "--rate", "3"), 2, "neither an http(s) URL nor a bundle"),
        (("nowhere", "--rate", "3"), 2, "neither an http(s) URL nor a bundle"),
        (("URL",), 2, "give one of --concurrency, --trace, --sweep, --rate; seen: none"),
        (("URL", "--rate", "3", "--concurrency", "2"), 2, "seen: --concurrency and --rate"),
        (("URL", "--rate", "-1"), 2, "--rate is -1; it must be above 0"),
        (("URL", "--concurrency", "0", "--requests", "1"), 2, "a concurrency of at least 1"),
        (("URL", "--rate", "3", "--requests", "5", "--duration", "2"), 2, "--duration belongs to"),
        (("URL", "--sweep", "--requests", "5"), 2, "--requests belongs to"),
        (("URL", "--rate", "3", "--arrival", "burst"), 2, "--arrival burst and --burst"),
        (("URL", "--rate", "3", "--arrival", "burst", "--burst", "5"), 2, "give RATE,PERIOD,LENGTH"),
        (("URL", "--rate", "3", "--prompt-tokens", "9,5,1"), 2, "rising P50,P95,MAX"),
        (("URL", "--rate", "3", "--body", "[]"), 2, "give a JSON object"),
        (("URL", "--rate", "3", "--sla", "ttft=3"), 2, "allowed are ttft_ms, tpot_ms, end_to_end_ms"),
        (("URL", "--rate", "3", "--sla", "ttft_ms"), 2, "is no KEY=MS"),
        (("URL", "--trace", "missing.jsonl"), 2, "trace missing.jsonl cannot be read"),
        (("URL", "--rate", "3", "--tokenizer", "missing"), 2, "no tokenizer at missing"),
        (("URL", "--rate", "3", "--text", "missing"), 2, "--text missing cannot be read"),
        (("URL", "--rate", "3", "--api-key-variable", "NOT_SET_HERE"), 2, "the environment has no NOT_SET_HERE"),
        (("URL", "--sweep", "--step", "0"), 2, "a step above 0 s"),
        (("URL", "--sweep", "--samples", "x"), 2, "--samples belongs to a single run"),
    ],
)
def test_bench_says_in_one_line_what_is_wrong(
    url: str, tmp_path: Path, command: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended = command("bench", *(url if it == "URL" else it for it in arguments), cwd=tmp_path)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err and ended.err.count("\n") == 1


def test_bench_refuses_a_server_that_answers_no_request(tmp_path: Path, command: Command) -> None:
    with running(Script(fail_every=1, fail_status=404)) as broken:
        ended = command("bench", broken, *OPTIONS, cwd=tmp_path)
    assert ended.code == 2 and 'answers no request: status 404. {"error"' in ended.err
