"""The seven stages: a module of its own, so that the command line knows their names without loading anything else."""

from enum import StrEnum


class Stage(StrEnum):
    """In order; the names used in store, command line, Prefect and MLflow."""

    PROFILE = "profile"
    SCAN = "scan"
    QUANTIZE = "quantize"
    COMPILE = "compile"
    MEMORY = "memory"
    VERIFY = "verify"
    PACKAGE = "package"
