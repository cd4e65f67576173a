"""Parquet files and folders of images through the whole program: the same losses in every layout, labels exported."""

import numpy as np
import pytest
from composed import config, execute, losses, run, run_layout
from PIL import Image
from slow_cases import with_slow

from common.errors import UserError
from training.run.prepare import prepare

SHORT = ["train.epochs=null", "train.steps=3", "train.global_batch_size=8", "train.eval_batches=1", "optim=sgd"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """What is typed, by the name of the data."""
    folder = tmp_path_factory.mktemp("data")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i} says {'so ' * (i % 9)}" for i in range(60)]
    pq.write_table(pa.table({"said": texts}), folder / "rows.parquet", row_group_size=7)
    random = np.random.default_rng(0)
    for i in range(40):
        path = folder / "images" / ("cat", "dog")[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (30 + i, 50, 3), dtype=np.uint8)).save(path)
    images = ["data=image_folder", f"data.root={folder}/images"]
    return {
        "parquet": [
            *["model=gpt2", "model.size=tiny", "data=parquet", f"data.root={folder}/rows.parquet", "data.column=said"],
            *["data.seq_len=12", f"data.cache_dir={folder}/cache"],
        ],
        "image_folder": ["model=convnet", *images],
    }


@pytest.mark.parametrize("name", with_slow(["parquet", "image_folder"], ["parquet"]))
def test_two_replicas_and_stages_learn_from_them_what_one_process_learns(ranks, words, tmp_path, name):
    layouts = ["single", "pipelined", "ddp"] if name == "image_folder" else ["single", "pipe_ddp"]
    # BatchNorm's statistics are those of a replica's micro-batch: the same where micro-batches are as large.
    found = [
        losses(run_layout(ranks, one, tmp_path / one, *SHORT, "train.precision=fp32", *words[name])) for one in layouts
    ]
    assert len(found[0]) == 3 and found[0][0] != found[0][-1]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


CLASSIFIER = ["model=classifier", "model.num_classes=2"]


def test_a_model_of_folders_is_exported_with_their_names(words, tmp_path):
    typed = [*words["image_folder"], *CLASSIFIER]
    run(tmp_path / "run", *SHORT, "train.steps=1", *typed)
    export = ["mode=export", f"checkpoint='{tmp_path}/run'", f"export_to={tmp_path}/out", "export.format=torch_export"]
    execute(config(*typed, *export), tmp_path)
    assert (tmp_path / "out" / "labels.txt").read_text() == "cat\ndog\n"


@pytest.mark.parametrize("mode", ["eval", "predict", "train"])
def test_a_folder_that_numbers_its_classes_in_another_way_is_refused(words, tmp_path, mode):
    typed = [*words["image_folder"], *CLASSIFIER, *SHORT]
    run(tmp_path / "run", *typed, "train.steps=1")
    for i in range(20):  # no cat: dogs would be class 0
        path = tmp_path / "dogs" / "dog" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 30)).save(path)
    saved = "train.resume" if mode == "train" else "checkpoint"
    other = [*typed, f"data.root={tmp_path}/dogs", f"mode={mode}", f"{saved}='{tmp_path}/run'"]
    with pytest.raises(UserError, match="class 0 was 'cat' in the data of .*, and is 'dog' in this data"):
        prepare(config(*other))


def test_more_folders_than_classes_of_the_model_are_an_error_before_training(words):
    with pytest.raises(UserError, match="the data has 2 classes, model.num_classes=1 is too few"):
        prepare(config(*words["image_folder"], *CLASSIFIER, "model.num_classes=1"))
