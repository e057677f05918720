"""What a profile may say about releasing."""

from pathlib import Path
from typing import Literal

from model_optimizer.spec import Spec


class SignerConfig(Spec):
    key: Path = Path("~/.config/model-optimizer/key.pem")
    """EC P-256 private key in PEM form, made on first use with mode 0600."""


class ReleaseConfig(Spec):
    approval: Literal["automatic"] = "automatic"
    signer: SignerConfig = SignerConfig()
