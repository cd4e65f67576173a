"""Composes the configuration of a command line with Hydra, and calls a function with it."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_automatic_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus, run_job
from hydra.errors import ConfigCompositionException, SearchPathException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from common.files import TYPED_IN
from common.machine import changed_environment
from conf import CHOSEN, COMMAND, FOLDER, LORA, ON_TOP, masking
from conf.instantiate import check_sections, is_ours, to_config, to_dict
from conf.messages import unknown_key
from conf.schema import Parallel, Root, register
from conf.words import GROUPS, code_folders, config_folder, expand_lists, hydra_word, key_of, parse
from launchers.world import launcher_start

# Keys that a checkpoint does not keep.
_WHERE = ("device", "parallel", "cluster", "launcher", "logger", "loggers", "callbacks", "import_from")
_OF_SWEEP = ("hydra", "sweep.", "train.monitor")  # keys that are read before and after the jobs
_LISTED = {"logger@loggers.": "logger", "callback@callbacks.": "callbacks"}  # groups of which several may be chosen


Start = tuple[float, str, float]


@dataclass(frozen=True)
class Composed:
    """A configuration and how it was composed: the whole input of a run.

    Attributes:
        cfg: The configuration. Its references are not resolved, so that values from the environment stay hidden.
        run_dir: The run directory.
        choices: The option of each group; None for a configuration that a program has made.
        typed: The typed words. Their references are not resolved, because a value may be secret or missing.
        own_options: The words that name folders of the user's options, ``--config-dir=PATH``.
        files: The folder of the configuration's files; None if none are written.
        job: Hydra's section, if it is a job of a sweep; None for a run.
        saved: A checkpoint's configuration (training.checkpoint.configuration.SavedConfig), until ``complete`` uses it.
        start: When the run began, its id, and the time by Hydra's ``now``.
    """

    cfg: Any
    run_dir: Path
    choices: Mapping[str, str | None] | None = None
    typed: Sequence[str] = ()
    own_options: Sequence[str] = ()
    files: Path | None = None
    job: Any = None
    saved: Any = None
    start: Start = (0.0, "", 0.0)

    @classmethod
    def of(cls, cfg: DictConfig, hydra: Any, saved: Any = None, start: Start = (0.0, "", 0.0)) -> Composed:
        """Return the configuration that Hydra has composed. ``hydra`` is Hydra's section."""
        run_dir, own = Path(hydra.runtime.output_dir), brought(saved)
        overrides: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
        sources = hydra.runtime.config_sources
        return cls(
            cfg, run_dir, dict(hydra.runtime.choices), [word for word in overrides["task"] if word not in own],
            [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"],
            None if hydra.output_subdir is None else run_dir / hydra.output_subdir,
            hydra if hydra.mode is RunMode.MULTIRUN else None, saved, start,
        )  # fmt: skip

    def complete(self) -> Composed:
        """Apply the checkpoint's values, which typed words override, check the keys, and update the files.

        Raises:
            HydraException: A key does not exist, or a value has another type.
            UserError: The checkpoint names code that it may not name.
        """
        if self.saved is not None:
            self.saved.lay_under(self.cfg, self.choices, self.typed)
            if self.files is not None:
                self._write("config.yaml", self.cfg)
                self._write("overrides.yaml", OmegaConf.create([*self.typed]))
        return replace(self, cfg=check_keys(with_schema(self.cfg)), saved=None)

    def made_by_program(self, cfg: DictConfig) -> Composed:
        """Return a copy with a configuration that a program has made, after checking its keys, and update its file."""
        check_keys(with_schema(cfg))
        self._write("config.yaml", cfg)
        return replace(self, cfg=cfg, choices=None)

    def _write(self, name: str, content: Any) -> None:
        file = (self.files or self.run_dir / ".hydra") / name
        OmegaConf.save(content, file)
        masking.mask_files([file])

    def plain(self) -> Any:
        """Return the configuration as plain data, with how it was composed.

        Raises:
            UserError: A section is not a mapping.
            omegaconf.errors.OmegaConfBaseException: A value is missing, or cannot be resolved.
        """
        check_sections(self.cfg)
        tree = to_dict(self.cfg)
        if self.choices is not None:
            tree[COMMAND] = self._how()
        return to_config(tree)

    def words(self) -> list[str]:
        """Return the words that were typed, or given by a program that has made more of the configuration."""
        return [*self.own_options, *masking.mask_secrets([*self.typed])]

    def differences(self) -> tuple[dict[str, str], list[str]]:
        """Return the option of each group, and the other typed words, which may contain secrets."""
        choices, cfg = self.choices or {}, self.cfg
        if "model" not in choices:  # composed before: --config-dir RUN/.hydra --config-name config
            return {group: cfg[group].name for group in ("model", "parallel", "launcher")}, [*self.typed]
        chosen = {group: option for group in (*GROUPS, *ON_TOP) if (option := choices.get(group)) is not None}
        chosen["model"] = cfg.model.name
        chosen |= _lists(choices)
        options = {*GROUPS, *ON_TOP, "callback"}
        return chosen, [word for word in self.typed if key_of(word) not in options and not word.startswith("hydra")]

    def _how(self) -> dict[str, Any]:
        """Return the options of groups and the typed keys.

        "where" has the words that a checkpoint does not keep, or may not name.
        """
        choices = self.choices or {}
        lists = _lists(choices)
        where = [*self.own_options, *(f"{group}={names}" for group, names in lists.items())]
        where += [word for word in self.typed if _is_where(word) and key_of(word) not in lists]
        return {
            "choices": {group: choices.get(group) for group in (*CHOSEN, *ON_TOP)},
            "typed": [key_of(word) for word in self.typed],
            "where": masking.mask_secrets(where),
        }


def compose_and_run(
    task: Callable[[Composed], Any],
    arguments: Sequence[str],
    saved: Any,
    in_directory: Callable[[DictConfig], AbstractContextManager],
) -> Any:
    """Compose the configuration, make the run directory, call ``task`` and return its result; in a sweep, for each job.

    Args:
        task: Called with the composed configuration, which it has to ``complete``.
        arguments: The command line without the program's name.
        saved: A checkpoint's configuration (training.checkpoint.configuration.SavedConfig); None without one.
        in_directory: Called with a run's or a sweep's configuration, before anything is written. Surrounds the rest.

    Raises:
        HydraException: The configuration cannot be composed.
        UserError: A word begins with a dash, and is no option.
    """
    # A rank that torchrun starts again finds the directory of the attempt before.
    start = *(launcher_start() or (time.time(), secrets.token_hex(3))), time.time()
    register_start(start)
    parsed = parse(arguments)
    job = HydraTask(task, start, code_folders(arguments), saved)
    if saved is not None and parsed.cfg:  # Hydra would show the files' part only
        print(OmegaConf.to_yaml(compose(arguments, saved=saved)))
        return None
    if parsed.cfg or parsed.info or parsed.hydra_help or parsed.shell_completion:
        parsed.overrides = expand_lists(parsed.overrides)
        GlobalHydra.instance().clear()
        with changed_environment({"HYDRA_FULL_ERROR": "1"}):  # then Hydra raises its errors instead of printing them
            return _run_hydra(parsed, get_args_parser(), job, str(FOLDER), "train")
    is_sweep = parsed.multirun or "hydra.mode=MULTIRUN" in parsed.overrides
    cfg, loader = _compose(arguments, saved, is_sweep)
    register_start(start)  # again: Hydra has set its ``now``
    before, sys.argv = sys.argv, [str(FOLDER.parent / "train.py"), *arguments]  # recorded as the command
    try:
        with in_directory(cfg):
            context = HydraContext(loader, users := Callbacks(cfg))
            of, kind = {"config": cfg, "config_name": parsed.config_name or "train"}, cfg.hydra.mode.name.lower()
            getattr(users, f"on_{kind}_start")(**of)
            try:
                if is_sweep:
                    # Processes of a third-party launcher register the resolvers too late for the directory.
                    cfg.hydra.overrides.hydra.append(f"hydra.sweep.dir={hydra_word(cfg.hydra.sweep.dir)}")
                    plugins = Plugins.instance()
                    sweeper = plugins.instantiate_sweeper(config=cfg, hydra_context=context, task_function=job)
                    return sweeper.sweep([*cfg.hydra.overrides.task])
                done = run_job(job, cfg, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
            finally:
                getattr(users, f"on_{kind}_end")(**of)
    finally:
        sys.argv = before
    if done.status is JobStatus.FAILED:  # ``return_value`` would print Hydra's own message
        raise done._return_value
    return done.return_value


@dataclass(frozen=True)
class HydraTask:
    """The function that Hydra calls with each composed configuration. Some launchers call it in another process.

    Attributes:
        task: See ``compose_and_run``.
        start: See ``Composed``.
        folders: The folders that may have the user's code.
        saved: The checkpoint's configuration.
    """

    task: Callable[[Composed], Any]
    start: Start
    folders: Sequence[str]
    saved: Any

    def __call__(self, cfg: DictConfig) -> Any:
        """Mask secrets in the files that Hydra has written, call the task and return its result to Hydra."""
        register_start(self.start)
        hydra_section = HydraConfig.get()
        composed = Composed.of(
            named(cfg, hydra_section.runtime.choices, self.folders), hydra_section, self.saved, self.start
        )
        content = [OmegaConf.to_container(part, resolve=False) for part in (cfg, hydra_section)]
        # Reading the files would take longer than everything else here.
        if composed.job is not None or masking.mask_secrets(content) != content:
            files = composed.files or composed.run_dir / ".hydra"
            masking.mask_files([*files.glob("*.yaml"), composed.run_dir.parent / "multirun.yaml"])
        # If Hydra changes the job's current directory, typed paths are still relative to the original one.
        with changed_environment({TYPED_IN: hydra_section.runtime.cwd if hydra_section.job.chdir else None}):
            return self.task(composed)


def brought(saved: Any) -> Sequence[str]:
    """Return the words that a checkpoint adds, which are options of groups; none without a checkpoint."""
    return () if saved is None else saved.words


def named(cfg: DictConfig, choices: Mapping[str, str | None], folders: Sequence[str] = ()) -> DictConfig:
    """Add the folders of code. A cluster, and a model whose file sets no name, get the name of their option."""
    cfg.import_from = [*(cfg.import_from or ()), *folders]
    if OmegaConf.is_dict(cfg.model) and "_target_" in cfg.model and cfg.model.get("name") is None:
        name = choices.get("model") or str(cfg.model._target_).rpartition(".")[2]
        OmegaConf.update(cfg, "model.name", name, force_add=True)
    if OmegaConf.is_dict(cfg.cluster) and choices.get("cluster"):
        OmegaConf.update(cfg, "cluster.name", choices["cluster"], force_add=True)
    return cfg


def register_start(start: Start) -> None:
    """Let ``${began:}``, ``${run_id:}`` and ``${now:}`` be the same wherever they appear."""
    began, run_id, now = start
    register()
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("began", datetime.fromtimestamp(began).strftime, replace=True)
    OmegaConf.register_new_resolver("now", datetime.fromtimestamp(now).strftime, replace=True)


def with_schema(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the types of its sections, so that ``train.steps=abc`` is an error.

    A configuration that was composed before (``--config-name config``) has none, and lacks the keys that are newer.
    """
    if OmegaConf.get_type(cfg) is Root:
        return cfg
    typed: Any = OmegaConf.merge(OmegaConf.structured(Root(parallel=Parallel())), cfg)
    return typed


def check_keys(cfg: DictConfig, path: str = "") -> DictConfig:
    """Return the section ``cfg`` at ``path``, after checking its keys: ``+parallel.chnks=4`` adds an unknown one.

    Raises:
        HydraException: A schema does not have a key. The message names the key, and the nearest that exists.
    """
    known = (*LORA, "base") if path == "model.lora" else getattr(OmegaConf.get_type(cfg), "__dataclass_fields__", None)
    names: list[Any] = list(cfg)  # Any: OmegaConf's functions declare different types for keys
    for name in names:
        key = f"{path}.{name}" if path else str(name)
        if key == "hydra":  # Hydra checks its section
            continue
        if known is not None and name not in known:
            raise ConfigCompositionException(unknown_key(key, list(known)))
        if not OmegaConf.is_missing(cfg, name) and not OmegaConf.is_interpolation(cfg, name):
            value = cfg[name]
            if isinstance(value, DictConfig):
                check_keys(value, key)
    return cfg


def _lists(choices: Mapping[str, str | None]) -> dict[str, str]:
    """Return the groups with several chosen options, in the form in which they are typed: ``logger=[wandb,csv]``."""
    lists = {}
    for start, shown in _LISTED.items():  # Hydra notes the last choice first
        further = [option for group, option in reversed([*choices.items()]) if option and group.startswith(start)]
        if further:
            lists[shown] = f"[{','.join([*filter(None, [choices.get(shown)]), *further])}]"
    return lists


def _is_where(word: str) -> bool:
    named_code = re.findall(r"_target_\W+([\w.]+)", word)
    return key_of(word).partition(".")[0] in _WHERE or not all(map(is_ours, named_code))


def compose(arguments: Sequence[str], with_hydra: bool = False, saved: Any = None) -> Any:
    """Compose the configuration of a command line without running anything.

    Args:
        arguments: The command line, which may name a folder of the user's options (``--config-dir``).
        with_hydra: Whether to return Hydra's section too, which has the option of each group.
        saved: A checkpoint's configuration (training.checkpoint.configuration.SavedConfig).

    Raises:
        HydraException: It cannot be composed.
        UserError: A word begins with a dash, and is no option.
    """
    cfg, _ = _compose(arguments, saved)
    choices, typed = cfg.hydra.runtime.choices, expand_lists(parse(arguments).overrides)
    if not with_hydra:
        with open_dict(cfg):
            del cfg.hydra
    cfg = named(cfg, choices)
    if saved is not None:
        saved.lay_under(cfg, choices, typed)
    return cfg


def _compose(arguments: Sequence[str], saved: Any, is_sweep: bool = False) -> tuple[DictConfig, ConfigLoader]:
    """Return what Hydra composes, with its own section, and its loader; of a sweep, what comes before its jobs."""
    register()
    version.setbase("1.3")
    parsed, folder = parse(arguments), config_folder(arguments)
    there = parsed.config_path or str(FOLDER)
    search_path = create_automatic_config_search_path(str(FOLDER.parent / "train.py"), None, there)
    if folder is not None:
        if not folder.is_dir():
            raise SearchPathException(f"Additional config directory '{folder}' not found")
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    typed, mode = expand_lists(parsed.overrides), RunMode.MULTIRUN if is_sweep else RunMode.RUN
    words = [*brought(saved), *(_before_jobs(typed) if is_sweep else typed), f"hydra.mode={mode.name}"]
    loader = ConfigLoaderImpl(search_path)
    cfg = Hydra("train", loader).compose_config(
        parsed.config_name or "train", words, mode, with_log_configuration=is_sweep
    )
    if is_sweep:  # the sweeper takes all of them
        cfg.hydra.overrides.task = [*brought(saved), *(word for word in typed if not key_of(word).startswith("hydra"))]
    return cfg, loader


def _before_jobs(words: list[str]) -> list[str]:
    """Return the words that are composed before the jobs of a sweep: in one over options, those that belong to no job.

    In ``-m model=gpt2,transformer data.seq_len=64``, the data of the default model would have no such key.
    """
    parsed = OverridesParser.create().parse_overrides(words)
    if not any(override.is_sweep_override() and "." not in override.key_or_group for override in parsed):
        return words
    return [word for word in words if "." not in key_of(word) or key_of(word).startswith(_OF_SWEEP)]
