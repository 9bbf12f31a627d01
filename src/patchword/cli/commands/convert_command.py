"""`patchword convert`: write a model in another format."""

from pathlib import Path
from typing import Annotated, Literal

from ...core.text import print_stderr
from ...errors import ConfigError
from ..arguments import arg, positional
from ..model_args import NO_OVERRIDES, Flag, ModelArgs, ModelReference
from ..output import print_notes

Format = Literal[
    "patchword", "google", "big_vision", "timm", "transformers", "torchvision", "deit", "mae", "dinov2", "dinov3"
]


def convert(
    model: ModelReference,
    out: Annotated[Path, positional("OUT")],
    to: Annotated[Format, arg("FORMAT")],
    model_args: ModelArgs = NO_OVERRIDES,
    half: Flag = False,
    overwrite: Flag = False,
) -> int:
    """Write a model in another format. The output is read back and compared with the model before OUT is created.

    Example: patchword convert ViT-B_16.npz vit-b16 --to transformers

    Args:
        out: directory to create (patchword, transformers, timm), or file: *.safetensors or *.pth (timm), *.npz (google,
            big_vision), *.pth (torchvision, deit, mae, dinov2, dinov3)
        to: the format to write
        half: store the weights in float16 (patchword format only); the model still computes in float32
        overwrite: replace an existing model
    """
    from ...checkpoints import write_checkpoint

    if half and to != "patchword":
        raise ConfigError("--half works only with --to patchword: other formats are written as their projects do.")
    checkpoint = model_args.read(model)
    checkpoint = checkpoint.to_half() if half else checkpoint
    print_notes(write_checkpoint(out, checkpoint, to, overwrite=overwrite))
    num_parameters = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    print_stderr(f"wrote {out} ({checkpoint.family} to {to}, {num_parameters:,} parameters)")
    return 0
