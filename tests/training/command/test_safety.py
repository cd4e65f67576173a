"""What a run must not do: listen to the network, write secrets down, write elsewhere, unpickle what it was given."""

import pickle
from contextlib import suppress

import psutil
import pytest
import torch
from commandline import ROOT, Started, train, wait_until
from PIL import Image

from launchers.world import is_loopback

TOY = ["device=cpu", "train.steps=3", "train.epochs=null"]
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_environmentEnvironmentEnv",
    "MY_SERVICE_PASSWORD": "correct-horse-battery",
}
# What no name gives away: only that the configuration takes them from the environment.
TAKEN = {
    "OPENAI_KEY": "open-sesame",
    "DB_PASS": "hunter2",
    "SLACK_WEBHOOK": "https://hooks.example/T0/B0",
    "PIN": "x7!q",
}
ON_THE_COMMAND_LINE = "tell-nobody-of-this"


# -- the network ---------------------------------------------------------------------------------------------------


def listening(processes):
    """(process, address) of each TCP socket on which one of them listens."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            sockets = process.net_connections("tcp")
            found |= {(process.pid, one.laddr.ip) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def everybody(run):
    """The processes of a run: wandb's service is at the head of a session of its own."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    return {*run.session(), *children}


def test_a_run_on_one_machine_listens_on_loopback_only_and_names_of_a_users_choice_make_no_files_elsewhere(tmp_path):
    endless = ["train.steps=10000000", "train.epochs=null", "device=cpu", "train.eval_every=null"]
    names = ["logger.name=../../escaped", "logger.group=/../escaped"]  # wandb itself refuses such a project
    (tmp_path / "runs").mkdir()
    run = Started(["parallel=pipe_ddp", "data.num_workers=1", *endless, *names], tmp_path / "runs" / "run")
    try:
        metrics, seen = run.folder / "metrics.jsonl", set()

        def trains():
            assert run.process.poll() is None, run.wait().console
            seen.update(listening(everybody(run)))
            return metrics.exists() and metrics.read_text().count("\n") >= 20

        wait_until(trains, 120, "twenty steps")
        family = everybody(run)
        names = [" ".join(process.cmdline()) for process in family]
        assert any("wandb-core" in name for name in names) and len(family) > 8, names
        seen.update(listening(family))
        assert len({pid for pid, _ in seen}) > 1, "gloo listens in every rank, and the launcher's store does"
        elsewhere = {(pid, address) for pid, address in seen if not is_loopback(address)}
        assert not elsewhere, names
        assert not list(tmp_path.rglob("*escaped*"))
        consoles = {"run.console.out", "run.console.err"}
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {"run", *consoles}
    finally:
        run.kill()


# -- secrets -------------------------------------------------------------------------------------------------------


def leaks(folder, *secrets):
    """(file, secret) wherever a file of ``folder``, or its name, has one of the secrets in it."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        found += [(path, s) for s in secrets if s.encode() in content or s in path.name]
    return found


def test_no_secret_is_written_or_shown(tmp_path):
    given = [
        "parallel.env={NCCL_DEBUG: to-be-seen}",
        "logger.name='run of ${oc.env:MY_SERVICE_PASSWORD} ${oc.env:PIN}'",
        f"logger.tags=['https://me:{ON_THE_COMMAND_LINE}@host/x','api_key={ON_THE_COMMAND_LINE}','${{oc.env:DB_PASS}}']",
        "logger.group=${oc.env:SLACK_WEBHOOK}",
        "data.cache_dir=${oc.env:OPENAI_KEY}",
        "print_config=true",
    ]
    run = train(["parallel=ddp", *TOY, *given], tmp_path / "run", env={**SECRETS, **TAKEN})
    assert run.code == 0, run.console
    secrets = [*SECRETS.values(), *TAKEN.values(), ON_THE_COMMAND_LINE]
    assert not leaks(run.folder, *secrets)
    assert not [secret for secret in secrets if secret in run.console]
    assert "name: run of ${oc.env:MY_SERVICE_PASSWORD}" in run.stdout
    assert "to-be-seen" in (run.folder / ".hydra" / "config.yaml").read_text()


@pytest.mark.slow
def test_no_secret_is_in_what_a_sweep_or_a_failed_run_leaves(tmp_path):
    secret = [f"logger.tags=['api_key={ON_THE_COMMAND_LINE}']", "logger.group=${oc.env:DB_PASS}"]
    words = ["-m", *TOY, *secret, "optim.lr=-1,0.1", f"hydra.sweep.dir='{tmp_path}/sweep'"]
    sweep = train(words, tmp_path / "sweep", own_folder=False, env={**SECRETS, **TAKEN})
    assert (tmp_path / "sweep" / "report.html").exists(), sweep.console
    secrets = [*SECRETS.values(), TAKEN["DB_PASS"], ON_THE_COMMAND_LINE]
    assert not leaks(tmp_path / "sweep", *secrets)
    assert not [s for s in secrets if s in sweep.console]


@pytest.mark.parametrize(
    "key, name",
    [
        ("train.precision", "SLACK_WEBHOOK"), ("train.steps", "PIN"), ("data.root", "DB_PASS"),
        ("optim._target_", "DB_PASS"), ("checkpoint", "OPENAI_KEY"),
    ],
)  # fmt: skip
def test_an_error_shows_where_a_value_came_from_and_not_the_value(name, key, tmp_path, monkeypatch, capsys):
    from train import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, TAKEN[name])
    more = {"data.root": ["model=gpt2", "data=text"], "checkpoint": ["mode=eval"]}.get(key, [])
    assert main(["logger=none", *more, f"{key}=${{oc.env:{name}}}"]) == 1
    printed = capsys.readouterr()
    assert f"${{oc.env:{name}}}" in printed.err
    assert TAKEN[name] not in printed.out + printed.err


# -- pickles -------------------------------------------------------------------------------------------------------


def without_pickles():
    """In a new process: every way to a pickle is closed."""

    def closed(*args, **kwargs):
        raise AssertionError("something was unpickled")

    pickle.load = pickle.loads = pickle._load = torch.load = torch.jit.load = closed
    pickle.Unpickler = type("Closed", (pickle.Unpickler,), {"__init__": closed})


REAL = ROOT.parent / "shared" / "data"
SMALL = ["train.steps=2", "train.epochs=null", "train.eval_batches=1", "logger=none", "device=cpu"]
TINY = ["model=gpt2", "model.size=tiny", "train.global_batch_size=4", "data.seq_len=16"]
DATA = {
    "random_regression": [],
    "jsonl": [*TINY, "data=jsonl", f"data.root='{REAL}/gsm8k'", "data.field=question"],
    "mnist": ["model=convnet", "data=mnist", f"data.root='{REAL}/MNIST'"],
}


@pytest.mark.slow
def test_neither_data_nor_checkpoints_are_unpickled(tmp_path, text):
    """Of the data sets that are downloads, those that lie in ../shared/data."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cache = [override for override in text if override.startswith("data.cache_dir=")]
    roots = {"jsonl": REAL / "gsm8k", "mnist": REAL / "MNIST"}
    here = {name: [*o, *cache, *SMALL] for name, o in DATA.items() if name not in roots or roots[name].exists()}
    pq.write_table(pa.table({"text": ["some words"] * 60}), tmp_path / "a.parquet")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for i in range(20):
        Image.new("RGB", (9, 9)).save(tmp_path / "images" / "cat" / f"{i}.png")
    here["parquet"] = [*TINY, *cache, "data=parquet", f"data.root='{tmp_path}/a.parquet'", *SMALL]
    images = ["model=convnet", "data=image_folder", f"data.root='{tmp_path}/images'", "train.global_batch_size=4"]
    here["image_folder"] = [*images, *SMALL]
    here["text"] = [*TINY, *text, "data.seq_len=16", *SMALL]
    latest = f"checkpoint='{tmp_path}/text/checkpoints/latest'"
    here["a checkpoint"] = [*here["text"], "mode=eval", latest]
    for name, words in here.items():
        run = train(words, tmp_path / name, before=without_pickles)
        assert run.code == 0, run.console
