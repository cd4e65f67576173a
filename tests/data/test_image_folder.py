"""Folders of classes as a data set: which image is what, what becomes of its pixels, and files that cannot be read."""

import io
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import DataError
from common.packages import load_torchvision
from data.image_folder import ImageFolder

NORMAL = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}


def save(path: Path, image: Image.Image | np.ndarray, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    return path


def grey(path: Path, value: int) -> Path:
    """An image that can be told by its grey value."""
    return save(path, np.full((6, 6), value, np.uint8))


@pytest.fixture
def images_of(prepared, tmp_path):
    return lambda **options: prepared(ImageFolder, tmp_path, **{"image_size": 4, **NORMAL, **options})


def content(source) -> list[tuple[int, int]]:
    """The grey value and the class of every sample."""
    if source is None:
        return []
    images, labels = source.read(np.arange(len(source)), 0)
    return [(round(255 * image[0, 0, 0].item()), label) for image, label in zip(images, labels.tolist(), strict=True)]


def test_classes_are_the_folders_by_name_and_of_20_images_in_order_two_are_held_out(tmp_path, images_of):
    for i in range(44):
        grey(tmp_path / ("cat" if i < 15 else "dog" if i < 43 else "Ant") / f"{i:02d}.png", i)
    grey(tmp_path / "no class.png", 99)
    grey(tmp_path / ".hidden" / "1.png", 99)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "1.webp").write_bytes(b"not read")
    data = images_of()
    assert (data.class_names(), data.num_classes) == (["Ant", "cat", "dog"], 3)
    order = [(43, 0), *((i, 1) for i in range(15)), *((i, 2) for i in range(15, 43))]
    assert content(data.valid) == order[9::20] and content(data.test) == order[19::20]
    assert content(data.train) == [one for i, one in enumerate(order) if i % 20 not in (9, 19)]
    others = "without 3 other files (.png, .txt, .webp)"
    assert f"images of {tmp_path} {others}, 3x4x4, 3 classes: train 40, valid 2, test 2 images" in data.description


@pytest.mark.parametrize(
    "folders, splits",
    [
        (["train/a", "train/b/deeper", "val/b", "test/a", "extra/c"], [[(0, 0), (50, 1)], [(100, 1)], [(150, 0)]]),
        (["train/a", "valid/a"], [[(0, 0)], [(50, 0)], []]),
        (["Training/a", "Testing/a"], [[(0, 0)], [], [(50, 0)]]),
    ],
)
def test_folders_named_train_val_and_test_are_the_splits(tmp_path, images_of, folders, splits):
    for i, name in enumerate(folders):
        grey(tmp_path / name / "1.Jpg", 50 * i)
    data = images_of()
    assert [content(source) for source in (data.train, data.valid, data.test)] == splits


def test_a_folder_with_training_and_test_images_alone_gives_the_10th_of_20_to_valid(tmp_path, images_of):
    for i in range(20):
        grey(tmp_path / "train" / "a" / f"{i:02d}.PNG", i)
    grey(tmp_path / "test" / "a" / "1.png", 99)
    data = images_of()
    assert content(data.valid) == [(9, 0)] and content(data.test) == [(99, 0)]
    assert len(data.train) == 19


def test_train_may_be_a_class(tmp_path, images_of):
    grey(tmp_path / "train" / "1.png", 1)
    grey(tmp_path / "bus" / "1.png", 2)
    assert images_of().class_names() == ["bus", "train"]


@pytest.mark.parametrize(
    "height, width, largest, mean",
    # torchvision rounds what is cut out to whole pixels of the resized image; where there are such, both are the same.
    [(300, 200, 0.02, 0.01), (64, 64, 1e-6, 1e-6), (40, 80, 0.02, 0.01), (37, 91, 0.5, 0.05), (500, 375, 0.5, 0.05)],
)
def test_an_image_is_what_torchvision_makes_of_it_resized_cut_out_and_normalised(
    tmp_path, images_of, height, width, largest, mean
):
    smooth = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC)
    path = save(tmp_path / "a" / "1.jpg", image)
    (given,), _ = images_of(image_size=64, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]).train.read(
        np.array([0]), 0
    )
    load_torchvision()
    from torchvision import transforms as T

    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    expected = T.Compose([T.Resize(64), T.CenterCrop(64), T.ToTensor(), norm])(Image.open(path))
    assert given.shape == (3, 64, 64) and given.dtype == torch.float32
    difference = (given - expected).abs()
    assert difference.max() <= largest and difference.mean() <= mean and expected.std() > 0.5


def square(mode: str) -> Image.Image:
    return Image.new("RGB", (6, 6), (200, 40, 90)).convert(mode)


def transparent() -> Image.Image:
    palette = square("RGB").quantize(4)
    palette.info["transparency"] = b"\x80\xff"
    return palette


KINDS = {
    "RGB": (square("RGB"), "png", (200, 40, 90)),
    "RGBA": (square("RGBA"), "png", (200, 40, 90)),
    "grey": (square("L"), "png", (94, 94, 94)),
    "grey and alpha": (square("LA"), "png", (94, 94, 94)),
    "black and white": (Image.new("1", (6, 6), 1), "png", (255, 255, 255)),
    "palette": (square("RGB").quantize(4), "png", (200, 40, 90)),
    "palette with transparent colours": (transparent(), "png", (200, 40, 90)),
    "16 bits of grey": (Image.fromarray(np.full((6, 6), 0x9234, np.uint16)), "png", (0x92,) * 3),
    "JPEG": (square("RGB"), "jpeg", (200, 40, 90)),
    "grey JPEG": (square("L"), "jpg", (94, 94, 94)),
    "CMYK": (square("CMYK"), "jpg", (200, 40, 90)),
}


@pytest.mark.parametrize("image, suffix, colour", KINDS.values(), ids=KINDS)
def test_every_kind_of_image_becomes_red_green_and_blue_without_a_warning(tmp_path, images_of, image, suffix, colour):
    save(tmp_path / "a" / f"1.{suffix}", image)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (given,), _ = images_of().train.read(np.array([0]), 0)
    assert (255 * given[:, 1, 1]).tolist() == pytest.approx(colour, abs=3)


def test_a_model_of_grey_images_gets_one_channel(tmp_path, images_of):
    save(tmp_path / "a" / "1.png", square("RGB"))
    (given,), _ = images_of(channels=1).train.read(np.array([0]), 0)
    assert given.shape == (1, 4, 4) and 255 * given[0, 0, 0].item() == pytest.approx(94, abs=1)


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def claiming(side: int) -> bytes:
    """A PNG whose head says that it has so many pixels a side."""
    png = encoded("PNG")
    head = b"IHDR" + struct.pack(">II", side, side) + png[24:29]
    return png[:12] + head + struct.pack(">I", zlib.crc32(head)) + png[33:]


DAMAGED = {
    "no image": b"<html>404</html>",
    "cut": encoded("PNG")[:3000],
    "overwritten": encoded("PNG")[:3000] + bytes(200) + encoded("PNG")[3200:],
    "another format": encoded("GIF"),
    "too large": claiming(65536),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_when_it_is_read_and_the_others_are_read(tmp_path, images_of, damaged):
    for i in range(3):
        grey(tmp_path / "a" / f"{i}.png", i)
    (tmp_path / "a" / "1.png").write_bytes(damaged)
    data = images_of()
    with pytest.raises(DataError, match=rf"{tmp_path}/a/1\.png is damaged, or neither JPEG nor PNG"):
        data.train.read(np.array([0, 1]), 0)
    assert data.train.read(np.array([0, 2]), 0)[1].tolist() == [0, 0]


def test_without_a_folder_the_error_says_what_to_give():
    with pytest.raises(DataError, match="data.root=FOLDER"):
        ImageFolder()


@pytest.mark.parametrize(
    "name, others",
    [("1.png", " without 1 other files (.png)"), ("cat/1.webp", " without 1 other files (.webp)"), ("", "")],
)
def test_a_folder_without_classes_says_what_it_has_and_what_it_needs(tmp_path, images_of, name, others):
    if name:
        grey(tmp_path / name, 1)
    says = f"images of {tmp_path}{others}: there is none; data.root=FOLDER needs folders of classes"
    with pytest.raises(DataError, match=re.escape(says)):
        images_of()
