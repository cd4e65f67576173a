"""How a model is computed on several ranks: the layout, the mesh, stages, strategies and schedules.

    layout.py, mesh.py               a layout, and the ranks along its axes
    plan.py, planning.py             the plan of a run, and how it is made and checked
    axes/                            how ranks divide the work along each axis: replicas, shards, pipeline, tensor
    strategies.py                    the registry of strategies
    strategy.py                      Strategy, the base class, and LocalStrategy: single, ddp, fsdp, hsdp and tensor
    step_result.py                   the numbers of a step, and the scale of the loss in float16
    several_devices.py               model_parallel and data_parallel, several devices in one process
    pipeline.py, pipe_stage.py       the pipelined strategies, on torch.distributed.pipelining
    schedules.py, actions.py         the schedules of pipelines; the pieces of work that they put in order
    partition.py                     the division of layers into stages
    zero_bubble/                     schedules that split the backward
    stage.py                         the layers of a rank
    examination.py                   the facts of layers and the loss that depend on the layout, found before a run
    supported.py                     whether a layout supports a model, by its axes and by the examination
    shape_inference.py               the shapes and dtypes of the layers' outputs, inferred without numbers
    watching.py                      the torch mode through which an examination sees each operator
    gathering.py                     losses that compare the samples of all replicas
    gradients.py, batchnorm.py       the gradients of a rank's stages; BatchNorm's statistics
    auxiliary.py                     the totals of auxiliary losses over all ranks
    placement.py, pieces.py          how a tensor is divided over the axes, and the part that a rank holds
    dtensor.py                       the placement of a DTensor
    host_group.py, devices.py        ranks that share a GPU; devices and threads
    late_imports.py                  stand-ins for torch's compiler until something is compiled
    timeline.py                      when each piece of work ran

These modules use parts of torch that are private or undocumented and may change. Tested with torch 2.11, 2.13 and 2.15:

    pipe_stage.py, zero_bubble/   the methods of torch's pipeline stage that PipeStage overrides; schedules._Action,
                                  _PipelineScheduleRuntime with its _prepare_schedule_with_comms, _num_stages and
                                  _n_microbatches
    host_group.py                 a subclass of ProcessGroup, with _get_backend, _set_group_name, _allgather_base and
                                  _reduce_scatter_base; the methods of ProcessGroupGloo
    watching.py,                  torch.utils._python_dispatch, torch._ops.OpOverload, Operator._schema,
    shape_inference.py            UntypedStorage._cdata, torch._subclasses.fake_tensor; torch._dynamo.reset (tried with
                                  2.13)
    stage.py, axes/replicas.py    aten._unsafe_view, Tensor._is_view; torch._dynamo.config.recompile_limit
    axes/replicas.py              DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    gradients.py, batchnorm.py    torch._foreach_*; aten.native_batch_norm_backward
    devices.py                    torch.cpu._is_avx512_bf16_supported and _is_amx_tile_supported
    late_imports.py               what torch uses of torch._dynamo, torch.fx.experimental.symbolic_shapes and sympy when
                                  nothing is compiled; the file of torch._dynamo.config
"""

import common  # noqa: F401  it joins the user's modules with this package
