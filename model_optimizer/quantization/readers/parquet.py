"""Parquet: one record per row."""

from pathlib import Path

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.quantization.reading import READERS, Rows

BATCH_ROWS = 256
"""Read at a time, so that a large file needs little memory."""


@READERS.register("parquet")
def read_parquet(path: Path) -> Rows:
    """Yield every row; columns keep their names.

    Raises:
        ConfigError: no whole Parquet file.
        UnsupportedError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow, or convert it to JSONL") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is no whole Parquet file ({' '.join(str(error).split())[:200]}); copy it again") from error
