"""The `data=` options as Hydra composes them."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class

from conf.instantiate import instantiate
from conf.schema import register
from data.dataset import DataSet

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def composed():
    """What the data section is for a command line."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: compose("train", list(overrides)).data


@pytest.mark.parametrize("path", sorted((CONF / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_option_names_a_data_set_and_sets_what_it_takes(composed, path):
    config = composed(f"data={path.stem}")
    kind = get_class(config._target_)
    assert issubclass(kind, DataSet)
    if path.stem in ("text", "jsonl", "parquet", "tokens", "image_folder"):
        config.root = "somewhere"
    assert isinstance(instantiate(config), kind)


def test_the_columns_of_a_text_follow_the_global_batch(composed):
    config = composed("data=wikitext2", "data.vocabulary=words", "data.batchify=true", "train.global_batch_size=20")
    assert config.columns == 20
    data = instantiate(config)
    assert data.columns == 20 and data.vocab_size is None
