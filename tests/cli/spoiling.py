"""Ways to spoil a tiny project: each takes its folder and damages one thing in it."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

Spoil = Callable[[Path], object]
SHARD = "model-{:05d}-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def nothing(_folder: Path) -> None:
    return None


def replace(old: str, new: str) -> Spoil:
    """Change the profile's text."""

    def spoil(folder: Path) -> None:
        path = folder / "tiny.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def config(**changes: object) -> Spoil:
    """Change fields of config.json; `...` takes a field away."""

    def spoil(folder: Path) -> None:
        edit_json(folder / "model" / "config.json", changes)

    return spoil


def edit_json(path: Path, changes: dict[str, object]) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))


def sharded(then: Spoil) -> Spoil:
    """Split the model into three shards with an index, then spoil it."""

    def spoil(folder: Path) -> None:
        model = folder / "model"
        tensors = load_file(model / "model.safetensors")
        (model / "model.safetensors").unlink()
        names, places = sorted(tensors), {}
        for number in range(3):
            shard = SHARD.format(number + 1)
            save_file({name: tensors[name] for name in names[number::3]}, model / shard)
            places |= dict.fromkeys(names[number::3], shard)
        total = sum(tensor.nbytes for tensor in tensors.values())
        (model / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
        then(model)

    return spoil


def index(**changes: object) -> Spoil:
    return sharded(lambda model: edit_json(model / INDEX, changes))


def misplaced(model: Path) -> None:
    """Let the index name a fourth shard that nobody wrote."""
    places = json.loads((model / INDEX).read_text())["weight_map"]
    edit_json(model / INDEX, {"weight_map": places | {"model.norm.weight": "model-00004-of-00003.safetensors"}})


def truncate(model: Path) -> None:
    path = model / SHARD.format(2)
    path.write_bytes(path.read_bytes()[:-100])


def doubled(model: Path) -> None:
    """Put one tensor into a second shard as well."""
    first, second = (load_file(model / SHARD.format(number)) for number in (1, 2))
    save_file(second | {name: first[name] for name in list(first)[:1]}, model / SHARD.format(2))


def offsets(shift: Callable[[int, int], tuple[int, int]]) -> Spoil:
    """Move the second tensor's data offsets in one shard's header."""

    def spoil(model: Path) -> None:
        path = model / SHARD.format(1)
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        names = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
        entry = header[names[1]]
        entry["data_offsets"] = list(shift(*entry["data_offsets"]))
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return sharded(spoil)


def header(content: bytes) -> Spoil:
    return sharded(lambda model: (model / SHARD.format(1)).write_bytes(content + bytes(1000)))


def tensors(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Spoil:
    """Write the weights anew after `change`."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / "model.safetensors"
        save_file(change(load_file(path)), path)

    return spoil


DOWN = "model.layers.1.mlp.down_proj.weight"


def value_at_one_place(value: float) -> Spoil:
    def change(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        weight = found[DOWN].copy()
        weight[3, 5] = value
        return found | {DOWN: weight}

    return tensors(change)


def calibration(*records: object, times: int = 1) -> Spoil:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    return lambda folder: (folder / "calibration.jsonl").write_text("\n".join(lines * times) + "\n")


def calibration_bytes(content: bytes) -> Spoil:
    return lambda folder: (folder / "calibration.jsonl").write_bytes(content)


def calibration_at(name: str, content: bytes) -> Spoil:
    """Let the profile name another calibration file."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)
        replace("calibration.jsonl", name)(folder)

    return spoil


def parquet(**columns: list[int]) -> Spoil:
    import pyarrow
    import pyarrow.parquet

    stream = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return calibration_at("data.parquet", stream.getvalue().to_pybytes())


def calibration_folder(folder: Path) -> None:
    (folder / "calibration.jsonl").unlink()
    (folder / "calibration.jsonl").mkdir()


def without_template(folder: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / "model" / name).unlink(missing_ok=True)
    edit_json(folder / "model" / "tokenizer_config.json", {"chat_template": ...})
    calibration({"messages": [{"role": "user", "content": "seven quiet lamps by the river"}]}, times=3)(folder)


def without_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / "model" / name, {"eos_token_id": None})
    edit_json(folder / "model" / "tokenizer_config.json", {"eos_token": None})


def larger_tokenizer(folder: Path) -> None:
    path = folder / "model" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["zzz"] = 4711
    path.write_text(json.dumps(data))


def item(**fields: object) -> Spoil:
    """Append one golden item."""
    whole = {"id": "x", "prompt": "a", "choices": ["b", "c"], "answer": 0, "slices": []} | fields
    return items((json.dumps(whole) + "\n").encode())


def items(content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / "words" / "items.jsonl").open("ab") as stream:
            stream.write(content)

    return spoil


def card(old: str, new: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "words" / "card.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def leak(folder: Path) -> None:
    """Put a golden item into the calibration text."""
    found = json.loads((folder / "words" / "items.jsonl").read_text().splitlines()[3])
    with (folder / "calibration.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": found["prompt"] + found["choices"][found["answer"]]}) + "\n")


def own_code(folder: Path) -> None:
    (folder / "model" / "modeling_mine.py").write_text("raise SystemExit('this must never run')\n")
    config(model_type="mine")(folder)


def pickled(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def file_at(*parts: str, content: str = "in the way\n") -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    return spoil


def folder_at(*parts: str) -> Spoil:
    return lambda folder: folder.joinpath(*parts).mkdir(parents=True)


def remove(*parts: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder.joinpath(*parts)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil
