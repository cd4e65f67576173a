"""The table of hostile inputs: what is typed, and what the one line of error must say.

``{folder}`` stands for a folder of the test's own, in which ``files`` have put what the name of a case promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hostile_files import FILES

TOY = ("logger=none", "device=cpu")
GPT2 = (*TOY, "model=gpt2", "model.size=tiny", "data.seq_len=16", "train.global_batch_size=4")
CONVNET = (*TOY, "model=convnet", "train.global_batch_size=4")


@dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
        name: What is hostile about it.
        overrides: The command line.
        says: What the error must say.
    """

    name: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]


# -- numbers -------------------------------------------------------------------------------------------------------

_WHOLE = (
    "train.steps", "train.global_batch_size", "train.keep_checkpoints", "train.eval_batches", "parallel.pp",
    "parallel.dp", "parallel.threads", "data.samples", "data.num_workers", "model.hidden", "seed",
)  # fmt: skip
_NO_WHOLE_NUMBERS = ("many", "1.5", "nan", "-1", "1" + 30 * "0")
_REAL = (
    "train.epochs", "train.grad_clip", "train.clip_value", "train.spike_factor", "parallel.timeout_s",
    "parallel.bucket_mb", "data.noise", "optim.lr",
)  # fmt: skip
_NO_REAL_NUMBERS = ("much", "nan", "inf", "-1", "{a: 1}")


def _numbers() -> Iterator[Case]:
    for key in _WHOLE:
        for value in _NO_WHOLE_NUMBERS:
            # Where replicas are counted, a strategy that has some: otherwise that is the error.
            more = ("parallel=pipe_ddp",) if key.startswith("parallel.") else ()
            yield Case(f"{key}={value}", (*TOY, *more, f"{key}={value}"), (key.rpartition(".")[2],))
    for key in _REAL:
        for value in _NO_REAL_NUMBERS:
            more = ("parallel=ddp",) if key.startswith("parallel.") else ()
            says = "optim" if key == "optim.lr" else key.rpartition(".")[2]  # where the optimizer itself refuses it
            yield Case(f"{key}={value}", (*TOY, *more, f"{key}={value}"), (says,))


# -- words and sections --------------------------------------------------------------------------------------------

_WORDS = (
    "train.precision", "parallel.schedule", "parallel.order", "parallel.comm_hook", "device", "mode",
)  # fmt: skip


def _words() -> Iterator[Case]:
    for key in _WORDS:
        for value in ("nothing", "[]"):
            yield Case(f"{key}={value}", (*TOY, f"{key}={value}"), (key.rpartition(".")[2],))
    for group in ("model", "data", "optim", "scheduler", "parallel", "launcher", "logger", "experiment"):
        yield Case(f"{group} of a name that leads elsewhere", (*TOY, f"{group}=../../evil"), (group,))


_NEEDS = {
    "more threads than a machine can have": (("parallel.threads=100000",), ("parallel.threads=100000", "1,024")),
    "a wait of centuries": (("parallel=ddp", "parallel.timeout_s=1e12"), ("parallel.timeout_s", "seconds")),
    "a bucket of exabytes": (("parallel=ddp", "parallel.bucket_mb=1e12"), ("parallel.bucket_mb", "MiB")),
    "more samples than memory": (("data.samples=100000000000",), ("data.samples=100000000000", "GiB", "free")),
    "wider samples than memory": (("data.in_features=100000000000",), ("data.in_features", "GiB", "free")),
    "a layer wider than memory": (("model.hidden=100000000000",), ("model=toy", "GiB", "free", "smaller")),
    "a layer wider than 64 bits": (("model.hidden=1000000000000000000",), ("model=toy", "hidden=")),
    "a model with a billion layers": (("model=gpt2", "model.n_layer=1000000000"), ("model.n_layer=1000000000",)),
    "a model larger than memory": (
        ("model=gpt2", "model.size=1558M", "model.n_embd=160000", "data=tokens", "data.root={folder}/good.bin"),
        ("model=gpt2", "GiB", "free"),
    ),
    "a vocabulary larger than memory": (
        ("model=gpt2", "model.size=tiny", "model.vocab_size=100000000000", "data=tokens",
         "data.root={folder}/good.bin"),
        ("model=gpt2", "GiB", "free"),
    ),
    "an image larger than memory": (
        ("model=convnet", "data=random_images", "data.channels=1", "data.image_size=10000000"),
        ("data.image_size=10000000", "GiB", "free"),
    ),
    "a batch larger than memory": (
        ("train.global_batch_size=10000", "model=convnet", "data=random_images", "data.channels=1",
         "data.samples=20000", "data.image_size=4000"),
        ("micro-batch of 10000 samples", "GiB", "free", "parallel.chunks"),
    ),
    "more processes than memory": (
        ("parallel=ddp", "parallel.dp=512", "train.global_batch_size=512"), ("512 processes", "GiB", "free"),
    ),
    "an optimizer that needs a closure": (("optim._target_=torch.optim.LBFGS",), ("LBFGS", "closure")),
    "an optimizer without its own settings": (("optim._target_=torch.optim.SparseAdam",), ("SparseAdam",)),
    "an experiment that includes itself": (
        ("--config-dir={folder}", "experiment=itself"), ("experiment/itself", "includes itself", "take"),
    ),
    "a NUL byte in a path": (("data.cache_dir='a\0b'",), ("data.cache_dir", "NUL")),
    "a home folder of nobody": (("model=gpt2", "data=text", "data.root='~no-such-user/x'"), ("no such home folder",)),
    "a checkpoint with a name of 300 letters": (("mode=eval", "checkpoint=" + 300 * "a"), ("too long", "shorter")),
    "a text with a name of 300 letters": (
        ("model=gpt2", "data=text", "data.root=" + 300 * "a"), ("too long", "shorter"),
    ),
    "a missing variable of the environment": (("train.steps=${oc.env:NO_SUCH_VARIABLE}",), ("NO_SUCH_VARIABLE",)),
    "an interpolation of itself": (("train.steps=${train.steps}",), ("train.steps",)),
    "an interpolation of what is not there": (("train.steps=${nothing}",), ("nothing",)),
    "a resolver that is not there": (("train.steps=${evil:1}",), ("evil",)),
    "a grammar error": (("train.steps=[1,",), ("train.steps",)),
    "a word that is no override": (("please",), ("please",)),
    "an interface that is not there": (
        ("parallel=ddp", "parallel.env={GLOO_SOCKET_IFNAME: nowhere0}"), ("GLOO_SOCKET_IFNAME=nowhere0", "unset"),
    ),
    "a run directory with a name of 300 letters": (("hydra.run.dir=" + 300 * "a",), ("hydra.run.dir", "shorter")),
    "a run directory with a line end": (("hydra.run.dir='a\nb'",), ("hydra.run.dir", "another name")),
    "a run directory with a NUL byte": (("hydra.run.dir='a\0b'",), ("hydra.run.dir", "another name")),
    "a run directory that commands a terminal": (("hydra.run.dir='a\33]0;b'",), ("hydra.run.dir", "another name")),
    "a run directory that is a file": (("hydra.run.dir={folder}/good.bin",), ("good.bin",)),
    "a run directory under a file": (("hydra.run.dir={folder}/good.bin/run",), ("good.bin",)),
}  # fmt: skip

# -- code and secrets ----------------------------------------------------------------------------------------------

_CODE = {
    "a callback": (("+hydra.callbacks.evil._target_=os.system",), ("hydra.callbacks.evil",)),
    "another target of a callback": (
        ("hydra.callbacks.guard._target_=os.system",), ("hydra.callbacks.guard._target_",),
    ),
    "no guard": (("~hydra.callbacks.guard",), ("hydra.callbacks",)),
    "no callbacks": (("hydra.callbacks=null",), ("hydra.callbacks",)),
    "a callback in a file": (("--config-dir={folder}", "+hydra/callbacks=evil"), ("hydra.callbacks",)),
    "a log handler": (("hydra.job_logging.handlers.console.class=os.system",), ("hydra.job_logging",)),
    "a log file": (("+hydra/job_logging=default",), ("job_logging",)),
    "a log formatter": (("+hydra.hydra_logging.formatters.evil=x",), ("hydra.hydra_logging",)),
    "a pickle of Hydra's": (("--experimental-rerun", "{folder}/evil.pkl"), ("pickle",)),
    "the environment of a job": (("+hydra.job.env_set.LD_PRELOAD=x",), ("hydra.job.env_set", "LD_PRELOAD")),
    "a launcher of Hydra's": (("-m", "seed=1,2", "hydra.launcher._target_=os.system"), ("os.system",)),
    "a sweeper of Hydra's": (("-m", "seed=1,2", "hydra.sweeper._target_=os.system"), ("os.system",)),
    "a model that is a command": (("model._target_=os.system",), ("os.system", "not allowed")),
    "a data set that is a command": (("data._target_=subprocess.run",), ("subprocess.run", "not allowed")),
    "a scheduler that is a command": (("scheduler._target_=os.system",), ("os.system", "not allowed")),
    "an optimizer that is a command": (("optim._target_=os.system",), ("os.system", "not allowed")),
    "a target through a module of the project": (
        ("scheduler._target_=training.run.os.system",), ("training.run.os.system", "names nothing"),
    ),
    "a private target": (("scheduler._target_=training.optimizer._build",), ("_build", "private")),
    "shell lines from elsewhere": (
        ("--config-dir={folder}", "experiment=shell"), ("launcher.setup", "touch", "type"),
    ),
    "a package that a file allows": (
        ("--config-dir={folder}", "experiment=allowed"), ("allow=['os']", "type it"),
    ),
    "a folder of modules that a file names": (
        ("--config-dir={folder}", "experiment=imported"), ("import_from=", "type it"),
    ),
    "an option of sbatch that runs commands": (
        ("launcher=slurm", "+launcher.sbatch.wrap=id"), ("launcher.sbatch.wrap", "not allowed"),
    ),
    "an option of sbatch that sets variables": (
        ("launcher=slurm", "+launcher.sbatch.export=LD_PRELOAD"), ("launcher.sbatch.export", "not allowed"),
    ),
}  # fmt: skip
_VARIABLES = (
    "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "HOME", "BASH_ENV", "CXX", "WANDB_BASE_URL",
    "HTTPS_PROXY", "NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "OMP_TOOL_LIBRARIES", "CUDA_INJECTION64_PATH", "TORCH_HOME",
    "nccl_debug",
)  # fmt: skip


def _code() -> Iterator[Case]:
    for name in _VARIABLES:
        text = f"parallel.env={{{name}: x}}"
        yield Case(f"the variable {name}", (*TOY, text), ("parallel.env", name, "not allowed"))
    yield Case("a variable that names a library", (*TOY, "parallel.env={NCCL_X: /tmp/evil.so}"), ("parallel.env",))
    yield Case("an environment that is a list", (*TOY, "parallel.env=[LD_PRELOAD]"), ("parallel.env",))


# -- files ---------------------------------------------------------------------------------------------------------


def _files() -> Iterator[Case]:
    for name, file in FILES.items():
        base = {"gpt2": GPT2, "convnet": CONVNET}.get(file.model, TOY)
        yield Case(name, (*base, *file.overrides), file.says)


def _table() -> Iterator[Case]:
    yield from _numbers()
    yield from _words()
    for name, (overrides, says) in {**_NEEDS, **_CODE}.items():
        yield Case(name, (*TOY, *overrides), says)
    yield from _code()
    yield from _files()


CASES = list(_table())
