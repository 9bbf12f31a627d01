"""What can be read: the families of checkpoints, the bundled models, and well-known models on the Hugging Face Hub.

known_models.tsv lists the hub's models. Parameters are those of the image encoder, with its head: of CLIP and SigLIP
without the text tower, of MAE without the decoder. The license is the one that the page of the weights states.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..core.io import read_json
from ..models import tensor_shapes
from . import BUNDLED_DIR, BUNDLED_PREFIX
from .convert import WRITABLE
from .detect_format import FAMILIES
from .model_dir import CONFIG_CLASSES, MODEL_JSON

# What the models are good for, by the word in the table.
USES = {
    "imagenet": "Classifiers of ImageNet's 1,000 classes, and good starts for fine-tuning",
    "imagenet21k": "Trained on the labels of ImageNet-21k: starts for fine-tuning",
    "self_supervised": "Trained without labels: features for probes, search and clustering; starts for fine-tuning",
    "text": "Trained on images with texts: features for probes and search; starts for fine-tuning",
    "masked": "Trained to restore masked images: starts for fine-tuning, with weaker features for probes",
}


@dataclass(frozen=True)
class KnownModel:
    """A model on the Hugging Face Hub, or one that is bundled with patchword.

    Attributes:
        reference: How commands refer to it, such as "hf:facebook/dinov2-small".
        family: The format of its files.
        parameters: The number of parameters.
        image_size: Height and width of its input in pixels.
        classes: The number of classes; 0 if it has no head and returns features.
        license: The license of the weights, by its identifier on the hub.
        gated: Whether the hub asks to accept the license first, so that a token is needed.
        use: What it is good for.
        remark: What else to know; "" if nothing.
    """

    reference: str
    family: str
    parameters: int
    image_size: int
    classes: int
    license: str
    gated: bool
    use: str
    remark: str = ""


@dataclass(frozen=True)
class KnownFamily:
    """A family of checkpoints.

    Attributes:
        name: The name, such as "timm".
        writable: Whether `convert` writes it, too.
        description: The projects whose files they are.
    """

    name: str
    writable: bool
    description: str


@cache
def hub_models() -> tuple[KnownModel, ...]:
    """Return the well-known models on the hub, in groups of the same use."""
    table = files(__package__).joinpath("known_models.tsv").read_text(encoding="utf-8")
    return tuple(
        KnownModel(
            reference=f"hf:{row['name']}",
            family=row["family"],
            parameters=int(row["parameters"]),
            image_size=int(row["image_size"]),
            classes=int(row["classes"]),
            license=row["license"],
            gated=row["gated"] == "yes",
            use=USES[row["use"]],
            remark=row["remark"],
        )
        for row in csv.DictReader(table.splitlines(), delimiter="\t")
    )


def bundled_models() -> list[KnownModel]:
    """Return the models that are part of the package."""
    models = []
    for path in sorted(BUNDLED_DIR.glob(f"*/{MODEL_JSON}")):
        document = read_json(path)
        config = CONFIG_CLASSES[document["architecture"]].from_json(document["config"])
        models.append(
            KnownModel(
                reference=BUNDLED_PREFIX + path.parent.name,
                family="patchword",
                parameters=sum(tensor.numel() for tensor in tensor_shapes(config).values()),
                image_size=config.image_size[0],
                classes=config.num_classes,
                license="apache-2.0",
                gated=False,
                use=f"Trained here from scratch on {document['provenance']['data']}",
            )
        )
    return models


def families() -> list[KnownFamily]:
    """Return the families that can be read, patchword's own first; several classes may read one family."""
    descriptions: dict[str, list[str]] = {"patchword": ["model directories and runs of patchword"]}
    for family in FAMILIES:
        text = (type(family).__doc__ or "").partition("\n")[0].rstrip(".")
        lines = descriptions.setdefault(family.name, [])
        project = lines[0].partition(": ")[0] if lines else ""  # named once
        lines.append(text.removeprefix(f"{project}: "))
    return [
        KnownFamily(name, name in ("patchword", *WRITABLE), "; ".join(dict.fromkeys(lines)))
        for name, lines in descriptions.items()
    ]
