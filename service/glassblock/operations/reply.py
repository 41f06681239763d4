"""An answer with the tensors that belong to it, before it is known how it will travel."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, cast

import torch
from torch import Tensor

from glassblock.operations.tensors import wire_tensor
from glassblock.wire import framing
from glassblock.wire.endpoints import AnswerT
from glassblock.wire.framing import WireTensor

NestedNumbers = float | int | bool | list["NestedNumbers"]


@dataclass(frozen=True)
class Reply(Generic[AnswerT]):
    """What an operation returns.

    Attributes:
        answer: the message; its tensor-valued fields still empty.
        tensors: by their names in a safetensors body.
        nest_under: the field of a JSON answer that gathers the tensors, or None where each
            tensor is a field of its own.
        headers: further HTTP headers.
    """

    answer: AnswerT
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    nest_under: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def nested(self) -> AnswerT:
        """The answer with its tensors as nested lists."""
        if not self.tensors:
            return self.answer
        fields = {name: nested_numbers(tensor) for name, tensor in self.tensors.items()}
        return self.answer.model_copy(update={self.nest_under: fields} if self.nest_under else fields)

    def wire_tensors(self) -> dict[str, WireTensor]:
        """The tensors as they travel: on the host, contiguous, in their own type."""
        return {name: wire_tensor(tensor) for name, tensor in self.tensors.items()}

    def body(self, form: Literal["json", "tensors"]) -> tuple[str, tuple[bytes | memoryview, ...]]:
        """The answer as it travels, as JSON or as one safetensors body: media type, and the body in pieces."""
        if form == "tensors":
            chunks = framing.frame("response", self.answer.model_dump_json(), self.wire_tensors())
            return framing.MEDIA_TYPE, tuple(chunks)
        return "application/json", (self.nested().model_dump_json().encode(),)


def nested_numbers(tensor: Tensor) -> NestedNumbers:
    """Lists of lists, the last axis innermost; a number for a scalar. 16-bit values come exactly."""
    wide = tensor.to(torch.float32) if tensor.dtype in {torch.bfloat16, torch.float16} else tensor
    return cast("NestedNumbers", wide.detach().cpu().tolist())
