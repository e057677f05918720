"""Where calibration text comes from: a file of the user, a built-in set, or the model itself; and what identifies it."""

import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from model_optimizer.artifacts.base import Frozen, Tree
from model_optimizer.errors import ConfigError
from model_optimizer.paths import data_directory
from model_optimizer.quantization.config import SELF, CalibrationConfig, FieldRole
from model_optimizer.quantization.reading import READERS, reader_name
from model_optimizer.quantization.records import KNOWN, Record, to_record

BUILTIN = "builtin:"
ALL = "all"
SETS = "calibration_sets"
SELF_SEQUENCES, SELF_TOKENS = 128, 256
"""The most that a model is asked to write: 128 sequences as in GPTQ (Frantar et al. 2022, section 4), short for CPUs."""


class SelfSampling(Frozen):
    """What determines the text that a model writes."""

    model: Tree
    seed: int
    num_sequences: int
    num_tokens: int


class Sampler(Frozen):
    """Which model writes `self` text, and where that text is kept."""

    model: Tree
    cache: Path = Field(exclude=True)


class CalibrationSource(Frozen):
    """Calibration text and how it is to be read: the part of a stage's identity that calibration makes up."""

    tree: Tree
    """File or folder of files; of `self`, the digest is that of what determines the text, and the file is written when asked."""
    origin: Literal["own", "builtin", "self"] = "own"
    kind: str = "jsonl"
    """Reader of the file."""
    fields: dict[FieldRole, str] = {}
    sampling: SelfSampling | None = None
    num_samples: int
    max_length: int
    min_length: int
    held_out_ratio: float

    @classmethod
    def of(cls, config: CalibrationConfig, base: Path, sampler: Sampler | None = None) -> Self:
        """Digest the text that `config` names, relative to `base`; `sampler` is asked for `self` only.

        Raises:
            ConfigError: there is no such file or set, no reader for it, or `self` without a model.
        """
        settings = config.model_dump(exclude={"path", "seed"})
        if config.is_self:
            if sampler is None:
                raise ConfigError("calibration `self` is sampled from the model, and none is given; name the model")
            sampling = _sampling(config, sampler.model)
            digest = hashlib.sha256(sampling.model_dump_json().encode()).hexdigest()
            tree = Tree(digest=digest, path=sampler.cache / f"self-{digest[:16]}.jsonl")
            return cls(tree=tree, origin="self", sampling=sampling, **settings)
        path = locate(config, base)
        if str(config.path).startswith(BUILTIN):
            return cls(tree=Tree.of(path), origin="builtin", **settings)
        return cls(tree=Tree.of(path), kind=reader_name(path), **settings)

    @property
    def name(self) -> str:
        """Say what the user named: a file, `builtin:NAME` or `self`."""
        if self.origin == "self":
            return str(SELF)
        if self.origin == "builtin":
            return BUILTIN + (ALL if self.tree.path.is_dir() else self.tree.path.stem)
        return str(self.tree.path)

    def records(self) -> Iterator[tuple[str, Record | str]]:
        """Yield where each record stands, and the record or what is wrong with it; `self` text is written first if need be.

        Raises:
            ConfigError: the file cannot be read as its kind.
        """
        if self.sampling is not None and not self.tree.path.is_file():
            from model_optimizer.quantization.self_sampling import write_self_samples  # loads torch

            write_self_samples(self.sampling, self.tree.path)
        read = READERS.get(self.kind)
        if not self.tree.path.is_dir():
            yield from ((place, to_record(row, self.fields)) for place, row in read(self.tree.path))
            return
        for rows in zip_longest(*map(read, self.files())):  # in turns: whoever takes the first few gets some of each
            yield from ((place, to_record(row, self.fields)) for place, row in filter(None, rows))

    def files(self) -> tuple[Path, ...]:
        """Return the file, or the files of a folder of sets."""
        return tuple(sorted(self.tree.path.glob("*.jsonl"))) if self.tree.path.is_dir() else (self.tree.path,)


def locate(config: CalibrationConfig, base: Path) -> Path:
    """Return the file or folder that a configuration other than `self` names.

    Raises:
        ConfigError: there is none.
    """
    name = str(config.path)
    if name.startswith(BUILTIN):
        return _built_in(name.removeprefix(BUILTIN))
    path = base / config.path.expanduser()
    if path.is_dir():
        raise ConfigError(f"calibration file {path} is a folder; name the file in it")
    if not path.is_file():
        raise ConfigError(
            f"calibration file {path} does not exist; give JSON, JSONL, text or Parquet with {KNOWN}, or {BUILTIN}{ALL}"
        )
    reader_name(path)
    return path


def built_in_sets() -> tuple[str, ...]:
    """Return the names of the sets that ship with the project."""
    return tuple(sorted(path.stem for path in data_directory(SETS).glob("*.jsonl")))


def _built_in(name: str) -> Path:
    known = built_in_sets()
    if name == ALL:
        return data_directory(SETS)
    if name not in known:
        raise ConfigError(f"unknown built-in calibration set {name!r}; known: {', '.join((*known, ALL))}, each after {BUILTIN!r}")
    return data_directory(SETS) / f"{name}.jsonl"


def _sampling(config: CalibrationConfig, model: Tree) -> SelfSampling:
    """Ask for as many sequences as leave `num_samples` when some are held out, within what a model can write in minutes."""
    wanted = -(-config.num_samples // (1 - config.held_out_ratio))
    return SelfSampling(
        model=model,
        seed=config.seed,
        num_sequences=min(int(wanted), SELF_SEQUENCES),
        num_tokens=min(config.max_length, SELF_TOKENS),
    )
