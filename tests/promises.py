"""A fault for each promise of docs/guarantees.md: which line of hetmem it breaks, and which test sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`before` becomes `after` in `file`; `test` must notice. `costly`: `make test` leaves it out."""

    file: str
    before: str
    after: str
    test: str
    costly: bool = False


UNSEEN = "tests/engine/test_unseen_writes.py::"
WITHIN = "tests/engine/test_writes_within_steps.py::"
OTHERS = "tests/intercept/test_unmanaged.py::"
THREADS = "tests/intercept/test_threads.py::"
EXCHANGED = "tests/engine/test_exchanged_tensors.py::"
QUANTISED = "tests/engine/test_quantised.py::"
HOSTILE = "tests/checkpoint/test_hostile.py::"
EDITS = "tests/optim/test_edits.py::"

PROMISES: dict[str, Mutation | str] = {
    # ---- Bits
    "equal plain torch's with `torch.optim.AdamW(fused=True)`": "skip a write-back to NVMe",
    "The same with `mixed_precision`": "update no 16-bit copy at home",
    "The same in every overlap mode": "fetch from a home that is being written",
    "`hetmem.accumulate` gives the bits of the loop": Mutation(
        "accumulation/surroundings.py",
        "                generator.set_state(state)\n",
        "                pass\n",
        "tests/accumulation/test_accumulate.py::test_a_plain_model_gets_the_bits_of_the_loop[2-]",
    ),
    "The same after `hetmem.park`": Mutation(
        "placing/rehome.py",
        "                    self._copy(Link.HOST_TO_DEVICE, chunk, role, into[role], chunk.homes[role].memory)\n",
        "                    pass\n",
        "tests/test_parking.py::test_training_goes_on_with_the_bits_of_a_run_without[whole-fp32-off]",
    ),
    "`hetmem.export_weights` gives": Mutation(
        "checkpoint/export.py",
        "        changed = {*writes.touched, ",
        "        changed = {",
        "tests/checkpoint/test_export.py::test_copies_at_home_are_given_themselves_unless_the_program_wrote_to_weights",
    ),
    "Rows of a frozen embedding, and": Mutation(
        "engine/rows.py",
        "known and max_norm is None and",
        "known and",
        "tests/engine/test_rows.py::test_a_call_may_ask_for_another_norm[False]",
    ),
    "A model that bitsandbytes has quantised": Mutation(
        "placing/taken.py",
        "        scales.copy_(self.scales)\n",
        "        pass\n",
        "tests/models/test_taken.py::test_a_quantised_model_trains_over_its_decoded_values[host-nf4]",
    ),
    "Several ranks of a machine": Mutation(
        "schedule/turns.py",
        "[parameter] >= self.backward for rank in self._all[: self._rank])",
        "[parameter] >= self.backward for rank in self._all[:0])",
        "tests/ranks/test_turns.py::test_every_order_of_events_ends_with_sums_in_the_order_of_ranks[3]",
    ),
    "`hetmem.accumulate` on several ranks": Mutation(
        "engine/ranked_gradients.py",
        "count in arrivals.items() if count > 1}",
        "count in arrivals.items() if count > 99}",
        "tests/ranks/test_bits.py::test_weights_gradients_and_states_are_those_of_plain_torch[2-names0]",
    ),
    "States of a group on NVMe": Mutation(
        "ranks/drive.py",
        "if self._owns(chunk, tile):",
        "if self._owns(chunk + 1, tile):",
        "tests/ranks/test_drive.py::test_states_on_nvme_have_the_bits_of_one_process[2-1-runs0]",
    ),
    "Ranks of several machines": Mutation(
        "engine/machine_sums.py",
        "if has[one, at] or (one == 0 and there[number])]",
        "if has[one, at]]",
        "tests/ranks/test_machines_beside.py::test_gradients_that_come_late_are_in_the_sums_once",
        costly=True,
    ),
    "an update of ranks begins with the sum of all": Mutation(
        "ranks/updates.py",
        "self._words.computed_parts[:, chunks] >=",
        "self._words.computed_parts[self._rank, chunks] >=",
        "tests/ranks/test_overlap.py::test_an_update_begins_with_the_sum_of_all_ranks_and_ends_with_the_tiles_of_all",
    ),
    "write the file of one process, and load": Mutation(
        "checkpoint/save_load.py",
        "        self.file.read(own)\n",
        "        self.file.read(own[1:])\n",
        "tests/checkpoint/test_resume.py::test_training_goes_on_with_the_same_bits[host to resident]",
    ),
    "The planned peaks of host memory and NVMe of several ranks": Mutation(
        "planner/ranked.py",
        "tier: rank.peak_bytes[tier] for",
        "tier: ranks * rank.peak_bytes[tier] for",
        "tests/ranks/test_plan.py::test_peaks_are_those_of_a_run[2-64MiB-options0]",
    ),
    "how long copies take change no bit": "compute before a copy has arrived",
    "A save in the background has the bytes": Mutation(
        "optim/update_queue.py",
        "not (update.writes and self._is_held(update))",
        "True",
        "tests/checkpoint/test_background.py::test_a_save_at_every_step_has_the_bytes_of_one_that_waits[host-backward-bf16]",
    ),
    "`keep=` deletes nothing before": Mutation(
        "checkpoint/saving.py",
        "            stack.push(kept.after)\n",
        "            kept.delete_older()\n",
        "tests/checkpoint/test_kept.py::test_nothing_is_deleted_before_the_new_one_is_complete",
    ),
    "The same after a checkpoint": Mutation(
        "checkpoint/save_load.py",
        "targets = self.targets + self.begin()",
        "self.begin()\n        targets = self.targets",
        "tests/checkpoint/test_resume.py::test_training_goes_on_with_the_same_bits[groups]",
    ),
    "The same under `torch.autocast`": Mutation(
        "intercept/autocast_casts.py",
        "torch.is_grad_enabled() and not compiled\n",
        "False\n",
        "tests/intercept/test_autocast.py::test_gradients_of_a_weight_are_added_at_one_cast[around-kept-tied]",
    ),
    "With `frozen=`": Mutation(
        "memory/coded.py",
        "slot[part.offset : part.offset + part.coding.numel]",
        "slot[: part.coding.numel]",
        QUANTISED + "test_adapters_train_as_over_the_decoded_values[False-off-third-nf4]",
    ),
    "Decoded values are those of bitsandbytes": Mutation(
        "cuda/dequantise.py",
        "torch.stack((codes >> 4, codes & 15) if high_first",
        "torch.stack((codes & 15, codes >> 4) if high_first",
        "tests/cpu/test_quantised.py::test_nf4_has_the_high_nibble_first_and_a_scale_for_64[dtype0]",
    ),
    "The same compiled": Mutation(
        "intercept/leases.py",
        "                    show_gradient(parameter, gradient)\n",
        "                    pass\n",
        "tests/intercept/test_compiled.py::test_code_is_made_anew_while_gradients_are_added_up",
        costly=True,
    ),
    # ---- What a program writes to weights
    "any to a weight that is quantised": Mutation(
        "intercept/coded.py",
        "if value._version != before[key]:",
        "if False:",
        QUANTISED + "test_nothing_writes_to_a_quantised_weight[out]",
    ),
    "between a step and the next forward": "keep the copies of weights that the user may have written to after a step",
    "before the first forward": Mutation(
        "engine/write_check.py",
        "        self._renew(due)\n",
        "",
        "tests/engine/test_user_writes.py::"
        "test_writes_before_the_first_forward_and_without_an_optimizer_count[bf16-host]",
    ),
    "between other forwards": "forget to look again at what a disk was reading",
    "that does not (`p.data.mul_()`, NumPy, also through memory that was kept)": Mutation(
        "engine/param_views.py",
        "return [each for each in compress(among, map(gt, now, map(_EXPECTED, among))) if each.numel]",
        "return []",
        UNSEEN + "test_single_elements_of_frozen_weights_that_are_written_reach_the_next_forward[bf16-all copies]",
    ),
    "between a forward and its backward": Mutation(
        "intercept/saved_tensors.py",
        "if version != managed.counter._version:",
        "if False:",
        WITHIN + "test_a_weight_changed_between_forward_and_backward_is_an_error_as_in_torch[bf16-nvme]",
    ),
    "the backward, the step and the next forward use it": Mutation(
        "engine/runtime.py",
        "            if self.writes.renew_touched():\n",
        "            if False:\n",
        "tests/engine/test_never_silent.py::"
        "test_a_program_gives_the_bits_of_torch_or_one_error_in_each_run[before_the_backward-off-all copies-None]",
        costly=True,
    ),
    "weights that are exchanged for their average": Mutation(
        "intercept/saved_tensors.py",
        "if packed.replaced != managed.replaced and not packed.itself:",
        "if False:",
        "tests/engine/test_replaced_data.py::"
        "test_weights_that_a_swap_for_another_forward_took_from_a_graph_are_an_error[host]",
    ),
    "although torch may go on with the cast of the old weight": Mutation(
        "intercept/saved_tensors.py",
        "if version != managed.counter._version:",
        "if version != managed.counter._version and not packed.is_cast:",
        WITHIN + "test_under_autocast_that_is_an_error_too[host]",
    ),
    "between a backward and its step": Mutation(
        "optim/update_pass.py",
        "writes.by_users(writes.all_counted(",
        "list((",
        "tests/engine/test_user_writes.py::test_writes_between_backward_and_step_are_stepped_from[shared-host]",
    ),
    "any, with another mode, from the second step on": Mutation(
        "intercept/faults.py",
        "            self._gradients.notify_use(used)\n        if in_backward():\n",
        "            pass\n        if in_backward():\n",
        EDITS + "test_a_hook_of_a_module_reads_the_weights_of_the_forward_or_is_refused[backward-host]",
    ),
    "also to views of a weight": "skip the write-back of what an operator wrote",
    "| within a forward | `p.data = t`": Mutation(
        "intercept/faults.py",
        "                raise refused_data(managed)\n",
        "                return\n",
        WITHIN + "test_data_that_is_set_within_a_forward_is_an_error_that_says_what_to_write[its module-fp32-host]",
    ),
    "as a measured forward (the first one) sees it": Mutation(
        "intercept/faults.py",
        "    if func != set_data or not isinstance(args[0], (Watched, Bound)):",
        "    if False:",
        WITHIN + "test_a_tensor_that_gets_the_memory_of_a_weight_by_data_writes_to_it_or_is_an_error[host]",
    ),
    "`torch.utils.swap_tensors(p, other)` (an average": Mutation(
        "intercept/faults.py",
        "            self._bindings.exposed.add(managed)\n            self._runtime.writes.touched.add(managed)\n",
        "",
        EXCHANGED + "test_averages_that_are_swapped_in_for_an_evaluation_come_out_again[off-fp32-nvme]",
    ),
    "| within a forward or backward | `torch.utils.swap_tensors(p, other)`": Mutation(
        "intercept/faults.py",
        "                refuse_exchange()\n",
        "                pass\n",
        EXCHANGED + "test_a_swap_that_cannot_be_served_is_refused_and_nothing_is_lost[host]",
        costly=True,
    ),
    "several weights set to parts of one tensor": Mutation(
        "engine/write_check.py",
        "        alone = storage_references(get_data(within[0].parameter)) == len(within) + 2",
        "        alone = True",
        EXCHANGED + "test_several_weights_in_memory_that_is_held_are_refused[by_vector-before a forward-host]",
        costly=True,
    ),
    "`p.data = other_weight.data`, left so": Mutation(
        "engine/write_check.py",
        "if source not in (None, managed) and not _is_replaced(source):",
        "if False:",
        WITHIN + "test_a_weight_that_is_left_the_memory_of_another_outside_of_forwards_is_an_error[host]",
    ),
    # ---- What else programs do with weights
    "`while_loop`": Mutation(
        "intercept/diagnostics.py",
        'if type(error).__name__ == "UncapturedHigherOrderOpError" and',
        "if False and",
        "tests/intercept/test_control_flow.py::test_managed_modules_as_branches_are_an_error_that_says_what_works[host]",
        costly=True,
    ),
    "`load_state_dict()` in a forward": Mutation(
        "intercept/hooks.py",
        "if hooked.runtime.bindings.away and hooked.computes():",
        "if False:",
        "tests/intercept/test_identity.py::"
        "test_a_state_dict_within_compute_is_refused_where_weights_are_copies[register_forward_hook-host]",
    ),
    "`torch.save(model)`": Mutation(
        "intercept/hooks.py",
        'return getattr, (nullcontext(), "__exit__")  #',
        "return object.__reduce__(self)  #",
        "tests/intercept/test_identity.py::test_pickled_models_come_back_equal[torch.save-resident]",
    ),
    "`save_on_cpu` around a model": Mutation(
        "intercept/saved_tensors.py",
        "given.data = managed.home.as_strided(place.size, place.stride, place.offset)",
        "pass",
        "tests/intercept/test_saved_by_others.py::"
        "test_weights_that_hooks_of_the_user_keep_take_nothing_of_the_device[host-save_on_cpu-fp32]",
    ),
    "`ctx.w = w`": Mutation(
        "engine/param_views.py",
        "            weight.data = managed.rest\n            weight.__class__ = managed.watched_kind\n",
        "            weight.data = managed.rest\n",
        "tests/intercept/test_saved_by_others.py::test_a_function_that_keeps_weights_on_its_context_finds_them[bf16-host]",
    ),
    "`module.to(dtype)` in forward": Mutation(
        "intercept/diagnostics.py",
        "if asked != dtype and computes and mixed:",
        "if False:",
        "tests/intercept/test_conversions.py::"
        "test_a_module_that_casts_its_weights_in_forward_computes_or_is_told_what_to_write[host]",
    ),
    "`jacrev`": Mutation(
        "intercept/interceptor.py",
        "runtime.sanitize, torch_private.transform_level() is not None",
        "runtime.sanitize, False",
        OTHERS + "test_derivatives_by_transforms_have_the_bits_of_torch[kernel-host]",
    ),
    "`functional_call` with other tensors": Mutation(
        "intercept/diagnostics.py",
        'if any(name.partition(" ")[0] in names for name in unmanaged):',
        "if False:",
        OTHERS + "test_functional_code_over_detached_weights_has_the_bits_of_torch_or_is_told_what_to_write[bf16-host]",
    ),
    "parameters made after `manage`": Mutation(
        "optim/states.py",
        "if found is None and (added := registry.added_as(parameter)) is not None:",
        "if False:",
        OTHERS + "test_an_optimizer_over_parameters_that_were_added_names_them",
    ),
    # ---- Gradients
    "`p.grad` after `backward()` is the true gradient": "read gradients before they have arrived",
    "of functions that read or write `p.grad` in a backward": "let hooks use gradients in flight",
    "What the program writes to `p.grad` between": Mutation(
        "engine/gradient_watch.py",
        "            if is_shared(managed.grad_home):\n",
        "            if False:\n",
        "tests/engine/test_gradients.py::"
        "test_edits_that_count_no_version_reach_gradients_of_which_a_copy_is_staged[by_a_kept_view]",
    ),
    "Without `zero_grad()`": "add to no gradient that a step has used up, and say nothing",
    "A program that overlap cannot serve": Mutation(
        "memory/hidden_gradient.py",
        "        raise RuntimeError(found[0].refused(func))\n",
        "        return torch.zeros(())\n",
        EDITS + "test_a_program_that_clips_gradients_itself_is_refused_before_an_update",
    ),
    # ---- Threads and views
    "on another thread waits for its turn": Mutation(
        "engine/runtime.py",
        "            self._wait(section, lambda: self._queue[0] is section and self._is_free())",
        "            pass",
        THREADS
        + "test_what_comes_within_a_forward_or_a_backward_of_another_thread_is_as_after_it[evaluated-fp32-resident]",
    ),
    "half updated": Mutation(
        "engine/runtime.py",
        "if ready is None or ready():",
        "if True:",
        THREADS
        + "test_between_a_backward_that_updates_and_its_step_nothing_computes_with_these_weights[host-backward]",
    ),
    "Threads that wait for each other": Mutation(
        "engine/runtime.py",
        "it waits for {other}:",
        "it waits:",
        THREADS + "test_threads_that_wait_for_each_other_get_an_error_that_names_both",
        costly=True,
    ),
    "A view of a weight from before `manage`": "manage a model that keeps a view of a weight",
    "A view that is kept within a forward": Mutation(
        "engine/runtime.py",
        "            if key != STEP:\n                self.uses.renew_held_copies()\n",
        "            if key != STEP:\n",
        "tests/intercept/test_kept_views.py::test_a_view_that_a_module_keeps_shows_the_weight_as_it_is[detached-reads-off-host]",
    ),
    "A raw pointer to a weight": "bind a module's weights for one function instead of its call",
    "made by `fork()`": Mutation(
        "intercept/registry.py",
        "interception.runtime.bindings.lose(InForkedChild)",
        "pass",
        "tests/memory/test_host_memory.py::test_a_worker_that_reads_the_model_is_told_why_it_cannot",
    ),
    # ---- Memory, errors, interrupts
    "No tier holds more than its budget": "keep homes on the device when an operator needs their memory",
    "What is kept for reports takes at most 8 MiB": Mutation(
        "base/packed_log.py",
        "        self._memory = mmap(-1, most * self._width,",
        "        self._most *= 100\n        self._memory = mmap(-1, self._most * self._width,",
        "tests/report/test_history.py::test_steps_whose_entries_are_dropped_remain_in_the_history_and_sums_are_exact",
    ),
    "The anonymous memory of the process grows by no more": Mutation(
        "memory/heap.py",
        '    _call("mallopt", _M_MMAP_THRESHOLD, MAPPED_BYTES)\n',
        "",
        "tests/test_process_memory.py::test_large_tensors_of_a_process_that_manages_a_model_are_not_in_the_heap",
    ),
    "Building a class that `@managed` decorates": Mutation(
        "placing/building_memory.py",
        "        memory = self._take(nbytes)\n",
        "        return\n",
        "tests/engine/test_building.py::test_what_no_tier_has_room_for_is_refused_while_it_is_built",
    ),
    "An error of a disk": "update twice when a failed step is repeated",
    "Loading a checkpoint changes everything or nothing": Mutation(
        "checkpoint/save_load.py",
        "    file.check(lambda name: optimizer is not None or not name.startswith(OPTIMIZER), sharing.part)\n",
        "",
        "tests/checkpoint/test_all_or_nothing.py::test_a_flipped_bit_of_any_tensor_is_seen[host]",
    ),
    "A checkpoint or a file of weights that was changed": Mutation(
        "checkpoint/save_load.py",
        "    problems += _refused_by_the_model(state, header)\n",
        "",
        HOSTILE + "test_a_lie_is_refused_by_its_place[plain-an object that is a tied parameter's]",
    ),
    "goes through nothing that others have put there": Mutation(
        "base/whole_files.py",
        "os.open(path, _NEW, 0o666)",
        "os.open(path, os.O_RDWR | os.O_CREAT, 0o666)",
        "tests/test_whole_files.py::test_nothing_is_written_through_what_lies_beside[checkpoint]",
    ),
    "runs no code but that of transformers": Mutation(
        "planner/hugging_face/offline.py",
        "    if event in _REFUSED and ",
        "    if False and ",
        "tests/planner/test_configurations.py::"
        "test_within_offline_the_network_and_questions_are_refused_on_this_thread_alone",
        costly=True,
    ),
    "taken whole, or refused with the name of a key": Mutation(
        "report/files.py",
        "        check_report(data)\n",
        "        pass\n",
        "tests/test_hostile_files.py::test_a_changed_file_is_taken_whole_or_refused_with_the_name_of_a_key[report-25]",
    ),
    "A plan that was kept": Mutation(
        "tools/plan_cache.py",
        " and not found.st_mode & 0o022",
        "",
        "tests/planner/test_commands.py::test_what_others_may_write_is_not_used",
    ),
    "Ctrl-C is raised at the next module": Mutation(
        "memory/interrupts.py",
        "        if not (self.depth or self.segments):\n            self._deliver()\n",
        "        if True:\n            self._deliver()\n",
        "tests/memory/test_interrupts.py::test_one_within_comes_at_the_end",
    ),
    "try a smaller batch": Mutation(
        "schedule/tracer.py",
        "            self.book.forget(key)\n",
        "            pass\n",
        "tests/faults/test_shortage.py::test_what_a_batch_without_room_needed_is_not_kept_for_smaller_ones",
    ),
    "`hetmem.chunked_loss` is the model's own loss": Mutation(
        "losses.py",
        "        if logits is not None:\n            of_logits",
        "        if False:\n            of_logits",
        "tests/models/test_chunked_loss.py::test_it_is_the_loss_of_the_model_with_its_gradients[Gemma2-None]",
    ),
    "A first step without room on the device": Mutation(
        "planner/rehearsal.py",
        "        return size\n\n    def _sized",
        "        return small\n\n    def _sized",
        "tests/faults/test_shortage.py::test_one_message_says_what_the_whole_step_needs[True]",
    ),
    "An optimizer state that lacks entries": Mutation(
        "optim/optimizer.py",
        "                stepper.refuse_incomplete(members)\n",
        "                pass\n",
        "tests/engine/test_optimizers.py::"
        "test_incomplete_states_are_refused_by_name_before_anything_is_updated[AdamW-host]",
    ),
    "over unmanaged parameters": Mutation(
        "optim/state_pass.py",
        "        self._write_states(passed)\n\n    def _write_states",
        "        passed.written = True\n\n    def _write_states",
        "tests/optim/test_unmanaged.py::test_twenty_steps_have_the_bits_of_torchs_fused_adamw[torch.float32-nvme]",
    ),
    "The NVMe file has mode 0600": Mutation(
        "memory/nvme_io.py",
        "tempfile.TemporaryFile(buffering=0, dir=directory)",
        "tempfile.NamedTemporaryFile(buffering=0, dir=directory, delete=False)",
        "tests/memory/test_nvme_lifetime.py::test_close_finishes_what_was_started_and_leaves_neither_threads_nor_files",
    ),
    "the identity of every parameter stay": Mutation(
        "engine/param_views.py",
        "        managed.stand_in = managed.rest = stand_in(home, ",
        "        managed.stand_in = managed.rest = stand_in(home[:0], ",
        "tests/intercept/test_identity.py::test_parameters_keep_shape_and_dtype_inside_forward[host]",
    ),
}
"""By words that stand in its row and no other: a fault of its own, or the name of one in `test_mutations`."""
