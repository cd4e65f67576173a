"""Writes a trained model to a folder in one of the formats. The folder appears complete or not at all."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import CheckpointError, TrainingError
from common.files import atomic_folder, explain, folder_of, template
from conf.schema import Root
from data.dataset import DataSet
from data.vocabulary import SETTINGS, TOKENIZER
from models.huggingface import HuggingFace
from models.lora import merge
from models.sequential import names_of_module
from parallel.strategy import Strategy
from training.export.served import (
    LABELS,
    ONNX,
    PROGRAM,
    ServedModel,
    TensorInfo,
    serve,
    tokenizer,
    transformers_of,
    write_onnx,
    write_program,
    write_texts,
)

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
EXAMPLE = "example.safetensors"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_EXAMPLES, _AS_IT_IS = 2, "PreTrainedTokenizerFast"
_AS_THE_FILE = {"tokenizer_class": _AS_IT_IS, "split_special_tokens": False}
_ONNX = ("onnx", "onnxscript", "onnxruntime")
_PACKAGES = {"onnx": _ONNX, "triton": (*_ONNX, "transformers")}
# Name endings that peft 0.21 takes for experts, wherever the modules are. transformers 5 has one tensor for experts.
_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_MAGNITUDE = ".lora_magnitude_vector.weight"
_KINDS = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}


def check_export(cfg: Root) -> None:
    """Check packages and settings, before a checkpoint is read. Raises TrainingError."""
    form = cfg.export.format
    missing = [name for name in _PACKAGES.get(form, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingError(
            f"export.format={form} needs {' and '.join(missing)}: pip install -r requirements-serving.txt"
        )
    rank, start = (cfg.model.get("lora") or {}).get("rank"), cfg.model.init_from
    if form == "peft" and None in (rank, start):
        said = f"model.lora.rank={rank} and model.init_from={start}. The other formats merge adapters"
        raise TrainingError(f"export.format=peft needs a rank and the base's folder; this run has {said}")
    if form == "triton" and cfg.export.max_batch_size < 1:
        raise TrainingError(f"export.max_batch_size={cfg.export.max_batch_size} must be at least 1")


def write(cfg: Root, folder: Path, data: DataSet, strategy: Strategy) -> str:
    """Write the model of ``strategy``, which is whole and on the CPU, to a folder that does not exist yet.

    Returns:
        The names of the written files and, if another program has computed the model too, the largest difference.

    Raises:
        TrainingError: The format does not support the model, or another program's outputs differ from the model's.
        CheckpointError: A file cannot be written.
    """
    form, said = cfg.export.format, ""
    try:
        with atomic_folder(folder) as draft:
            if form != "peft":
                merge(strategy.stages[0].layers)
            if form == "peft":
                write_adapters(draft, cfg.model, data, strategy)
            elif form == "safetensors":
                write_weights(draft, data, strategy, cfg.model.init_from)
            else:
                model = serve(cfg.model.name, data, strategy, last=cfg.export.positions == "last")
                if form == "triton":
                    kind = _KINDS.get(cfg.device, "KIND_AUTO")
                    text = write_text(draft, model, data, strategy, cfg, kind) if model.takes_tokens else ""
                    said = write_repository(draft, model, cfg.export.max_batch_size, kind) + text
                else:
                    write_texts(draft, model.texts)
                    onnx = form == "onnx"
                    said = write_onnx(draft / ONNX, model) if onnx else write_program(draft / PROGRAM, model)
            for file in draft.rglob(TOKENIZER):
                said += keep_tokens(file.parent, data.vocabulary)
            names = ", ".join(sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {explain(error, folder)}") from error
    return names + (f"; {said.removeprefix('; ')}" if said else "")


def keep_tokens(folder: Path, vocabulary: Any) -> str:
    """Make transformers read a tokenizer as this run does, and return the end of a sentence about the change.

    For some kinds of models, transformers ignores the class in tokenizer_config.json unless this class is in a module.
    """
    path, changed, why = folder / SETTINGS, "", vocabulary.difference(folder)
    module = {"auto_map": {"AutoTokenizer": [f"as_it_is.{_AS_IT_IS}"] * 2}}
    for more, where in (({}, ""), (module, " in as_it_is.py")):
        if vocabulary.difference(folder) is not None:
            settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
            path.write_text(json.dumps({**settings, **_AS_THE_FILE, **more}, indent=1), "utf-8")
            if more:
                (folder / "as_it_is.py").write_text(f"from transformers import {_AS_IT_IS}  # noqa: F401\n")
            changed = f"; {SETTINGS} names {_AS_IT_IS}{where}, because {why} without it"
    return changed


def write_weights(folder: Path, data: DataSet, strategy: Strategy, published: str | None = None) -> None:
    """Write the weights in a form that other programs read, with configuration and tokenizer.

    A model with a Hugging Face counterpart (``Chain.hugging_face``) is written under the counterpart's names, with
    config.json, generation_config.json and the tokenizer, so that ``from_pretrained(folder)`` gives the same logits.
    The tokens that begin and end a text are kept from ``published``, the folder that training began with. Other models
    are written as a plain state dict, under the given module's names or under this project's names (for ResNet-50,
    these are torchvision's).
    """
    chain, state = strategy.chain, strategy.state_dict()
    texts = tokenizer(data, chain)
    if chain.hugging_face is not None:
        theirs = _published(published)
        known = json.loads(theirs.get(_CONFIG, "{}"))
        state, config = chain.hugging_face.export(state, _words(known, data))
        # Published GPT-2s have no prefix, and mlx-lm reads no other names.
        state = {name.removeprefix(chain.hugging_face.optional): tensor for name, tensor in state.items()}
        end = getattr(data.vocabulary, "end", None)  # words and unknown vocabularies have no end token
        if (config.get("pad_token_id") or 0) >= config["vocab_size"]:  # beyond the data's words
            config["pad_token_id"] = None
        ends = {key: known[key] for key in _ENDS if key in known} or dict.fromkeys(_ENDS[:2], end)
        texts[_CONFIG] = json.dumps({**config, **ends}, indent=1)
        texts[_GENERATION] = theirs.get(_GENERATION, json.dumps(ends, indent=1))
    else:
        state = {k: v.clone() for k, v in names_of_module(state, dict(chain.tied), chain.names).items()}
    # transformers refuses a file without this metadata
    save_file({k: v.contiguous() for k, v in state.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_texts(folder, texts)


def write_adapters(folder: Path, model: Any, data: DataSet, strategy: Strategy) -> None:
    """Write the adapters for ``peft.PeftModel.from_pretrained(base, folder)``, and the tokenizer."""
    chain, lora = strategy.chain, model.lora
    if chain.hugging_face is None:
        raise TrainingError(f"export.format=peft is for models of transformers, and model={model.name} is not one")
    adapters, modules, state, named = {}, set(), strategy.state_dict(), chain.hugging_face.their_name
    for name, tensor in state.items():
        module, factor, _ = name.rpartition(".lora_")
        if factor:
            modules.add(theirs := named(f"{module}.weight").removesuffix(".weight"))
            key = f"base_model.model.{theirs}{name[len(module) :]}"
            if name.endswith(_MAGNITUDE):  # peft has the magnitude itself, under a shorter name
                linear: Any = strategy.stages[0].layers.get_submodule(module)
                key, tensor = key.removesuffix(".weight"), linear.norms()[0] + tensor
            adapters[key] = tensor.contiguous()
    parameters = dict(chain.skeleton().named_parameters())
    base = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    trained = [name for name in base if name in parameters and name not in chain.unsaved]
    copies = [alias for alias, owner in chain.tied.items() if owner in trained]  # peft reads both names
    if trained:
        known = json.loads(_published(model.init_from).get(_CONFIG, "{}"))
        base, _ = HuggingFace.export(chain.hugging_face, base, _words(known, data))
    for name in (*trained, *copies):
        adapters[f"base_model.model.{named(name)}"] = base[named(chain.canonical(name))].contiguous().clone()
    save_file(adapters, folder / ADAPTERS, metadata={"format": "pt"})
    has_experts = any(".experts." in name for name, _ in chain.skeleton().named_parameters())
    moved = {name for name in modules if has_experts and name.rpartition(".")[2] in _EXPERTS}
    if moved and lora.get("dora"):
        raise TrainingError("export.format=peft with model.lora.dora=true: peft has no DoRA in a model with experts")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder_of(model.init_from)),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if moved else lora.dropout,  # peft has none for parameters, nor while nothing is trained
        "target_modules": sorted(modules - moved),
        "target_parameters": sorted(f"{name}.weight" for name in moved) or None,
        "use_dora": bool(lora.get("dora")),
        "modules_to_save": sorted({named(name).rpartition(".")[0] for name in trained}) or None,
        "ensure_weight_tying": bool(copies),
        "fan_in_fan_out": chain.hugging_face.config["model_type"] == "gpt2",  # its Conv1D keeps weights transposed
        "inference_mode": True,
    }
    write_texts(folder, {**tokenizer(data, chain), "adapter_config.json": json.dumps(settings, indent=1)})


def _words(known: dict[str, Any], data: DataSet) -> int | None:
    """Return the number of words of the model in a config.json ``known`` and of the data; None if both are unknown."""
    return max(filter(None, (known.get("vocab_size"), data.vocab_size)), default=None)


def _published(folder: str | None) -> dict[str, str]:
    """Return the texts of the configuration files in a Hugging Face folder, by file name."""
    paths = [] if folder is None else [folder_of(folder) / name for name in (_CONFIG, _GENERATION)]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def write_repository(folder: Path, model: ServedModel, max_batch_size: int, kind: str) -> str:
    """Write a model repository for Triton and return the sentence of the comparison with ONNX Runtime.

        README.md                requests and answers, and how to start the server
        NAME/config.pbtxt        inputs, outputs, batching
        NAME/1/model.onnx        version 1 of the model
        NAME/labels.txt          the names of the classes
        NAME/example.safetensors inputs and the model's outputs, to compare with a server's

    The README also describes NAME_text, if ``write_text`` has written it.

    The server may compute ``max_batch_size`` samples together, on KIND_CPU, KIND_GPU or KIND_AUTO.

    Raises:
        TrainingError: ONNX Runtime's outputs differ from the model's.
    """
    home = folder / model.name
    (home / "1").mkdir(parents=True)
    said = write_onnx(home / "1" / ONNX, model)
    settings = render("config.pbtxt", model, max_batch_size=max_batch_size, kind=kind)
    write_texts(home, {**model.texts, "config.pbtxt": settings})
    inputs = model.example(min(_EXAMPLES, max_batch_size))
    tensors = dict(zip(model.names, inputs, strict=True)) | {model.gives.name: model.answer(*inputs)}
    # Triton represents one number per sample as [batch, 1].
    tensors = {name: tensor[:, None] if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, home / EXAMPLE)
    has_text = _text_home(folder, model).exists()
    readme = render("README.md", model, example=EXAMPLE, examples=len(inputs[0]), has_text=has_text)
    write_texts(folder, {"README.md": readme})
    return said


def write_text(folder: Path, model: ServedModel, data: DataSet, strategy: Strategy, cfg: Root, kind: str) -> str:
    """Write a model that continues texts into a repository, and return the end of a sentence about it.

        NAME_text/config.pbtxt   settings, with the values of ``cfg.sample`` as defaults
        NAME_text/1/model.py     for Triton's Python backend
        NAME_text/1/...          the Hugging Face folder that it loads

    The text model is written only if the model and its tokenizer have a Hugging Face form.

    Raises:
        TrainingError: The outputs of transformers differ from the model's.
    """
    home = _text_home(folder, model)
    if strategy.chain.hugging_face is None or "tokenizer.json" not in model.texts:
        return f"; no {home.name}: the model or its tokenizer has no Hugging Face form"
    version = home / "1"
    version.mkdir(parents=True)
    write_weights(version, data, strategy, cfg.model.init_from)
    shutil.copyfile(Path(__file__).with_name("text_model.py"), version / "model.py")
    seed = cfg.seed if cfg.sample.seed is None else cfg.sample.seed
    settings = render("text.pbtxt", model, sample=cfg.sample, seed=seed, at_once=cfg.export.max_batch_size, kind=kind)
    write_texts(home, {"config.pbtxt": settings})
    return "; " + model.compare(transformers_of(version, model), "transformers")


def _text_home(folder: Path, model: ServedModel) -> Path:
    return folder / f"{model.name}_text"


def render(name: str, model: ServedModel, **settings: Any) -> str:
    """Fill in the template of a file. The template is in the folder of this module."""
    labels = LABELS if LABELS in model.texts else None
    filled_in = template(Path(__file__).with_name(f"{name}.jinja"), kind=_kind, dims=_dims, describe=_describe)
    return filled_in.render(settings, model=model, labels=labels)


def _describe(info: TensorInfo) -> str:
    dims = ["batch", *("tokens" if n < 0 else str(n) for n in _dims(info))]
    return f"`{info.name}`, {_kind(info)} [{', '.join(dims)}]"


def _dims(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of one sample. Triton represents a scalar as [1]."""
    return info.dims or (1,)


def _kind(info: TensorInfo) -> str:
    """Return Triton's name of a dtype: FP32, INT64, BOOL."""
    return str(info.dtype).removeprefix("torch.").upper().replace("FLOAT", "FP")
