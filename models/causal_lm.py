"""Any causal language model of transformers as a chain. The layers are computed by the model's own code.

No architecture is hard-coded here. ``Decoder`` builds the model once on the meta device.
``models.causal_lm_layers`` finds the layers, and computes each by a part of the model's ``forward``. The model's tensor
plan determines how the layers can be cut, and ``prove`` checks that the chain computes the same as the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ModelError
from common.packages import load_transformers
from models.attention import Reordered
from models.auxiliary import Collected, collecting
from models.causal_lm_balance import Balance
from models.causal_lm_config import Published, read_config, sizes_of
from models.causal_lm_layers import Forward, first_of, hidden_of, refused
from models.chain import Chain, LayerSpec, aliases, without_weights
from models.cut import Columns, CutOf, Experts, GatherInput, Refused, Rows, Vocabulary, own_computation
from models.losses import TokenCrossEntropy
from models.sequence import computing_documents, computing_part

_TEXTS, _TOKENS = 2, 12  # the size of the batch in ``prove``
_EXACT = 1e-6  # the largest relative difference from the whole model in float32
_ROUNDING = 1e-4  # the same for logits of a text beside other texts, which are rounded differently
# What a layer that returns other values cannot be cut into, when it returns them, and why.
_ON_ITS_OWN = "layers", "on its own than inside the model", "so it must receive more than hidden states"
_IN_DOCUMENTS = "rows of documents", "beside another document", "so it reads other documents; set data.packing=false"
_IN_PARTS = "parts of sequences", "for positions in another order", "so it attends by itself; set parallel.cp=1"


class Decoder(Forward):
    """Makes a chain from a causal language model of transformers: names, layers, cuts and a proof."""

    def __init__(self, config: Any) -> None:
        """Build the model from a configuration of transformers.

        Raises:
            ModelError: If the model cannot be built, or is not a causal language model with consecutive layers.
        """
        transformers = load_transformers()
        try:
            with torch.device("meta"):
                model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        except Exception as error:  # each model checks its configuration in its own way
            raise ModelError(f"transformers cannot build a {config.model_type} model: {error}") from None
        if model.base_model is model and isinstance(getattr(model, "model", None), nn.Module):
            model.base_model_prefix = "model"  # Llama 4 says "language_model", which belongs to another of its models
        # The model's ``forward`` would compute the routers' loss without the layers.
        self.adds_balance, model.config.output_router_logits = getattr(config, "output_router_logits", False), False
        super().__init__(model)
        if self.adds_balance and hasattr(model, "router_aux_loss_coef"):
            self.balance = Balance(model)

    # -- names ---------------------------------------------------------------------------------------------------------

    def chain_name(self, name: str) -> str:
        """Return the chain's name for a module or parameter of the model."""
        if name.startswith(f"{self.layers}."):
            return f"layers.{name.removeprefix(f'{self.layers}.')}"
        first = any(f"{name}.".startswith(f"{unit}.") for unit in self.before)
        return f"{'embedding' if first else 'head'}.{name}"

    @property
    def tied(self) -> dict[str, str]:
        """{alias: canonical} chain names of the parameters that the model ties."""
        shared = aliases(self.model.named_parameters(remove_duplicate=False))
        return {self.chain_name(name): self.chain_name(owner) for name, owner in shared.items()}

    @property
    def of_words(self) -> list[str]:
        """The chain names of the projection's parameters: its weight and, if it has one, its bias."""
        own = [f"{self.projection}.{key}" for key, _ in self.model.get_submodule(self.projection).named_parameters()]
        return [self.tied.get(name, name) for name in map(self.chain_name, own)]

    # -- layers of the chain -------------------------------------------------------------------------------------------

    def chain_layers(self, part: Callable[[str], nn.Module]) -> list[LayerSpec]:
        """Return the layers of the chain. ``part`` returns the module for a name of the model."""
        blocks = [LayerSpec(f"layers.{i}", partial(self.layer, part, i)) for i in range(len(self.blocks))]
        embedding, head = (partial(build, part) for build in (self.embedding, self.head))
        return [LayerSpec("embedding", embedding), *blocks, LayerSpec("head", head)]

    def blank(self, name: str) -> nn.Module:
        """Return a copy of a module of the model on the current default device, with uninitialized memory."""
        return without_weights(self.model.get_submodule(name)).train()

    def initialise(self, form: Published, name: str, module: nn.Module) -> None:
        """Initialize a module as the model does. Modules that contain this one may set some of its numbers."""
        path = form.their_name(name)
        self.set_numbers(path, module)
        parent, _, key = path.rpartition(".")
        around = self.model.get_submodule(parent)
        own = getattr(around, key)
        setattr(around, key, module)
        try:
            while parent and parent != self.layers:
                self.model._init_weights(self.model.get_submodule(parent))  # its other modules have no numbers
                parent = parent.rpartition(".")[0]
        finally:
            setattr(around, key, own)

    def cut(self) -> dict[str, CutOf]:
        """Return the cuts of the layers, from the model's tensor plan, and of experts, from their form."""
        base, experts = self.model.base_model, self._experts()
        if not base.config.base_model_tp_plan:
            return {**experts, "layers.*": Refused(f"transformers has no tensor plan for {self.kind}")}
        table: dict[str, CutOf] = {**experts}
        for path, style in base.config.base_model_tp_plan.items():
            pattern = f"{self.model.base_model_prefix}.{path}"
            if not pattern.startswith(f"{self.layers}."):
                continue
            name = self.chain_name(pattern)
            # None: a module of another variant of the architecture.
            found = next((each for each, _ in self.model.named_modules() if fnmatchcase(each, pattern)), None)
            if style == "colwise" and found is not None:
                table[name] = columns = self._columns(found)
                if columns.unit > 1:  # an attention, which reads the length of queries from its input
                    table[name.rpartition(".")[0]] = self._gathers_input(found.rpartition(".")[0])
            elif style == "rowwise" and found is not None:
                table[name] = Rows()
            # The style replicated_with_grad_allreduce needs no entry: here it applies to everything between the two
            # cuts.
            elif style not in ("colwise", "rowwise", "replicated_with_grad_allreduce"):
                said = f"{self.kind} has the style {style!r}; model=transformers knows colwise and rowwise"
                table[name] = Refused(said)
        embedding = self.model.get_input_embeddings()
        # Other classes scale the embeddings; a padding row gets no gradient.
        can_be_cut = {
            self.chain_name(self.name_of(embedding)): not own_computation(embedding),
            self.chain_name(self.projection): self.plain,
        }
        if self.tied and not all(can_be_cut.values()):  # cut both copies of a weight, or none
            return table
        words = {name: Vocabulary() for name, can in can_be_cut.items() if can}
        return table | words if len(table) > len(experts) else table

    def _experts(self) -> dict[str, CutOf]:
        """Return {name: Experts()} of the modules that compute experts from stacked matrices."""
        found: dict[str, CutOf] = {}
        for name, module in self.model.get_submodule(self.layers).named_modules(prefix="layers"):
            sizes = {parameter.shape[:1] for parameter in module.parameters()}
            if sizes == {(getattr(module, "num_experts", 0),)} and len(signature(module.forward).parameters) == 3:
                found[name] = Experts()
        return found

    def _gathers_input(self, attention: str) -> GatherInput | Refused:
        """Return ``GatherInput`` for an attention, or the reason why its inside cannot be computed by heads."""
        parts = [part for part in self.model.get_submodule(attention).modules() if not isinstance(part, nn.Linear)]
        if any(parameter.dim() > 1 for part in parts for parameter in part.parameters(recurse=False)):
            return Refused(f"{self.kind} has parameters for each head there, which its tensor plan leaves whole")
        return GatherInput()

    def _columns(self, name: str) -> Columns:
        """Return the division of a module's outputs: into heads, if the module is part of an attention."""
        around, own = self.model.get_submodule(name.rpartition(".")[0]), self.model.get_submodule(name)
        width = getattr(around, "head_dim", None) or getattr(around, "head_size", None)
        if width is None:
            return Columns()
        outputs, *others = (getattr(module, "out_features", 0) for module in (own, *around.children()))
        if outputs == 3 * width * self.model.config.get_text_config().num_attention_heads:
            # A plan cuts a single projection to queries, keys and values only if these are side by side within each
            # head, or within each of CodeGen's `mp_num` parts.
            return Columns(unit=outputs // around.mp_num if hasattr(around, "mp_num") else 3 * width)
        # The projections to keys and values have fewer outputs, and several query heads use each of their heads.
        return Columns(unit=width, shared=outputs < max(others))

    # -- proof ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prove(self) -> None:
        """Compare the chain with the whole model on a small batch, in float32 and in this process.

        Parameters are overlapping views of a few random numbers, so that models of any size need no memory.

        Raises:
            ModelError: If a layer, the logits or the loss differ. The message names the first difference.
        """
        with refused(self.kind, "its own code does not run layer by layer"):
            self._compare()

    @cache  # noqa: B019  # a process has few models
    @torch.no_grad()
    def prove_parts(self, packed: bool = False) -> None:
        """Compare the chain as ``prove`` does, but with the positions of each text in another order.

        With ``packed``, each text is two documents, and is compared with the whole model's results for each.

        Raises:
            ModelError: If layers do not attend by transformers' interface alone, or read positions of their own.
        """
        what = "documents that share a row" if packed else "a part of each sequence"
        with refused(self.kind, f"its own code does not run for {what}"):
            order = torch.randperm(_TOKENS, generator=torch.Generator().manual_seed(0))
            self._compare(None if packed else Reordered(order), packed)

    def _compare(self, part: Reordered | None = None, packed: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        whole = self._with_numbers(generator)
        words = whole.config.get_text_config().vocab_size
        tokens = torch.randint(min(3, words - 1), words, (1, _TOKENS), generator=generator).repeat(_TEXTS, 1)
        tokens[1, _TOKENS // 2 :] = tokens[1, _TOKENS // 2 :].flip(0)  # the texts begin alike
        step = Collected()
        calls: list[tuple] = []  # (arguments, keyword arguments, output) of each layer
        blocks = whole.get_submodule(self.layers)
        hooks = [block.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True) for block in blocks]
        adds = {"output_router_logits": True} if self.adds_balance else {}
        texts = tokens.view(-1, _TOKENS // 2) if packed else tokens
        output = whole(input_ids=texts, labels=texts, use_cache=False, **adds)
        for hook in hooks:
            hook.remove()
        args, kwargs, _ = calls[0]
        wanted = [hidden_of(args, kwargs), *[first_of(call[-1]) for call in calls], output.logits]
        order = slice(None) if part is None else part.positions
        computed = tokens[:, order]
        begins = torch.arange(_TOKENS).expand(_TEXTS, -1) // (_TOKENS // 2) * (_TOKENS // 2) if packed else None
        for layer, expected in zip(self.chain_layers(whole.get_submodule), wanted, strict=True):
            with computing_part(part), computing_documents(begins), collecting(step):
                computed = layer.build().eval()(computed)
            if (off := _difference(computed, expected.reshape(_TEXTS, _TOKENS, -1)[:, order])) > _EXACT:
                what, when, why = _IN_DOCUMENTS if packed else _ON_ITS_OWN if part is None else _IN_PARTS
                raise ModelError(
                    f"{self.kind} cannot be cut into {what}: {layer.name} returns different values {when} (a relative "
                    f"difference of {off:.1e}), {why}"
                )
        if part is not None or packed:
            return
        if (off := _difference(*computed[:, : _TOKENS // 2])) > _ROUNDING:
            raise ModelError(
                f"{self.kind} is no causal language model with this configuration: what comes later changes the logits "
                f"before it (a relative difference of {off:.1e}), so it would be trained on the tokens that it is to "
                "predict. Encoders have the key is_decoder: +model.settings.is_decoder=true"
            )
        loss = TokenCrossEntropy()(computed[:, :-1], tokens[:, 1:], None)
        mean = loss.loss / loss.count + sum(added(step.sums[key]) for key, added in step.losses.items())
        if (off := _difference(mean, output.loss)) > _EXACT:
            raise ModelError(
                f"{self.kind} adds something to the loss of its logits, {mean:.4f}: its own is {output.loss:.4f}. "
                "model=transformers trains on cross entropy and the balance of routers; switch it off by model.settings"
            )

    def _with_numbers(self, generator: torch.Generator) -> Any:
        """Return a copy of the model on the CPU. Its parameters are views of one small tensor."""
        memo = {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in self.model.buffers()}
        whole = copy.deepcopy(self.model, memo)
        for name, module in whole.named_modules():
            self.set_numbers(name, module)  # sets buffers only: parameters are still on the meta device
        parameters = dict(whole.named_parameters())
        largest = max(sum(parameter.shape) for parameter in parameters.values())
        noise = 0.05 * torch.randn(largest + len(parameters), generator=generator)
        for start, (name, parameter) in enumerate(parameters.items()):
            view = noise[start:].as_strided(parameter.shape, [1] * parameter.dim())
            module, _, key = name.rpartition(".")
            number = nn.Parameter(1 + view if parameter.dim() == 1 else view, requires_grad=False)
            setattr(whole.get_submodule(module), key, number)
        whole.tie_weights()
        return whole


def causal_lm(config: str | None, vocab_size: int | None = None, settings: Mapping[str, Any] | None = None) -> Chain:
    """Build a causal language model of transformers as a chain: ``embedding``, ``layers.0`` … ``layers.N-1``, ``head``.

    Token ids [b, t] -> logits [b, t, vocab_size].

    Args:
        config: A folder with config.json, or the path of config.json.
        vocab_size: The vocabulary size, in place of the configuration's. None keeps it.
        settings: {key of config.json: value that replaces the file's value}.

    Raises:
        ModelError: If transformers does not have the model, or the model cannot be cut into layers.
    """
    settings = settings or {}
    decoder = Decoder(read_config(config, vocab_size, settings))
    text = decoder.model.config.get_text_config()
    limits = {"vocabulary": text.vocab_size}
    if isinstance(positions := getattr(text, "max_position_embeddings", None), int):
        limits["positions"] = positions
    names = {"layers.": f"{decoder.layers}.", "embedding.": "", "head.": ""}
    embedding = f"{decoder.chain_name(decoder.name_of(decoder.model.get_input_embeddings()))}.weight"
    form = Published.of(decoder.model, names, (embedding, *decoder.of_words), settings)
    if decoder.adds_balance:
        form = replace(form, config={**form.config, "output_router_logits": True})
    return Chain(
        layers=decoder.chain_layers(decoder.blank),
        loss=TokenCrossEntropy(),
        tied=decoder.tied,
        initialise=partial(decoder.initialise, form),
        limits=limits,
        embedding=embedding,
        hugging_face=form,
        cut=decoder.cut(),
        prove=decoder.prove,
        prove_parts=decoder.prove_parts,
    )


causal_lm.sizes_of = sizes_of  # the values of sizes that are null: see training.run.prepare.model_and_data


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number of ``other``."""
    if one.shape != other.shape or not (one.isfinite().all() and other.isfinite().all()):
        return float("inf")
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
