"""The checks of a run in their order, each as early as it has what it needs; see ``training.run.prepare``."""

from conf.instantiate import environment
from training.run.checks import configuration, data, layers, memory, metrics, model

# Of the configuration; and of the configuration, the chain and the data, which are not prepared yet.
OF_WORDS = configuration.check_train, environment, configuration.check_components
OF_MODEL = model.check_names, model.check_saved_weights, model.check_length, model.check_proof
# Of the ``Setup``, before and after its data are prepared.
OF_PLAN = model.check_parameters, model.check_optimizer_layout, memory.check_gpu_memory, model.check_compile
OF_RUN = (
    data.check_splits, model.check_evaluated, model.check_fit, data.check_length_of_run, data.check_read,
    model.check_pairs, memory.check_microbatch_fits, model.check_divided_data, layers.check_examined,
    metrics.check_metrics,
)  # fmt: skip
