"""Which test stands for which reported case: the rows of the second round, and kinds like them.

A row is what a user ran into; its tests guard the kind behind it. `test_each_test_exists` keeps the
table true when tests move.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

INDEX: dict[str, list[str]] = {
    # weight used outside its layer, or there too
    "N107": [
        "engine/test_foreign_gradients.py::test_a_parameter_used_directly_is_refused_by_name",
        "engine/test_foreign_gradients.py::test_a_parameter_used_only_directly_is_refused",
    ],
    # branches joined along the batch; all layers flattened
    "N108": ["engine/test_rows_are_samples.py::test_rows_that_can_be_followed_are_grouped"],
    "B79": ["engine/test_units.py::test_rows_are_followed_to_their_samples"],
    # in-batch negatives
    "N109": [
        "core/isolation/test_coupled_samples.py::test_samples_that_depend_on_each_other",
        "core/isolation/test_coupled_samples.py::test_a_criterion_that_mixes_samples",
    ],
    # means over class weights or tokens of the batch
    "N110": [
        "core/isolation/test_isolation_warnings.py::test_means_over_class_weights",
        "core/isolation/test_isolation_warnings.py::test_means_over_the_tokens_of_the_batch",
    ],
    # gradient penalty
    "N111": ["engine/test_other_gradients.py::test_gradient_penalties_are_refused"],
    # public numbers
    "N112": ["engine/test_public_numbers.py::test_public_numbers_do_not_depend_on_the_data"],
    # gradients of inputs
    "N114": ["engine/test_other_gradients.py::test_gradients_of_inputs_leave_no_rows"],
    # criteria whose mean is one of their own
    "N115": [
        "engine/test_criteria.py::test_batchmean",
        "engine/test_criteria.py::test_ctc_divides_by_the_length_of_the_target",
    ],
    # a second loss
    "N121": [
        "engine/test_other_gradients.py::test_second_ordinary_loss_is_refused",
        "engine/test_other_gradients.py::test_loss_for_the_whole_batch_is_not_added",
    ],
    # no loader
    "N122": ["engine/test_public_numbers.py::test_bad_numbers_are_refused"],
    # kinds of adapters
    "N129": [
        "integrations/test_peft.py::test_adapters_are_exact",
        "integrations/test_peft.py::test_batches_as_large_as_something_else",
    ],
    # who reads a parameter
    "N130": [
        "engine/test_foreign_gradients.py::test_weights_computed_by_a_hook_before_the_layer",
        "integrations/test_peft.py::test_modules_that_read_parameters_of_parts",
    ],
    # hooks on parameters
    "N131": [
        "engine/test_other_gradients.py::test_hooked_parameters_are_refused_at_once",
        "engine/test_other_gradients.py::test_hooked_parameters_are_refused_in_the_first_backward",
    ],
    # complex parameters
    "N132": ["engine/test_other_gradients.py::test_complex_parameters_are_refused_by_name"],
    # settings at the edge
    "N133": ["cases/test_settings_and_loops.py::test_settings_at_the_edge"],
    # reductions switched off
    "N138": [
        "distributed/test_what_is_held.py::test_only_what_is_held_is_clipped_and_late_sums_are_whole"
    ],
    # torch's own state of an optimizer
    "N141": ["engine/test_step_accounting.py::test_state_dict_of_a_new_optimizer_takes_no_step"],
    # public batches between private ones
    "N146": ["cases/test_settings_and_loops.py::test_public_batches_by_turns"],
    # gradual unfreezing
    "B33": [
        "engine/test_held_parameters.py::test_unfreezing_goes_on_exactly",
        "engine/test_held_parameters.py::test_what_nobody_holds_is_not_unfrozen",
    ],
    # a framework clips between backward and step
    "B39": [
        "engine/test_changed_gradients.py::test_changed_sum_is_refused_by_name",
        "engine/test_trainers.py::test_trainers_own_clipping_is_refused",
    ],
    # closures
    "B67": [
        "cases/test_settings_and_loops.py::test_closures",
        "cases/test_settings_and_loops.py::test_optimizers_that_evaluate_more_than_once",
    ],
    # an optimizer of some parameters
    "B69": ["engine/test_held_parameters.py::test_what_the_optimizer_does_not_hold_takes_no_part"],
    # norms over the batch
    "B75": [
        "engine/test_rows_are_samples.py::test_norms_that_mix_samples_are_refused",
        "validators/test_fix.py::test_groups_where_a_channel_may_be_one_value",
    ],
    # inputs by name
    "B95": ["engine/test_expanded_weights.py::test_keyword_inputs"],
    # and kinds like them, which nobody has reported yet
    "rows moved by lists, generators, counters": [
        "cases/test_moved_rows.py::test_rows_are_followed_in_each_pass",
        "cases/test_moved_rows.py::test_a_model_that_goes_on_otherwise_is_found_out",
    ],
    "experts": ["cases/test_moved_rows.py::test_experts_of_transformers"],
    "a layer without a rule, used on rows of several kinds": [
        "cases/test_moved_rows.py::test_uses_of_several_kinds_add_up"
    ],
    "a batch of one rank that was not drawn": [
        "cases/test_draws_on_ranks.py::test_no_rank_releases_what_one_refuses"
    ],
    "any model of moves": [
        "cases/test_any_model.py::test_in_one_process",
        "cases/test_any_model.py::test_sharded",
    ],
    "samples that meet in a model": ["cases/test_relatives.py::test_samples_that_meet"],
    "ordinary models": ["cases/test_relatives.py::test_ordinary_models"],
}


@pytest.mark.parametrize("row", INDEX)
def test_each_test_exists(row: str) -> None:
    for test in INDEX[row]:
        path, _, name = test.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
