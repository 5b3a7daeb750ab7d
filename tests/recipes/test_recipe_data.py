"""The recipes' data: the same in every process, of the right shapes, normalised."""

from __future__ import annotations

import pytest
import torch

from recipes.datamodules.augment import CenterCrop, PadCropFlip, ResizedCropFlip
from recipes.datamodules.clicks import Clicks
from recipes.datamodules.digits import Digits
from recipes.datamodules.labelled_images import LabelledImages
from recipes.datamodules.stdlib_bytes import (
    StdlibBytes,
    Windows,
    read,
    source_files,
    split_by_file,
)


def set_up(data):
    data.prepare_data()
    data.setup("fit")
    return data


class TestDigits:
    def test_the_split_is_the_same_each_time(self):
        first, second = set_up(Digits()), set_up(Digits())
        for one, other in ((first.train, second.train), (first.val, second.val)):
            assert all(map(torch.equal, one.tensors, other.tensors))

    def test_sizes_shapes_and_normalisation(self):
        data = set_up(Digits(batch_size=32))
        assert (len(data.train), len(data.val)) == (1437, 360)
        images, labels = next(iter(data.train_dataloader()))
        assert (images.shape, images.dtype) == ((32, 1, 8, 8), torch.float32)
        assert (labels.shape, labels.dtype) == ((32,), torch.int64)
        assert data.train.tensors[0].mean().item() == pytest.approx(0, abs=1e-4)
        assert data.train.tensors[0].std().item() == pytest.approx(1, abs=1e-4)

    def test_every_class_is_in_both_parts(self):
        data = set_up(Digits())
        assert min(data.val.tensors[1].bincount()) >= 30
        assert min(data.train.tensors[1].bincount()) >= 130


class TestStdlibBytes:
    def test_the_text_is_the_same_each_time_and_is_python(self):
        first, second = (
            set_up(StdlibBytes(block_size=64, batch_size=4, max_bytes=50_000)) for _ in range(2)
        )
        assert torch.equal(first.train.tokens, second.train.tokens)
        assert torch.equal(first.val.tokens, second.val.tokens)
        assert len(first.train.tokens) == 50_000
        assert b"def " in bytes(first.train.tokens.tolist())

    def test_files_are_in_one_part_only(self, tmp_path):
        for index in range(100):
            (tmp_path / f"m{index}.py").write_text(f"x = {index}\n")
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "other.py").write_text("y = 1\n")
        files = source_files(tmp_path)
        train, val = split_by_file(files, tmp_path)
        assert len(files) == 100
        assert len(val) in range(3, 20)
        assert sorted(train + val) == sorted(files)
        assert len(read(train, max_bytes=17)) == 17

    def test_windows_overlap_by_the_byte_that_is_predicted(self):
        windows = Windows(bytes(range(10)), block_size=4)
        assert [window.tolist() for window in windows_of(windows)] == [
            [0, 1, 2, 3, 4],
            [4, 5, 6, 7, 8],
        ]

    def test_batches_are_windows_of_bytes(self):
        data = set_up(StdlibBytes(block_size=64, batch_size=4, max_bytes=50_000))
        batch = next(iter(data.train_dataloader()))
        assert (batch.shape, batch.dtype) == ((4, 65), torch.int64)
        assert 0 <= batch.min() <= batch.max() < 256


def windows_of(windows):
    return [windows[index] for index in range(len(windows))]


MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)


def labelled(path, **changes):
    settings = {"num_classes": 10, "batch_size": 4, "mean": MEAN, "std": STD, "num_workers": 0}
    return LabelledImages(str(path), **(settings | changes))


class TestLabelledImages:
    def test_a_folder_of_parquet_files(self, cifar10_folder):
        self.check(set_up(labelled(cifar10_folder, val_split="test")))

    def test_a_folder_that_save_to_disk_wrote(self, tiny_images, tmp_path):
        tiny_images.save_to_disk(tmp_path / "saved")
        self.check(set_up(labelled(tmp_path / "saved", val_split="test")))

    def check(self, data):
        assert (len(data.train), len(data.val)) == (12, 4)
        images, labels = next(iter(data.val_dataloader()))
        assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.float32)
        assert labels.tolist() == [0, 1, 2, 3]
        red = (20 * labels / 255 - MEAN[0]) / STD[0]
        torch.testing.assert_close(images[:, 0, 5, 7], red)
        torch.testing.assert_close(images[:, 1:, 0, 0], torch.tensor([[-2.0, -3.0]] * 4))

    def test_a_folder_of_images_per_class(self, imagenet_folder):
        transforms = {
            "train_transform": ResizedCropFlip(size=32),
            "val_transform": CenterCrop(shorter=40, size=32),
        }
        data = set_up(labelled(imagenet_folder, num_classes=3, **transforms))
        images, labels = next(iter(data.train_dataloader()))
        assert images.shape == (4, 3, 32, 32)
        assert set(labels.tolist()) <= {0, 1, 2}
        assert len(data.val) == 6

    def test_grey_images_when_one_channel_is_asked_for(self, cifar10_folder):
        grey = {"mean": (0.5,), "std": (0.5,), "val_split": "test"}
        data = set_up(labelled(cifar10_folder, **grey))
        assert next(iter(data.val_dataloader()))[0].shape == (4, 1, 32, 32)

    def test_a_wrong_number_of_classes_says_the_right_one(self, cifar10_folder):
        data = labelled(cifar10_folder, num_classes=100, val_split="test")
        with pytest.raises(ValueError, match="has 10 classes, the model 100"):
            data.setup("fit")

    def test_a_missing_label_column_lists_the_columns(self, cifar10_folder):
        data = labelled(cifar10_folder, label="fine_label", val_split="test")
        with pytest.raises(ValueError, match="it has img, label"):
            data.setup("fit")

    def test_data_without_images_says_how_to_cast(self, tiny_images, tmp_path):
        tiny_images.remove_columns("img").save_to_disk(tmp_path / "saved")
        with pytest.raises(ValueError, match="cast_column"):
            labelled(tmp_path / "saved", val_split="test").setup("fit")


class TestAugment:
    image = torch.arange(3 * 40 * 56, dtype=torch.float32).view(3, 40, 56)

    def test_pad_crop_flip_moves_and_mirrors_but_invents_nothing(self):
        image = torch.arange(1.0, 3 * 32 * 32 + 1).view(3, 32, 32)
        seen = [PadCropFlip(size=32, padding=4)(image) for _ in range(30)]
        assert all(crop.shape == image.shape for crop in seen)
        assert all(
            set(crop.unique().tolist()) <= {0.0, *image.flatten().tolist()} for crop in seen
        )
        left_to_right = {bool(crop[0, 16, 20] > crop[0, 16, 10]) for crop in seen}
        assert left_to_right == {True, False}

    def test_resized_crop_has_the_asked_size_within_the_range_of_values(self):
        for _ in range(20):
            crop = ResizedCropFlip(size=24)(self.image)
            assert crop.shape == (3, 24, 24)
            assert self.image.min() <= crop.min() <= crop.max() <= self.image.max()

    def test_resized_crop_falls_back_to_the_middle_when_no_window_fits(self):
        crop = ResizedCropFlip(size=24, scale=(4.0, 5.0))(self.image)
        middle = CenterCrop(24, 24)(self.image)
        assert torch.equal(crop, middle) or torch.equal(crop, middle.flip(-1))

    def test_the_seed_decides(self):
        crops = []
        for _ in range(2):
            torch.manual_seed(3)
            crops.append(ResizedCropFlip(size=24)(self.image))
        assert torch.equal(*crops)

    def test_center_crop_cuts_the_middle(self):
        crop = CenterCrop(shorter=40, size=32)(self.image)
        assert torch.equal(crop, self.image[:, 4:36, 12:44])


class TestClicks:
    def make(self, **changes):
        sizes = {"num_numbers": 3, "cardinalities": (5, 200), "num_train": 4000, "num_val": 100}
        data = Clicks(**(sizes | {"batch_size": 10} | changes))
        data.setup("fit")
        return data

    def test_rows_are_the_same_in_every_process(self):
        one, other = self.make(), self.make()
        for x, y in zip(one.train.dataset.tensors, other.train.dataset.tensors, strict=True):
            assert torch.equal(x, y)
        numbers, ids, clicks = next(iter(one.val_dataloader()))
        assert (numbers.shape, ids.shape, clicks.shape) == ((10, 3), (10, 2), (10,))
        assert set(clicks.tolist()) == {0.0, 1.0}
        assert not torch.equal(numbers, next(iter(self.make(seed=1).val_dataloader()))[0])

    def test_few_ids_come_often(self):
        _, ids, _ = self.make().train.dataset.tensors
        counts = torch.bincount(ids[:, 1], minlength=200)
        assert ids.max(0).values.tolist() == [4, 199]
        assert counts[:4].sum() > 4100 / 3
        assert counts[100:].float().mean() < counts[0] / 50
