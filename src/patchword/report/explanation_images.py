"""Explanations as files: each classified image with a relevance map over it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..core.io import atomic_output
from ..errors import OutputError
from ..inference.classifier import Classifier
from ..inference.inputs import InputImage
from ..inference.open_image import DecodedImage
from ..inference.predictions import Prediction
from ..inspection.explain import Method, default_method, explain
from ..plots.overlay import overlay_heatmap
from .figure_files import require_empty_dir


class ExplanationWriter:
    """Writes folder/NAME.png for each image, an explanation of its predicted class; pass it to `predict_images`.

    Attributes:
        method: the explanation method.
        num_written: files written so far.
    """

    def __init__(
        self,
        classifier: Classifier,
        images: Sequence[InputImage],
        folder: Path,
        *,
        overwrite: bool = False,
        method: Method | None = None,
    ) -> None:
        """Check before anything is computed that the model can be explained and the folder can be written.

        Args:
            classifier: the model; the maps are computed in PyTorch, whatever engine it runs in.
            images: all images of this command. Images of the same name get numbers, which do not depend on how many
                of them an interrupted process has already explained.
            folder: is made if it does not exist.
            overwrite: accept a folder that is not empty.
            method: by default the best one for this model.
        """
        self.classifier, self.folder = classifier, folder
        self.method = method or default_method(classifier.model)
        self.num_written = 0
        require_empty_dir(folder, overwrite)
        self.targets = unique_targets(images, folder)
        originals = {Path(image.image).resolve() for image in images if isinstance(image.image, str | Path)}
        for target in self.targets.values():
            if target.resolve() in originals:
                raise OutputError(f"{target} is one of the input images. Choose another folder.", code="output_exists")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder} could not be written ({error.strerror or error}).") from None

    def __call__(self, image: InputImage, decoded: DecodedImage, prediction: Prediction) -> None:
        """Explain the most probable class of a prediction."""
        inputs = self.classifier.preprocess.normalize(torch.from_numpy(decoded.pixels)[None])
        maps = explain(self.classifier.model, inputs, torch.tensor([prediction.index]), self.method)
        with atomic_output(self.targets[image.name], overwrite=True) as file:
            overlay_heatmap(decoded.image, maps[0], self.classifier.preprocess).save(file, "PNG")
        self.num_written += 1


def unique_targets(images: Sequence[InputImage], folder: Path) -> dict[str, Path]:
    """A file for each image: STEM.png, STEM-2.png, ... Names that differ only in case also get numbers."""
    targets: dict[str, Path] = {}
    taken: set[str] = set()
    for image in images:
        if image.name in targets:
            continue
        stem = Path(image.name).stem
        name, number = stem, 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        targets[image.name] = folder / f"{name}.png"
    return targets
