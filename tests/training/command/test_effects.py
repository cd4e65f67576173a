"""Keys that have an effect may be typed. Those that are refused stand in tests/refusals/table.py."""

import pytest
from hydra.errors import HydraException

from conf.composition import compose
from conf.effects import check_effects

LANGUAGE = "model=gpt2 model.size=tiny"


@pytest.mark.parametrize(
    "line",
    [
        "parallel=pipelined parallel.schedule=1f1b parallel.balance=size parallel.stages_per_rank=1 train.trace=true",
        "parallel=pipe_fsdp parallel.order=pp_dp parallel.sync_batchnorm=true",
        "parallel=pipe_ddp parallel.bucket_mb=50 parallel.comm_hook=bf16",
        "parallel=model_parallel parallel.balance=[2,1]",
        "mode=plan parallel=auto parallel.schedule=1f1b parallel.bucket_mb=50 parallel.comm_hook=bf16",
        "mode=verify parallel.bucket_mb=50 parallel.comm_hook=bf16 parallel.order=pp_dp",
        "parallel=ddp parallel.name=mine parallel.strategy={_target_:mine.Mine} parallel.bucket_mb=50 train.trace=true",
        f"{LANGUAGE} sample.prompt=a sample.at_end=9",
        f"{LANGUAGE} mode=sample checkpoint=x sample.tokens=9",
        f"{LANGUAGE} mode=export checkpoint=x export.format=triton sample.tokens=9",
        "mode=eval checkpoint=x train.eval_every=null train.eval_batches=2",
        "debug=overfit train.eval_batches=2 train.keep_checkpoints=1",  # a command, and debug= in addition
        "sample.at_end=0",  # says that nothing is wanted
    ],
)
def test_a_key_that_the_run_reads_may_be_typed(line):
    check_effects(compose(line.split()), line.split(), of_sweep=False)


@pytest.mark.parametrize("layout", ["single", "ddp", "pipelined"])
def test_a_job_of_a_sweep_may_have_keys_that_other_jobs_read(layout):
    words = [f"parallel={layout}", "parallel.schedule=1f1b", "parallel.comm_hook=bf16", "sweep.objective=val_loss"]
    check_effects(compose(words), words, of_sweep=True)
    with pytest.raises(HydraException, match="has no effect without"):
        check_effects(compose(words), words, of_sweep=False)
