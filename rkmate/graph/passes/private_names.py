"""Private names of torch: which files use which.

A capture cannot do without them. They stand in `graph/capture`, in `measure` and in `device`, and those of
`ELSEWHERE`, so that another version of torch is a matter of these; a test reads every file of the package and
holds it against this list. Names that torch documents for everybody are no matter here, wherever they stand:
`PUBLIC`.
"""

from __future__ import annotations

SEEN_IN = "2.13"
"""The version of torch that has them all, and that the tests run with."""

FOLDERS = ("graph/capture", "measure", "device")
"""Where private names may stand. Those of `graph/capture` are listed one by one."""

PUBLIC = ("torch.utils._pytree", "torch.utils._python_dispatch.TorchDispatchMode")
"""Documented, for all that a part of the path says private."""

IN_CAPTURE: dict[str, tuple[str, ...]] = {
    "attention_elsewhere.py": ("torch._C.DispatchKey",),
    "autocast.py": ("torch._functorch.config",),
    "backward_tags.py": ("torch._functorch._aot_autograd.descriptors.TangentAOTInput",),
    "batch_norm.py": ("torch.nn.modules.batchnorm._BatchNorm",),
    "capture.py": ("torch._functorch._aot_autograd.descriptors",
                   "torch._functorch.aot_autograd.aot_export_joint_with_descriptors"),
    "checkpoints.py": ("torch.utils.checkpoint._checkpoint_without_reentrant_generator",),
    "closed_over.py": ("torch.utils._python_dispatch._disable_current_modes",),
    "collectives.py": ("torch._C._distributed_c10d._resolve_process_group",
                       "torch._subclasses.fake_tensor.FakeTensorMode"),
    "cudnn_batch_norm.py": ("torch._C._BatchNormBackend.Cudnn",
                            "torch._C._get_cudnn_batch_norm_reserve_space_size",
                            "torch._C._select_batch_norm_backend",
                            "torch._prims_common.suggest_memory_format"),
    "cudnn_rnn.py": ("torch._cudnn_rnn", "torch._cudnn_rnn_flatten_weight",
                     "torch.utils._python_dispatch._disable_current_modes"),
    "custom_functions.py": ("torch._ops.HigherOrderOperator",),
    "direct.py": ("torch._C.DisableTorchFunctionSubclass",),
    "dry_run.py": ("torch.Tensor._make_wrapper_subclass", "torch._C.DisableTorchFunction",
                   "torch._C._disabled_torch_function_impl",
                   "torch._subclasses.fake_tensor.FakeTensor",
                   "torch._subclasses.fake_tensor.FakeTensorMode",
                   "torch.utils._python_dispatch._disable_current_modes"),
    "eager_kernels.py": ("torch._C.DispatchKey", "torch._C._AutoDispatchBelowAutograd",
                         "torch.utils._python_dispatch._disable_current_modes"),
    "elsewhere.py": ("torch._subclasses.fake_tensor.FakeTensor",),
    "gradient_places.py": ("torch.nn.parallel.DistributedDataParallel._active_ddp_module",),
    "global_hooks.py": ("torch.nn.modules.module._global_backward_hooks",
                        "torch.nn.modules.module._global_backward_pre_hooks",
                        "torch.nn.modules.module._global_forward_hooks",
                        "torch.nn.modules.module._global_forward_pre_hooks"),
    "inner_gradients.py": ("torch.autograd._engine_run_backward",),
    "input_values.py": ("torch._C.DisableTorchFunction", "torch._ops.OpOverload",
                        "torch.utils._python_dispatch._disable_current_modes"),
    "layouts.py": ("torch._decomp.decomposition_table", "torch._prims_common.suggest_memory_format",
                   "torch._refs", "torch._subclasses.fake_impls.op_implementations_dict",
                   "torch._subclasses.fake_tensor.FakeTensorMode"),
    "library_paths.py": ("torch._C.DisableTorchFunction", "torch._ops.OpOverload",
                         "torch._subclasses.fake_tensor.unset_fake_temporarily"),
    "meta_kernels.py": ("torch.utils._python_dispatch._disable_current_modes",),
    "modes.py": ("torch._C._functorch.peek_interpreter_stack", "torch._guards.detect_fake_mode"),
    "moves.py": ("torch._C._nn._parse_to",),
    "opaque.py": ("torch._C.DisableTorchFunction", "torch.utils._python_dispatch._disable_current_modes"),
    "operations.py": ("torch._ops.OpOverload",),
    "quiet.py": ("torch.export._trace",),
    "resized.py": ("torch.Tensor._make_subclass", "torch._C._set_throw_on_mutable_data_ptr",
                   "torch._subclasses.fake_tensor.FakeTensor",
                   "torch._subclasses.fake_tensor.FakeTensorMode"),
    "recurrent.py": ("torch._decomp.decompositions",),
}
"""Files of `graph/capture` -> the private names that they import or reach."""

ELSEWHERE: dict[str, tuple[tuple[str, ...], str]] = {
    "dtr/runtime/buffer.py": (("torch._ops.OpOverload",), "the class of operations, in annotations"),
    "dtr/runtime/engine.py": (("torch._ops.OpOverload",), "the class of operations, in annotations"),
    "dtr/runtime/rates.py": (("torch._ops.OpOverload",), "the class of operations, in annotations"),
    "dtr/runtime/schema.py": (("torch._ops.OpOverload",), "the class of operations, in annotations"),
    "dtr/runtime/sizes.py": (("torch._ops.OpOverload",), "the class of operations, in annotations"),
    "dtr/wrapping.py": (("torch._C._will_engine_execute_node",),
                        "whether a backward adds to a parameter's gradient, which its engine alone knows"),
    "runtime/added_gradients.py": (("torch._C._will_engine_execute_node",),
                                   "whether a backward adds to a parameter's gradient, which its engine "
                                   "alone knows"),
    "runtime/deferred_tensor.py": (("torch.Tensor._make_wrapper_subclass",
                                    "torch._C.DisableTorchFunctionSubclass"),
                                   "a tensor that has a form and no memory, and answers for itself"),
    "runtime/segments.py": (("torch._C._autograd._get_current_graph_task_keep_graph",),
                            "whether a backward keeps its graph, which its engine alone knows"),
    "runtime/unchanged.py": (("torch._C._dynamo.guards.TensorGuards", "torch._C._dynamo.guards.dict_version"),
                             "how often a dictionary has changed, which Python tells C alone; and forms of "
                             "many tensors compared in one call"),
}
"""Files outside of these folders -> the names that they use all the same, and what for."""
