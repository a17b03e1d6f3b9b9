"""What training depends on; without PyTorch, so that the command's help shows its defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What training depends on, besides the images.

    Attributes:
        epochs: passes over the training images.
        batch_size: images per step; what is left over of an epoch is left out.
        learning_rate: the schedule's highest.
        weight_decay: of weights, not of biases and normalisation.
        shift: the most pixels that an image is shifted by in each direction.
        settle: the part of the epochs, at the end, in which images are no longer shifted.
        seed: of the first weights, the shuffling, the shifts and the mirroring.
        teacher_weight: the teacher's part of the loss, if there is one; the labels have the rest.
        temperature: what both networks' scores are divided by before they are compared.
    """

    epochs: int = 300
    batch_size: int = 512
    learning_rate: float = 0.01
    weight_decay: float = 0.01
    shift: int = 2
    settle: float = 0.1
    seed: int = 0
    teacher_weight: float = 0.9
    temperature: float = 3.0
