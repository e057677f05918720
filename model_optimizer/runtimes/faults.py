"""What a running engine may say of one request, beside its tokens."""

from model_optimizer.errors import ModelOptimizerError
from model_optimizer.protocols import RequestId


class RequestFault(ModelOptimizerError):
    """One request ended without its answer; the engine and all other requests go on.

    `refused`: it will never be accepted as it is; else it was lost, and may be sent again.
    """

    def __init__(self, request: RequestId, message: str, *, refused: bool):
        super().__init__(message)
        self.request = request
        self.refused = refused
