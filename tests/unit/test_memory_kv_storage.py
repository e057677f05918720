"""The numbers behind the pool: what is written is read, to the bound of each precision; bytes agree with the plan."""

from pathlib import Path

import pytest
import torch

from model_optimizer.memory.account import config_document
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.kv_layout import KvLayerShape, KvLayout
from model_optimizer.memory.kv_pool import KvPool, PoolExhausted
from model_optimizer.memory.kv_storage import KvStorage, resize
from model_optimizer.memory.plan import Available, Demand, make_kv_plan
from model_optimizer.models.facts import read_facts
from model_optimizer.spec import Lengths, Sla, Traffic

PRECISIONS = ("float32", "float16", "bfloat16", "fp8", "int8")
HEADS, DIM, PAGE = 2, 8, 4


def storage_of(precision: str, num_pages: int = 8) -> KvStorage:
    return KvStorage(KvLayout((KvLayerShape(HEADS, DIM, DIM),) * 2, PAGE, precision), num_pages)


def random_THD(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "layer", [KvLayerShape(2, 16, 16), KvLayerShape(1, 24, 0), KvLayerShape(4, 8, 12)], ids=["gqa", "latent", "uneven"]
)
def test_num_bytes_is_what_the_layout_says(precision: str, layer: KvLayerShape) -> None:
    layout = KvLayout((layer,) * 3, 5, precision)
    storage = KvStorage(layout, 7)
    assert storage.num_bytes == layout.pool_bytes(7)
    storage.resize(11)
    assert storage.num_bytes == layout.pool_bytes(11)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plan_and_storage_agree_to_the_byte(tiny_llama: Path, precision: str) -> None:
    facts = read_facts(tiny_llama)
    traffic = Traffic(prompt_tokens=Lengths(p50=10, p95=40, max=60), output_tokens=Lengths(p50=5, p95=24, max=30))
    config = MemoryConfig.model_validate({"page_tokens": 13, "kv_precision": precision})
    plan, budget = make_kv_plan(
        facts, Demand(Sla(concurrency=3, max_model_len=128), traffic, config), Available(4 * 2**30, 10**6)
    )
    storage = KvStorage(KvLayout.of(facts, plan.page_tokens, plan.precision), plan.num_pages)
    line = next(line for line in budget.lines() if line.part == "kv_reservation")
    assert storage.num_bytes == plan.pool_bytes == line.num_bytes == config_document(plan, facts)["pool_bytes"]


def test_layout_bytes_of_an_8_bit_page_worked_by_hand() -> None:
    layout = KvLayout((KvLayerShape(8, 128, 128),) * 32, 16, "int8")
    assert (layout.bytes_per_token, layout.scale_bytes_per_page) == (65_536, 32 * 2 * 8 * 4)
    assert layout.page_bytes == 16 * 65_536 + 2_048


@pytest.mark.parametrize(("precision", "ratio"), [("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_read_returns_what_was_written_to_the_precision_of_floats(precision: str, ratio: float) -> None:
    storage, keys, values = storage_of(precision), random_THD(6), random_THD(6, seed=1)
    storage.write(1, torch.tensor([20, 21, 22, 23, 8, 9]), keys, values)
    read_keys, read_values = storage.read(1, [5, 2])
    assert (read_keys[:6] - keys).abs().max() <= ratio * keys.abs().max()
    assert (read_values[:6] - values).abs().max() <= ratio * values.abs().max()
    assert storage.read(0, [5, 2])[0].abs().max() == 0  # the other layer


@pytest.mark.parametrize("chunks", [[6], [1] * 6, [2, 3, 1], [4, 2]])
@pytest.mark.parametrize("growth", [1.0, 3.0, 100.0])
def test_read_is_within_one_step_of_int8_however_the_scale_grew(chunks: list[int], growth: float) -> None:
    storage = storage_of("int8")
    keys = random_THD(6) * torch.linspace(1, growth, 6)[:, None, None]
    slots = torch.tensor([20, 21, 22, 23, 8, 9])
    at = 0
    for size in chunks:
        storage.write(0, slots[at : at + size], keys[at : at + size], -keys[at : at + size])
        at += size
    read_keys, read_values = storage.read(0, [5, 2])
    for tokens in (slice(0, 4), slice(4, 6)):
        absmax_H = keys[tokens].abs().amax((0, 2))
        bound_H = 2 * absmax_H / 127 * (0.5 if len(chunks) == 1 else 1.0)
        assert ((read_keys[tokens] - keys[tokens]).abs().amax((0, 2)) <= bound_H).all()
        assert ((read_values[tokens] + keys[tokens]).abs().amax((0, 2)) <= bound_H).all()


def test_read_of_one_int8_write_is_the_rounding_of_a_symmetric_grid() -> None:
    storage, keys = storage_of("int8"), random_THD(4)
    storage.write(0, torch.arange(4), keys, keys)
    scale_H = keys.abs().amax((0, 2)) / 127
    expected = (keys / scale_H[:, None]).round() * scale_H[:, None]
    assert torch.allclose(storage.read(0, [0])[0], expected, atol=1e-7)


@pytest.mark.parametrize("chunks", [[6], [1] * 6])
def test_read_is_within_half_a_step_of_e4m3_however_the_scale_grew(chunks: list[int]) -> None:
    storage = storage_of("fp8")
    keys = random_THD(6) * torch.linspace(1, 50, 6)[:, None, None]
    at = 0
    for size in chunks:
        storage.write(0, torch.arange(at, at + size), keys[at : at + size], keys[at : at + size])
        at += size
    read = storage.read(0, [0, 1])[0][:6]
    # 3 mantissa bits: relative error 2^-4; below the smallest normal, absmax x 2 / 448 x 2^-6, half a subnormal step
    smallest_step = 2 * keys.abs().max() / 448 * 2**-9
    assert ((read - keys).abs() <= torch.maximum(keys.abs() * 2**-4, smallest_step)).all()


def test_write_starts_the_scale_anew_when_a_page_is_used_again() -> None:
    storage = storage_of("int8")
    storage.write(0, torch.arange(4), 1000 * random_THD(4), 1000 * random_THD(4))
    small = random_THD(2, seed=3)
    storage.write(0, torch.tensor([0, 1]), small, small)
    assert (storage.read(0, [0])[0][:2] - small).abs().max() <= small.abs().max() / 127


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_write_of_values_near_the_end_of_float32_reads_numbers(precision: str) -> None:
    storage, keys = storage_of(precision), torch.zeros(4, HEADS, DIM)
    keys[0] = 1e-38
    storage.write(0, torch.arange(4), keys, keys)
    assert storage.read(0, [0])[0].abs().max() == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_write_of_zeros_reads_zeros(precision: str) -> None:
    storage = storage_of(precision)
    storage.poison([1])
    storage.write(0, torch.arange(4, 8), torch.zeros(4, HEADS, DIM), torch.zeros(4, HEADS, DIM))
    assert storage.read(0, [1])[0].abs().max() == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_poison_shows_until_a_page_is_written_from_its_first_slot(precision: str) -> None:
    storage, keys = storage_of(precision), random_THD(4)
    storage.write(0, torch.arange(4), keys, keys)
    storage.poison([0])
    assert storage.read(0, [0])[0].isnan().all()
    storage.write(0, torch.tensor([2]), keys[:1], keys[:1])  # a bug: the page was not begun
    assert storage.read(0, [0])[0].isnan().any()
    storage.write(0, torch.arange(4), keys, keys)
    assert not storage.read(0, [0])[0].isnan().any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copy_takes_all_layers_and_scales_in_order(precision: str) -> None:
    storage = storage_of(precision)
    for layer in (0, 1):
        for page in (0, 1):
            keys = random_THD(PAGE, seed=2 * layer + page) * (1 + 9 * page)
            storage.write(layer, torch.arange(page * PAGE, (page + 1) * PAGE), keys, -keys)
    before = [[storage.read(layer, [page]) for page in (0, 1)] for layer in (0, 1)]
    storage.copy([(0, 4), (1, 5), (4, 6), (5, 6)])  # the last two depend on what came before
    for layer in (0, 1):
        for source, target in ((0, 4), (1, 5), (1, 6)):
            for side in (0, 1):
                assert torch.equal(storage.read(layer, [target])[side], before[layer][source][side])


def test_read_of_a_batch_of_tables_joins_pages_in_their_order() -> None:
    storage, keys = storage_of("float32"), random_THD(32)
    storage.write(0, torch.arange(32), keys, keys)
    batch, _ = storage.read(0, torch.tensor([[3, 0], [7, 7]]))
    assert batch.shape == (2, 8, HEADS, DIM)
    assert torch.equal(batch[0], torch.cat([keys[12:16], keys[:4]]))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_resize_keeps_what_live_sequences_read(precision: str) -> None:
    storage = storage_of(precision, num_pages=8)
    pool = KvPool(8, PAGE, debug=True, on_free=storage.poison)
    blocker, sequence = pool.begin([]), pool.begin([])
    blocker.extend(20)
    keys = random_THD(10)
    sequence.extend(10)
    storage.write(0, torch.tensor(sequence.slots(0, 10)), keys, keys)
    sequence.commit(range(10))
    before = storage.read(0, sequence.pages)[0][:10].clone()
    blocker.free()
    resize(pool, storage, 3)
    assert (pool.num_pages, storage.num_pages) == (3, 3)
    assert torch.equal(storage.read(0, sequence.pages)[0][:10], before)
    with pytest.raises(PoolExhausted):
        resize(pool, storage, 2)
    assert (pool.num_pages, storage.num_pages) == (3, 3)
    resize(pool, storage, 6)
    assert torch.equal(storage.read(0, sequence.pages)[0][:10], before)
    assert storage.num_bytes == storage.layout.pool_bytes(6)


def test_layout_refuses_an_unknown_precision() -> None:
    from model_optimizer.errors import ConfigError

    with pytest.raises(ConfigError, match="'int5' is unknown; known: float32, float16"):
        KvLayout((), 16, "int5")
