"""What torch's compiler found out about the CPU is asked once per machine, not once per process."""

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from model_optimizer.runtimes.torch.vector_sets import vector_sets_kept

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


def test_vector_sets_kept_remembers_nothing_that_the_compiler_did_not_try(tmp_path: Path) -> None:
    with vector_sets_kept():
        assert config.cpp.vec_isa_ok is None
    assert not _kept(tmp_path)


@pytest.mark.full
def test_vector_sets_kept_remembers_what_the_compiler_tried_and_spares_it_the_next_time(tmp_path: Path) -> None:
    with vector_sets_kept():
        tried = [str(it) for it in valid_vec_isa_list()]  # builds and loads a library for each
    assert len(_kept(tmp_path)) == 1
    valid_vec_isa_list.cache_clear()
    with vector_sets_kept():
        assert config.cpp.vec_isa_ok is True
        assert [str(it) for it in valid_vec_isa_list()] == tried


def test_vector_sets_kept_asks_anew_for_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    with vector_sets_kept():
        pass
    from model_optimizer.runtimes.torch.vector_sets import _place

    _place().parent.mkdir(exist_ok=True)
    _place().touch()
    monkeypatch.delenv("CXX")
    with vector_sets_kept():
        assert config.cpp.vec_isa_ok is None
    monkeypatch.setenv("CXX", str(other))
    with vector_sets_kept():
        assert config.cpp.vec_isa_ok is True


def test_vector_sets_kept_leaves_the_users_setting() -> None:
    with config.patch({"cpp.vec_isa_ok": False}), vector_sets_kept():
        assert config.cpp.vec_isa_ok is False
