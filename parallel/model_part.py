"""A rank's part of the model, by the names that the whole model has for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from models.chain import Chain
from parallel.rows import fill
from parallel.stage import Stage


class ModelPart:
    """The parameters and buffers of a rank's stages under global names.

    Attributes:
        chain: The whole model.
        stages: The stages that this rank runs, in order.
    """

    chain: Chain
    stages: list[Stage]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over every parameter that this rank updates, copies of tied ones included."""
        for stage in self.stages:
            yield from stage.layers.parameters()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List (global name, parameter) of what this rank updates. A copy of a tied one has its canonical name."""
        return [
            (self.chain.canonical(name), parameter)
            for stage in self.stages
            for name, parameter in stage.layers.named_parameters()
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of this rank's stages under global names; of shared ones, its rows.

        A tied parameter is included under its canonical name only, so that the parts of one replica's ranks make up
        the model with each tensor once.
        """
        return {
            name: tensor
            for stage in self.stages
            for name, tensor in stage.layers.state_dict().items()
            if name not in self.chain.tied
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part out of ``state``.

        Args:
            state: Any part of the model that includes this rank's, under global names: tensors, or what has a tensor's
                ``shape`` and gives rows of it for a slice.

        Raises:
            KeyError: Naming a tensor that is missing.
            ValueError: Naming a tensor that has another shape or holds another kind of number.
        """
        for stage in self.stages:
            for name, tensor in stage.layers.state_dict().items():
                canonical = self.chain.canonical(name)
                if canonical not in state:
                    raise KeyError(f"{canonical} is not among the {len(state)} tensors given")
                fill(tensor, state[canonical], canonical)
