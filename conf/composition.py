"""Composes the configuration of a command line with Hydra, and calls a function with it."""

from __future__ import annotations

import re
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus, run_job
from hydra.errors import ConfigCompositionException, SearchPathException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict

from common.files import TYPED_IN
from common.machine import changed_environment
from conf import CHOSEN, COMMAND, DPO, FOLDER, LORA, MIXTURE, ON_TOP, OWN_KEYS, masking
from conf.instantiate import check_sections, is_ours, to_config, to_dict
from conf.messages import nearest, unknown_key
from conf.schema import Parallel, Root, register
from conf.words import GROUPS, code_folders, config_folder, expand_lists, key_of, parse
from launchers.world import World, launcher_start

# Keys that a checkpoint does not keep.
_WHERE = ("device", "parallel", "cluster", "launcher", "logger", "loggers", "callbacks", "import_from")
_OF_SWEEP = ("hydra", "sweep.", "train.monitor")  # keys that are read before and after the jobs
_LISTED = {"logger@loggers.": "logger", "callback@callbacks.": "callbacks"}  # groups of which several may be chosen


Start = tuple[float, str, float]
Program = Callable[[DictConfig], DictConfig]


@dataclass(frozen=True)
class Composed:
    """A configuration with the words and options that it was composed of: the whole input of a run.

    Attributes:
        cfg: The configuration. Its references are not resolved until a mode runs, so that values from the environment
            stay hidden.
        run_dir: The run directory.
        choices: The option of each group; None if a program has made the configuration.
        typed: The typed words. Their references are not resolved, because a value may be secret or missing.
        own_options: The words that name folders of the user's options, ``--config-dir=PATH``.
        files: The folder of the configuration's files; None if no files are written.
        job: Hydra's section for a job of a sweep; None for a run.
        start: The start time of the run, its id, and the time of Hydra's ``now``.
        world: The ranks that exist already; None if this process starts those that the run needs.
    """

    cfg: Any
    run_dir: Path
    choices: Mapping[str, str | None] | None = None
    typed: Sequence[str] = ()
    own_options: Sequence[str] = ()
    files: Path | None = None
    job: Any = None
    start: Start = (0.0, "", 0.0)
    world: World | None = None

    @classmethod
    def of(cls, cfg: DictConfig, hydra: Any, start: Start = (0.0, "", 0.0)) -> Composed:
        """Return a configuration that Hydra has composed. ``hydra`` is Hydra's section."""
        run_dir, sources = Path(hydra.runtime.output_dir), hydra.runtime.config_sources
        typed: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        return cls(
            cfg, run_dir, dict(hydra.runtime.choices) or None, typed,
            [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"],
            None if hydra.output_subdir is None else run_dir / hydra.output_subdir,
            hydra if hydra.mode is RunMode.MULTIRUN else None, start,
        )  # fmt: skip

    def plain(self) -> Any:
        """Return the configuration as plain data, with its options and typed words under the key ``COMMAND``.

        Raises:
            UserError: A section is not a mapping.
            omegaconf.errors.OmegaConfBaseException: A value is missing or cannot be resolved.
        """
        check_sections(self.cfg)
        tree = to_dict(self.cfg)
        if self.choices is not None:
            tree[COMMAND] = self._how()
        return to_config(tree)

    def words(self) -> list[str]:
        """Return the typed words, or the words of a program that has changed the configuration."""
        return [*self.own_options, *masking.mask_secrets([*self.typed])]

    def differences(self) -> tuple[dict[str, str], list[str]]:
        """Return the option of each group, and the other typed words. These may contain secrets."""
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

        "where" has the words that a checkpoint does not keep or may not name.
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


class Loader(ConfigLoaderImpl):
    """Composes every configuration: of a run, of a sweep and its jobs, and one that is only shown.

    A value comes from the files of the options, a checkpoint, a typed word or a Python program. If several of them have
    it, the last one in this order wins. Some launchers call the loader in another process.
    """

    def __init__(
        self, arguments: Sequence[str], saved: Any = None, program: Program | None = None, start: Start | None = None
    ) -> None:
        """Find the folders of options.

        Args:
            arguments: The command line, which may name a folder of the user's options (``--config-dir``).
            saved: A checkpoint's configuration (training.checkpoint.configuration.SavedConfig); None without one.
            program: Called with the composed configuration; returns that of a Python program.
            start: See ``Composed``; None if no run starts.

        Raises:
            SearchPathException: The user's folder does not exist.
        """
        register()
        version.setbase("1.3")
        there, folder = parse(arguments).config_path or str(FOLDER), config_folder(arguments)
        search_path = create_automatic_config_search_path(str(FOLDER.parent / "train.py"), None, there)
        if folder is not None:
            if not folder.is_dir():
                raise SearchPathException(f"Additional config directory '{folder}' not found")
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        super().__init__(search_path)
        self._saved, self._program, self._start, self._code = saved, program, start, code_folders(arguments)
        self._typed: Sequence[str] | None = None

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *checks: Any, **more: Any
    ) -> DictConfig:
        """Compose words, with Hydra's section; for a sweep, only the words that it needs before its jobs.

        Raises:
            HydraException: The configuration cannot be composed, or a key does not exist.
            UserError: The checkpoint or an object of a Python program cannot be used.
        """
        if self._start is not None:
            register_start(self._start)
        typed, is_run = expand_lists(overrides), run_mode is RunMode.RUN
        words = typed if is_run else _before_jobs(typed)
        self._typed = typed if self._saved is not None and is_run and config_name is not None else None
        if self._saved is not None:  # what the run added is there already
            added = (f"+{word}" if re.match(r"\+[^+@=]*\.", word) else word for word in words)
            words = [*self._saved.words(typed), *added]
        cfg = super().load_configuration(config_name, words, run_mode, *checks, **more)
        if config_name is None:  # Hydra's own help
            return cfg
        # The typed words only, and all of them: the sweeper takes those of the jobs from here.
        cfg.hydra.overrides.task = [word for word in typed if not key_of(word).startswith("hydra")]
        if not is_run:
            return cfg
        named(cfg, cfg.hydra.runtime.choices, self._code)
        if self._program is not None:
            hydra = pop_hydra(cfg)
            hydra.runtime.choices = {}
            cfg = self._program(cfg)
            cfg.hydra = hydra
        self._complete_parts(cfg)
        return check_keys(with_schema(cfg))

    def _complete_parts(self, cfg: DictConfig) -> None:
        """Add to each part of a mixture the keys of its option of ``data=``: ``name``, or the name of the part."""
        if OmegaConf.select(cfg, "data._target_") != MIXTURE or not OmegaConf.is_dict(cfg.data.parts):
            return
        for name, part in cfg.data.parts.items():
            part = part if OmegaConf.is_dict(part) else {"name": part}
            if "_target_" not in part:
                option = str(part.get("name", name))
                if (found := self.repository.load_config(f"data/{option}")) is None:
                    others = nearest("{}", option, self.repository.get_group_options("data"))
                    raise ConfigCompositionException(f"data.parts.{name}.name={option} is no option of data={others}")
                part = OmegaConf.merge({"weight": 1}, found.config, part)
            given = [key for key in (*OWN_KEYS["data"], "cache_dir") if key in part and cfg.data[key] is not None]
            with flag_override(cfg, ["struct", "readonly"], False):
                cfg.data.parts[name] = OmegaConf.merge(part, {key: f"${{data.{key}}}" for key in given})

    def _compose_config_from_defaults_list(self, defaults: Any, repo: Any) -> DictConfig:
        cfg = super()._compose_config_from_defaults_list(defaults, repo)
        if self._typed is not None:
            self._saved.lay_over(cfg, self._typed)
        return cfg


def compose(
    arguments: Sequence[str], with_hydra: bool = False, saved: Any = None, program: Program | None = None
) -> Any:
    """Compose the configuration of a command line without running anything.

    Args:
        arguments: The command line.
        with_hydra: Whether to keep Hydra's section, which has the option of each group.
        saved: See ``Loader``.
        program: See ``Loader``.

    Raises:
        HydraException: It cannot be composed.
        UserError: A word begins with a dash and is no option.
    """
    parsed, hydra = parse(arguments), Hydra("train", Loader(arguments, saved, program))
    cfg = hydra.compose_config(_name(parsed), [*parsed.overrides, "hydra.mode=RUN"], RunMode.RUN)
    if not with_hydra:
        pop_hydra(cfg)
    return cfg


def pop_hydra(cfg: DictConfig) -> Any:
    """Remove Hydra's section from a configuration, and return it."""
    with open_dict(cfg):
        return cfg.pop("hydra")


def compose_and_run(
    task: Callable[[Composed], Any],
    arguments: Sequence[str],
    saved: Any,
    program: Program | None,
    in_directory: Callable[[DictConfig], AbstractContextManager],
) -> Any:
    """Compose the configuration, make the run directory, and return the result of ``task``; in a sweep, for each job.

    Args:
        task: Called with the composed configuration.
        arguments: The command line without the program's name.
        saved: See ``Loader``.
        program: See ``Loader``.
        in_directory: Called with the configuration of the run or the sweep before anything is written. It returns the
            context of all that follows.

    Raises:
        HydraException: The configuration cannot be composed.
        UserError: A word begins with a dash, and is no option.
    """
    # If torchrun starts a rank again, the rank finds the directory of the first attempt.
    start = *(launcher_start() or (time.time(), secrets.token_hex(3))), time.time()
    parsed, loader = parse(arguments), Loader(arguments, saved, program, start)
    hydra, job = Hydra("train", loader), partial(_run, task, start)
    if parsed.cfg or parsed.info or parsed.hydra_help or parsed.shell_completion:
        return _show(hydra, parsed)
    is_sweep = parsed.multirun or "hydra.mode=MULTIRUN" in parsed.overrides
    mode = RunMode.MULTIRUN if is_sweep else RunMode.RUN
    words = [*parsed.overrides, f"hydra.mode={mode.name}"]
    cfg = hydra.compose_config(_name(parsed), words, mode, with_log_configuration=is_sweep)
    before, sys.argv = sys.argv, [str(FOLDER.parent / "train.py"), *arguments]  # recorded as the command
    try:
        with in_directory(cfg):
            context = HydraContext(loader, users := Callbacks(cfg))
            of, kind = {"config": cfg, "config_name": _name(parsed)}, mode.name.lower()
            getattr(users, f"on_{kind}_start")(**of)
            try:
                if is_sweep:
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


def _name(parsed: Namespace) -> str:
    return parsed.config_name or "train"


def _show(hydra: Hydra, parsed: Namespace) -> None:
    """Answer ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion``."""
    words = parsed.overrides = expand_lists(parsed.overrides)
    if parsed.cfg:
        hydra.show_cfg(_name(parsed), words, parsed.cfg, parsed.package, parsed.resolve)
    elif parsed.info:
        hydra.show_info(parsed.info, _name(parsed), words)
    elif parsed.hydra_help:
        hydra.hydra_help(None, get_args_parser(), parsed)
    else:
        hydra.shell_completion(_name(parsed), words)


def _run(task: Callable[[Composed], Any], start: Start, cfg: DictConfig) -> Any:
    """Mask secrets in the files that Hydra has written, and call the task with the composed configuration."""
    hydra_section = HydraConfig.get()
    composed = Composed.of(cfg, hydra_section, start)
    content = [OmegaConf.to_container(part, resolve=False) for part in (cfg, hydra_section)]
    # Reading the files would take longer than everything else here.
    if composed.job is not None or masking.mask_secrets(content) != content:
        files = composed.files or composed.run_dir / ".hydra"
        masking.mask_files([*files.glob("*.yaml"), composed.run_dir.parent / "multirun.yaml"])
    # If Hydra changes the current directory of the job, typed paths are still relative to the original directory.
    with changed_environment({TYPED_IN: hydra_section.runtime.cwd if hydra_section.job.chdir else None}):
        return task(composed)


def named(cfg: DictConfig, choices: Mapping[str, str | None], folders: Sequence[str] = ()) -> DictConfig:
    """Add the folders of code, and name a cluster and a model without a name after their options."""
    if folders:
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
    register()  # again, for another process
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("began", datetime.fromtimestamp(began).strftime, replace=True)
    OmegaConf.register_new_resolver("now", datetime.fromtimestamp(now).strftime, replace=True)


def with_schema(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the types of its sections, so that ``train.steps=abc`` is an error.

    A configuration that was composed earlier (``--config-name config``) has no types and lacks newer keys.
    """
    if OmegaConf.get_type(cfg) is Root:
        return cfg
    typed: Any = OmegaConf.structured(Root(parallel=Parallel()))
    with open_dict(typed):  # for Hydra's section
        typed.merge_with(cfg)
    return typed


def check_keys(cfg: DictConfig, path: str = "") -> DictConfig:
    """Return the section ``cfg`` at ``path``, after checking its keys: ``+parallel.chnks=4`` adds an unknown one.

    Raises:
        HydraException: A schema does not have a key. The message names the key and the nearest existing key.
    """
    of_section = {"model.lora": (*LORA, "base"), "model.dpo": DPO}
    known = of_section.get(path) or getattr(OmegaConf.get_type(cfg), "__dataclass_fields__", None)
    names: list[Any] = list(cfg)  # Any: OmegaConf's functions declare different types for keys
    for name in names:
        key = f"{path}.{name}" if path else str(name)
        if key == "hydra":  # Hydra checks its section
            continue
        if known is not None and name not in known:
            raise ConfigCompositionException(unknown_key(key, list(known)))
        has_value = not OmegaConf.is_missing(cfg, name) and not OmegaConf.is_interpolation(cfg, name)
        if has_value and isinstance(value := cfg[name], DictConfig):
            check_keys(value, key)
    return cfg


def _lists(choices: Mapping[str, str | None]) -> dict[str, str]:
    """Return the groups with several chosen options as they are typed: ``logger=[wandb,csv]``."""
    lists = {}
    for start, shown in _LISTED.items():  # Hydra notes the last choice first
        further = [option for group, option in reversed([*choices.items()]) if option and group.startswith(start)]
        if further:
            lists[shown] = f"[{','.join([*filter(None, [choices.get(shown)]), *further])}]"
    return lists


def _is_where(word: str) -> bool:
    named_code = re.findall(r"_target_\W+([\w.]+)", word)
    return key_of(word).partition(".")[0] in _WHERE or not all(map(is_ours, named_code))


def _before_jobs(words: list[str]) -> list[str]:
    """Return the words of a sweep that are composed before its jobs.

    A sweep over options leaves keys of sections to its jobs: in ``-m model=gpt2,transformer data.seq_len=64``, the data
    of the default model have no such key.
    """
    parsed = OverridesParser.create().parse_overrides(words)
    if not any(override.is_sweep_override() and "." not in override.key_or_group for override in parsed):
        return words
    return [word for word in words if "." not in key_of(word) or key_of(word).startswith(_OF_SWEEP)]
