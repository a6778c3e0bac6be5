"""The rows of docs/from-ddp.md and docs/from-fsdp2.md, and the test that shows each."""

from __future__ import annotations

ROWS: dict[str, dict[str, str]] = {
    "from-ddp.md": {
        "`DistributedDataParallel(model)` once": "tests/clients/test_recipes.py::test_a_pretraining_loop",
        "`model.module`": "tests/shard/test_api.py::test_names_classes_and_identities_stay",
        "`model.no_sync()`, `require_backward_grad_sync`": (
            "tests/shard/test_reduce.py::test_no_sync_restores_what_it_found"
        ),
        "`torch.save(model.module.state_dict())`": (
            "tests/ragged/test_state_dict.py::test_full_state_dicts_are_those_of_the_unsharded_model"
        ),
        "the optimizer may be made before the wrapper": (
            "tests/guard/test_traps.py::test_an_optimizer_built_before_is_named"
        ),
        "the wrapper broadcasts rank 0's weights": (
            "tests/guard/test_traps.py::test_ranks_must_begin_with_equal_weights"
        ),
        "`broadcast_buffers=True`, the default": (
            "tests/shard/test_buffers.py::test_all_buffers_after_each_forward_are_those_of_ddp"
        ),
        "`torch.autocast` casts what an operation reads; weights, gradients and wire are float32": (
            "tests/shard/test_mixed_precision.py::test_bf16_compute_trains_fp32_masters"
        ),
        "`find_unused_parameters=True`": (
            "tests/shard/test_used.py::test_a_parameter_has_a_gradient_if_any_rank_has_used_it"
        ),
        "rank 0 may evaluate alone on `model.module`": (
            "tests/comm/test_journal.py::test_ranks_that_are_elsewhere_are_named"
        ),
    },
    "from-fsdp2.md": {
        (
            "`fully_shard(module_or_list, mesh=, reshard_after_forward=, shard_placement_fn=, mp_policy=, "
            "offload_policy=, ignored_params=, dp_mesh_dims=)`"
        ): "tests/shard/test_fsdp2_names.py::test_fully_shard_has_all_arguments_of_fsdp2",
        "`MixedPrecisionPolicy`, `CPUOffloadPolicy`, `DataParallelMeshDims`": (
            "tests/shard/test_fsdp2_names.py::test_fully_shard_takes_torchs_own_policies"
        ),
        # the same
        "`FSDPModule`": "tests/shard/test_fsdp2_names.py::test_names",
        "`DTensor` parameters": ("tests/ragged/test_as_dtensor.py::test_placements_and_redistribution_as_of_a_dtensor"),
        "one mesh axis; two axes for HSDP": (
            "tests/comm/test_cluster.py"
            "::test_names_of_axes_say_how_to_arrange_a_mesh_and_other_meshes_are_arranged_by_machine"
        ),
        (
            "`unshard`, `reshard`, `set_requires_gradient_sync`, `set_requires_all_reduce`, "
            "`set_reshard_after_forward`, `set_modules_to_forward_prefetch`, ..."
        ): "tests/docs/test_pages.py::test_each_public_method_and_hook_works_or_raises_as_the_page_says",
        "`get_model_state_dict`, `set_model_state_dict`, `torch.distributed.checkpoint`": (
            "tests/checkpoint/test_sizes.py::test_fsdp2_reads_and_is_read"
        ),
        "`clip_grad_norm_`, `torch.compile`, activation checkpointing, meta-device initialisation": (
            "tests/composition/test_caches.py::test_a_sample_of_its_cells"
        ),
        "tensor and expert parallelism on other mesh axes, context parallelism among the ranks of the mesh": (
            "tests/composition/test_caches.py::test_a_sample_of_its_cells"
        ),
        # different
        "where a parameter is cut": (
            "tests/layout/test_bucket.py::test_extents_partition_every_tensor_and_lie_where_the_bucket_has_it"
        ),
        "a rank's part, `to_local()`": (
            "tests/ragged/test_tensor.py::test_it_has_the_global_shape_and_holds_its_extent"
        ),
        "operations on sharded parameters": (
            "tests/ragged/test_reductions.py::test_reductions_equal_those_of_the_whole_tensor"
        ),
        "weights between forward and backward": (
            "tests/shard/test_reduce.py::test_weights_cross_once_per_optimizer_step_and_gradients_once"
        ),
        "gradient accumulation with `set_requires_gradient_sync(False)`": (
            "tests/shard/test_reduce.py::test_weights_cross_once_per_optimizer_step_and_gradients_once"
        ),
        "a loss of a tensor that a forward has kept, while the unit's output stays unused": (
            "tests/shard/test_past_outputs.py::test_losses_past_the_outputs_train_as_in_plain_torch"
        ),
        "sums that wait for a later micro-batch": (
            "tests/shard/test_mixed_precision.py::test_micro_batches_are_summed_in_float32"
        ),
        "gradients that are pending over tensor parallelism": (
            "tests/ragged/test_outer_axes.py::test_sums_over_another_axis_have_the_reduce_dtype"
        ),
        "`zero_grad()` after a micro-batch that did not sync": "tests/shard/test_cleared.py::test_every_way_to_clear",
        "default of `reduce_dtype`": (
            "tests/shard/test_mixed_precision.py::test_gradients_are_summed_in_the_reduce_dtype"
        ),
        "`reshard_after_forward=2` and other integers": (
            "tests/shard/test_fsdp2_names.py::test_integers_reshard_to_a_node"
        ),
        "tied weights": "tests/shard/test_errors.py::test_mistakes_are_refused_by_name",
        "collectives": "tests/shard/test_reduce.py::test_weights_cross_once_per_optimizer_step_and_gradients_once",
        # refused
        "`set_custom_all_gather`, `set_custom_reduce_scatter`": "tests/shard/test_fsdp2_names.py::test_names",
        "`set_allocate_memory_from_process_group_for_comm`, `set_symm_mem_for_comm`": (
            "tests/docs/test_pages.py::test_each_public_method_and_hook_works_or_raises_as_the_page_says"
        ),
        "`set_separate_reduce_scatter_group(False)`": "tests/shard/test_fsdp2_names.py::test_names",
        "`set_all_reduce_hook(stream=...)`": "tests/shard/test_fsdp2_names.py::test_reduced_shards_pass_a_hook",
        "`dp_mesh_dims` without an axis to cut over": (
            "tests/ragged/test_outer_axes.py::test_axes_by_name_and_dtensors_that_cannot_be_cut"
        ),
        "an operation that needs the whole of a `RaggedTensor`, such as `matmul`": (
            "tests/ragged/test_tensor.py::test_other_operations_raise_and_say_what_to_call"
        ),
        "pickling a `RaggedTensor`": (
            "tests/ragged/test_tensor.py::test_operands_of_other_shapes_and_layouts_and_pickles_are_refused"
        ),
        "`register_hook` on a parameter, before `fully_shard` or later": (
            "tests/shard/test_api.py::test_attributes_and_hooks_stay_whichever_form_of_a_parameter_gets_them"
        ),
        "`DTensor.from_local` with the placements of a parameter": (
            "tests/docs/test_pages.py::test_each_public_method_and_hook_works_or_raises_as_the_page_says"
        ),
        "`share_memory_()` of a parameter": (
            "tests/docs/test_pages.py::test_each_public_method_and_hook_works_or_raises_as_the_page_says"
        ),
        "attributes and hooks of parameters": (
            "tests/shard/test_api.py::test_attributes_and_hooks_stay_whichever_form_of_a_parameter_gets_them"
        ),
        "an edit of a gathered parameter, `p.mul_(2)`": (
            "tests/shard/test_api.py::test_an_edit_by_data_of_a_gathered_parameter_is_refused_in_the_first_steps"
        ),
        "`.grad` scaled or clipped before a micro-batch that syncs": (
            "tests/shard/test_cleared.py"
            "::test_what_stands_in_grad_takes_no_memory_and_no_optimizer_moves_a_parameter_by_it"
        ),
        "`torch.distributed.fsdp.fully_shard.state(module)`": (
            "tests/ragged/test_as_dtensor.py::test_placements_and_redistribution_as_of_a_dtensor"
        ),
        "`torch.compile(optimizer.step)`": "tests/ragged/test_as_dtensor.py::test_a_compiled_step_is_refused_by_name",
        "`torch.func.grad` and others by sharded parameters": (
            "tests/shard/test_autograd.py::test_derivatives_by_sharded_parameters_are_refused"
        ),
        "one full state dict loaded into two models by `set_model_state_dict`": (
            "tests/shard/test_fsdp2_names.py::test_a_full_state_dict_that_torch_has_loaded_is_copied_for_another_model"
        ),
        "`parameter.data = value` while the unit is gathered": (
            "tests/shard/test_settings.py::test_what_would_be_lost_is_refused"
        ),
        "`HuggingFaceStorageWriter(save_distributed=True)` of a part that is several boxes": (
            "tests/checkpoint/test_storages.py::test_each_storage_keeps_the_bits_or_is_refused"
        ),
    },
}
"""By page and the first cell of a row: a test of `make test`."""
