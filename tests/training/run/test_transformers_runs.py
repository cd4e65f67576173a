"""model=transformers in whole runs, beside transformers' own model that torch's AdamW trains on the same batches."""

import pytest
import torch
import torch.nn.functional as F
from composed import again, config, losses, run, saved
from hugging_face import EXPERTS, make_folder, words
from slow_cases import with_slow

from data.loader import TrainBatches
from training.command.modes.sample import sample
from training.run.prepare import prepare

pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
KINDS = {
    "Gemma2": {"head_dim": 12, "sliding_window": 8},
    "Mistral": {"sliding_window": 8},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "GPTNeoX": {"tie_word_embeddings": False},
    "Phi3": {"tie_word_embeddings": False},
    "Qwen3Moe": {"head_dim": 12, **EXPERTS},  # in the file each expert has matrices of its own
    "Mixtral": {"sliding_window": None, **EXPERTS},
}
QUICK = ("Qwen3Moe",)  # Gemma2 has a quick test of its own below
EPSILON = 1e-5  # the biases of keys have no gradient but rounding, which AdamW's own 1e-8 magnifies
STEPS, PROMPT, DRAWN = 20, "Ann has 3 apples and 4 pears.", 12
RECIPE = [
    "train.epochs=null", f"train.steps={STEPS}", "train.precision=fp32", "train.grad_clip=null", "parallel=single",
    "train.eval_every=null", "optim=adamw", "optim.lr=2e-3", f"optim.eps={EPSILON}", "scheduler=constant",
]  # fmt: skip


def read(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def by_hand(model, batches, lr, betas, decay):
    """Train a model of transformers, and return the loss of each step."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, found = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPSILON), []
    for batch in batches:
        logits = model(input_ids=batch.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", with_slow(KINDS, KINDS.keys() - QUICK))
def test_losses_weights_and_greedy_text_are_those_of_transformers_and_torch(rows, tmp_path, kind):
    folder = make_folder(tmp_path / "published", kind, **KINDS[kind])
    line = words(folder, rows, *RECIPE, model="transformers")
    setup = prepare(config(*line))
    run(tmp_path / "run", *line)
    batches, optim = TrainBatches(setup.data.train, 8, setup.cfg.seed), setup.cfg.optim
    model = read(folder)
    wanted = by_hand(model, map(batches.__getitem__, range(1, STEPS + 1)), optim.lr, optim.betas, optim.weight_decay)
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0] - 0.5
    theirs, form = model.state_dict(), setup.chain.hugging_face
    for name, tensor in saved(tmp_path / "run", STEPS).items():
        other = theirs[form.their_name(name)]
        assert (tensor - other).norm() <= 5e-4 * other.norm(), name
    text = sample(again(tmp_path / "run", "mode=sample", "sample.temperature=0", f"sample.tokens={DRAWN}",
                        f"sample.prompt='{PROMPT}'"))  # fmt: skip
    assert text == greedy(model, setup.data)


@torch.no_grad()
def greedy(model, data):
    """What transformers' model writes after PROMPT, encoded as mode=sample encodes it."""
    (prompt,) = data.encode_prompts([PROMPT])
    given = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    drawn = model.eval().generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=DRAWN, min_new_tokens=DRAWN
    )
    return data.vocabulary.decode(drawn[0].tolist())
