"""The tests see the faults that lose data: each of these makes the test beside it fail.

The test is run in a process of its own, in which functions of one module have the code of a text with one line changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.cuda.shim import GPP
from tests.forked import ROOT, Ended, Forks
from tests.pairs import case
from tests.promises import PROMISES, Mutation

STORIES = "tests/schedule/test_residency.py::"
BITS = "tests/intercept/test_bit_equality.py::"
COPIES = "tests/engine/test_home_copies.py::"
SMALL = "tests/optim/test_small_states.py::"
EXCHANGED = "tests/engine/test_exchanged_tensors.py::test_weights_that_are_exchanged_for_good_are_trained"
UNSEEN = "tests/engine/test_unseen_writes.py::"
SHARE = "tests/engine/test_share.py::"
TURNS = "tests/accumulation/test_accumulate.py::"
OF_RANKS = "tests/ranks/test_bits.py::test_weights_gradients_and_states_are_those_of_plain_torch["
FAILURES = "tests/ranks/test_failures.py::"


MUTATIONS = {
    "skip a write-back to NVMe": Mutation(
        "memory/transfer.py",
        "self._submit(tag, partial(self._nvme().write, extent, source), Link.NVME_WRITE, len(source))",
        "self._finished.put(Finished(tag))",
        BITS + "test_the_least_staging_gives_the_same_bits[fp32]",
    ),
    "skip the write-back of what an operator wrote": Mutation(
        "engine/write_check.py",
        "_copy_changes(home, source), home.nbytes",
        "None, home.nbytes",
        "tests/engine/test_writes_within_steps.py::test_writes_inside_forward_are_kept[mul_-host]",
    ),
    "leave weights unwatched after a forward in which the model left the device": Mutation(
        "engine/parameter_marks.py",
        "        self._watches |= self._writes.has_copies  # also if homes have left the device meanwhile\n",
        "",
        "tests/engine/test_leaving.py::"
        "test_a_write_that_counts_no_version_is_kept_after_a_forward_in_which_the_model_left[float32]",
    ),
    "take a swap for data that was set": Mutation(
        "engine/write_check.py",
        "at_home = parameter.data_ptr() == managed.home_address and parameter.__dict__ is managed.own",
        "at_home = parameter.data_ptr() == managed.home_address or parameter.__dict__ is not managed.own",
        EXCHANGED + "[with_another-off-bf16-host]",
    ),
    "pass no border on in the backwards of micro-batches": Mutation(
        "accumulation/order.py",
        "            for _ in range(times):\n                self._baton.pass_on(number)\n",
        "            pass\n",
        TURNS + "test_layers_are_passed_by_all_micro_batches_in_order_forth_and_back",
    ),
    "run micro-batches in the order m … 1": Mutation(
        "accumulation/call.py",
        "self._baton.run(range(len(self._batches)))",
        "self._baton.run(range(len(self._batches))[::-1])",
        TURNS + "test_layers_are_passed_by_all_micro_batches_in_order_forth_and_back",
    ),
    "send a sum of gradients before the last micro-batch": Mutation(
        "engine/summed_gradients.py",
        "_Sum(managed.grad_home, arrived, self._expected[managed] - 1)",
        "_Sum(managed.grad_home, arrived, self._expected[managed] - 2)",
        "tests/accumulation/test_sums.py::test_gradients_cross_the_link_once_for_eight_micro_batches[all copies-fp32]",
    ),
    "leave the autocast of the caller out of the threads of micro-batches": Mutation(
        "accumulation/surroundings.py",
        "            torch.set_autocast_enabled(kind, enabled)\n",
        "",
        TURNS + "test_autocast_of_the_caller_or_of_each_forward_changes_no_bit[plain-around]",
    ),
    "swallow the error of a micro-batch": Mutation(
        "accumulation/call.py",
        "self._errors.append(error)",
        "pass",
        TURNS + "test_an_error_of_one_ends_all_is_raised_once_and_the_next_call_is_right[forward-0-FaultError--plain]",
    ),
    "drop a dirty copy": Mutation(
        "schedule/residency.py",
        "copy.dirty = copy.load = True",
        "copy.load = True",
        STORIES + "test_a_dirty_copy_is_dropped_only_once_its_write_is_done",
    ),
    "miss a use count of a copy that is there": Mutation(
        "schedule/residency.py",
        "            copy.uses += 1\n            copy.last_use = ledger.tick\n            self._supply",
        "            copy.last_use = ledger.tick\n            self._supply",
        STORIES + "test_a_miss_is_one_fetch_and_a_hit_is_nothing",
    ),
    "miss the use count of a feed": Mutation(
        "schedule/ledger.py",
        "self.caches[HOST].copies[block].uses += 1",
        "pass",
        STORIES + "test_staging_is_kept_while_it_feeds_the_device",
    ),
    "forget who holds a weight after its operator": Mutation(
        "engine/uses.py",
        "                if managed not in self._held:\n                    self._held[managed] = None\n",
        "                if False:\n                    pass\n",
        "tests/engine/test_writes_within_steps.py::test_writes_inside_forward_are_kept[view-host]",
    ),
    "give up a copy before its write is done": Mutation(
        "schedule/cache.py",
        "(copy.dirty and (copy.writing or least is not None))",
        "(copy.dirty and least is not None)",
        STORIES + "test_a_copy_on_its_way_home_is_neither_given_up_nor_written_again",
    ),
    "read before the write is done": Mutation(
        "schedule/ledger.py",
        "        copy.writing = True\n        self.caches",
        "        copy.dirty = False\n        self.caches",
        STORIES + "test_a_copy_on_its_way_home_is_neither_given_up_nor_written_again",
    ),
    "use a copy before its fetch is done": Mutation(
        "schedule/ledger.py",
        "copy.state = LOADING",
        "copy.state = VALID",
        STORIES + "test_a_miss_is_one_fetch_and_a_hit_is_nothing",
    ),
    "join threads while garbage is collected": Mutation(
        "engine/runtime.py",
        "    engine.abandon()\n",
        "    engine.close()\n",
        "tests/intercept/test_dropped.py::test_collecting_a_dropped_model_joins_no_thread[host]",
    ),
    "compute before a copy has arrived": Mutation(
        "engine/executor.py",
        "        return self._engine.order_compute_after(fetch)\n",
        "        return True\n",
        "tests/engine/test_streams.py::test_training_equals_torch_however_late_copies_are[None-fp32-host]",
    ),
    "copy into a slot that compute still reads": Mutation(
        "engine/executor.py",
        "        self._compute_marks[slot] = self._engine.mark()\n",
        "        pass\n",
        "tests/engine/test_streams.py::test_a_copy_comes_after_the_last_use_of_its_slot[host-fp32-off]",
    ),
    "read gradients before they have arrived": Mutation(
        "engine/gradient_watch.py",
        "self._executor.wait_while(lambda: self.sends.under_way)",
        "pass",
        "tests/engine/test_streams.py::test_training_equals_torch_however_late_copies_are[None-fp32-host]",
    ),
    "let hooks use gradients in flight": Mutation(
        "engine/gradients.py",
        "            traffic.gradients.wait()\n        except Exception:\n",
        "            pass\n        except Exception:\n",
        "tests/engine/test_gradients_in_flight.py::test_a_hook_that_uses_a_gradient_in_flight_waits_for_it[host]",
    ),
    "let hooks write to gradients of which a copy is staged again": Mutation(
        "engine/handed_out_gradients.py",
        "if chunk not in watched or end_watch_of(chunk):",
        "if chunk not in watched:",
        "tests/engine/test_gradients_in_flight.py::"
        "test_a_hook_writes_to_a_gradient_of_a_chunk_that_got_another_since_it_did_last",
    ),
    "round the 16-bit copy down": Mutation(
        "cpu/loops.py",
        "np.uint32(np.uint32(bits + odd) + np.uint32(0x7FFF))",
        "np.uint32(bits + odd)",
        "tests/cpu/test_kernels.py::test_numba_is_what_runs_here",
    ),
    "fetch from a home that is being written": Mutation(
        "schedule/supply.py",
        "        self._suspended |= {*blocks}\n",
        "",
        "tests/optim/test_overlap.py::test_the_next_forward_runs_while_updates_do[host]",
    ),
    "update before the gradients have arrived": Mutation(
        "optim/update_queue.py",
        "on_their_way and not on_their_way.keys().isdisjoint(update.chunks)",
        "False",
        "tests/optim/test_overlap.py::test_gradients_that_arrive_behind_the_backward_are_waited_for",
    ),
    "count a step that failed": Mutation(
        "optim/chunk_update.py",
        "            state.update(before)\n",
        "            state.update(before | {'step': before['step'] + 1})\n",
        "tests/faults/test_step_retry.py::test_a_step_of_which_a_tile_fails_in_staging_is_repeated[tasks that update]",
    ),
    "clip by nothing": Mutation(
        "optim/optimizer.py",
        "return unscale * clip_factor(self.grad_norm, self.max_grad_norm)",
        "return unscale",
        "tests/optim/test_clipping.py::test_clipping_equals_a_clip_of_plain_gradients[off-fp32-host]",
    ),
    "leave parameters in staging at the end of a step": Mutation(
        "optim/step.py",
        "        self.runtime.traffic.wait_until_written(homes)\n",
        "",
        "tests/optim/test_overlap.py::test_parameters_can_be_read_as_soon_as_a_step_is_over[backward]",
    ),
    "invalidate the device before staging": Mutation(
        "engine/traffic.py",
        "for tier in (Tier.HOST, Tier.DEVICE):  # in this order",
        "for tier in (Tier.DEVICE, Tier.HOST):  # in this order",
        "tests/engine/test_traffic.py::test_what_the_device_is_fed_while_an_old_copy_is_waited_for_is_old_too",
    ),
    "overlook what GradScaler writes to gradients on NVMe": Mutation(
        "engine/handed_out_gradients.py",
        " or end_watch_of(chunk):\n",
        ":\n",
        "tests/optim/test_clipping.py::test_the_gradient_scaler_of_torch_works[nvme]",
    ),
    "overlook memory of a weight that was shared past torch's functions": Mutation(
        "engine/parameter_marks.py",
        ", *writes.copied()",
        "",
        "tests/engine/test_unseen_writes.py::test_a_tensor_that_shares_memory_for_long_is_written_to_once_and_dropped"
        "[past_functions-bf16-a third of them-forward]",
    ),
    "overlook hooks of a weight that the last backward did not reach": Mutation(
        "engine/working_gradients.py",
        "        for hook in before:\n",
        "        for hook in ():\n",
        "tests/engine/test_gradients.py::test_hooks_and_gradients_of_others_that_come_between_backwards[nvme]",
    ),
    "step with a gradient that the program has zeroed since": Mutation(
        "optim/members.py",
        "at_home = [*map(and_, at_home, map(not_, zeroed))]",
        "at_home = [*map(and_, at_home, map(bool, at_home))]",
        "tests/optim/test_clipping.py::test_a_norm_counts_gradients_that_are_dropped_zeroed_or_replaced_behind_the_backward",
    ),
    "update from where the gradients of the step before were": Mutation(
        "cpu/adamw.py",
        "table[:, _GRADIENT_COLUMN] += shifts[owner]",
        "table[:, _GRADIENT_COLUMN] += 0 * shifts[owner]",
        "tests/engine/test_gathered_gradients.py::test_chunks_that_get_other_gradients_have_the_bits_of_torch",
    ),
    "let a gradient in lent memory be summed in 16 bits": Mutation(
        "engine/gradients.py",
        "        if dtype is not None and (adds or",
        "        if dtype is not None and (",
        "tests/optim/test_arriving_bits.py::test_a_second_gradient_is_added_in_float32",
    ),
    "undo a step of torch by a copy that a view holds": Mutation(
        "engine/write_check.py",
        "if self._traffic.copy_counts(managed.chunk) and managed not in self.touched:",
        "if self._traffic.copy_counts(managed.chunk):",
        "tests/intercept/test_kept_views.py::"
        "test_a_step_of_torch_that_a_drive_did_not_let_be_noted_is_not_undone_by_data_that_a_module_keeps",
    ),
    "update twice when a failed step is repeated": Mutation(
        "optim/step.py",
        "                if not update.begun:\n                    self._add_update(update, grad_scale)\n",
        "                self._add_update(update, grad_scale)\n",
        "tests/faults/test_step_retry.py::test_a_step_that_is_repeated_after_a_fault_updates_every_chunk_once",
    ),
    "update a group that is whole on the device twice when that of another one failed": Mutation(
        "optim/optimizer.py",
        "                stepper.mark_corrupt(update.members.managed)\n",
        "                pass\n",
        "tests/optim/test_whole_step.py::"
        "test_a_step_that_fails_in_its_first_group_is_repeated_and_in_a_later_one_refused",
    ),
    "update tiles twice when others of their chunk failed": Mutation(
        "optim/update_queue.py",
        "update.writes and any(home.tier is not Tier.NVME for home in homes)",
        "False",
        "tests/faults/test_tile_failures.py::"
        "test_a_chunk_that_was_half_updated_at_home_is_lost_until_a_checkpoint_is_loaded[host-off-adamw]",
    ),
    "start a parameter's scales where another's end": Mutation(
        "memory/chunk.py",
        " + self.chunk.parameters.index(self)",
        "",
        SMALL + "test_the_bits_are_those_of_the_kernels_wherever_states_live[8-bit moments-off-nvme]",
    ),
    "leave a 16-bit copy at home as it was before the user wrote": Mutation(
        "engine/write_check.py",
        "            managed.recast(managed.home)\n",
        "            pass\n",
        COPIES + "test_what_another_optimizer_writes_is_in_the_copies[host]",
    ),
    "keep the copies of weights that the user may have written to after a step": Mutation(
        "engine/write_check.py",
        "        self._renew(due)\n",
        "",
        UNSEEN + "test_after_a_step_of_others_they_do_so_too[off-all copies]",
    ),
    "add to no gradient that a step has used up, and say nothing": Mutation(
        "engine/working_gradients.py",
        "                clear_consumed(managed.parameter)\n",
        "                parameter.grad = None\n",
        UNSEEN + "test_a_forgotten_zero_grad_adds_up_as_in_torch_or_is_an_error[backward-fp32-host]",
    ),
    "begin with states that another optimizer has loaded": Mutation(
        "optim/update_pass.py",
        "if home.written or not home.untouched:",
        "if not home.untouched:",
        "tests/optim/test_update_queue.py::test_states_begin_at_zero_where_another_optimizer_has_loaded_some",
    ),
    "leave a tile out": Mutation(
        "cpu/adamw.py",
        "np.zeros(1, np.int64), *samples), self._runs)",
        "np.ones(1, np.int64), *samples), self._runs)",
        "tests/cpu/test_kernels.py::test_tiles_and_threads_do_not_change_a_bit[1]",
    ),
    "update no 16-bit copy at home": Mutation(
        "optim/update_pass.py",
        "copy = opened.get(Role.COMPUTE)",
        "copy = None",
        COPIES + "test_training_equals_torch[off-host-1]",
    ),
    "make no 16-bit copies at home to begin with": Mutation(
        "placing/filling.py",
        "    managed.recast(home)\n",
        "",
        COPIES + "test_a_copy_lies_in_host_memory_beside_its_parameters_or_nowhere",
    ),
    "move a home without what lies there": Mutation(
        "placing/rehome.py",
        "self._runtime.traffic.engine.copy_now(link, work, nbytes)",
        "pass",
        SHARE + "test_the_bits_are_those_of_plain_torch[off-bfloat16-host]",
    ),
    "move a home of which somebody holds a view": Mutation(
        "placing/rehome.py",
        "    return storage_references(managed.home) > managed.home_references\n",
        "    return False\n",
        SHARE + "test_a_chunk_whose_weights_somebody_holds_does_not_move",
    ),
    "show states where they were before they moved": Mutation(
        "optim/states.py",
        "shown.data = home",
        "pass",
        SHARE + "test_tensors_that_users_hold_of_gradients_and_states_stay_the_real_ones[float32]",
    ),
    "measure a backward as the evaluation before it": Mutation(
        "intercept/phases.py",
        "if trains or not self._pending:",
        "if True:",
        "tests/engine/test_shapes.py::"
        "test_an_evaluation_between_forward_and_backward_changes_nothing_that_is_expected[new]",
    ),
    "keep homes on the device when an operator needs their memory": Mutation(
        "engine/device_limit.py",
        "self.give_way(missing)",
        "pass",
        SHARE + "test_homes_go_back_when_a_larger_batch_needs_their_memory[1-float32-host]",
    ),
    "forget to look again at what a disk was reading": Mutation(
        "engine/traffic.py",
        "while self.residency.state(block, tier) in _LOADING and self.residency.in_flight():",
        "while False:",
        "tests/engine/test_user_writes.py::test_writes_while_a_disk_reads_what_was_there_before_reach_the_next_evaluation",
    ),
    "give a slot away although compute still uses a superseded copy there": Mutation(
        "engine/traffic.py",
        "(slot := self.residency.slot_taken(block, Tier.DEVICE)) >= 0:",
        "(slot := self.residency.slot_taken(block, Tier.DEVICE)) >= 0"
        " and self.residency.state(block, Tier.DEVICE) in (CopyState.VALID, CopyState.LOADING):",
        "tests/engine/test_streams.py::test_a_copy_comes_after_the_last_use_of_its_slot[host-fp32-backward]",
    ),
    "clip by squares of gradients that have changed since": Mutation(
        "optim/arrived_squares.py",
        "if not all(part.at_home for part in update.parts) or {*map(type, update.gradients)} != {HiddenGradient}:",
        "if False:",
        "tests/optim/test_clipping.py::test_a_norm_counts_gradients_that_are_dropped_zeroed_or_replaced_behind_the_backward",
    ),
    "update a state while the disk is still writing it": Mutation(
        "engine/traffic.py",
        " and not residency.writing(home.block)",
        "",
        "tests/optim/test_update_queue.py::test_no_update_changes_what_the_disk_is_still_writing",
    ),
    "bind a module's weights for one function instead of its call": Mutation(
        "intercept/leases.py",
        "        for managed in used:\n            managed.bound += 1\n        if self.casts.alive:\n",
        "        call.used = []\n        self._uses.end_call(used)\n        if self.casts.alive:\n",
        "tests/intercept/test_pointers.py::test_an_extension_in_cpp_that_keeps_the_address_of_a_weight_finds_it_there",
    ),
    "manage a model that keeps a view of a weight": Mutation(
        "placing/build.py",
        "> len(names) + 1 and",
        "> len(names) + 99 and",
        "tests/intercept/test_kept_views.py::test_a_view_from_before_manage_is_refused_by_name[kept]",
    ),
    "look at every weight in each call of a module": Mutation(
        "intercept/leases.py",
        "        keys = (*map(id, module._parameters.values()),)\n",
        "        keys = (*map(id, module._parameters.values()),)\n"
        "        for each in self._by_id:\n            id(each)\n",
        "tests/intercept/test_call_counts.py::test_a_checkpointed_backward_costs_what_is_used_and_not_what_there_is",
    ),
    "divide the gradients of ranks in another way": Mutation(
        "engine/ranked_gradients.py",
        "whole.to(managed.chunk.dtype) / self._ranks.of_all",
        "whole.to(managed.chunk.dtype) * (1 / self._ranks.of_all)",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "take the mean over the ranks that have come": Mutation(
        "engine/ranked_gradients.py",
        "whole.to(managed.chunk.dtype) / self._ranks.of_all",
        "whole.to(managed.chunk.dtype) / int((self._ranks.words.entered >= self._turns.backward).sum())",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "pass the turn of a rank as its copy is submitted": Mutation(
        "schedule/turns.py",
        "        self._adding[parameter] += count\n",
        "        self._adding[parameter] += count\n        self._words.passed[self._rank][parameter] = self.backward\n",
        "tests/ranks/test_turns.py::test_a_rank_waits_for_lower_ranks_and_begins_when_all_are_there",
    ),
    "have no rank compute a tile": Mutation(
        "ranks/group.py",
        "return (chunk + tile) % self.count == self.rank",
        "return (chunk + tile) % self.count == self.rank != 0",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "have two ranks compute a tile": Mutation(
        "ranks/group.py",
        "return (chunk + tile) % self.count == self.rank",
        "return (chunk + tile) % self.count in (self.rank, self.rank - 1)",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "zero states on ranks that do not compute them": Mutation(
        "optim/update_pass.py",
        "        if ranks is None:\n            state.zero_()\n            return\n",
        "        state.zero_()\n        return\n",
        "tests/ranks/test_bits.py::test_states_are_zeroed_by_the_ranks_that_compute_them",
        costly=True,
    ),
    "close an update before the other ranks are done": Mutation(
        "optim/update_queue.py",
        "if self._of_ranks is not None and not failed:",
        "if False:",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "lose a private write": Mutation(
        "engine/ranked_writes.py",
        "mapping.bring_home(np.array_split(pages, ranks.count)[ranks.rank].tolist())",
        "mapping.bring_home(np.array_split(pages[1:], ranks.count)[ranks.rank].tolist())",
        OF_RANKS + "3-names1]",
        costly=True,
    ),
    "take the write of one rank for that of all": Mutation(
        "engine/ranked_writes.py",
        "if len(self.pages) and (counts == counts[0]).all() and (mine == mine[0]).all():",
        "if True:",
        "tests/ranks/test_peers.py::test_what_differs_and_who_is_missing_is_an_error_by_name",
        costly=True,
    ),
    "count waits for writes as those of a step": Mutation(
        "ranks/group.py",
        "self._all_count(self.words.brought, what)",
        "self.meet(what)",
        "tests/ranks/test_random_programs.py::test_ranks_have_the_bits_of_plain_torch[0:8]",
        costly=True,
    ),
    "wait for other ranks without a name": Mutation(
        "ranks/waits.py",
        'each._words.set_place(rank, f"{where}, awaits {what}")',
        "each._words.set_place(rank, where)",
        "tests/ranks/test_turns.py::test_ranks_that_wait_for_each_other_are_an_error_that_says_where_they_are",
    ),
    "save what a step has half changed": Mutation(
        "ranks/saves.py",
        "                self._refuse_half_stepped()\n",
        "",
        FAILURES + "test_others_are_told_and_the_last_step_can_be_saved[update-1]",
        costly=True,
    ),
    "evict a copy of which a call has handed a view out": Mutation(
        "engine/param_views.py",
        "        return are_held(used)\n",
        "        return False\n",
        "tests/engine/test_bindings.py::test_a_copy_stays_as_long_as_a_view_of_it_that_a_call_has_handed_out",
    ),
    "carry commands out before those given earlier": Mutation(
        "engine/executor.py",
        "carry_out(waiting.popleft())",
        "carry_out(waiting.pop())",
        "tests/engine/test_command_order.py::test_no_command_overtakes_one_that_was_given_before_it",
    ),
}

FAULTS = MUTATIONS | {f"break: {row}": fault for row, fault in PROMISES.items() if isinstance(fault, Mutation)}


MUTATED = """
import os
import sys

import numba
import pytest

from hetmem.ranks import launch
from tests import mutated

path, before, after, kernels, *tests = sys.argv[1:]
if path:
    mutated.install(path, before, after)
    launch.START[:] = ["fork"]
if kernels:
    numba.config.CACHE_DIR = kernels
options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=native"]  # other tracebacks parse each source that they show
status = pytest.main([*options, "--all-cases", *tests])
sys.stdout.flush()
os._exit(status)  # what is left is to be dropped piece by piece otherwise
"""


def module_of(file: str) -> str:
    return file.partition("::")[0].removesuffix(".py").replace("/", ".")


@pytest.fixture(scope="module")
def prepared(forks: Forks) -> Iterator[Forks]:
    """Processes that have imported all that is mutated and all tests that see it."""
    files = {"hetmem/" + mutation.file for mutation in FAULTS.values()} | {each.test for each in FAULTS.values()}
    with forks.that_import("tests.conftest", *sorted(map(module_of, files)), "tests.mutated") as prepared:
        yield prepared


def run(
    prepared: Forks, tests: Iterable[str], directory: Path, file: str = "", before: str = "", after: str = ""
) -> Ended:
    """`tests` with the text `after` in the place of `before`, which is in `file`."""
    path = str(ROOT / "hetmem" / file) if file else ""
    kernels = str(directory) if file.startswith("cpu/") else ""  # those compiled before are of what was before
    given = [path, before, after, kernels, *tests]
    basetemp = f"--basetemp={directory / 'tests'}"
    return prepared.run(MUTATED, *given, basetemp, environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, seconds=1200)


def test_each_promise_has_a_fault() -> None:
    """Words of `PROMISES` are in one row of docs/guarantees.md each, and each row has some."""
    lines = (ROOT / "docs/guarantees.md").read_text().splitlines()
    heads = [number - 1 for number, line in enumerate(lines) if line.startswith("|---")]
    rows = [line for number, line in enumerate(lines) if line.startswith("| ") and number not in heads]
    found = {words: [row for row in rows if words in row] for words in PROMISES}
    assert {words: len(where) for words, where in found.items() if len(where) != 1} == {}
    assert set(rows) - {row for where in found.values() for row in where} == set(), "rows without a fault"
    assert {fault for fault in PROMISES.values() if isinstance(fault, str)} <= MUTATIONS.keys()


def test_each_fault_changes_one_line_that_is_there() -> None:
    changed = [name for name, fault in FAULTS.items() if _source(fault).count(fault.before) != 1]
    assert changed == [], "the source has changed: mend these mutations"


def _source(fault: Mutation) -> str:
    return (ROOT / "hetmem" / fault.file).read_text()


@pytest.mark.parametrize(
    "name", [case(name, nightly=FAULTS[name].costly or at % 3 > 0) for at, name in enumerate(sorted(FAULTS))]
)
def test_the_fault_is_seen(name: str, prepared: Forks, tmp_path: Path) -> None:
    mutation = FAULTS[name]
    if "_in_cpp_" in mutation.test and GPP is None:
        pytest.skip("g++ is not installed")
    source = _source(mutation)
    mutated = source.replace(mutation.before, mutation.after)
    ended = run(prepared, [mutation.test], tmp_path, mutation.file, source, mutated)
    assert ended.returncode == 1, f"{mutation.test} does not see it:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    assert " failed" in ended.stdout, ended.stdout[-2000:]


@pytest.mark.nightly
def test_without_a_fault_they_pass(prepared: Forks, tmp_path: Path) -> None:
    """Else they would see anything. Outside of forks they run beside this."""
    ended = run(prepared, sorted({mutation.test for mutation in FAULTS.values()}), tmp_path)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
