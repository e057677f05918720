"""What torch's compiler found out about the CPU is asked once per machine, not once per process."""

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from model_optimizer.runtimes.torch.vector_sets import keep_vector_sets

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has sets to choose from")


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    valid_vec_isa_list.cache_clear()
    with config.patch({"cpp.vec_isa_ok": None}):
        yield
    valid_vec_isa_list.cache_clear()


def _kept(folder: Path) -> list[Path]:
    return list(folder.glob("cache/vector-sets-*"))


@pytest.mark.full
def test_keep_vector_sets_asks_the_compiler_once(tmp_path: Path) -> None:
    keep_vector_sets()  # builds and loads a library for each
    tried = [str(it) for it in valid_vec_isa_list()]
    assert len(_kept(tmp_path)) == 1 and config.cpp.vec_isa_ok is True
    valid_vec_isa_list.cache_clear()
    with config.patch({"cpp.vec_isa_ok": None}):
        keep_vector_sets()
        assert config.cpp.vec_isa_ok is True and [str(it) for it in valid_vec_isa_list()] == tried


def test_keep_vector_sets_leaves_the_users_setting(tmp_path: Path) -> None:
    with config.patch({"cpp.vec_isa_ok": False}):
        keep_vector_sets()
        assert config.cpp.vec_isa_ok is False
    assert not _kept(tmp_path)
