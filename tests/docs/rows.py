"""The rows of docs/from-ddp.md and docs/from-fsdp2.md, and the test that shows each."""

from __future__ import annotations

ROWS: dict[str, dict[str, str]] = {
    "from-ddp.md": {
        "`DistributedDataParallel(model)` once": "clients/test_recipes::test_a_pretraining_loop",
        "`model.module`": "shard/test_api::test_names_classes_and_identities_stay",
        "`model.no_sync()`, `require_backward_grad_sync`": "shard/test_reduce::test_no_sync_restores_what_it_found",
        "`torch.save(model.module.state_dict())`": "ragged/test_state_dict::test_full_state_dicts_are_those_of_the",
        "the optimizer may be made before the wrapper": "guard/test_traps::test_an_optimizer_built_before_is_named",
        "the wrapper broadcasts rank 0's weights": "guard/test_traps::test_ranks_must_begin_with_equal_weights",
        "`broadcast_buffers=True`, the default": "shard/test_buffers::test_all_buffers_after_each_forward_are_those_of",
        "`torch.autocast` casts what an operation reads; weights, gradients and wire are float32": (
            "shard/test_mixed_precision::test_bf16_compute_trains_fp32_masters"
        ),
        "`find_unused_parameters=True`": "shard/test_used::test_a_parameter_has_a_gradient_if_any_rank_has_used_it",
        "rank 0 may evaluate alone on `model.module`": "comm/test_journal::test_ranks_that_are_elsewhere_are_named",
    },
    "from-fsdp2.md": {
        (
            "`fully_shard(module_or_list, mesh=, reshard_after_forward=, shard_placement_fn=, mp_policy=, "
            "offload_policy=, ignored_params=, dp_mesh_dims=)`"
        ): "shard/test_fsdp2_names::test_fully_shard_has_all_arguments_of_fsdp2",
        "`MixedPrecisionPolicy`, `CPUOffloadPolicy`, `DataParallelMeshDims`": (
            "shard/test_fsdp2_names::test_fully_shard_takes_torchs_own_policies"
        ),
        # the same
        "`FSDPModule`": "shard/test_fsdp2_names::test_names",
        "`DTensor` parameters": "ragged/test_as_dtensor::test_placements_and_redistribution_as_of_a_dtensor",
        "one mesh axis; two axes for HSDP": "comm/test_cluster::test_names_of_axes_say_how_to_arrange_a_mesh_and_other",
        (
            "`unshard`, `reshard`, `set_requires_gradient_sync`, `set_requires_all_reduce`, "
            "`set_reshard_after_forward`, `set_modules_to_forward_prefetch`, ..."
        ): "docs/test_pages::test_each_public_method_and_hook_works_or_raises_as_the_page_says",
        "`get_model_state_dict`, `set_model_state_dict`, `torch.distributed.checkpoint`": (
            "checkpoint/test_sizes::test_fsdp2_reads_and_is_read"
        ),
        "`clip_grad_norm_`, `torch.compile`, activation checkpointing, meta-device initialisation": (
            "composition/test_caches::test_a_sample_of_its_cells"
        ),
        "tensor and expert parallelism on other mesh axes, context parallelism among the ranks of the mesh": (
            "composition/test_caches::test_a_sample_of_its_cells"
        ),
        # different
        "where a parameter is cut": "layout/test_bucket::test_extents_partition_every_tensor_and_lie_where_the_bucket",
        "a rank's part, `to_local()`": "ragged/test_tensor::test_it_has_the_global_shape_and_holds_its_extent",
        "operations on sharded parameters": "ragged/test_reductions::test_reductions_equal_those_of_the_whole_tensor",
        "weights between forward and backward": "shard/test_reduce::test_weights_cross_once_per_optimizer_step_and",
        "gradient accumulation with `set_requires_gradient_sync(False)`": "shard/test_reduce::test_weights_cross_once",
        "a loss of a tensor that a forward has kept, while the unit's output stays unused": (
            "shard/test_past_outputs::test_losses_past_the_outputs_train_as_in_plain_torch"
        ),
        "sums that wait for a later micro-batch": "shard/test_mixed_precision::test_micro_batches_are_summed_in",
        "gradients that are pending over tensor parallelism": "ragged/test_outer_axes::test_sums_over_another_axis",
        "`zero_grad()` after a micro-batch that did not sync": "shard/test_cleared::test_every_way_to_clear",
        "default of `reduce_dtype`": "shard/test_mixed_precision::test_gradients_are_summed_in_the_reduce_dtype",
        "`reshard_after_forward=2` and other integers": "shard/test_fsdp2_names::test_integers_reshard_to_a_node",
        "tied weights": "shard/test_errors::test_mistakes_are_refused_by_name",
        "collectives": "shard/test_reduce::test_weights_cross_once_per_optimizer_step_and_gradients_once",
        # refused
        "`set_custom_all_gather`, `set_custom_reduce_scatter`": "docs/test_pages::test_each_public_method_and_hook",
        "`set_allocate_memory_from_process_group_for_comm`, `set_symm_mem_for_comm`": (
            "docs/test_pages::test_each_public_method_and_hook_works_or_raises_as_the_page_says"
        ),
        "`set_separate_reduce_scatter_group(False)`": "shard/test_fsdp2_names::test_names",
        "`set_all_reduce_hook(stream=...)`": "shard/test_fsdp2_names::test_reduced_shards_pass_a_hook",
        "`dp_mesh_dims` without an axis to cut over": "ragged/test_outer_axes::test_axes_by_name_and_dtensors_that",
        "an operation that needs the whole of a `RaggedTensor`, such as `matmul`": (
            "ragged/test_tensor::test_other_operations_raise_and_say_what_to_call"
        ),
        "pickling a `RaggedTensor`": "ragged/test_tensor::test_operands_of_other_shapes_and_layouts_and_pickles_are",
        "`register_hook` on a parameter, before `fully_shard` or later": "shard/test_api::test_attributes_and_hooks",
        "`DTensor.from_local` with the placements of a parameter": "docs/test_pages::test_each_public_method_and_hook",
        "`share_memory_()` of a parameter": "docs/test_pages::test_each_public_method_and_hook_works_or_raises_as_the",
        "attributes and hooks of parameters": "shard/test_api::test_attributes_and_hooks_stay_whichever_form_of_a",
        "an edit of a gathered parameter, `p.mul_(2)`": "shard/test_api::test_editing_a_gathered_parameter_is_refused",
        "`.grad` scaled or clipped before a micro-batch that syncs": "shard/test_cleared::test_what_stands_in_grad",
        "`torch.distributed.fsdp.fully_shard.state(module)`": "ragged/test_as_dtensor::test_placements_and",
        "`torch.compile(optimizer.step)`": "ragged/test_as_dtensor::test_a_compiled_step_is_refused_by_name",
        "`torch.func.grad` and others by sharded parameters": "shard/test_autograd::test_derivatives_by_sharded",
        "one full state dict loaded into two models by `set_model_state_dict`": (
            "shard/test_fsdp2_names::test_a_full_state_dict_that_torch_has_loaded_is_copied_for_another_model"
        ),
        "`parameter.data = value` while the unit is gathered": "shard/test_settings::test_what_would_be_lost_is",
        "`HuggingFaceStorageWriter(save_distributed=True)` of a part that is several boxes": (
            "checkpoint/test_storages::test_each_storage_keeps_the_bits_or_is_refused"
        ),
    },
}
"""By page and the first cell of a row: the file and the beginning of the name of a test of `make test`."""
