"""`model-optimizer eval` and `golden`: scores, verdicts as exit codes, resuming, perplexity, import, replay and review."""

import json
import random
from pathlib import Path

import pytest
import yaml
from entry import Command
from tiny import write_golden_set

from model_optimizer.models.tiny import write_tiny_llama

CARD = {
    "version": "1",
    "description": "d",
    "provenance": "p",
    "licence": "MIT",
    "languages": ["en"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with a set of choices, a set of texts and another model."""
    folder = tmp_path_factory.mktemp("golden")
    write_golden_set(folder / "words", tiny_llama, num_items=40, rng=random.Random(0))
    write_tiny_llama(folder / "other", seed=1)
    (folder / "texts").mkdir()
    card = {**CARD, "name": "texts", "metric": "token_f1", "primary": False, "generation": {"max_new_tokens": 4}}
    (folder / "texts" / "card.yaml").write_text(yaml.safe_dump(card))
    items = [{"id": f"t{n}", "prompt": f"lamp {n}", "references": ["bread"]} for n in range(6)]
    (folder / "texts" / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


def test_eval_scores_a_model_keeps_it_and_does_nothing_the_second_time(
    command: Command, place: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    arguments = ("eval", str(tiny_llama), "--golden", str(place / "words"), "--golden", str(place / "texts"), "--json")
    first = command(*arguments, cwd=tmp_path)
    assert first.code == 0, first.err
    run = json.loads(first.out)
    scores = {(score["golden_set"], score["slice"]): score["value"] for score in run["scores"]}
    assert scores["words", None] == pytest.approx(0.75) and scores["words", "hard"] == 0.0
    assert run["verdict"] is None and run["num_tokens_written"] <= 24 and run["items_per_s"] > 0
    folder = Path(run["folder"])
    journal = (folder / "candidate.jsonl").read_bytes()
    lines = journal.splitlines(keepends=True)
    again = json.loads(command(*arguments, cwd=tmp_path).out)
    assert again == run and (folder / "candidate.jsonl").read_bytes() == journal
    (folder / "result.json").unlink()  # as if killed before the last shard was through
    (folder / "candidate.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    resumed = json.loads(command(*arguments, cwd=tmp_path).out)
    assert resumed["scores"] == run["scores"] and resumed["items_per_s"] is None
    assert (folder / "candidate.jsonl").read_bytes() == journal


def test_eval_against_a_baseline_ends_with_the_verdict_and_feeds_replay_and_review(
    command: Command, place: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    against = ("--against", str(tiny_llama), "--golden", str(place / "words"), "--margin", "0.2")
    worse = command("eval", str(place / "other"), *against, "--output", "run", cwd=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (worse.code, result["verdict"]) in ((3, "REJECT"), (5, "INCONCLUSIVE"))
    assert "run/result.json" in worse.err and "all-primary-sets (choice_accuracy)" in worse.out
    same = command("eval", str(tiny_llama), *against, cwd=tmp_path)
    assert same.code == 0 and "ACCEPT" in same.out
    changed = command("eval", str(tiny_llama), *against, "--output", "run", cwd=tmp_path)
    assert changed.code == 2 and "holds a golden run with another model;" in changed.err
    assert command("golden", "replay", "run", "--output", "page.html", "--items", "5", cwd=tmp_path).code == 0
    assert "5 of 40 items" in (tmp_path / "page.html").read_text()
    assert command("golden", "review", "run", "--output", "sheet", "--items", "8", cwd=tmp_path).code == 0
    key = json.loads((tmp_path / "sheet" / "key.json").read_text())
    sheet = (tmp_path / "sheet" / "sheet.html").read_text()
    name = sheet.split('data-sheet="')[1].split('"')[0]
    saved = {
        "sheet": name,
        "reviewer": "me",
        "answers": {item: {"overall": side} for item, side in key["candidate_side"].items()},
    }
    (tmp_path / "me.json").write_text(json.dumps(saved))
    read = json.loads(command("golden", "reviewed", "sheet/key.json", "me.json", "--json", cwd=tmp_path).out)
    assert read["preferences"][0]["num_candidate"] == 8 and read["num_in_sheet"] == 8


def test_eval_judges_files_of_predictions_without_a_model(command: Command, place: Path, tmp_path: Path) -> None:
    for name, text in (("good", "bread"), ("bad", "stone")):
        lines = [json.dumps({"id": f"t{n}", "output": text}) for n in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    golden = ("--golden", str(place / "texts"), "--json")
    alone = json.loads(command("eval", "--predictions", "good.jsonl", *golden, cwd=tmp_path).out)
    assert alone["scores"][0]["value"] == 1.0 and alone["engine"] == "good.jsonl"
    pair = command("eval", "--predictions", "bad.jsonl", "--baseline-predictions", "good.jsonl", *golden, cwd=tmp_path)
    found = json.loads(pair.out)
    assert pair.code == 5 and found["results"][0]["difference"] == -1.0 and not found["results"][0]["gates"]


def test_eval_prints_perplexity_with_window_stride_and_count(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789")
    base = ("eval", str(tiny_llama), "--ppl", "text.txt", "--max-length", "4")
    shown = command(*base, "--stride", "2", cwd=tmp_path)
    assert "9 tokens scored once each" in shown.out and "stride 2; no BOS" in shown.out
    found = json.loads(command(*base, "--stride", "4", "--bos", "--json", cwd=tmp_path).out)
    assert (found["num_scored"], found["bos"], found["stride"]) == (10, 0, 4)
    refused = command(*base, "--stride", "5", cwd=tmp_path)
    assert refused.code == 2 and "--stride is 5; allowed: 1 to --max-length, which is 4" in refused.err


def test_golden_import_writes_a_set_that_eval_reads(command: Command, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "maths.jsonl").write_text('{"question": "2+2?", "answer": "#### 4", "topic": "sums"}\n')
    facts = ("--licence", "MIT", "--provenance", "made up", "--metric", "exact_arithmetic", "--max-new-tokens", "4")
    asked = (
        "golden",
        "import",
        "maths.jsonl",
        "--to",
        "maths",
        "--template",
        r"Question: {question}\nAnswer:",
        "--stop",
        r"\n\n",
    )
    done = command(*asked, *facts, "--guard", "repetition=0.05", cwd=tmp_path)
    assert done.code == 0 and "1 items, measured by exact_arithmetic; references from answer" in done.out
    assert "not read: topic" in done.out
    card = yaml.safe_load((tmp_path / "maths" / "card.yaml").read_text())
    assert card["generation"] == {"max_new_tokens": 4, "stop": ["\n\n"]} and card["guards"] == {"repetition": 0.05}
    run = json.loads(command("eval", str(tiny_llama), "--golden", "maths", "--json", cwd=tmp_path).out)
    assert [score["metric"] for score in run["scores"]] == ["exact_arithmetic", "repetition"]
    again = command(*asked, *facts, cwd=tmp_path)
    assert again.code == 2 and "--to must name a new directory" in again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to answer: give --golden SET"),
        (("--golden", "nowhere"), "golden set 'nowhere' has no card.yaml"),
        (("--golden", "quickstart-en"), "give the MODEL that answers, or --predictions FILE"),
        (("--golden", "quickstart-en", "--predictions", "absent.jsonl"), "absent.jsonl: no such file of predictions"),
        (("--predictions", "p.jsonl", "--golden", "quickstart-en", "--limit", "3"), "leave --limit out"),
        (("model", "--golden", "quickstart-en"), "model 'model': no directory"),
        (("model", "--ppl", "x.txt", "--golden", "quickstart-en"), "--ppl takes a MODEL and no golden set"),
    ],
)
def test_eval_says_what_is_wrong(command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    ended = command("eval", *arguments, cwd=tmp_path)
    assert ended.code == 2 and message in ended.err
