"""What cannot be done is one line that names it, with the numbers and the way out, before anything has begun."""

import pwd
import shlex

import psutil
import pytest
from table import TABLE

# So that nothing is downloaded where there is a network, either.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
OFFLINE |= {"no_proxy": "", "NO_PROXY": ""}


@pytest.fixture(scope="module")
def before():
    return ranks()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Shared, so that text which several rows name is tokenized once."""
    return tmp_path_factory.mktemp("cache")


def ranks():
    """The processes that are children of a fork server of this process's, as every worker of a run is."""
    return {rank.pid for server in psutil.Process().children() for rank in server.children()}


@pytest.mark.parametrize("names, refusal", TABLE, ids=lambda value: getattr(value, "words", value)[:80])
def test_what_cannot_be_done_is_refused(names, refusal, before, cache, tmp_path, monkeypatch, capsys):
    from train import main

    here, place = tmp_path / "files", tmp_path / "place"
    here.mkdir()
    place.mkdir()
    if refusal.file is not None:
        refusal.file(here)
    for name, value in {**OFFLINE, **refusal.env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place)
    words = shlex.split(refusal.words.replace("HERE", str(here)))
    own_folder = [] if "hydra." in refusal.words else ["hydra.run.dir=run"]
    code = main(["logger=none", "device=cpu", f"data.cache_dir={cache}", *own_folder, *words])
    printed = capsys.readouterr()

    assert code == 1, printed
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    said = [text.replace("HERE", str(here)) for text in (names, *refusal.says)]
    assert [text for text in said if text not in line] == [], line
    assert "step 1" not in printed.out and ranks() <= before, "something was begun"
    assert list(place.iterdir()) == [], "something was left behind"
    assert not list(cache.rglob("*.tmp")), "half of something was built"


def test_a_user_without_a_home_folder(tmp_path, monkeypatch, capsys):
    from train import main

    def nobody(*args):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert main(["model=gpt2", "model.size=tiny", "logger=none"]) == 1
    said = capsys.readouterr().err
    assert "HOME is not set" in said and "data.cache_dir=FOLDER" in said
