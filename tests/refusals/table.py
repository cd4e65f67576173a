"""What is refused: what is typed, and what the one line of error says.

The table's keys are what the line must name: the key of the configuration, the file, the option. A row adds what else
it must say, which is the numbers and the way out. ``HERE`` is a folder of the row's own with the files that it needs.
"""

import json

import numpy as np
from file_formats import idx, shard
from files import CONFIG, MANIFEST, Make, file, manifest, mnist, option, rows

GPT2 = "model=gpt2 model.size=tiny data.seq_len=16 train.global_batch_size=4 "
MOE = "model=moe data.seq_len=16 train.global_batch_size=12 "
CONVNET = "model=convnet train.global_batch_size=4 "
MIX = GPT2 + "data=mixture "
TEXT = GPT2 + "data=text data.root=HERE/x.txt"
ROWS = GPT2 + "data=jsonl data.root=HERE/x.jsonl"
PAIRS = ROWS + " data.chosen=chosen data.rejected=rejected"
PAIR = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
PARQUET = GPT2 + "data=parquet data.root=HERE/x.parquet"
SHARD = GPT2 + "data=tokens data.root=HERE/x.bin"
MNIST = CONVNET + "data=mnist data.root=HERE"
RESUME = "train.resume=HERE/run train.steps=5"
OWN = "--config-dir=HERE "  # options in files of the user's own
CHAT = '{"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
NOWHERE = "/no/such/place"
GOOD_TEXT = file("x.txt", b"a text of some words\n" * 500)
GOOD_SHARD = file("x.bin", shard(np.arange(40_960) % 50000))


class Refusal:
    """One command that is refused.

    Args:
        words: What is typed, as in a shell.
        says: What the error says, besides what the key of the table names.
        file: Writes what the words point to.
        env: Variables of the environment.
    """

    def __init__(self, words: str, *says: str, file: Make | None = None, env: dict[str, str] | None = None) -> None:
        self.words, self.says, self.file, self.env = words, says, file, env or {}


# -- words ---------------------------------------------------------------------------------------------------------

WORDS = {
    "no key train.stepz": [
        Refusal("train.stepz=5", "did you mean train.steps?"),
        Refusal("-m ++train.stepz=3 seed=1,2 hydra.sweep.dir=sweep", "did you mean train.steps?"),
    ],
    "debug=nonsense": [
        Refusal("-m debug=null,nonsense hydra.sweep.dir=sweep", "job 1 (", "there is no 'debug/nonsense'"),
    ],
    "no key train.lr": Refusal("train.lr=1", "did you mean optim.lr?"),
    "no key dp": Refusal("dp=2", "did you mean parallel.dp?"),
    "no key steps": Refusal("steps=2", "did you mean train.steps or verify.steps?"),
    "no key parallel.chnks": Refusal("parallel.chnks=2", "did you mean parallel.chunks? There are:"),
    "no key nonsense": Refusal("nonsense=2", "there are hydra,"),
    "experiment has an option already": Refusal(
        "+experiment=convnet_mnist", "drop the plus of +experiment=convnet_mnist", "override experiment: convnet_mnist"
    ),
    "model has an option already": Refusal("+model=gpt2", "drop the plus of +model=gpt2"),
    "no key paralel": Refusal("+paralel=ddp", "did you mean parallel?"),
    "--parallel=ddp": Refusal("--parallel=ddp", "without dashes: parallel=ddp"),
    "optim.mometum": Refusal("+optim.mometum=0.9", "did you mean optim.momentum?"),
    "'model/gpt3'": Refusal("model=gpt3", "gpt2", "toy"),
    "'optim/adamW'": Refusal("optim=adamW", "did you mean optim=adamw? There"),
    "'parallel/DDP'": Refusal("parallel=DDP", "did you mean parallel=ddp? There"),
    "'please' cannot be read": Refusal("please", "write KEY=VALUE"),
    "logger=[csv,wandb,csv]": Refusal("logger=[csv,wandb,csv]", "names csv 2 times; name each once"),
    "no key loggers.csv": Refusal("loggers.csv.file=x", "type logger=[wandb,csv] first"),
    "experiment/own": [
        Refusal(OWN + "experiment=own", file=file("experiment/own.yaml", b"train: [1,\n")),
        Refusal(OWN + "experiment=own", "train.stepz", file=option("experiment/own", "train: {stepz: 1}")),
        Refusal(OWN + "experiment=own", file=option("experiment/own", "train: !!python/object/apply:os.system [id]")),
    ],
    "sweep.repeat: no job has the key sed": Refusal(
        "-m seed=1,2 sweep.repeat=[sed] hydra.sweep.dir=sweep", "did you mean seed?"
    ),
    "hydra.run.dir is empty": Refusal("hydra.run.dir="),
    "hydra.run.dir=~/runs": Refusal("hydra.run.dir=\\'~/runs\\'", "~ is not replaced here; write a whole path"),
    "hydra.sweep.dir=~/runs": Refusal("-m seed=1,2 hydra.sweep.dir=\\'~/runs\\'", "write a whole path"),
    "2 jobs have the directory sweep/same": Refusal(
        "-m seed=1,2 hydra.sweep.dir=sweep hydra.sweep.subdir=same", "let hydra.sweep.subdir differ"
    ),
    "parallel.env.A=null": Refusal("parallel.env={A:null}", "leave it out"),
    "parallel.env={True": Refusal("parallel.env={true:1}", "True is no name of a variable"),
    "the run directory": Refusal("hydra.run.dir=" + 300 * "a", "cannot be written: File name too long"),
    "x.bin": Refusal("hydra.run.dir=HERE/x.bin", file=GOOD_SHARD),
    "RANK=0": Refusal("", "WORLD_SIZE is not set", env={"RANK": "0"}),
}  # fmt: skip

# -- types and ranges: a type is one truth for all keys that have it -------------------------------------------------

VALUES = {
    "train.steps": [
        Refusal("train.steps=many", "'many'", "Integer"),
        Refusal("train.steps=0", "train.steps=0", "at least 1"),
        Refusal("train.epochs=null", "train.epochs", "train.steps=100"),
        Refusal("train.steps=[1,"),
    ],
    "nothing": Refusal("train.steps='${nothing}'"),
    "data.samples": [
        Refusal("data.samples=0", "error: data.samples=0: it must be at least 1"),
        Refusal("data.samples=100000000000", "data.samples=100000000000", "GiB", "free"),
    ],
    "train.grad_clip": Refusal("train.grad_clip=0", "train.grad_clip=0", "above 0"),
    "train.spike_factor": Refusal("train.spike_factor=1", "train.spike_factor=1.0 must be above 1"),
    "train.spike_rollback=2": Refusal("train.spike_rollback=2", "needs train.spike_factor"),
    # A key has an effect: what switches it on is set, and something reads it.
    "has no effect without": [
        Refusal("model.lora.targets=[net1]", "model.lora.targets", "model.lora.rank: set that"),
        Refusal("'model.lora={alpha:8,targets:[net1]}'", "model.lora", "model.lora.rank"),
        Refusal("mode=plan model.lora.alpha=8", "model.lora.alpha", "model.lora.rank"),
        Refusal(GPT2 + "model.dpo.beta=0.2", "model.dpo.beta", "model.loss=dpo: set that"),
        Refusal(SHARD + " model.vocabulary=words", "model.vocabulary", "data: data.tokens.Tokens", file=GOOD_SHARD),
        Refusal("+model.tokenizer=HERE", "model.tokenizer", "data: data.random_regression"),
        Refusal("model=llama data=digits model.tokenizer=HERE", "model.tokenizer", "data: data.digits"),
        Refusal(GPT2 + "recipes.finetune.adamw.lr=1", "recipes.finetune.adamw.lr", "recipe=published"),
        Refusal(GPT2 + "optim=sgd recipes.published.adamw.lr=1", "recipes.published.adamw.lr"),
        Refusal(TEXT + " data.columns=4", "data.columns", "data.batchify=true", file=GOOD_TEXT),
        Refusal(ROWS + " data.messages=chat data.field=text", "data.field", "data.messages=null"),
        Refusal("optim.decay_vectors=true", "optim.decay_vectors", "optim.weight_decay"),
        Refusal("optim.dampening=0.1", "optim.momentum"),
        Refusal("scheduler=cosine_warmup scheduler.warmup_steps=1 scheduler.warmup_ratio=0.1", "warmup_steps=null"),
        Refusal("train.checkpoint_every=null train.keep_checkpoints=1", "train.checkpoint_every: set that"),
        Refusal("export.format=onnx", "mode=export"),
        Refusal("export_to=x", "mode=export"),
        Refusal("verify.steps=2", "mode=verify"),
        Refusal("-m model.lora.targets=[net1],[net2] hydra.sweep.dir=sweep", "model.lora.rank"),
        Refusal("parallel=ddp parallel.schedule=1f1b", "parallel.schedule", "parallel=pipe_ddp"),
        Refusal("parallel=model_parallel parallel.stages_per_rank=2", "parallel.stages_per_rank"),
        Refusal("parallel=fsdp parallel.balance=size", "parallel.balance", "parallel=model_parallel"),
        Refusal("parallel=pipelined parallel.order=pp_dp", "parallel.order", "parallel=pipe_fsdp"),
        Refusal("parallel=fsdp parallel.bucket_mb=50", "parallel.bucket_mb", "parallel=ddp"),
        Refusal("parallel.comm_hook=bf16", "parallel.comm_hook", "parallel.dp!=1"),
        Refusal("parallel=pipelined parallel.sync_batchnorm=true", "parallel.sync_batchnorm"),
        Refusal("parallel=ddp train.trace=true", "train.trace", "parallel=pipelined"),
        Refusal("launcher=slurm launcher.max_parallel=2", "launcher.max_parallel", "without -m"),
        Refusal("sweep.objective=val_loss", "sweep.objective", "without -m"),
        Refusal("'sweep={direction:maximize}'", "sweep", "without -m"),
        Refusal("sample.prompt=hello", "sample.prompt", "model.vocab_size"),
        Refusal(GPT2 + "sample.tokens=5", "sample.tokens", "mode=sample"),
        Refusal("mode=verify sample.temperature=1", "sample.temperature", "mode=train"),
        Refusal("train.eval_every=null train.eval_batches=2", "train.eval_batches", "train.eval_every"),
        Refusal("train.eval_every=null train.monitor_direction=maximize", "train.monitor_direction"),
    ],
    "optim.update has no effect": Refusal("optim.update=elementwise", "not of torch"),
    "no key model.lora.use_dora": [
        Refusal("model.lora.rank=2 +model.lora.use_dora=true", "rank, alpha, dropout, targets"),
        Refusal("+model.lora.use_dora=true"),
    ],
    "no key model.lora.modules_to_train": Refusal(OWN + "experiment=own model.lora.rank=2", "modules_to_save",
        file=option("experiment/own", "model: {lora: {modules_to_train: [net2]}}")),
    "no key model.dpo.alpha": Refusal(GPT2 + "+model.dpo.alpha=1", "beta"),
    "model.lora.alpha": Refusal("model.lora.rank=2 model.lora.alpha=much", "'much'", "Float"),
    "model.extra_tokens": Refusal("+model.extra_tokens=[x]", "does not name its embedding parameter"),
    "train.eval_every": Refusal("train.eval_every=-1", "train.eval_every=-1", "at least 0"),
    "train.precision": Refusal("train.precision=fp8", "fp8", "auto", "fp64", "fp32", "bf16", "fp16"),
    "device=cuda": Refusal("device=cuda", "this machine has none; available are: cpu"),
    "optim": [
        Refusal("optim.lr=-1", "-1"),
        Refusal("optim.lr=null", "optim.lr=None must be a finite number", "1e-3"),
        Refusal("optim.lr=true", "optim.lr=True must be a finite number"),
        Refusal("optim.lr=nan", "optim.lr=nan must be a finite number"),
        Refusal("optim=muon optim.others.lr=inf", "optim.others.lr=inf must be a finite number"),
        Refusal("optim=muon optim.lr=0", "the rate of optim.others follows optim.lr", "a small number"),
        Refusal("optim.weight_decay=nan", "optim.weight_decay=nan must be finite"),
        Refusal("optim=adamw optim.betas=[0.9,nan]", "optim.betas=[0.9, nan] must be finite"),
        Refusal("optim.nesterov=perhaps", "nesterov", "'perhaps'", "Boolean"),
        Refusal("optim.weight_decay=null", "weight_decay", "NoneType", "Float"),
        Refusal("optim._target_=torch.optim.RMSprop", "RMSprop has no dampening, nesterov, fused, which optim=sgd"),
        Refusal(
            "optim={_target_:torch.optim.Adam,lr:0.1}", "sets: add ~optim.momentum ~optim.dampening ~optim.nesterov"
        ),
        Refusal("optim._target_=torch.nn.Linear", "optim: torch.nn.Linear is not an optimizer"),
        Refusal("optim._target_=torch.optim.Adma", "_target_=torch.optim.Adma names nothing"),
        Refusal("optim=adamw optim.betas=[0.9]", "AdamW cannot take these values"),
        Refusal("optim=muon optim.others._target_=torch.optim.SGD", "there is no key optim.others.betas"),
        Refusal("optim=muon optim.others=null", "2D parameters", "optim.others"),
        Refusal("optim._target_=torch.optim.LBFGS", "LBFGS", "closure"),
    ],
    "names nothing: write the dotted name of a class": Refusal("optim._target_=nothing", "_target_=nothing "),
    "optim.rates": [
        Refusal("optim.rates={net1:nan}", "optim.rates.net1=nan must be a number of at least 0, and finite"),
        Refusal("+optim.rates={net3:2}", "the model has no module 'net3'; it has net1, net2"),
        Refusal("+optim.rates={net1:-1}", "net1=-1 must be a number of at least 0"),
        Refusal("+optim.rates=10", "optim.rates=10 must be factors by module"),
        Refusal("optim.rates={1.10:0}", "a key is read as 1.1:", "in a command, too: {1.10.weight: 0.1}"),
        Refusal("optim.rates={net1:true}", "net1=True must be a number of at least 0"),
        Refusal("optim.rates={true:0}", "a key is read as True:"),
    ],
    "data.parts.": [
        Refusal(MIX + "'data.parts={a:{name:txt}}'", "data.parts.a.name=txt is no option of data=; did you mean text?"),
        Refusal(MIX + "'data.parts={a:{name:text,rot:x}}'", "did you mean data.parts.a.root?"),
        Refusal(MIX + "'data.parts={a:{name:text,root:/no/such}}'", "data.parts.a: data.root=/no/such does not exist"),
        Refusal(MIX + "'data.parts={torch_docs:{wieght:3}}'", "no key data.parts.torch_docs.wieght"),
        Refusal(MIX + "'data.parts={torch_docs:{}}' data.parts.torch_docs.packing=true", "type +data.parts.torch_"),
        Refusal(MIX + "'data.parts={torch_docs:{weight:0}}'", "data.parts.torch_docs.weight=0 must be"),
        Refusal(MIX + "'data.parts={torch_docs:{},b:{name:torch_docs,vocabulary:words}}'", "GPT-2 tokens", "parts.b"),
        Refusal(MIX + "'data.parts={torch_docs:{packing:true},b:{name:torch_docs}}'", "data.packing is true in"),
        Refusal(MIX + "'data.parts={torch_docs:{batchify:true}}'", "data.parts.torch_docs: batchify"),
        Refusal(MIX + "'data.parts={top:{name:torch_docs}}'", "val_loss_top does not read as a loss"),
        Refusal(
            "model=convnet data=mixture 'data.parts={a:{name:digits},b:{name:random_images,image_size:8}}'",
            "[1, 28, 28]", "[1, 8, 8]", "data.parts.b",
        ),
    ],
    "data.parts=": [Refusal(MIX, "needs parts by name"), Refusal(MIX + "data.parts=3", "data.parts={}")],
    "train.monitor=val_loss_b": [
        Refusal(MIX + "train.monitor=val_loss_b 'data.parts={a:{name:torch_docs}}'", "did you mean"),
        Refusal(  # five rows have no validation split
            MIX + "train.monitor=val_loss_b 'data.parts={a:{name:torch_docs},b:{name:jsonl,root:HERE/x.jsonl}}'",
            "did you mean train.monitor=val_loss_a", "There are: val_loss, val_loss_a, val_perplexity",
            file=file("x.jsonl", b'{"text": "some words"}\n' * 5),
        ),
    ],
    "optim.decays": [
        Refusal("optim.decays={net3:2}", "optim.decays: the model has no module 'net3'; it has net1, net2"),
        Refusal("optim.decays={net1:-1}", "optim.decays.net1=-1 must be a number of at least 0"),
        Refusal("optim.decays=10", "optim.decays=10 must be numbers by module"),
        Refusal("optim=muon +optim.others.decays={net1:1}", "optim.decays applies to both optimizers"),
    ],
    "scheduler": [
        Refusal("scheduler.warmup_steps=3", "it is a key of scheduler=cosine_warmup"),
        Refusal("scheduler=wsd scheduler.decay_ratio=2", "scheduler.decay_ratio=2.0 must be 0 or more"),
        Refusal("scheduler=wsd scheduler.warmup_steps=3 scheduler.decay_steps=4 train.steps=6", "than the 3 steps"),
        Refusal("scheduler=cosine_warmup scheduler.warmup_steps=-1", "scheduler.warmup_steps=-1"),
        Refusal("scheduler=step scheduler.every=0", "scheduler.every=0 must be at least 1"),
    ],
    "logger": [
        Refusal("logger=null", "logger=none for none"),
        Refusal("logger=wandb logger.mode=onlien", "'onlien', expected one of [offline, online]"),
    ],
    "early_stop": [
        Refusal("callbacks=[early_stop] callbacks.early_stop.patience=0", "patience=0 must be at least 1"),
        Refusal("callbacks=[early_stop] train.eval_every=null", "this run has none: train.eval_every=null"),
        Refusal("callbacks=[early_stop] callbacks.early_stop.metric=val_los", "did you mean", "metric=val_loss?"),
    ],
    "train.monitor=val_acc": [
        Refusal("model=convnet train.monitor=val_acc", "did you mean train.monitor=val_accuracy? There are: "),
        Refusal("mode=compare model=convnet train.monitor=val_acc", "did you mean train.monitor=val_accuracy?"),
        Refusal("-m model=convnet train.monitor=val_acc seed=1,2 hydra.sweep.dir=s", "did you mean", "=val_accuracy?"),
    ],
    "scheduler follows evaluations": Refusal("scheduler=plateau train.eval_every=0", "for one in each epoch"),
    "scheduler.factor=2": Refusal("scheduler=plateau scheduler.factor=2 train.eval_every=1", "between 0 and 1"),
    "train.monitor=val_los": Refusal("scheduler=plateau train.eval_every=1 train.monitor=val_los", "=val_loss?"),
    "callbacks": [
        Refusal("callbacks=[ema] callbacks.ema.decay=1.5", "callbacks.ema.decay=1.5 must be from 0 to 1"),
        Refusal("callbacks=[swa] callbacks.swa.every=0", "callbacks.swa.every=0 must be at least 1"),
        Refusal("callbacks=[ema,swa]", "callbacks.ema and callbacks.swa average the weights: leave one of them out"),
    ],
    "train.unfreeze": [
        Refusal("train.unfreeze={2:[net3]}", "the model has no trained module 'net3'; it has net1, net2"),
        Refusal("train.unfreeze={0:[net1]}", "0 is not the number of a step"),
        Refusal("train.unfreeze={-3:[net1]}", "-3 is not the number of a step"),
        Refusal("train.unfreeze={soon:net1}", "'soon' is not the number of a step"),
        Refusal("train.unfreeze=[net1]", "must be modules by step, such as {20: [head, layer4]}"),
    ],
    "train.test=best": [
        Refusal("train.test=best train.checkpoint_every=null", "train.checkpoint_every=0"),
        Refusal("train.test=best train.eval_every=null", "this run has none: train.eval_every=null"),
    ],
    "callback": Refusal("callbacks=[{_target_:models.losses.SquaredError}]", "is not a callback", "on_step"),
}  # fmt: skip

# -- layouts -------------------------------------------------------------------------------------------------------


def convolution(here):
    """A model whose second layer takes positions for channels."""
    file("mixes.py", b"""
from torch import nn
from models.losses import TokenCrossEntropy
from models.sequential import chain_of
def mixes(vocab_size):
    layers = nn.Embedding(vocab_size, 4), nn.Conv1d(16, 16, 1), nn.Linear(4, vocab_size)
    return chain_of(nn.Sequential(*layers), TokenCrossEntropy())
""")(here)  # fmt: skip
    option("model/own", "model: {_target_: mixes.mixes, name: own, vocab_size: null, vocabulary: words}")(here)


CONTEXT, EXPERT = "parallel=context ", "parallel=expert "
PIPELINED = "parallel=pipelined "
LAYOUTS = {
    "train.global_batch_size=10 cannot be cut into dp=2 x chunks=4": Refusal(
        "parallel=pipe_ddp parallel.dp=2 train.global_batch_size=10", "8 and 16"
    ),
    "train.global_batch_size=5": Refusal(
        "parallel=pipe_ddp parallel.dp=2 train.global_batch_size=5", "the smallest that can is 8"
    ),
    "parallel.pp=3": Refusal(PIPELINED + "parallel.pp=4", "4 stages", "only 3 layers: net1, relu, net2"),
    "parallel.chunks=1 is below parallel.pp=2": Refusal(
        PIPELINED + "parallel.schedule=1f1b parallel.chunks=1", "parallel.chunks=2", "parallel.schedule=gpipe"
    ),
    "parallel.chunks=5": Refusal(
        PIPELINED + GPT2 + "parallel.schedule=interleaved_1f1b parallel.chunks=5 train.global_batch_size=5",
        "interleaved_1f1b", "parallel.pp=2", "4 and 6",
    ),
    "parallel.chunks": [
        Refusal("parallel.chunks=0", "parallel.chunks=0", "at least 1"),
        Refusal("parallel.chunks=abc", "must be a whole number of at least 1"),
    ],
    "parallel.stages_per_rank=2": Refusal(
        PIPELINED + "parallel.stages_per_rank=2", "parallel.schedule=interleaved_1f1b"
    ),
    "parallel.dp=2": Refusal("parallel.dp=2", "parallel=single has one replica", "parallel=ddp"),
    "parallel.pp=2": Refusal("parallel.pp=2", "parallel=single has one stage", "parallel=pipelined"),
    "parallel.pp=1 is one stage": Refusal(PIPELINED + "parallel.pp=1", "use parallel=single,"),
    "parallel=data_parallel": Refusal("parallel=data_parallel", "GPU", "device=cpu", "parallel=ddp"),
    "parallel.balance": [
        Refusal(PIPELINED + "parallel.balance=fair", "uniform", "size", "parallel.balance=[2,1]"),
        Refusal(PIPELINED + "parallel.balance=5", "parallel.balance=5 is not known", "parallel.balance=[2,1]"),
        Refusal(PIPELINED + "parallel.balance=[2,2]", "2 whole numbers", "the sum 3", "parallel.balance=[2,1]"),
    ],
    "parallel.devices": [
        Refusal(
            "parallel=model_parallel parallel.devices=[cpu]", "names 1 devices for parallel.pp=2", "one per stage",
        ),
        Refusal("parallel=ddp parallel.devices=[cpu,cpu]", "only supported by parallel=model_parallel"),
    ],
    "parallel.timeout_s": Refusal("parallel.timeout_s=0", "must be above 0"),
    "parallel.schedule=planned": Refusal(
        PIPELINED + GPT2 + "parallel.schedule=planned train.compile=true", "train.compile=true",
        "parallel.schedule=interleaved_1f1b",
    ),
    "parallel.cp": [
        Refusal(GPT2 + CONTEXT + "parallel.cp=2 data.seq_len=18", "cp=2", "4 equal chunks", "18", "a multiple of 4"),
        Refusal(GPT2 + CONTEXT + "parallel.cp=4 data.seq_len=20", "cp=4", "8 equal chunks", "20", "a multiple of 8"),
        Refusal(GPT2 + CONTEXT + "parallel.cp=1", "parallel=context", "parallel.cp=1 is one", "set parallel.cp=2"),
        Refusal(GPT2 + CONTEXT + "parallel.cp=0", "parallel.cp=0 must be at least 1"),
        Refusal(GPT2 + "parallel=ddp parallel.context=ring", "parallel.context has no effect", "parallel.cp!=1"),
        Refusal(CONVNET + CONTEXT + "parallel.cp=2", "divides sequences", "(1, 28, 28), ()", "without parallel.cp"),
        Refusal("parallel=ddp parallel.dp=2 parallel.cp=2", "cp=2 divides sequences", "(10,), (5,)"),
        Refusal(
            OWN + "model=own train.steps=1 data=stdlib data.seq_len=16 parallel=context parallel.cp=2",
            "(Conv1d) does not compute 8 of 16 positions", "models.attention.attend", "set parallel.cp=1",
            file=convolution,
        ),
        *(Refusal(GPT2 + f"parallel={name} parallel.cp=2", f"parallel={name} leaves sequences whole",
                  "parallel=context, or with replicas or stages parallel=ddp")
          for name in ("single", "model_parallel", "data_parallel")),
    ],
    "parallel.context=ulysses": [
        Refusal(
            "model=llama data.seq_len=16 train.global_batch_size=4 parallel.context=ulysses parallel.cp=4 " + CONTEXT,
            "4 heads of queries and 2 of keys", "set parallel.cp=2 for ulysses, or parallel.context=gather or",
        ),
        Refusal(
            GPT2 + CONTEXT + "parallel.context=ulysses parallel.cp=2 parallel.tp=4",
            "8 ranks (parallel.cp=2, parallel.tp=4)", "4 heads of queries", "parallel.context=gather or",
        ),
    ],
    "parallel.ep": [
        Refusal(MOE + EXPERT + "parallel.ep=3", "ep=3 does not divide the 8 experts of layers.0", "can be 2, 4, 8"),
        Refusal(MOE + EXPERT + "parallel.ep=1", "parallel=expert", "parallel.ep=1 is one", "set parallel.ep=2"),
        Refusal(MOE + EXPERT + "parallel.ep=0", "parallel.ep=0 must be at least 1"),
        Refusal(
            MOE + "parallel=pipe_ddp parallel.dp=2 parallel.pp=2 parallel.ep=2 parallel.chunks=2 "
            "parallel.schedule=interleaved_zero_bubble parallel.stages_per_rank=2 train.activation_checkpointing=true",
            "interleaved_zero_bubble recomputes", "parallel.ep=2", "interleaved_1f1b",
        ),
        Refusal(MOE + "parallel=ddp parallel.dp=4 parallel.ep=3", "does not divide the parallel.dp=4 replicas",
                "set parallel.dp=3, or parallel.ep to 2 or 4"),
        Refusal(GPT2 + EXPERT + "parallel.ep=2", "ep=2 divides experts", "has no Experts()", "or set parallel.ep=1"),
        *(Refusal(MOE + f"parallel={name} parallel.ep=2", f"parallel={name} has one replica",
                  "use parallel=ddp, pipe_ddp, fsdp, hsdp, pipe_fsdp, expert")
          for name in ("single", "model_parallel", "data_parallel", "context")),
    ],
    "train.compile=true": Refusal(
        "train.compile=true", "C++ compiler", "CXX", "train.compile=false", env={"CXX": f"{NOWHERE}/g++"}
    ),
    "512 processes": Refusal("parallel=ddp parallel.dp=512 train.global_batch_size=512", "GiB", "free"),
}  # fmt: skip

# -- models, and data that do not fit them --------------------------------------------------------------------------

MODELS = {
    "model=null": Refusal("model=null", "a run needs this section"),
    "torch.nn.Linear gives an nn.Module": Refusal(
        OWN + "model=own train.steps=1", "'model.loss={_target_: torch.nn.CrossEntropyLoss}'",
        file=option("model/own", "model: {_target_: torch.nn.Linear, in_features: 3, out_features: 2}"),
    ),
    "the model is one layer": Refusal(
        OWN + "model=own train.steps=1 parallel=pipelined model.loss='{_target_: torch.nn.MSELoss}'",
        "nn.Sequential or as a Chain",
        file=option("model/own", "model: {_target_: torch.nn.Linear, in_features: 10, out_features: 5}"),
    ),
    "model.loss=mse": Refusal("model.loss=mse", "write 'model.loss={_target_: models.losses.SquaredError}'"),
    "NLLLoss is not a loss": Refusal("model.loss='{_target_: torch.nn.NLLLoss}'", "nn.MSELoss()", "'A loss'"),
    "model.size": Refusal("model=gpt2 model.size=125M", "125M", "124M, 350M, 774M, 1558M, tiny"),
    "model.n_layer": Refusal(GPT2 + "model.n_layer=0", "model.n_layer=0 must be at least 1"),
    "n_embd": Refusal(GPT2 + "model.n_embd=100 model.n_head=12", "n_head=12", "the nearest width that does is 96"),
    "model.dropout": Refusal(GPT2 + "model.dropout=1.0", "model.dropout=1.0 must lie in [0, 1)"),
    "model.vocab_size=100": Refusal(GPT2 + "model.vocab_size=100", "model.vocab_size=50257 or more"),
    "model.num_classes": Refusal("model=convnet model.num_classes=5", "label of sample 5 is 5", "0 to 4"),
    "model.image_size": Refusal("model=convnet model.image_size=3", "halved twice, so it must be at least 4"),
    "model.loss": Refusal("model=resnet50 model.loss=hinge", "hinge", "mse, cross_entropy"),
    "data.seq_len=300": Refusal(GPT2 + "data.seq_len=300", "256 positions", "data.seq_len=256", "model.block_size=300"),
    "model=gpt2": Refusal("model=gpt2 data=random_regression", "numbers", "leave data= out"),
    "model=toy": [
        Refusal("data.in_features=7", "7", "10"),
        Refusal("model.hidden=100000000000", "GiB", "free", "smaller"),
    ],
    "model=resnet50": Refusal("model=resnet50 data=digits data.image_size=32 data.channels=1", "(1, 32, 32)"),
    "micro-batch of 10000 samples": Refusal(
        "model=convnet train.global_batch_size=10000 data=random_images data.channels=1 data.samples=20000 "
        "data.image_size=4000", "GiB", "free", "parallel.chunks",
    ),
}  # fmt: skip

# -- data ----------------------------------------------------------------------------------------------------------


def _row(words: str, *says: str, content: bytes) -> Refusal:
    """One that reads ``content`` from the file that the words name."""
    name = words.partition("HERE/")[2].partition(" ")[0]
    return Refusal(words, *says, file=file(name, content))


DATA = {
    "train.global_batch_size=64": Refusal("data.samples=20", "20 samples", "20"),
    "largest batch that fits is": Refusal(
        "model=convnet parallel=ddp train.global_batch_size=2000", "1439 samples", "is 1438"
    ),
    "data.root": [
        Refusal(GPT2 + "data=text", "data.root=FILE_OR_FOLDER"),
        Refusal(GPT2 + f"data=text data.root={NOWHERE}", f"data.root={NOWHERE}", "does not exist", "folder"),
    ],
    "data.fold=3": Refusal("data.folds=3 data.fold=3", "from 0 to data.folds - 1"),
    "MNIST": Refusal("model=convnet data=mnist", "download", "data.root=FOLDER"),
    NOWHERE: Refusal(GPT2 + f"data=wikitext2 data.root={NOWHERE}", "train.txt"),
    "HERE/x.jsonl line 42": _row(
        ROWS + " parallel=ddp", "not JSON", "Correct the line", content=rows() + b'\n\n{"text": "cut sho\n1'
    ),
    "HERE/x.jsonl line 1": [
        _row(ROWS, "type int", content=b"1\n" * 40),
        _row(ROWS + " data.field=question", "'question'", "data.field", "'text'", content=rows()),
        _row(ROWS, "byte 0xff", content=b'{"text": "\xff\xfe"}\n' * 40),
        _row(ROWS, "'text'", "type data.messages=chat", content=rows(CHAT)),
    ],
    "model.loss=dpo": [
        _row(ROWS + " model.loss=dpo", "here targets are [16]", "data.chosen=chosen", content=rows()),
        _row(PAIRS, "here targets are [2, 16]; set model.loss=dpo", content=rows(*[PAIR] * 40)),
        Refusal("model.loss=dpo", "TokenCrossEntropy", "SquaredError"),
    ],
    "data.rejected=a": _row(ROWS + " data.chosen=a data.rejected=a", "a chosen and a rejected one", content=rows()),
    "data.rejected=None": _row(ROWS + " data.chosen=a", "data.chosen=a", "a rejected one", content=rows(*[PAIR] * 40)),
    "parallel.cp=2": _row(PAIRS + " model.loss=dpo parallel=context", "(2, 16), (2, 16)", content=rows(*[PAIR] * 40)),
    "model.dpo: beta=0.0": _row(PAIRS + " model.loss=dpo model.dpo.beta=0", "above 0", content=rows(*[PAIR] * 40)),
    "'rejected'": _row(PAIRS + " model.loss=dpo", "missing", content=rows('{"prompt": "a", "chosen": "b"}')),
    "data.messages=chat": _row(ROWS + " data.messages=chat", "have none", "data.template=FILE", content=rows(CHAT)),
    "HERE/x.jsonl": [
        _row(ROWS, "is empty", "JSON lines", content=b""),
        _row(ROWS, "no row", content=b"\n" * 40),
    ],
    "HERE/x.parquet": _row(PARQUET, "cannot be read as Parquet", content=b"PAR1" * 9),
    "HERE": Refusal(CONVNET + "data=image_folder data.root=HERE", "CLASS/*.jpg", "there is none"),
    "HERE/cat/1.jpg": Refusal(
        "model=classifier data=image_folder data.root=HERE train.global_batch_size=1", "damaged", "Replace it",
        file=file("cat/1.jpg", b"<html>"),
    ),
    "HERE/x.bin": [
        _row(SHARD, "llm.c's header", "20240520", "data.format=nanogpt", content=b"PK\x03\x04" + bytes(5000)),
        _row(SHARD + " parallel=ddp", "truncated", "5,000 tokens", "3,024", content=shard(np.zeros(1000), says=5000)),
        _row(SHARD, "the token 60,000", "data.vocab_size=50,257", content=shard(np.array([1, 2, 60000] * 400))),
        _row(SHARD + " data.format=nanogpt", "Leave out data.format", content=shard(np.zeros(100))),
    ],
    "HERE/x.txt": [
        _row(TEXT, "is empty", "file of text", content=b""),
        _row(TEXT, "no text", "not UTF-8", content=b"\xff" * 100),
        _row(TEXT, "UTF-16", "iconv -f UTF-16 -t UTF-8", content="some words".encode("utf-16")),
    ],
    "data.seq_len": [_row(TEXT, "tokens", content=b"a")],
    "HERE/train-images-idx3-ubyte": Refusal(MNIST, file=mnist(images=idx(np.zeros((20, 4, 4), "u1"))[:-1])),
    "HERE/train-labels-idx1-ubyte": Refusal(
        MNIST, "sample 7 is 12", "0 to 9", "data.num_classes",
        file=mnist(labels=idx(np.array([*range(7), 12, *range(8, 10)] * 2, "u1"))),
    ),
    "20 images": Refusal(MNIST, "10 labels", file=mnist(labels=idx(np.zeros(10, "u1")))),
}  # fmt: skip

# -- checkpoints and weights ----------------------------------------------------------------------------------------

EVAL = "mode=eval checkpoint=HERE/run"
INIT = "model.init_from=HERE"
SAMPLE = "mode=sample checkpoint=HERE/run "
TINY = manifest(config={**CONFIG, "model": {"_target_": "models.gpt2.gpt2", "name": "gpt2", "size": "tiny"}})
CHECKPOINTS = {
    "mode=sample": Refusal(SAMPLE, "model=toy is not a language model", file=manifest(config=CONFIG)),
    "sample.tokens=0": Refusal(SAMPLE + "sample.tokens=0", "must be at least 1", file=TINY),
    "sample.temperature=-1.0": Refusal(SAMPLE + "sample.temperature=-1", "must be 0", file=TINY),
    "sample.top_p=0.0": Refusal(SAMPLE + "sample.top_p=0", "must lie in (0, 1]", file=TINY),
    "sample.prompts": [
        Refusal(SAMPLE + "sample.prompts=[]", "is empty", file=TINY),
        Refusal(SAMPLE + "sample.prompts=[a] sample.prompt=b", "and sample.prompt are both set", file=TINY),
    ],
    "checkpoint=PATH": [
        Refusal("mode=eval", "mode=eval"),
        Refusal(GPT2 + "mode=sample", "mode=sample"),
    ],
    f"no checkpoint at {NOWHERE}": Refusal(f"mode=eval checkpoint={NOWHERE}", "manifest.json"),
    "too long": Refusal("mode=eval checkpoint=" + 300 * "a", "check the path"),
    "manifest.json": [
        Refusal(EVAL, "cannot be read", file=manifest(b"")),
        Refusal(EVAL, "not the manifest", file=manifest(b'{"format": 99}')),
        Refusal(EVAL, "damaged", "checksum", file=manifest(json.dumps(MANIFEST).encode())),
        # Whole by its checksum, and not what this program writes.
        Refusal(RESUME, "damaged", file=manifest(step=[1])),
        Refusal(RESUME, "config", file=manifest(config={**CONFIG, "optim": ["torch.optim.SGD"]})),
    ],
    "os.system": Refusal(
        RESUME, "not allowed",
        file=manifest(config={**CONFIG, "scheduler": {"_target_": "os.system", "command": "touch executed"}}),
    ),
    "../../x.safetensors is not the name of a file in its folder": [
        Refusal(RESUME, file=manifest(files={"../../x.safetensors": {"bytes": 1, "sha256": "0"}})),
    ],
    "x.safetensors cannot be read: No such file": [
        Refusal(RESUME, file=manifest(files={"x.safetensors": {"bytes": 1, "sha256": "0"}})),
    ],
    "model.init_from": [
        Refusal(INIT, "safetensors", file=file("model.safetensors", b"hello")),
        Refusal(INIT + "/no", "does not exist"),
    ],
    "pickle": Refusal(INIT, "convert", file=file("model.bin", b"\x80\x05N.")),
}  # fmt: skip

TABLE = [
    (names, refusal)
    for part in (WORDS, VALUES, LAYOUTS, MODELS, DATA, CHECKPOINTS)
    for names, refusals in part.items()
    for refusal in (refusals if isinstance(refusals, list) else [refusals])
]
