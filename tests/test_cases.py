"""Which test holds each case that people reported about neighbouring systems (placement, paging, resuming).

The number is the one that the tests' docstrings name as ``CASES n``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("offload is not all or nothing: any budget, within a block", (
        "runtime/test_budgets.py::test_every_budget_is_honoured_and_used_to_within_a_block",
        "pool/test_state_placement.py::test_every_budget_is_kept_and_used_to_within_one_block",
    )),
    2: ("the first Adam step needs no more than the others", (
        "runtime/test_pool_memory.py::test_the_first_step_takes_no_more_than_the_others",
        "pool/test_pooled_optimizer.py::test_what_is_held_on_the_device_is_what_was_booked",
    )),
    3: ("bytes mapped are bytes booked", (
        "runtime/test_pool_memory.py::test_the_hosts_bytes_are_those_that_were_booked",
        "pool/test_memory_stores.py::test_host_bytes_resident_are_bytes_of_the_arena",
    )),
    4: ("any scheduler drives the wrapped optimizer", (
        "pool/test_pooled_optimizer.py::test_every_scheduler_drives_it",
    )),
    5: ("clipping under every placement", (
        "runtime/test_pool_cases.py::test_micro_batches_and_both_clippings_are_one_batch",
        "lightning/test_pool_gradients.py::test_losses_of_gradients_on_the_device",
    )),
    6: ("k micro-batches are one batch", (
        "runtime/test_pool_cases.py::test_micro_batches_and_both_clippings_are_one_batch",
        "pool/test_gradients.py::test_bits_of_plain_accumulation",
    )),
    7: ("nothing is left after kill -9, and nothing grows", (
        "pool/test_killed.py::test_killed_at_random_instants",
        "pool/test_killed.py::test_the_disk_blocks_are_free_again",
        "pool/test_killed_training.py::test_killed_in_the_middle_of_training_and_rerun",
    )),
    8: ("every share of offloading is another one", (
        "runtime/test_budgets.py::test_every_budget_is_honoured_and_used_to_within_a_block",
    )),
    9: ("no host allocation after the second step", (
        "lightning/test_pool_hot_path.py::test_nothing_is_mapped_after_the_second_step",
        "runtime/test_pool_cases.py::test_nothing_is_mapped_after_the_second_step",
    )),
    10: ("copies do not alias live tensors", (
        "runtime/test_pool_memory.py::test_a_save_in_flight_holds_what_was_there",
        "runtime/test_pool_memory.py::test_gradients_on_the_host_share_no_memory_with_those_on_the_device",
        "accelerate/test_resume.py::test_a_state_dict_does_not_change_with_later_steps",
        "accelerate/test_resume.py::test_on_one_rank_neither",
        "pool/test_memory_stores.py::test_a_snapshot_does_not_alias_what_it_was_taken_of",
        "lightning/test_resume.py::test_an_asynchronous_save_does_not_see_later_changes",
    )),
    11: ("ranks share cores; the plan knows what the host's arithmetic takes", (
        "engine/test_capacity.py::test_cpu_quotas_of_both_versions",
        "engine/test_capacity.py::test_launched_processes_share_threads_and_memory",
        "lightning/test_launcher.py::test_a_script_on_two_devices",
        "planner/test_host.py::test_the_cost_follows_the_cores",
        "cli/test_planning.py::test_the_plan_says_what_the_optimizer_takes_on_the_host",
        "cli/test_planning.py::test_units_step_on_the_host_where_that_is_cheaper",
    )),
    12: ("saving adds one block", (
        "runtime/test_pool_memory.py::test_saving_adds_one_block_wherever_the_state_rests",
        "runtime/test_checkpoint_forks.py::test_memory_of_saving_and_loading_is_bounded_by_one_block",
    )),
    22: ("resumed by other numbers of ranks", (
        "runtime/test_pool_cases.py::test_two_ranks_resume_as_any_number",
        "runtime/test_checkpoint.py::test_two_ranks_to_other_world_sizes",
    )),
}  # fmt: skip


@pytest.mark.parametrize("number", CASES)
def test_each_case_has_its_tests(number: int) -> None:
    for name in CASES[number][1]:
        path, _, test = name.partition("::")
        found = {
            node.name: ast.get_docstring(node) or ""
            for node in ast.parse((TESTS / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert test in found, f"{name} is gone: say here which test holds case {number} now"
